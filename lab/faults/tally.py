"""Counts and verdicts for the rows of ranks.py and resources.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.faults.crew import End, RankGroup, crew
from lab.faults.table import Form, Verdict
from lab.limits import claim
from lab.outcomes import DESTROYED, SOON

HANGS = claim(20)  # seconds after which a rank that does not end is killed
OPERATION = re.compile(
    r"\b((all_reduce|broadcast|all_gather|reduce_scatter|barrier|collective) #\d|(send|recv) \w+\[)"
)


@dataclass
class Tally:
    """Counts what was right, and why the rest was not; the slowest of what was timed."""

    good: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)

    def add(self, *complaints: str | None) -> None:
        """One more; it was right when there is no complaint. Only the first counts."""
        first = next((complaint for complaint in complaints if complaint), None)
        if first is None:
            self.good += 1
        else:
            self.wrong[first] += 1

    def took(self, what: str, seconds: float) -> None:
        self.slowest[what] = max(seconds, self.slowest.get(what, 0.0))

    def verdict(self, right: str) -> Verdict:
        """`right` says what the good ones did."""
        total = self.good + sum(self.wrong.values())
        parts = [f"{self.good} of {total} {right}"]
        parts += [f"{what} {seconds:.2f} s at most" for what, seconds in self.slowest.items()]
        parts += [f"{count}x {why}" for why, count in self.wrong.most_common(3)]
        return Verdict(total > 0 and self.good == total, "; ".join(parts))


def named(end: End, words: Sequence[str], since: float, tally: Tally) -> str | None:
    """Return the fault in the way a rank was told; None when there is none."""
    if failed := end.get("lost") or end.get("raised"):
        return str(failed)[:120]
    if not end["kind"]:
        return "no error"
    took = end["at"] - since
    if took < 0:
        return "an error before anything was done"
    tally.took("told after", took)
    tally.took("destroyed in", end["destroyed"])
    if not all(word in end["text"] for word in words):
        return "an error that does not name " + " and ".join(words)
    if not OPERATION.search(end["text"]):
        return "an error that names no operation"
    if took > SOON:
        return "an error that comes late"
    return None if end["destroyed"] < DESTROYED else "slow to be destroyed"


def undisturbed(ends: Sequence[End]) -> str | None:
    """Return the fault of a job to which nothing should have happened; None when none."""
    for rank, end in enumerate(ends):
        if failed := end.get("lost") or end.get("raised") or end["text"]:
            return f"rank {rank}: {failed}"[:200]
        if end["destroyed"] > DESTROYED:
            return f"rank {rank} took {end['destroyed']:.1f} s to be destroyed"
    return None


def started(form: Form, task: str, places: list[int], *args: object, **env: str) -> RankGroup:
    job = crew().job(task, places, form.backend, args, env=env)
    job.until("running")
    return job


def stopped(job: RankGroup) -> list[End]:
    """Let a job of `train` come to its end."""
    job.ranks[0].send("stop")
    return job.ends(HANGS)
