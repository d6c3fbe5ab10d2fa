"""The critical path: the waits of the last rank to end, step by step, back to the start."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ringcomm.tools.plan.simulate.engine import Engine, TimedMessage

KINDS = ("latency", "transfer", "copy", "reduce")


class Part(NamedTuple):
    """A stretch of the path from `begin` to `end`, in seconds.

    latency, transfer: a message on its way from `rank` to `to`. copy, reduce: work of `rank`. Of a
    transfer, `shared` are the seconds that it takes because others are on the same links.
    """

    kind: str
    begin: float
    end: float
    rank: int
    to: int
    bytes: int
    shared: float = 0.0


def critical_path(run: Engine) -> list[Part]:
    """Return the parts, in order: each ends where the next begins."""
    return walk(run)[0]


def messages_of(run: Engine) -> list[TimedMessage]:
    """Return the messages of the critical path, in order."""
    return walk(run)[1]


def walk(run: Engine) -> tuple[list[Part], list[TimedMessage]]:
    rank = max(range(len(run.programs)), key=lambda rank: (run.clock[rank], -rank))
    parts: list[Part] = []
    taken: list[TimedMessage] = []
    left = len(run.of_rank[rank])
    while left:
        span = run.of_rank[rank][left - 1]
        if span.message is None or span.end <= span.begin:
            if span.end > span.begin:
                parts.append(Part(span.verb, span.begin, span.end, rank, -1, span.bytes))
            left -= 1
            continue
        message = trace(run, span.message, parts, taken)
        rank, left = message.sender, message.spans
    parts.reverse()
    taken.reverse()
    return parts, taken


def trace(
    run: Engine, message: TimedMessage, parts: list[Part], taken: list[TimedMessage]
) -> TimedMessage:
    """Add a message and its parts, and those of the same pair that it waited for.

    Returns the first of these: that was sent when its turn had come.
    """
    ends = message.sender, message.receiver
    parts.append(Part("latency", message.left, message.arrived, *ends, message.bytes))
    while True:
        taken.append(message)
        if message.left > message.began:
            pair = ends[0] // run.local, ends[1] // run.local
            alone = message.bytes / run.topology.rate(pair)
            took = message.left - message.began
            shared = took - alone if took > alone * (1 + 1e-9) else 0.0
            part = Part("transfer", message.began, message.left, *ends, message.bytes, shared)
            parts.append(part)
        if message.before is None or message.began <= message.sent:
            return message
        message = message.before


def totals(parts: Sequence[Part]) -> dict[str, float]:
    """Return the seconds of each kind, and of all that is "shared" among the transfers."""
    seconds = {kind: sum(p.end - p.begin for p in parts if p.kind == kind) for kind in KINDS}
    return {**seconds, "shared": sum(part.shared for part in parts)}


def hops(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return from which rank to which the path goes, in order; a pair that stays counts once."""
    ends = [(part.rank, part.to) for part in parts if part.to >= 0]
    return [pair for pair, _ in itertools.groupby(ends)]


def message_count(parts: Sequence[Part]) -> int:
    """Return how many messages the path has: one that waited for another's bytes, and that one."""
    starts = {(part.rank, part.to, part.begin) for part in parts if part.kind == "transfer"}
    bare = sum(part.kind == "latency" and part.bytes == 0 for part in parts)
    return len(starts) + bare
