"""Ranks that share a device: one kernel does an operation, where all tensors lie.

The simulated device counts copies. None is made where tensors are mapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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


CASES: dict[str, Callable[[Rank, SimulatedMemory], Any]] = {
    case.__name__: case for case in (copies, short_messages, few_commands)
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
