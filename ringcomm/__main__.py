"""The command `ringcomm`, or `python -m ringcomm`: see `ringcomm --help`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

# Each is a module with add_arguments(parser) and run(options), which returns the exit status. It is
# imported when its command is called, so that the others' packages need not be there.
COMMANDS = {
    "doctor": ("ringcomm.tools.doctor", "find what is wrong with hosts and network"),
    "tune": (
        "ringcomm.tools.tune.command",
        "measure what messages cost between the ranks of a job",
    ),
    "top": ("ringcomm.tools.top", "watch where each rank of a running job is"),
    "model": ("ringcomm.tools.plan.model", "how long a collective takes by the model"),
    "trace": ("ringcomm.tools.trace", "what went wrong in a job, by its flight records"),
    "plan": ("ringcomm.tools.plan.show", "what each rank of a collective does, step by step"),
    "verify": ("ringcomm.tools.plan.verify", "prove an algorithm that is written by hand"),
    "simulate": ("ringcomm.tools.plan.simulate", "how long a plan takes on links that are shared"),
    "draw": ("ringcomm.tools.plan.draw", "who has what after each message of a plan, as a picture"),
    "search": ("ringcomm.tools.plan.search", "find a plan for a network whose links differ"),
    "elastic": ("ringcomm.elastic.__main__", "serve the store of elastic worlds"),
    "bench": ("ringcomm.tools.bench.command", "measure collectives next to other backends"),
}
USUAL_FAILURE = 1


def parser(command: str | None) -> argparse.ArgumentParser:
    """Make the parser of the command line; it knows the arguments of `command` only."""
    whole = argparse.ArgumentParser(prog="ringcomm", description="Tools for ringcomm.")
    commands = whole.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        own = commands.add_parser(name, help=text)
        if name == command:
            tool = importlib.import_module(module)
            own.description = (tool.__doc__ or text).partition(": ")[2]
            tool.add_arguments(own)
    return whole


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    named = next((word for word in words if word in COMMANDS), None)
    options = parser(named).parse_args(words)
    tool = importlib.import_module(COMMANDS[options.command][0])
    try:
        status = int(tool.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `head` reads no more; nor does Python write more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return USUAL_FAILURE
    except (OSError, ValueError) as error:
        print(f"ringcomm {options.command}: {error}", file=sys.stderr)
        return USUAL_FAILURE


if __name__ == "__main__":
    sys.exit(main())
