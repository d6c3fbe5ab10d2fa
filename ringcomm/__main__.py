"""The command `ringcomm`, or `python -m ringcomm`: see `ringcomm --help`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Each is a module with add_arguments(parser) and run(options), which returns the exit status. It is
# imported when its command is called, so that the others' packages need not be there.
Command = tuple[str, str]  # the module, and what it does
PLAN: dict[str, Command] = {
    "show": ("ringcomm.tools.plan.show", "what each rank does, step by step, and why so"),
    "verify": ("ringcomm.tools.plan.verify", "prove an algorithm that is written by hand"),
    "simulate": (
        "ringcomm.tools.plan.simulate.command",
        "how long a plan takes on links that are shared",
    ),
    "draw": (
        "ringcomm.tools.plan.draw.command",
        "who has what after each message of a plan, as a picture",
    ),
    "search": (
        "ringcomm.tools.plan.search.command",
        "find a plan for a network whose links differ",
    ),
}
COMMANDS: dict[str, Command | tuple[dict[str, Command], str]] = {
    "doctor": ("ringcomm.tools.doctor", "find what is wrong with hosts and network"),
    "tune": (
        "ringcomm.tools.tune.command",
        "measure what messages cost between the ranks of a job",
    ),
    "top": ("ringcomm.tools.top", "watch where each rank of a running job is"),
    "trace": ("ringcomm.tools.trace", "what went wrong in a job, by its flight records"),
    "plan": (PLAN, "show, prove, simulate, draw or search the plans of collectives"),
    "elastic": ("ringcomm.elastic.__main__", "serve the store of elastic worlds"),
    "bench": ("ringcomm.tools.bench.command", "measure collectives next to other backends"),
}
# Former commands, which go with version 0.3.
FORMER = {name: ["plan", name] for name in ("verify", "simulate", "draw", "search")}
GONE = {
    "model": "`ringcomm plan simulate all_reduce --ranks 2..64 --size 1K,1M` simulates the plans "
    "themselves"
}
USUAL_FAILURE = 1


def expanded(words: list[str]) -> list[str]:
    """Return the words of a command line with the names that commands have now.

    A former name is told on stderr. `ringcomm plan all_reduce` shows the plan.
    """
    if words and words[0] in FORMER:
        now = FORMER[words[0]]
        print(f"ringcomm {words[0]}: it is now `ringcomm {' '.join(now)}`", file=sys.stderr)
        return [*now, *words[1:]]
    if words[:1] == ["plan"] and len(words) > 1 and words[1] not in (*PLAN, "-h", "--help"):
        return ["plan", "show", *words[1:]]
    return words


def add_commands(
    whole: argparse.ArgumentParser, commands: Mapping[str, Any], named: Sequence[str]
) -> None:
    """Add commands to a parser, of which the one that is named gets its arguments."""
    some = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, text) in commands.items():
        own = some.add_parser(name, help=text)
        if list(named[:1]) != [name]:
            continue
        own.description = text
        if isinstance(module, dict):
            add_commands(own, module, named[1:])
            continue
        tool = importlib.import_module(module)
        own.description = (tool.__doc__ or text).partition(": ")[2]
        tool.add_arguments(own)
        own.set_defaults(run=tool.run, command=own.prog)


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options of a command line. Exits where it is none."""
    words = expanded(words)
    parser = argparse.ArgumentParser(prog="ringcomm", description="Tools for ringcomm.")
    if words and words[0] in GONE:
        parser.error(f"{words[0]} is gone: {GONE[words[0]]}")
    add_commands(parser, COMMANDS, words)
    return parser.parse_args(words)


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `head` reads no more; nor does Python write more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return USUAL_FAILURE
    except (OSError, ValueError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return USUAL_FAILURE


if __name__ == "__main__":
    sys.exit(main())
