"""The vote at the end of each step: 64 bytes from every rank, which all ranks see.

A rank votes when it holds all gradients of its step. So a vote that ended on any rank was begun on
every rank, also on those that died since: all of them hold the gradients. That is why one
all_gather is enough for a step to be applied by every member or by none.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ringcomm.elastic.errors import Diverged

if TYPE_CHECKING:
    from ringcomm.elastic.state import Tracked

WORDS = 8  # of 64 bits

LEAVES = 1  # this rank goes after the step
ADMITS = 2  # rank 0 has guests to admit


class Ballot(NamedTuple):
    """What a rank says: where it is, and what it has. Hashes are 0 where they are not compared."""

    epoch: int
    commits: int  # decided so far: steps and attempts
    flags: int = 0
    act: int = 0  # 0 for an attempt, else the optimizers that apply a step
    deck: int = 0  # hash of the sampler's state
    state: int = 0  # hash of the parameters
    options: int = 0  # hash of learning rates and the like

    def words(self) -> list[int]:
        return [*map(_signed, self), *[0] * (WORDS - len(self))]

    @classmethod
    def of(cls, words: list[int]) -> Ballot:
        return cls(*(word & (1 << 64) - 1 for word in words[:7]))


def _signed(value: int) -> int:
    """A word of 64 bits as torch's int64 has it."""
    return value - (1 << 64) if value >> 63 else value


def vote(mine: Ballot, ranks: int) -> list[Ballot]:
    """Exchange ballots over the default group. Raises DistBackendError when the group fails."""
    own = mine.words()
    every = torch.empty(ranks * WORDS, dtype=torch.int64)
    # Not through torch.distributed's function: its name changes, and it costs as much as the vote.
    group = dist.distributed_c10d._get_default_group()
    group._allgather_base(every, torch.tensor(own, dtype=torch.int64)).wait()
    words: list[int] = every.tolist()
    if words == own * ranks:  # as at nearly all steps
        return [mine] * ranks
    return [Ballot.of(words[at : at + WORDS]) for at in range(0, len(words), WORDS)]


def say(mine: str) -> list[str]:
    """Tell all ranks at most 4,095 bytes; returns what each says."""
    data = mine.encode()[:4095].ljust(4096, b"\0")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    every = torch.empty(dist.get_world_size() * 4096, dtype=torch.uint8)
    dist.distributed_c10d._get_default_group()._allgather_base(every, own).wait()
    rows = every.view(-1, 4096)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def require_same(mine: str, told: list[str]) -> None:
    """Raise ValueError, on each rank, where one tracks something else."""
    for rank, theirs in enumerate(told):
        if theirs != mine:
            raise ValueError(
                f"world.track: rank {rank} tracks {theirs}, this one {mine}: every rank must track "
                "the same things"
            )


# What has to be equal, and what it means if it is not.
DIFFERENCES = {
    "commits": "counts of steps differ between ranks after step {}: {} from the others; every rank "
    "must enter world.step() and world.attempt() equally often",
    "act": "what ranks apply differs after step {}: {} from the others; every rank must call the "
    "same optimizers in world.step(), and world.attempt() where the others do",
    "deck": "samplers differ between ranks after step {}: {} from the others; give every rank the "
    "same sampler, num_workers, prefetch_factor and accumulate",
    "state": "parameters differ between ranks after step {}: {} from the others; a step that is "
    "not deterministic, or a module that is not tracked",
    "options": "learning rates or other options differ between ranks after step {}: {} from the "
    "others; track the schedulers, and call operations before opt.step(), not after it",
}


def compare(ballots: list[Ballot], step: int) -> None:
    """Raise Diverged unless all ranks are where they should be: at the same place."""
    if ballots.count(ballots[0]) == len(ballots):
        return
    for what, text in DIFFERENCES.items():
        values = [getattr(ballot, what) for ballot in ballots]
        usual = max(values, key=values.count)
        odd = [str(rank) for rank, value in enumerate(values) if value != usual]
        if odd:
            ranks = "rank " + odd[0] if len(odd) == 1 else "ranks " + ", ".join(odd)
            raise Diverged(text.format(step, ranks))


def hash_of_options(tracked: Tracked) -> int:
    """64 bits of what optimizers, schedulers and scalers go by, beside their tensors."""
    values: list[Any] = []
    for optimizer in tracked.optimizers:
        for group in optimizer.param_groups:
            values += sorted((k, _plain(v)) for k, v in group.items() if k != "params")
    values += [getattr(scheduler, "last_epoch", None) for scheduler in tracked.schedulers]
    values += [scaler.get_scale() for scaler in tracked.scalers]
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


def _plain(value: Any) -> str:
    """A number, or several, as text; "" for what may have another text on each rank."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return repr(value) if isinstance(value, int | float | str) else ""
