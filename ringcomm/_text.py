"""Sizes, ranks and times: as arguments of commands, and as people read them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """Return the bytes of "8", "1K", "1.5M" or "1G"; "4MB" and "4MiB" are "4M"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)(?:I?B)?", text.strip().upper(), re.ASCII)
    count = float(match[1]) * UNITS[match[2]] if match else 0.0
    if count < 1 or not count.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 8, 1K, 1.5M or 1G")
    return int(count)


def sizes(text: str) -> list[int]:
    """Parse "1K,1M"; of "1K..64M" each size is four times the one before."""
    powers: list[int] = []
    for word in text.split(","):
        low, dots, high = word.partition("..")
        first, last = size(low), size(high if dots else low)
        if first > last:
            raise argparse.ArgumentTypeError(f"{word!r}: {low} is more than {high}")
        powers += [first * 4**power for power in range(31) if first * 4**power <= last]
    return powers


def ranks(text: str) -> list[int]:
    """Parse "2..4096", the powers of two from 2 to 4096, or "3,5,8"."""
    match = re.fullmatch(r"([1-9][0-9]*)\.\.([1-9][0-9]*)", text, re.ASCII)
    if match:
        low, high = int(match[1]), int(match[2])
        return [2**power for power in range(high.bit_length()) if low <= 2**power <= high]
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks: write 2..4096, or 3,5,8")
    return [int(word) for word in text.split(",")]


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


def output(text: str) -> Path:
    """Parse the path of a file to be written, for argparse; "-" is stdout."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {why}")
    return path


def spans(numbers: Iterable[int]) -> str:
    """Return "0-2 and 5" for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words: list[str] = []
    for low, high in runs:
        words += [f"{low}-{high}"] if high > low + 1 else map(str, dict.fromkeys((low, high)))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-2 and 5"."""
    every = set(ranks)
    return f"rank{'s' if len(every) > 1 else ''} {spans(every)}"


def counted(count: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", "1,024 ranks"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def show_size(size: int) -> str:
    """Return "1K" for 1024: a whole number of the largest unit that divides it."""
    for name, unit in reversed(UNITS.items()):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def show_seconds(value: float) -> str:
    """Return "12.3 µs" for 0.0000123."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit * 0.9995:
            return f"{value / unit:.3g} {name}" if value < 999.5 * unit else f"{value:.0f} s"
    return f"{value * 1e9:.3g} ns"


def show_rate(rate: float) -> str:
    """Return "2.5 GB/s" for 2.5e9 bytes a second."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= unit * 0.9995:
            return f"{rate / unit:.3g} {name}"
    return f"{rate:.3g} B/s"


def padded(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[list[str]]:
    """Return the cells of a table, each as wide as its column.

    The first column stands to the left, and the others, too, or to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if right and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line for each row, their columns beneath one another."""
    return ["  ".join(cells).rstrip() for cells in padded(rows, right=right)]
