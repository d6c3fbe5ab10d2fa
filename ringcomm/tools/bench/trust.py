"""Which figures are in doubt, and what all figures together say."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ringcomm.tools import load
from ringcomm.tools.bench.ranks import Ranks
from ringcomm.tools.bench.report import Spread, show_bandwidth
from ringcomm.tools.load import Counters, Span

T = TypeVar("T")
WIDE = 0.5  # of the median, from the lowest round to the highest
AGAIN = 2  # rounds more, at most, in place of those that others disturbed


def cores_of(ranks: int) -> int:
    """Return how many cores so many ranks need: one each, as far as there are any."""
    return min(ranks, len(os.sched_getaffinity(0)))


class Watch:
    """Counts the CPU time that the ranks use, this process and its `more`, and that of all."""

    def __init__(self, ranks: Iterable[Ranks], more: Iterable[int] = ()) -> None:
        self._pids = [os.getpid(), *more, *(pid for some in ranks for pid in some.pids)]
        self._cores = os.sched_getaffinity(0)

    def now(self) -> Counters:
        return load.count(self._pids, self._cores)


@dataclass(frozen=True)
class Round:
    """The figures of a round, and the CPU time of the host meanwhile."""

    figures: Any
    span: Span


def rounds_of(count: int, cores: int, watch: Watch, once: Callable[[int], Any]) -> list[Round]:
    """Measure so many rounds, and some more where others were busy: those count for the worst.

    `once` gets the number of the round.
    """
    rounds: list[Round] = []
    while len(rounds) < count + AGAIN:
        if len(rounds) >= count and not any(disturbed(r, cores) for r in quietest(rounds, count)):
            break
        before = watch.now()
        figures = once(len(rounds))
        rounds.append(Round(figures, load.between(before, watch.now())))
    return quietest(rounds, count)


def disturbed(some: Round, cores: int) -> bool:
    return load.in_doubt(some.span.share(cores))


def quietest(rounds: Sequence[Round], count: int) -> list[Round]:
    """Return those in which others were the least busy, in their order; equals: the first ones."""
    order = sorted(range(len(rounds)), key=lambda at: rounds[at].span.others or 0.0)
    return [rounds[at] for at in sorted(order[:count])]


def doubts(share: float | None, spread: Spread) -> list[str]:
    """Say why a figure cannot be trusted, in a word and a number; nothing where it can.

    `share` is what others used of the cores that the ranks need.
    """
    told = []
    if share is not None and load.in_doubt(share):
        told.append(f"others {share:.0%}")
    width = (spread.high - spread.low) / spread.median if spread.median > 0 else 0.0
    if width > WIDE:
        told.append(f"spread {width:.0%}")
    return told


def summary(spans: Sequence[Span]) -> dict[str, Any]:
    """Return what JSON gets about other processes, over the whole run."""
    return {
        "others_cores": load.together(spans).others,
        "cores": len(os.sched_getaffinity(0)),
        "limit_share": load.MOST,
        "limit_spread": WIDE,
    }


def load_says(body: dict[str, Any], doubtful: int, count: int) -> str:
    """Say how busy others were, and how many figures are in doubt."""
    said = load.says(body["others_cores"], body["cores"]) + "."
    if not doubtful:
        return said
    verb = "is" if doubtful == 1 else "are"
    return (
        f"{said} {doubtful} of {count} figures {verb} in doubt: others took more than "
        f"{body['limit_share']:.0%} of the cores that the ranks need, or rounds differ by more "
        f"than {body['limit_spread']:.0%} of their median."
    )


# ---- the average over the sizes


def averages(samples: Sequence[dict[str, Any]], backends: Sequence[str]) -> dict[str, Any]:
    """Return the mean bus bandwidth of each backend, and the ratio of the first to each other.

    A ratio is that of the means over the sizes that both have measured, without busy cores.
    """
    moved: dict[str, dict[tuple[Any, ...], float]] = {backend: {} for backend in backends}
    keys = ("collective", "ranks", "type", "redop", "in_place", "bytes")
    for sample in samples:
        if sample["bytes"] and not sample["refused"] and not sample["loaded"]:
            key = tuple(sample[key] for key in keys)
            moved[sample["backend"]][key] = sample["busbw_gb_per_s"]
    means = {name: statistics.fmean(some.values()) for name, some in moved.items() if some}
    first = next((name for name in ("ringcomm", *backends) if name in means), None)
    ratios = {}
    for peer in means:
        both = moved[first].keys() & moved[peer].keys() if first else set()
        if peer != first and first and both:
            own, theirs = (sum(moved[name][key] for key in both) for name in (first, peer))
            ratios[peer] = own / theirs
    return {"backend": first, "busbw_gb_per_s": means, "ratio_to": ratios}


def averages_say(told: dict[str, Any]) -> str:
    """Say it in one line; nothing where no bytes were moved."""
    first, means = told["backend"], told["busbw_gb_per_s"]
    if first is None:
        return ""
    line = f"# Avg bus bandwidth: {first} {show_bandwidth(means[first])} GB/s"
    for peer, ratio in told["ratio_to"].items():
        line += f", {ratio:.2f} times {peer}'s {show_bandwidth(means[peer])} GB/s"
    return line
