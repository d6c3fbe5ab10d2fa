"""The fault table: what is done to a job, what the job shall do, and what it did.

The rows are in rows.py. `make test` runs each in its short form
(test_fault_table.py), `make soak` in its long form, and benchmarks/faults.py runs them on other
backends too and prints the table side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """The backend that it is done to, for how long, and the seed of its random parts."""

    backend: str = "ringcomm"
    long: bool = False
    seed: int = 1


@dataclass(frozen=True)
class Verdict:
    """Whether the job did what the table wants, and what it did: one cell of the table."""

    good: bool
    told: str


@dataclass(frozen=True)
class Fault:
    """A row. `run` does it to a job of its own and never raises because of what the job does."""

    name: str  # one word, as "resets"
    done: str  # what is done: "every connection is reset, 1,000 times"
    wanted: str  # "exact results, no error, 90 % of the speed"
    run: Callable[[Form], Verdict]
    namespaces: bool = True  # it needs hosts.py
    elsewhere: bool = True  # it can be done to other backends
    short: bool = True  # it has a form for `make test`


def table(rows: Sequence[tuple[Fault, dict[str, Verdict]]]) -> str:
    """A table in Markdown, one column a backend."""
    backends = list(dict.fromkeys(name for _, verdicts in rows for name in verdicts))
    head = ["fault", "wanted", *backends]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for fault, verdicts in rows:
        cells = [told(verdicts.get(backend)) for backend in backends]
        lines.append(f"| {fault.done} | {fault.wanted} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def told(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    return f"{'yes' if verdict.good else '**no**'}: {verdict.told}"
