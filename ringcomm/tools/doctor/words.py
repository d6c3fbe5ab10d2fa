"""A finding: one sentence, and the words that its rules share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ringcomm._text import ranks_text
from ringcomm.tools.doctor.facts import Facts
from ringcomm.tools.doctor.stages import Findings

NOTE, WARNING, ERROR = "note", "warning", "error"
STATUS = {NOTE: 0, WARNING: 1, ERROR: 2}


@dataclass(frozen=True)
class Finding:
    """`severity`: note (nothing to do), warning (works, but badly) or error (cannot work)."""

    severity: str
    sentence: str
    remedy: str = ""


Rule = Callable[[Findings], Iterator[Finding]]


def status_of(findings: Iterable[Finding]) -> int:
    return max((STATUS[each.severity] for each in findings), default=0)


# ---- words


def upper_first(text: str) -> str:
    """Begin a sentence; names of hosts stay as they are."""
    return text[:1].upper() + text[1:]


def on_host(facts: Facts, ranks: Iterable[int]) -> str:
    return f"{ranks_text(ranks)} on {facts.host}"


def machines(found: Findings) -> dict[tuple[str, str, int], list[int]]:
    """Return the ranks of each host."""
    hosts: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for rank, facts in sorted(found.ranks.items()):
        hosts[facts.machine].append(rank)
    return hosts


def by_value(found: Findings, value: Callable[[Facts], str]) -> dict[str, list[int]]:
    """Return the ranks by what they have; those without it are left out."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, facts in sorted(found.ranks.items()):
        if value(facts):
            groups[value(facts)].append(rank)
    return groups
