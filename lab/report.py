"""Words that the scripts of benchmarks share, beside those of `ringcomm bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ringcomm._text import list_of, positive, show_size, size
from ringcomm.tools.bench.machine import machine
from ringcomm.tools.bench.report import (
    Spread,
    print_table,
    show_bandwidth,
    show_time,
    write_json,
)

__all__ = [
    "Spread",
    "list_of",
    "machine",
    "parser",
    "positive",
    "print_table",
    "progress",
    "show_bandwidth",
    "show_size",
    "show_time",
    "size",
    "write_json",
]


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has, described by its first line."""
    first = (documentation or "").partition("\n")[0]
    made = argparse.ArgumentParser(
        description=first, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = made.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--markdown", action="store_true", help="print Markdown tables")
    add("--deadline", type=float, default=3600, help="seconds after which all of it is ended")
    return made


def progress(text: str) -> None:
    """Show what is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
