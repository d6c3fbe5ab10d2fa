"""Figures as texts: spreads, times, tables, JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringcomm._text import aligned, padded


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, and the lowest and highest of them, in the rounds' unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def show_time(seconds: float) -> str:
    """Write a time in microseconds with three digits that mean something."""
    microseconds = seconds * 1e6
    digits = 2 if abs(microseconds) < 10 else 1 if abs(microseconds) < 100 else 0
    return f"{microseconds:.{digits}f}"


def show_bandwidth(gigabytes: float) -> str:
    """Write GB/s; nothing where no bytes are moved."""
    return f"{gigabytes:.{2 if gigabytes >= 1 else 3}f}" if gigabytes else "-"


def write_json(path: Path | None, benchmark: str, body: dict[str, Any]) -> None:
    """Write `body` with the machine's facts; None writes nothing."""
    if path is not None:
        path.write_text(json_text({"benchmark": benchmark, **body}) + "\n", encoding="utf-8")


def json_text(value: Any, depth: int = 0) -> str:
    """Return JSON in which the innermost lists and objects have a line each."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(item, (dict, list)) and has_more(item) for item in inner):
        return json.dumps(value)
    margin = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {json_text(item, depth + 1)}" for key, item in value.items()]
    else:
        parts = [json_text(item, depth + 1) for item in value]
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{first}{margin}{f',{margin}'.join(parts)}{margin[:-1]}{last}"


def has_more(value: Any) -> bool:
    """Tell whether it is an object, or a list of others: these stand in lines of their own."""
    return isinstance(value, dict) or any(isinstance(item, (dict, list)) for item in value)


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    """Return lines whose columns line up, the first to the left; or those of a Markdown table."""
    if not markdown:
        return aligned([head, *rows], right=True)
    lines = [f"| {' | '.join(cells)} |" for cells in padded([head, *rows], right=True)]
    marks = ["-" * len(cell) for cell in padded([head, *rows])[0]]
    first, *others = marks
    return [lines[0], f"| {first} {''.join(f'| {mark}:' for mark in others)}|", *lines[1:]]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """Print the lines of such a table, and an empty one."""
    print("\n".join(table_lines(head, rows, markdown)) + "\n", flush=True)
