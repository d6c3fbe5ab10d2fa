"""The options that several commands share, so that each thing has one flag."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ringcomm import _planner
from ringcomm._text import list_of, output, sizes

# The types of elements, with their bytes.
DTYPES = {
    "bfloat16": 2,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}


class Former(argparse.Action):
    """Does what another action does, and says what the option is called now."""

    def __init__(self, option_strings: Sequence[str], dest: str, now: argparse.Action) -> None:
        nargs = None if now.nargs == argparse.OPTIONAL else now.nargs
        super().__init__(
            option_strings, dest, nargs, type=cast(Any, now.type), choices=now.choices,
            default=argparse.SUPPRESS, help=argparse.SUPPRESS,
        )  # fmt: skip
        self.now = now

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        now = self.now.option_strings[0] if self.now.option_strings else self.now.metavar
        print(f"{parser.prog}: {option_string} is now {now}", file=sys.stderr)
        self.now(parser, namespace, values, option_string)


class Given(argparse.Action):
    """Stores what was given; an argument that is left out undoes no former option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is not None:
            setattr(namespace, self.dest, values)


def former(parser: argparse.ArgumentParser, now: argparse.Action, *names: str) -> None:
    """Let names of an option from before 1.0 work, with a line on stderr."""
    parser.add_argument(*names, action=Former, dest=now.dest, now=now)


class Local(argparse.Action):
    """Stores how many ranks each host has."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(f"{parser.prog}: {option_string} is now --hosts: how many there are", file=sys.stderr)
        namespace.local = values


def former_local(parser: argparse.ArgumentParser) -> None:
    """Let --local from before 1.0 work, as `options.local`: the ranks on each host."""
    parser.add_argument("--local", type=int, action=Local, help=argparse.SUPPRESS)


def named(names: Sequence[str] = _planner.COLLECTIVES) -> Callable[[str], str]:
    """Return an argparse type for names: "allreduce" and "AllReduce" are "all_reduce".

    Others stay as they are, so that the command can say what it takes.
    """
    bare = {name.replace("_", ""): name for name in names}

    def parse(text: str) -> str:
        return bare.get(text.strip().lower().replace("_", ""), text)

    return parse


def add_collective(
    parser: argparse.ArgumentParser,
    names: Sequence[str] = _planner.COLLECTIVES,
    *,
    several: bool = False,
    optional: bool = False,
) -> argparse.Action:
    """Add COLLECTIVE: `options.collective`, or a list in `options.collectives`.

    Where it is optional and left out, that is None.
    """
    parse = named(names)
    return parser.add_argument(
        "collectives" if several else "collective",
        metavar="COLLECTIVE",
        type=list_of(parse) if several else parse,
        nargs="?" if optional else None,
        action=Given,
        help=f"{'some' if several else 'one'} of {', '.join(names)}",
    )


def add_size(parser: argparse.ArgumentParser, default: str, text: str) -> argparse.Action:
    """Add --size: a list in `options.sizes`."""
    text = f"{text}; a list, or 1K..64M ({default})"
    add = parser.add_argument
    return add("--size", type=sizes, default=default, dest="sizes", metavar="LIST", help=text)


def add_ranks(parser: argparse.ArgumentParser, default: int, text: str) -> argparse.Action:
    """Add --ranks: a number."""
    text = f"{text} ({default})"
    return parser.add_argument("--ranks", type=int, default=default, metavar="N", help=text)


def add_hosts(parser: argparse.ArgumentParser, default: int | None, text: str) -> argparse.Action:
    """Add --hosts: a number."""
    return parser.add_argument("--hosts", type=int, default=default, metavar="H", help=text)


def add_dtype(parser: argparse.ArgumentParser, default: str = "float32") -> argparse.Action:
    """Add --dtype: a key of DTYPES."""
    text = f"as in torch ({default})"
    add = parser.add_argument
    return add("--dtype", choices=list(DTYPES), default=default, metavar="NAME", help=text)


def add_costs(parser: argparse.ArgumentParser) -> argparse.Action:
    """Add --costs: the path of a file of `ringcomm tune`."""
    text = "what `ringcomm tune` has written"
    return parser.add_argument("--costs", type=Path, metavar="FILE", help=text)


def add_files(parser: argparse.ArgumentParser, **texts: str) -> dict[str, argparse.Action]:
    """Add options that take a file to be written, as `json="the figures"` adds --json."""
    add = parser.add_argument
    return {
        kind: add(f"--{kind}", type=output, metavar="FILE", help=text)
        for kind, text in texts.items()
    }
