"""Whether a training has kept its promises, by what its ranks have written down.

It is judged by the journals alone (journal.py): each step was applied by all that wrote it with
equal parameters and the same batches, no step and no batch counts twice, and none is missing. A
member is lost only by its end. Checkpoints fail only while the disk is full, and the newest one
that was written stays whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.epochs import BROKEN
from ringcomm.elastic.stats import NOT_ENTERED

Line = dict[str, Any]


@dataclass
class Verdict:
    """The promises that were kept, and a sentence in `broken` for each that was not."""

    steps: int = 0
    seconds: float = 0.0  # from the first step to the last
    usual: float = 0.0  # seconds of a step, the median
    longest: float = 0.0  # the longest time between two steps
    aborted: int = 0  # steps that were computed again, on any rank
    changes: int = 0
    saved: int = 0  # checkpoints
    unsaved: int = 0  # those that could not be written
    broken: list[str] = field(default_factory=list)


def judge(lines: list[Line]) -> Verdict:
    """Judge the journals of one training. `lines` are by time."""
    steps = [line for line in lines if line["what"] == "step"]
    verdict = Verdict(changes=len({line["epoch"] for line in lines if line["what"] == "change"}))
    verdict.aborted = sum(line["what"] == "aborted" for line in lines)
    _look_at_losses(lines, verdict)
    _look_at_checkpoints(lines, verdict)
    if not steps:
        verdict.broken.append("no step was applied")
        return verdict
    first: dict[int, Line] = {}
    of_shard: dict[tuple[int, int], Line] = {}  # by step, and place in a unit
    for line in steps:
        same = first.setdefault(line["step"], line)
        held = of_shard.setdefault((line["step"], line.get("place", -1)), line)
        for what, name, known in (("digest", "parameters", held), ("used", "batches", same)):
            if known[what] != line[what]:
                verdict.broken.append(
                    f"step {line['step']}: processes {known['pid']} and {line['pid']} have "
                    f"different {name}"
                )
    counts = Counter((line["pid"], line["step"]) for line in steps)
    for (pid, step), count in counts.items():
        if count > 1:
            verdict.broken.append(f"process {pid} applied step {step} {count} times")
    _look_for_gaps(first, verdict)
    _look_at_batches(first, verdict)
    times = sorted(line["at"] for line in first.values())
    between = sorted(after - before for before, after in pairwise(times))
    verdict.steps, verdict.seconds = len(first), times[-1] - times[0]
    if between:
        verdict.usual, verdict.longest = between[len(between) // 2], between[-1]
    return verdict


def _look_for_gaps(first: dict[int, Line], verdict: Verdict) -> None:
    missing = sorted(set(range(min(first), max(first) + 1)) - first.keys())
    if missing:
        verdict.broken.append(f"steps are missing: {', '.join(map(str, missing[:5]))}")


def _look_at_batches(first: dict[int, Line], verdict: Verdict) -> None:
    used = Counter(batch for line in first.values() for batch in line["used"] or ())
    if twice := sorted(batch for batch, count in used.items() if count > 1):
        verdict.broken.append(f"batches count twice: {', '.join(map(str, twice[:5]))}")
    if used:
        # Those before the last one that are not used lie in queues, or were given back.
        missing = set(range(min(used), max(used))) - used.keys()
        last = first[max(first)]
        if len(missing) > last["held"]:
            lost = ", ".join(map(str, sorted(missing)[:5]))
            verdict.broken.append(
                f"batches are missing: {len(missing)}, the first of them {lost}, and ranks hold "
                f"{last['held']}"
            )


def _look_at_losses(lines: list[Line], verdict: Verdict) -> None:
    """Have members be lost only where they have ended, or wait for their unit, or were coming in.

    So a connection that is cut, or a process that is stopped for a moment, costs nobody its place.
    """
    ended = {line["pid"] for line in lines if line["what"] in ("kill", "leave", "ended")}
    changes = [line for line in lines if line["what"] == "change"]
    lost = {pair for line in changes for pair in zip(line["lost"], line["why"], strict=True)}
    for pid, why in sorted(lost):
        if pid not in ended and why not in (BROKEN, NOT_ENTERED):
            verdict.broken.append(f"process {pid} was lost ({why}), and it had not ended")


def _look_at_checkpoints(lines: list[Line], verdict: Verdict) -> None:
    tries = [line for line in lines if line["what"] in ("checkpoint", "unsaved")]
    full = _times_when_full(lines)
    for line in tries:
        if line["what"] == "unsaved":
            verdict.unsaved += 1
            if not any(line["began"] < end and begin < line["at"] for begin, end in full):
                verdict.broken.append(
                    f"the checkpoint of step {line['step']} could not be written: {line['why']}"
                )
    verdict.saved = len(tries) - verdict.unsaved
    if not full:
        return
    freed = full[-1][1]
    longest = max((b["at"] - a["at"] for a, b in pairwise(tries)), default=0.0)
    last = max((line["at"] for line in lines if line["what"] == "step"), default=0.0)
    if last > freed + 3 * longest and not any(line["began"] > freed for line in tries):
        verdict.broken.append("no checkpoint was made after the disk had been full")


def _times_when_full(lines: list[Line]) -> list[tuple[float, float]]:
    """Return from when until when the disk was full, each time; the last may have no end."""
    begins = [line["at"] for line in lines if line["what"] == "fill"]
    ends = [line["at"] for line in lines if line["what"] == "freed"]
    return list(zip(begins, [*ends, float("inf")], strict=False))


def look_at_disk(lines: list[Line]) -> list[str]:
    """Return a sentence for each folder in which the newest checkpoint is not whole any more."""
    newest = {line["folder"]: line["step"] for line in lines if line["what"] == "checkpoint"}
    broken = []
    for folder, step in newest.items():
        try:
            whole = Checkpoints(folder, every=1, log=lambda _: None).newest()
        except RuntimeError:
            whole = None
        if whole is None or whole.step < step:
            broken.append(f"the checkpoint of step {step} in {folder} is not whole any more")
    return broken
