"""What every benchmark says alike: sizes, spreads, tables, and the machine it ran on."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import re
import statistics
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, and the lowest and highest of them, in the rounds' unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def parse_size(text: str) -> int:
    """Return the bytes of "8", "1K", "4M" or "1G" (powers of 1024)."""
    found = re.fullmatch(r"(0*[1-9][0-9]*)([KMG]?)B?", text.strip().upper(), re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 8, 1K, 4M or 1G")
    return int(found[1]) * UNITS[found[2]]


def show_size(size: int) -> str:
    """Write bytes as `parse_size` reads them: "4M"."""
    for unit in ("G", "M", "K"):
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def show_time(seconds: float) -> str:
    """Write a time in microseconds with three digits that mean something."""
    microseconds = seconds * 1e6
    digits = 2 if abs(microseconds) < 10 else 1 if abs(microseconds) < 100 else 0
    return f"{microseconds:.{digits}f}"


def show_bandwidth(gigabytes: float) -> str:
    """Write GB/s; nothing where no bytes are moved."""
    return f"{gigabytes:.{2 if gigabytes >= 1 else 3}f}" if gigabytes else "-"


def list_of(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return an argparse type for values separated by commas; what is there twice counts once."""

    def parse(text: str) -> list[Any]:
        return list(dict.fromkeys(item(part.strip()) for part in text.split(",") if part.strip()))

    parse.__name__ = "list"
    return parse


def positive(text: str) -> int:
    """Parse an integer above 0, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


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


def machine() -> dict[str, Any]:
    """Return what a reader needs to compare these figures with others."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ringcomm": _ringcomm_version(),
        "load_average_before": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_json(path: Path | None, benchmark: str, body: dict[str, Any]) -> None:
    """Write `body` with the machine's facts; None writes nothing."""
    if path is None:
        return
    text = json.dumps({"benchmark": benchmark, **body}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """Print columns that line up, the first to the left; with `markdown`, as a Markdown table."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    ends, middle = ("|", " | ") if markdown else ("", "  ")
    for number, row in enumerate([head, *rows]):
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"{ends} {middle.join(cells)} {ends}".rstrip())
        if markdown and number == 0:
            marks = ["-" * width + (":" if i else " ") for i, width in enumerate(widths)]
            print(f"| {'| '.join(marks)}|")
    print(flush=True)


def progress(text: str) -> None:
    """Show what is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _ringcomm_version() -> str | None:
    if not find_spec("ringcomm"):
        return None
    return str(importlib.import_module("ringcomm").__version__)
