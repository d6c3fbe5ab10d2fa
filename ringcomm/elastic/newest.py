"""The newest step of which every shard is whole somewhere: on a rank's disk, or in its memory.

All ranks call `search` together. Each tells of which steps it can give each shard, and all come to
the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from ringcomm.elastic.gathering import gather

NONE = -1  # instead of a step


class Source(Protocol):
    """States of training that one rank can give, by their shards' places and their steps."""

    def latest(self, place: int, most: int | None) -> int:
        """Return the newest step, `most` at most, of which it has that shard; NONE: of none."""

    def history(self, place: int, step: int) -> int:
        """Return a number which says in what course of training that shard of that step was made.

        When all ranks are lost, or the last unit loses one, a step may be made once more, and not
        with the same bits: checkpoints hold no random numbers. Shards of both do not fit together.
        """

    def check(self, place: int, step: int) -> None:
        """Read all of a state. If it is damaged, `latest` returns an earlier step from now on."""


class Found(NamedTuple):
    """The answer of all ranks: the step, or NONE, and by place the rank that gives the shard."""

    step: int
    givers: list[int]
    missing: list[int]  # the places of which there is no shard that fits those of the others


def search(sources: Sequence[Source], places: Sequence[int], unit: int) -> Found:
    """Search the sources of all ranks, which call this together over the default group.

    `places` are the ranks' places in units of so many. A shard comes from the first rank of its
    place that has it, else from the first one of another place. Raises what the group raises.
    """
    rank, most = dist.get_rank(), None
    clashes = False  # shards of one step were of different courses of training
    while True:
        told = _tell([_latest(sources, place, most) for place in range(unit)])
        held = [max(row[place] for row in told) for place in range(unit)]
        step = min(held)
        if step < 0:
            missing = [place for place, newest in enumerate(held) if newest < 0]
            # Not all: there are some, and to begin anew would lose them.
            return Found(NONE, [], missing[1:] if clashes and len(missing) == unit else missing)
        if max(map(max, told)) > step:  # of a shard, and others are behind
            most = step
            continue
        histories = _tell([_history(sources, place, step) for place in range(unit)])
        common = _common(step, told, histories)
        if not common:
            most, clashes = step - 1, True
            continue
        wanted = (step, max(common))
        offered = [list(zip(*rows, strict=True)) for rows in zip(told, histories, strict=True)]
        givers = [_giver(wanted, offered, place, places) for place in range(unit)]
        for place in range(unit):
            if givers[place] == rank:
                _source(sources, place, step).check(place, step)
        told = _tell([_latest(sources, place, most) for place in range(unit)])
        histories = _tell([_history(sources, place, step) for place in range(unit)])
        if all((told[r][place], histories[r][place]) == wanted for place, r in enumerate(givers)):
            return Found(step, givers, [])


def _latest(sources: Sequence[Source], place: int, most: int | None) -> int:
    return max((source.latest(place, most) for source in sources), default=NONE)


def _history(sources: Sequence[Source], place: int, step: int) -> int:
    held = [source for source in sources if source.latest(place, step) == step]
    return held[0].history(place, step) if held else NONE


def _common(step: int, told: list[list[int]], histories: list[list[int]]) -> set[int]:
    """Return the histories in which some rank has each shard of that step."""
    ranks, shards = range(len(told)), range(len(told[0]))
    return set.intersection(
        *({histories[r][place] for r in ranks if told[r][place] == step} for place in shards)
    )


def _source(sources: Sequence[Source], place: int, step: int) -> Source:
    return next(source for source in sources if source.latest(place, step) == step)


def _giver(
    wanted: tuple[int, int],
    offered: Sequence[Sequence[tuple[int, int]]],
    place: int,
    places: Sequence[int],
) -> int:
    order = sorted(range(len(places)), key=lambda rank: places[rank] != place)
    return next(rank for rank in order if offered[rank][place] == wanted)


def _tell(mine: list[int]) -> list[list[int]]:
    """Tell all ranks some numbers; returns each rank's."""
    every = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64)
    gather(every, torch.tensor(mine))
    rows: list[list[int]] = every.view(-1, len(mine)).tolist()
    return rows
