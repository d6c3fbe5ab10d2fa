"""Names a rank that keeps the others waiting, in the log, at most once a minute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ringcomm._flight.records import GroupRecord, Operation, read_ring
from ringcomm._runtime.process import say

EVERY = 60.0  # seconds
SHARE = 0.2  # a straggler: this rank has waited for it so much of the time
OTHERS = 3.0  # times as long as for any other
LATE_NS = 1_000_000  # a wait that counts: no network inside a site is so far away
FEWEST = 10  # such waits


@dataclass
class Seen:
    """The waits of one group's rank for each of its ranks, in total; seconds."""

    rank: int
    waits: list[float]
    at: float


def suspect(before: Seen, now: Seen) -> int | None:
    """Return the one rank for which this one has waited most since then, if it is so much.

    A wait counts for the one rank that had not called yet, and else for the peer whose bytes were
    awaited: a rank that is only far away makes every operation longer, but none of them late.
    The first of the other ranks speaks, so that not all of them do.
    """
    grown = [then - first for then, first in zip(now.waits, before.waits, strict=True)]
    slow = max(range(len(grown)), key=lambda rank: grown[rank])
    rest = max((time for rank, time in enumerate(grown) if rank != slow), default=0)
    speaks = now.rank == (0 if slow != 0 else 1)
    enough = grown[slow] >= max(SHARE * (now.at - before.at), OTHERS * rest)
    return slow if speaks and enough and grown[slow] > 0 else None


def sentence(record: GroupRecord, slow: int, before: Seen, now: Seen) -> str | None:
    """Return what there is to say of the suspect, or None where its waits were few."""
    since = before.at * 1e9
    recent = [call for call in record.operations if (call.called_ns or 0) >= since]
    late = [call for call in recent if call.longest_peer == slow and call.longest_ns > LATE_NS]
    if len(late) < FEWEST:
        return None
    usual = median(call.longest_ns for call in late) * 1e-6
    own = median(moving(call) for call in late) * 1e-6
    return (
        f"rank {record.global_ranks[slow]} is slow: in the last {now.at - before.at:.0f} s this "
        f"rank waited {now.waits[slow] - before.waits[slow]:.3g} s for it, in {len(late)} of "
        f"{len(recent)} operations and typically {usual:.3g} ms, while the operations themselves "
        f"took {own:.3g} ms"
    )


def moving(operation: Operation) -> int:
    taken = (operation.ended_ns or 0) - (operation.began_ns or 0)
    return max(taken - operation.waited_ns, 0)


def median(values: Iterable[int]) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])


class Stragglers:
    """The state of each group when it was looked at last."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, bool], Seen] = {}

    def look(self, rings: Iterable[bytes], at: float) -> None:
        """Write a line to stderr for each group that has a straggler; `at`: time.monotonic()."""
        for ring in rings:
            record = read_ring(ring, newest=0)
            now = Seen(record.rank, [wait * 1e-9 for wait in record.waits_ns], at)
            key = (record.group, record.device)
            before, self._before[key] = self._before.get(key), now
            slow = suspect(before, now) if before and len(before.waits) == record.size else None
            if before is None or slow is None:
                continue
            said = sentence(read_ring(ring), slow, before, now)  # slow to read: only if need be
            if said:
                say(f"WARNING: rank {now.rank} of group '{record.group}': {said}")
