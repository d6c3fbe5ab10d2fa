"""The vote at the end of each step: 64 bytes from every rank, which all ranks see.

A rank votes when it holds all gradients of its step. So a vote that ended on any rank was begun on
every rank, also on those that died since: all of them hold the gradients. That is why one
all_gather is enough for a step to be applied by every member or by none.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringcomm.elastic.errors import Diverged
from ringcomm.elastic.gathering import gather

if TYPE_CHECKING:
    from ringcomm.elastic.state import Tracked

FORM = struct.Struct("=8Q")  # a ballot

LEAVES = 1  # this rank goes after the step
ADMITS = 2  # rank 0 has guests to admit
OVER = 4  # another world was founded in the place of this one
COPIES = 8  # this rank is ready to copy its shard after the step


class Ballot(NamedTuple):
    """A rank's report of where it is, and what it has. Hashes are 0 where they are not compared."""

    epoch: int
    commits: int  # decided so far: steps and attempts
    flags: int = 0
    act: int = 0  # 0 for an attempt, else the optimizers that apply a step
    deck: int = 0  # hash of the sampler's state
    state: int = 0  # hash of the parameters
    options: int = 0  # hash of learning rates and the like


class _Box:
    """Where ballots are exchanged: bytes, and the tensors over them."""

    def __init__(self, ranks: int) -> None:
        self.own, self.every = bytearray(FORM.size), bytearray(ranks * FORM.size)
        self.tensors = [torch.frombuffer(b, dtype=torch.int64) for b in (self.every, self.own)]


_box = functools.lru_cache(maxsize=1)(_Box)


def vote(mine: Ballot, ranks: int) -> list[Ballot]:
    """Exchange ballots over the default group. Raises DistBackendError when the group fails."""
    box = _box(ranks)
    FORM.pack_into(box.own, 0, *mine, 0)
    gather(*box.tensors)
    if box.every == box.own * ranks:  # as at nearly all steps
        return [mine] * ranks
    return [Ballot(*words[:-1]) for words in FORM.iter_unpack(box.every)]


def require_same(mine: str, told: list[str]) -> None:
    """Raise ValueError, on each rank, where one tracks something else."""
    for rank, theirs in enumerate(told):
        if theirs != mine:
            raise ValueError(
                f"world.track: rank {rank} tracks {theirs}, this one {mine}: every rank must track "
                "the same things"
            )


# Fields that have to be equal, and the meaning of a difference.
DIFFERENCES = {
    "commits": "counts of steps differ between ranks after step {}: {} from the others; every rank "
    "must enter world.step() and world.attempt() equally often",
    "act": "ranks apply different updates after step {}: {} from the others; every rank must call "
    "the same optimizers in world.step(), and world.attempt() where the others do",
    "deck": "samplers differ between ranks after step {}: {} from the others; give every rank the "
    "same sampler, num_workers, prefetch_factor and accumulate",
    "state": "parameters differ between ranks after step {}: {} from the others; a step that is "
    "not deterministic, or a module that is not tracked",
    "options": "learning rates or other options differ between ranks after step {}: {} from the "
    "others; track the schedulers, and call operations before opt.step(), not after it",
}


def compare(ballots: list[Ballot], step: int, places: list[int]) -> None:
    """Raise Diverged unless all ranks are at the same step, and those of a place equal.

    `places` are those in units, of which each holds other parameters.
    """
    if ballots.count(ballots[0]) == len(ballots):
        return
    for what, text in DIFFERENCES.items():
        values = [getattr(ballot, what) for ballot in ballots]
        held = places if what == "state" else [0] * len(ballots)
        odd = tuple(
            rank for rank, value in enumerate(values) if value != _usual(values, held, rank)
        )
        if odd:
            ranks = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd))
            raise Diverged(text.format(step, ranks), what, odd)


def _usual(values: list[int], places: list[int], rank: int) -> int:
    there = [value for value, place in zip(values, places, strict=True) if place == places[rank]]
    return max(there, key=there.count)


def hash_of_options(tracked: Tracked) -> int:
    """Return 64 bits of settings of optimizers, schedulers and scalers, beside their tensors."""
    values: list[Any] = []
    for optimizer in tracked.optimizers:
        for group in optimizer.param_groups:
            values += sorted((k, _plain(v)) for k, v in group.items() if k != "params")
    values += [getattr(scheduler, "last_epoch", None) for scheduler in tracked.schedulers]
    values += [scaler.get_scale() for scaler in tracked.scalers]
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


def hash_of_rates(tracked: Tracked) -> int:
    """Return 64 bits of learning rates, and of how far the schedulers are: quick, for each step."""
    values = [getattr(scheduler, "last_epoch", 0) for scheduler in tracked.schedulers]
    values += [
        group.get("lr", 0) for optimizer in tracked.optimizers for group in optimizer.param_groups
    ]
    return hash(tuple(v for v in values if isinstance(v, int | float))) & (1 << 64) - 1


def _plain(value: Any) -> str:
    """A number, or several, as text; "" for what may have another text on each rank."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return repr(value) if isinstance(value, int | float | str) else ""
