"""Which kernel is the fastest for each size, as rules that RINGCOMM_ALGORITHM=@FILE takes.

Pure functions of the times: kernel_times.py measures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcomm._text import show_size
from ringcomm.tools.bench.report import show_time, table_lines

# How much faster than the model's choice a kernel must be, as a part of its time. The first is
# what is meant. The others are for tables that would be too long: ranks tell theirs to one another.
MARGINS = (0.05, 0.1, 0.2, 0.4)
MOST_TEXT = 2000  # letters of all rules: csrc/plan/rules.cc


class Segment(NamedTuple):
    """Messages of `first` to `last` bytes, None: any more; the kernel, "": the model chooses."""

    first: int
    last: int | None
    kernel: str


@dataclass
class Measured:
    """Of one size: bytes of the message as rules count them, and the median of each kernel."""

    bytes: int
    model: str  # what is chosen without a rule
    size: int = 0  # of the larger buffer
    seconds: dict[str, float] = field(default_factory=dict)

    def chosen(self, margin: float) -> str:
        """Return the kernel that a rule must name, or "" where the model's is as good."""
        if not self.seconds:
            return ""
        fastest = min(self.seconds, key=lambda kernel: self.seconds[kernel])
        as_good = self.seconds[fastest] * (1 + margin)
        return "" if self.seconds.get(self.model, float("inf")) <= as_good else fastest


Table = Mapping[str, Sequence[Measured]]  # by collective


def segments(measured: Sequence[Measured], margin: float = MARGINS[0]) -> list[Segment]:
    """Cover all numbers of bytes: each size speaks for what is above the one before it.

    The last speaks for all that is longer, too. Neighbours that have the same kernel are one.
    """
    found: list[Segment] = []
    for one in sorted(measured, key=lambda one: one.bytes):
        kernel = one.chosen(margin)
        if found and found[-1].kernel == kernel:
            found[-1] = found[-1]._replace(last=one.bytes)
        elif not found or found[-1].last != one.bytes:
            found.append(Segment((found[-1].last or 0) + 1 if found else 0, one.bytes, kernel))
    if not found:
        return [Segment(0, None, "")]
    return [*found[:-1], found[-1]._replace(last=None)]


def rule(collective: str, segment: Segment) -> str:
    last = "" if segment.last is None else show_size(segment.last)
    return f"{collective}:{show_size(segment.first)}-{last}={segment.kernel}"


def rules_by(table: Table, margin: float) -> dict[str, list[str]]:
    """Return the rules of each collective; none where the model's choices stand."""
    return {
        name: [rule(name, one) for one in segments(measured, margin) if one.kernel]
        for name, measured in table.items()
    }


def fitting_margin(table: Table) -> float:
    """Return the least margin with which the rules are short enough. Raises ValueError."""
    for margin in MARGINS:
        every = [rule for rules in rules_by(table, margin).values() for rule in rules]
        if len(",".join(every)) <= MOST_TEXT:
            return margin
    raise ValueError(f"the rules have more than {MOST_TEXT} letters: measure fewer --sizes")


def text(table: Table, about: Sequence[str]) -> str:
    """Return the file; it may have comments alone. `about` are the first of them."""
    margin = fitting_margin(table)
    by_collective = rules_by(table, margin)
    lines = [f"# {line}" for line in about]
    lines += [
        "# Bytes are the tensor's, or one rank's shard. Where no rule fits, the model chooses;"
    ]
    lines += [f"# so it does where its kernel took up to {margin:.0%} longer than the fastest."]
    for name, rules in by_collective.items():
        lines += rules or [f"# {name}: the model's choices stand"]
    return "\n".join(lines) + "\n"


def has_rules(text: str) -> bool:
    return any(not line.startswith("#") for line in text.splitlines())


def shown(measured: Sequence[Measured], kernels: Sequence[str], margin: float) -> list[str]:
    """Return the lines of a table of microseconds; `*` is what runs with the rules."""
    used = [kernel for kernel in kernels if any(kernel in one.seconds for one in measured)]
    rows = []
    for one in measured:
        runs = one.chosen(margin) or one.model
        cells = [
            show_time(one.seconds[kernel]) + ("*" if kernel == runs else " ")
            if kernel in one.seconds
            else "- "
            for kernel in used
        ]
        rows.append([show_size(one.size), show_size(one.bytes), *cells, one.model])
    return table_lines(["size", "message", *(f"{name} " for name in used), "model"], rows, False)
