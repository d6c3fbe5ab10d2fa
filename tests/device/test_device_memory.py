"""Memory that ranks map of one another on a device, which is as strict about it as CUDA.

A range of another's addresses is mapped once, and what was freed counts until its last mapping is
closed. The simulated device counts copies: where a tensor is mapped, an all_reduce makes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms

from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks
from lab.simulated_device import SimulatedMemory, on_device

COUNT = 1 << 18  # elements: half a segment of the allocator
SLOW = {"RINGCOMM_SIM_SLOW_US": "100"}  # the host is always ahead of the device


def run(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    case = CASES[life.split(",")[0]]
    return on_device(rank, life, settings, lambda rank: case(rank, SimulatedMemory()))


def copies_of(memory: SimulatedMemory, tensor: torch.Tensor, group: Any = None) -> int:
    """How many copies an all_reduce makes."""
    before = memory.copies()
    dist.all_reduce(tensor, group=group)
    return memory.copies() - before


def replace(memory: SimulatedMemory, tensor: torch.Tensor) -> torch.Tensor:
    """Free it, and allocate the like at the same address."""
    address, count = tensor.data_ptr(), tensor.numel()
    memory.release(tensor)
    assert memory.empty_cache() == 1
    tensor = memory.empty(count)
    assert tensor.data_ptr() == address
    return tensor


# ---- cases, on each rank


def freed_and_back(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """The copies of the last all_reduce, before and after its memory was another allocation."""
    all_copies = []
    tensor = memory.empty(COUNT)
    for _ in range(3):
        for _ in range(3):
            tensor.fill_(rank.index + 1.0)
            copies = copies_of(memory, tensor)
            assert tensor.eq(3).all()
        all_copies.append(copies)
        tensor = replace(memory, tensor)
    return all_copies


def never_idle(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """The same, where something is always under way."""
    all_copies, works = [], []
    tensor = memory.empty(COUNT)
    other = memory.empty(2 * COUNT)  # in a segment of its own
    tensor.fill_(1.0)
    other.fill_(1.0)
    for _ in range(2):
        for _ in range(200):
            works += [dist.all_reduce(other, op=dist.ReduceOp.MAX, async_op=True)]
            before = memory.copies()
            works += [dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)]
            copies = memory.copies() - before
            if len(works) > 8:
                works[-8].wait()  # so much is under way that it ends in the 0.2 s that are waited
        all_copies.append(copies)
        works[-1].wait()  # the last user of this memory
        works += [dist.all_reduce(other, op=dist.ReduceOp.MAX, async_op=True)]
        tensor = replace(memory, tensor)
        tensor.fill_(1.0)
    works[-1].wait()
    assert other.eq(1).all()
    return all_copies


def two_groups(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """An idle group has mapped what lay there before."""
    idle = dist.new_group()
    tensor = memory.empty(COUNT)
    tensor.fill_(1.0)
    for group in (idle, None):
        for _ in range(2):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    tensor = replace(memory, tensor)
    all_copies = []
    for group in (None, idle, None):
        for _ in range(3):
            tensor.fill_(rank.index + 1.0)
            copies = copies_of(memory, tensor, group)
            assert tensor.eq(3).all()
        all_copies.append(copies)
    return all_copies


def changing(rank: Rank, memory: SimulatedMemory) -> int:
    """The bytes that are held after 250 operations, beyond those before them."""
    warm = memory.empty(8)
    dist.all_reduce(warm)
    before = memory.used()
    for turn in range(250):
        tensor = memory.empty(1 + 7919 * turn % 3_000_000)
        tensor.fill_(float(rank.index))
        dist.all_reduce(tensor)
        assert tensor.eq(1).all()
        memory.release(tensor)
        if turn % 7 == 0:
            memory.empty_cache()
    memory.empty_cache()
    for _ in range(300):  # what was not used for 128 operations is looked at, piece by piece
        dist.all_reduce(warm)
    dist.barrier()
    return memory.used() - before


def late_leader(rank: Rank, memory: SimulatedMemory) -> str:
    """Tensors under way stay mapped, though there is no room for the next."""
    first, second = memory.empty(5 << 20), memory.empty(5 << 20)
    for tensor in (first.fill_(1.0), second.fill_(1.0), first):
        for _ in range(4):
            copies = copies_of(memory, tensor) if tensor is first else 0
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            tensor.fill_(1.0)
    assert copies == 0
    if rank.index == 0:
        time.sleep(0.5)  # the case: the other has enqueued all before
    second.fill_(10.0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    for work in works:
        work.wait()
    return "" if first.eq(2).all() and second.eq(20).all() else f"{first[:2]} {second[:2]}"


def mapped_bytes() -> int:
    """Memory of devices that this process has mapped, its own included."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "/memfd:ringcomm-sim" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ends)


def many(rank: Rank, memory: SimulatedMemory) -> float:
    """How much the leader has mapped of what all have, in MiB."""
    warm = memory.empty(8)
    dist.all_reduce(warm)
    before = mapped_bytes()
    tensors = [memory.empty(1 << 19) for _ in range(40)]  # 2 MiB, and each an allocation
    for _ in range(2):
        for tensor in tensors:
            tensor.fill_(rank.index + 1.0)
            dist.all_reduce(tensor)
            assert tensor.eq(3).all()
    return (mapped_bytes() - before) / (1 << 20)


def pieces(rank: Rank, memory: SimulatedMemory) -> int:
    """Tensors whose memory has too many pieces to be exported."""
    for count in (COUNT, 2 * COUNT):
        tensor = memory.empty(count)
        tensor.fill_(rank.index + 1.0)
        dist.all_reduce(tensor)
        assert tensor.eq(3).all()
    return 0


def first_message(rank: Rank, memory: SimulatedMemory) -> float:
    """Between ranks whose group has met, while a stream waits for a rank."""
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    if rank.index == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.isend(torch.full((5,), 7.0), 1).wait()
        work.wait()
    else:
        got = torch.zeros(5)
        dist.recv(got, 0)
        assert got.eq(7).all()
        dist.all_reduce(tensor)
    return float(tensor[0])


def captured_elsewhere(rank: Rank, memory: SimulatedMemory) -> str:
    """A question of the driver's that fails says nothing about the group."""
    tensor = torch.ones(3)
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()
    return str(error.value)


CASES: dict[str, Callable[[Rank, SimulatedMemory], Any]] = {
    function.__name__: function
    for function in (
        freed_and_back, never_idle, two_groups, changing, many, pieces, first_message,
        captured_elsewhere, late_leader,
    )
}  # fmt: skip


# ---- what they find


def answers(outcomes: list[Outcome]) -> list[Any]:
    assert all("answer" in outcome for outcome in outcomes), outcomes
    return [outcome["answer"] for outcome in outcomes]


@pytest.mark.parametrize("chunks", ["0", "262144"])
def test_memory_that_was_freed_is_mapped_anew(two: Ranks, chunks: str) -> None:
    settings = {"RINGCOMM_SIM_CHUNK_BYTES": chunks}
    assert answers(two(run, f"freed_and_back,{chunks}", settings)) == [[0, 0, 0]] * 2


def test_also_where_the_device_is_never_idle(two: Ranks) -> None:
    assert answers(two(run, "never_idle", SLOW)) == [[0, 0]] * 2


def test_also_where_an_idle_group_has_mapped_it(two: Ranks) -> None:
    assert answers(two(run, "two_groups", {})) == [[0, 0, 0]] * 2


@pytest.mark.parametrize("chunks", forms(["0", "1048576"], "1048576"))
def test_nothing_that_was_freed_is_held(two: Ranks, chunks: str) -> None:
    settings = {"RINGCOMM_SIM_CHUNK_BYTES": chunks}
    assert answers(two(run, f"changing,{chunks}", settings)) == [0, 0]


def test_the_leader_maps_no_more_than_a_part_of_the_device(two: Ranks) -> None:
    leader, follower = answers(two(run, "many", {"RINGCOMM_SIM_MEMORY_BYTES": str(128 << 20)}))
    assert 80 <= follower < 81  # its own
    assert 40 < leader - follower < 128 / 2 + 3  # one more until it is closed


def test_what_is_under_way_stays_mapped(two: Ranks) -> None:
    settings = {"RINGCOMM_SIM_MEMORY_BYTES": str(64 << 20)}  # half of it has room for one of two
    assert answers(two(run, "late_leader", settings)) == ["", ""]


def test_memory_that_cannot_be_exported_is_said_once(two: Ranks) -> None:
    outcomes = two(run, "pieces", {"RINGCOMM_SIM_CHUNK_BYTES": "4096"})
    assert answers(outcomes) == [0, 0]
    said = [outcome["log"].count("other processes cannot map") for outcome in outcomes]
    assert said == [0, 1]


def test_memory_that_cannot_be_mapped_is_said_once(two: Ranks) -> None:
    settings = {"RINGCOMM_SIM_IPC_OPENS": "1", "RINGCOMM_SIM_RANK": "0"}
    outcomes = two(run, "many,refused", settings)
    answers(outcomes)
    assert [outcome["log"].count("of rank 1 cannot be mapped") for outcome in outcomes] == [1, 0]


def test_the_first_message_makes_no_stream(two: Ranks) -> None:
    assert answers(two(run, "first_message", {}, seconds=20)) == [4.0, 4.0]


def test_few_connections_are_warned_of(two: Ranks) -> None:
    outcomes = two(run, "first_message,1", {"CUDA_DEVICE_MAX_CONNECTIONS": "2"})
    assert answers(outcomes) == [4.0, 4.0]
    assert all("CUDA_DEVICE_MAX_CONNECTIONS=2" in outcome["log"] for outcome in outcomes)


def test_a_capture_elsewhere_does_not_fail_the_group(two: Ranks) -> None:
    settings = {"RINGCOMM_SIM_CAPTURE_FAILS": "1"}
    for text in answers(two(run, "captured_elsewhere", settings)):
        assert "does another thread capture a CUDA graph?" in text
