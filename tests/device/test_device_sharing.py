"""Ranks that share a device: one kernel does an operation, where all tensors lie.

The simulated device counts copies. None is made where tensors are mapped.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.limits import limit
from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks
from lab.simulated_device import SMALL, SimulatedMemory, on_device

COUNT = 1 << 15  # elements of a part: more than a short message


def run(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    case = CASES[life.split(",")[0]]
    return on_device(rank, life, settings, lambda rank: case(rank, SimulatedMemory()))


def exchange(rank: Rank, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    works = [
        dist.isend(mine, (rank.index + 1) % rank.size),
        dist.irecv(theirs, (rank.index - 1) % rank.size),
    ]
    for work in works:
        work.wait()


Call = Callable[[Rank, torch.Tensor, torch.Tensor], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda rank, i, o: dist.all_reduce(i, op=dist.ReduceOp.MAX),
    "broadcast": lambda rank, i, o: dist.broadcast(i, 1),
    "reduce": lambda rank, i, o: dist.reduce(i, 2, op=dist.ReduceOp.MAX),
    "all_gather": lambda rank, i, o: dist.all_gather_into_tensor(o, i[:COUNT]),
    "reduce_scatter": lambda rank, i, o: dist.reduce_scatter_tensor(o[:COUNT], i),
    "all_to_all": lambda rank, i, o: dist.all_to_all_single(o, i),
    "message": lambda rank, i, o: exchange(rank, i, o),
}


def copies(rank: Rank, memory: SimulatedMemory) -> list[tuple[str, int]]:
    """Count for each call, once the ranks have mapped what it uses."""
    tensors = [memory.empty(rank.size * COUNT) for _ in range(2)]
    by_call = {}
    for name, call in CALLS.items():
        for _ in range(4):
            for tensor in tensors:
                tensor.fill_(float(rank.index))
            dist.barrier(device_ids=[0])
            before = memory.copies()
            call(rank, *tensors)
            by_call[name] = memory.copies() - before
    return list(by_call.items())


def short_messages(rank: Rank, memory: SimulatedMemory) -> str:
    """Their senders go on before anybody receives them."""
    mine, theirs = memory.empty(1000), memory.empty(1000)
    dist.all_reduce(mine.zero_())
    for turn in range(3):
        mine.fill_(rank.index + turn)
        begin = time.monotonic()
        dist.isend(mine, (rank.index + 1) % rank.size).wait()
        if time.monotonic() - begin > limit(10):
            return "it waited for the receiver"
        dist.recv(theirs, (rank.index - 1) % rank.size)
        if not theirs.eq((rank.index - 1) % rank.size + turn).all():
            return f"turn {turn}: {theirs[:3]}"
    return ""


def few_commands(rank: Rank, memory: SimulatedMemory) -> str:
    """A stream takes few commands, and a peer is late: the host goes on at once."""
    tensor, small = memory.empty(1 << 24), memory.empty(10)
    dist.all_reduce(small.fill_(1.0))
    tensor.fill_(1.0)
    if rank.index == 2:
        time.sleep(1)  # the case: a rank that is late
    begin = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    took = time.monotonic() - begin
    work.wait()
    if not tensor.eq(rank.size).all():
        return f"{tensor[:3]}"
    return "the call waited" if took > 0.7 and rank.index != 2 else ""


def takes_turns(rank: Rank, memory: SimulatedMemory) -> int:
    """Return how many slices of time kernels waited away."""
    tensors = [memory.empty(rank.size * COUNT) for _ in range(2)]
    for call in CALLS.values():
        for number in range(3):
            tensors[0].fill_(rank.index + number)
            call(rank, *tensors)
    short = memory.empty(100).fill_(rank.index)
    dist.all_reduce(short)
    assert short.eq(sum(range(rank.size))).all()
    return memory.lost_slices()


def denies(rank: Rank, memory: SimulatedMemory) -> int:
    """Have each rank take the device for one of its own, so that kernels wait for one another."""
    memory.library.ringcomm_device_salt(ctypes.c_uint8(1 + rank.index))
    tensor = memory.empty(100)
    for number in range(5):
        tensor.fill_(rank.index + number)
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(rank.size)) + rank.size * number).all()
    return memory.lost_slices()


CASES: dict[str, Callable[[Rank, SimulatedMemory], Any]] = {
    case.__name__: case for case in (copies, short_messages, few_commands, takes_turns, denies)
}


def answers(outcomes: list[Outcome]) -> list[Any]:
    assert all("answer" in outcome for outcome in outcomes), outcomes
    return [outcome["answer"] for outcome in outcomes]


def test_nothing_is_copied_that_is_mapped(three: Ranks) -> None:
    for by_call in answers(three(run, "copies", {})):
        own_part = {"all_to_all": 1}  # what a rank sends to itself
        assert dict(by_call) == {name: own_part.get(name, 0) for name in CALLS}


def test_a_short_message_waits_for_nobody(three: Ranks) -> None:
    assert answers(three(run, "short_messages", SMALL)) == [""] * 3


def test_a_long_operation_is_few_commands(three: Ranks) -> None:
    settings = {"RINGCOMM_SIM_COMMANDS": "100"}  # each word counts, and each round of 12 MiB
    assert answers(three(run, "few_commands", settings)) == [""] * 3


def test_no_slice_is_spent_on_waiting(three: Ranks, tmp_path: Path) -> None:
    slices = {"RINGCOMM_SIM_SLICES": str(tmp_path)}
    assert answers(three(run, "takes_turns", slices)) == [0] * 3
    # Where kernels do wait, the results are right, but a wait lasts until its slice is over.
    assert sum(answers(three(run, "denies", slices))) >= 5
