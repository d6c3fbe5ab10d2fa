"""Options that several commands share: each thing has one spelling, and former ones still work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringcomm._text import list_of, output, positive, sizes

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
DTYPES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


def collective(text: str, names: Sequence[str] = COLLECTIVES) -> str:
    """Parse the name of a collective; underscores and case do not matter."""
    plain = {name.replace("_", ""): name for name in names}
    name = plain.get(text.lower().replace("_", ""))
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
    return name


class _Kept(argparse.Action):
    """Keeps what a former option has said where the positional argument itself is left out."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is not self.default or not getattr(namespace, self.dest, None):
            setattr(namespace, self.dest, values)


def add_collective(
    parser: argparse.ArgumentParser,
    names: Sequence[str] = COLLECTIVES,
    default: str | None = None,
) -> argparse.Action:
    """Add the positional COLLECTIVE, a list; without a default it is required."""
    parse = list_of(lambda text: collective(text, names))
    return parser.add_argument(
        "collectives",
        metavar="COLLECTIVE",
        type=parse,
        action=_Kept,
        nargs=None if default is None else "?",
        default=None if default is None else parse(default),
        help=f"one or several of {', '.join(names)}, separated by commas"
        + (f" (default: {default})" if default else ""),
    )


def add_size(
    parser: argparse.ArgumentParser, default: str | None, text: str, dest: str = "sizes"
) -> argparse.Action:
    """Add --size, a list of bytes: "1M", "8,1K", "1K..64M"."""
    return parser.add_argument(
        "--size", dest=dest, type=sizes, default=default, metavar="8,1K,4M,…", help=text
    )


def add_ranks(parser: argparse.ArgumentParser, default: int | None, text: str) -> argparse.Action:
    return parser.add_argument("--ranks", type=positive, default=default, metavar="N", help=text)


def add_files(parser: argparse.ArgumentParser, **files: str) -> dict[str, argparse.Action]:
    """Add --json FILE and others, with these help texts."""
    return {
        name: parser.add_argument(f"--{name}", type=output, metavar="FILE", help=text)
        for name, text in files.items()
    }


class _Former(argparse.Action):
    """A former spelling: does what `now` does, and says what the option is called now."""

    def __init__(self, now: argparse.Action, **given: Any) -> None:
        super().__init__(type=now.type, nargs=given.pop("nargs", None), **given)
        self.now = now

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self.now.option_strings[-1] if self.now.option_strings else self.now.metavar
        print(f"{parser.prog}: {option_string} is now {name}", file=sys.stderr)
        self.now(parser, namespace, values, option_string)


def former(parser: argparse.ArgumentParser, action: argparse.Action, *spellings: str) -> None:
    """Take former spellings of an option, hidden from --help."""
    make: Callable[..., argparse.Action] = parser.add_argument
    make(
        *spellings,
        action=_Former,
        now=action,
        dest=action.dest,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
