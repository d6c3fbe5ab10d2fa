"""The command `ringcomm`, or `python -m ringcomm`: see `ringcomm --help`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ringcomm
from ringcomm._runtime.library import built, span

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
ELASTIC: dict[str, Command] = {
    "store": ("ringcomm.tools.store", "serve a store until it is stopped"),
    "top": ("ringcomm.tools.world.command", "watch a running world, or write a page of it"),
    "rehearse": ("ringcomm.tools.rehearse", "train while ranks are killed, stopped and started"),
}
# In the order in which a user meets them.
COMMANDS: dict[str, Command | tuple[dict[str, Command], str]] = {
    "doctor": ("ringcomm.tools.doctor", "find out what is wrong with hosts and network"),
    "bench": ("ringcomm.tools.bench.command", "measure collectives next to other backends"),
    "trace": ("ringcomm.tools.trace", "tell what went wrong in a job, from its flight records"),
    "top": ("ringcomm.tools.top", "watch where each rank of a running job is"),
    "tune": ("ringcomm.tools.tune.command", "measure what messages cost on this network"),
    "plan": (PLAN, "show, prove, simulate, draw or search the plans of collectives"),
    "elastic": (ELASTIC, "serve the store of elastic trainings, watch or rehearse one"),
    "completion": ("ringcomm.tools.completion", "print the completion of a shell"),
}
# Commands from before 1.0 (docs/stability.md).
FORMER = {name: ["plan", name] for name in ("verify", "simulate", "draw", "search")}
GONE = {
    "model": "`ringcomm plan simulate all_reduce --ranks 2..64 --size 1K,1M` simulates the plans "
    "themselves"
}
USUAL_FAILURE = 1
EVERY = ""  # in place of a command's name: all of them, for completion
EXAMPLES = (
    "ringcomm bench all_reduce               how fast it is here, next to Gloo",
    "ringcomm trace                          why your latest job hangs, or failed",
    "torchrun ... -m ringcomm doctor         whether these hosts can work together",
    "ringcomm plan show all_reduce --why     what each rank will do, and why",
)


def expanded(words: list[str]) -> list[str]:
    """Return the words of a command line with the names that commands have now.

    A former name is told on stderr. `ringcomm plan all_reduce` shows the plan, and `ringcomm help
    trace` the help of `ringcomm trace`.
    """
    if words and words[0] in FORMER:
        now = FORMER[words[0]]
        print(f"ringcomm {words[0]}: it is now `ringcomm {' '.join(now)}`", file=sys.stderr)
        return [*now, *words[1:]]
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    if words[:1] == ["plan"] and len(words) > 1 and words[1] not in (*PLAN, "-h", "--help"):
        return ["plan", "show", *words[1:]]
    return words


def add_commands(
    whole: argparse.ArgumentParser, commands: Mapping[str, Any], named: Sequence[str]
) -> None:
    """Add commands to a parser, of which the one that is named gets its arguments."""
    some = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, text) in commands.items():
        own = some.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if list(named[:1]) not in ([name], [EVERY]):
            continue
        own.description = sentence(text)
        if isinstance(module, dict):
            add_commands(own, module, named if named[0] == EVERY else named[1:])
            continue
        tool = importlib.import_module(module)
        own.description = sentence((tool.__doc__ or text).partition(": ")[2].strip())
        own.epilog = examples(getattr(tool, "EXAMPLES", ()))
        tool.add_arguments(own)
        own.set_defaults(run=tool.run, command=own.prog)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def examples(lines: Sequence[str]) -> str:
    """Return the end of a help text: each example, and what it does."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)]) if lines else ""


def version() -> str:
    """Return the versions of the package and of what it was built for; torch is not loaded."""
    builds = built()
    if not builds:
        return f"ringcomm {ringcomm.__version__}, not built"
    torches, pythons = {build.torch for build in builds}, {build.Python for build in builds}
    compiler = importlib.import_module("ringcomm._build_info").compiler
    return (
        f"ringcomm {ringcomm.__version__}, built for torch {span(torches)} and Python "
        f"{span(pythons)} by {compiler}"
    )


def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line; only the command that it names has its arguments."""
    parser = argparse.ArgumentParser(
        prog="ringcomm",
        description="Find out what your job's collectives do, and how fast.",
        epilog=examples(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version())
    add_commands(parser, COMMANDS, words)
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options of a command line. Exits where it is none."""
    words = expanded(words)
    parser = parser_of(words)
    if words and words[0] in GONE:
        parser.error(f"{words[0]} is gone: {GONE[words[0]]}")
    options = parser.parse_args(words or ["--help"])
    options.all_commands = lambda: parser_of([EVERY])
    return options


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
