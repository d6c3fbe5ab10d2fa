"""Many tensors of a device, tensors whose memory changes, and what cannot be mapped at all.

The simulated device counts the calls of the driver that ask about memory. Where a tensor is mapped,
an all_reduce makes no copy.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks
from lab.simulated_device import SIMULATED, SimulatedMemory, on_device

OWN = {"RINGCOMM_SIM_DEVICES": "3", "RINGCOMM_SIM_ROTATE": "0,1,2"}
TWO_SHOT = {"RINGCOMM_ALGORITHM": "two_shot"}
ONE_EACH = {"RINGCOMM_SIM_SEGMENT_BYTES": "0"}  # each tensor is an allocation
CHUNK = 16384
CHUNKS = {"RINGCOMM_SIM_CHUNK_BYTES": str(CHUNK), **ONE_EACH}
OF_FOUR = CHUNK - 127  # elements of a tensor in four chunks, as one of 64 MiB in torch's
MOST_CALLS = 4  # the driver's, for an operation


def run(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    case = CASES[life.split(",")[0]]
    return on_device(rank, life, settings, lambda rank: case(rank, life, SimulatedMemory()), 60)


def answers(outcomes: list[Outcome]) -> list[Any]:
    assert all("answer" in outcome for outcome in outcomes), outcomes
    return [outcome["answer"] for outcome in outcomes]


def summed(rank: Rank, memory: SimulatedMemory, tensor: torch.Tensor) -> int:
    """Check a sum, and count the copies that it took."""
    tensor.fill_(rank.index + 1.0)
    before = memory.copies()
    dist.all_reduce(tensor)
    copies = memory.copies() - before
    assert tensor.eq(6).all(), tensor
    return copies


# ---- cases, on each rank


def rounds(rank: Rank, life: str, memory: SimulatedMemory) -> tuple[float, int]:
    """As DDP does with its buckets: calls of the driver and copies of the last round.

    That is the fifth, or on a busy machine the first one after it in which nothing is copied.
    """
    _, count, elements = life.split(",")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # an allocation is a file here
    tensors = [memory.empty(int(elements)) for _ in range(int(count))]
    for done in range(60):
        for tensor in tensors:
            tensor.fill_(rank.index + 1.0)
        dist.barrier()
        copies, asked = memory.copies(), memory.asked()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        asked, copies = memory.asked() - asked, memory.copies() - copies
        for work in works:
            work.wait()
        assert all(tensor.eq(6).all() for tensor in tensors)
        all_copies = torch.tensor(copies)
        dist.all_reduce(all_copies)
        if done >= 4 and all_copies == 0:
            break
    return asked / len(tensors), copies


def remapped(rank: Rank, life: str, memory: SimulatedMemory) -> list[int]:
    """A tensor gets other memory at its addresses, all of it or the chunk in the middle."""
    tensor = memory.empty(OF_FOUR)
    copies = []
    for part in (tensor, tensor[CHUNK // 3 : CHUNK // 3 + 1], tensor[:1]):
        copies += [summed(rank, memory, tensor) for _ in range(4)][-1:]
        memory.remap(part)
        summed(rank, memory, tensor)
    return copies


def large(rank: Rank, life: str, memory: SimulatedMemory) -> int:
    tensor = memory.empty(8 << 20)
    return [summed(rank, memory, tensor) for _ in range(3)][-1]


def alone(rank: Rank, life: str, memory: SimulatedMemory) -> list[str]:
    """All share one device, and say that they do not."""
    ctypes.CDLL(str(SIMULATED)).ringcomm_device_salt(ctypes.c_uint8(1 + rank.index))
    tensor = memory.empty(CHUNK // 4)  # short enough for any kernel
    copies = [summed(rank, memory, tensor) for _ in range(4)]
    assert copies[-1] == 0
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cuda"))
    return [backend.flight_record()[-1]["algorithm"]]


CASES: dict[str, Callable[[Rank, str, SimulatedMemory], Any]] = {
    function.__name__: function for function in (rounds, remapped, large, alone)
}


# ---- what they find


@pytest.mark.parametrize("kernels", [{**OWN, **TWO_SHOT}, {}], ids=["own devices", "one device"])
@pytest.mark.parametrize(
    ("memory", "count", "elements"),
    [(ONE_EACH, 1000, 1000), (CHUNKS, 100, OF_FOUR)],
    ids=["allocations", "chunks"],
)
def test_few_calls_of_the_driver_and_no_copy(
    three: Ranks, memory: dict[str, str], count: int, elements: int, kernels: dict[str, str]
) -> None:
    life = f"rounds,{count},{elements}"
    for asked, copies in answers(three(run, life, {**memory, **kernels})):
        assert copies == 0
        assert asked <= MOST_CALLS


@pytest.mark.parametrize("same_ids", ["0", "1"])
def test_memory_that_changes_at_its_addresses(three: Ranks, same_ids: str) -> None:
    settings = {**CHUNKS, **OWN, **TWO_SHOT, "RINGCOMM_SIM_SAME_IDS": same_ids}
    outcomes = three(run, f"remapped,{same_ids}", settings)
    for copies in answers(outcomes):
        assert (copies == [0, 0, 0]) == (same_ids == "0")
    said = "this driver does not tell when virtual addresses get other memory"
    assert [outcome["log"].count(said) for outcome in outcomes] == [int(same_ids)] * 3


def test_chunks_that_cannot_be_exported_are_said_once(three: Ranks) -> None:
    settings = {**CHUNKS, **OWN, **TWO_SHOT, "RINGCOMM_SIM_CHUNK_EXPORTS": "0"}
    outcomes = three(run, "remapped,refused", settings)
    assert all(copies > 0 for by_tensor in answers(outcomes) for copies in by_tensor)
    said = "cuMemExportToShareableHandle: operation not supported"
    assert [outcome["log"].count(said) for outcome in outcomes] == [1] * 3


def test_what_is_too_large_is_said_once(three: Ranks) -> None:
    settings = {**OWN, **TWO_SHOT, "RINGCOMM_SIM_MEMORY_BYTES": str(60 << 20)}
    outcomes = three(run, "large", settings)
    assert all(copies > 0 for copies in answers(outcomes))
    said = "it is larger than half of the device"
    assert [outcome["log"].count(said) for outcome in outcomes] == [1] * 3


@pytest.mark.parametrize("kernel", ["two_shot", "one_shot", "low_latency", "device_ring"])
def test_ranks_of_one_device_run_kernels_that_meet(three: Ranks, kernel: str) -> None:
    outcomes = three(run, f"alone,{kernel}", {"RINGCOMM_ALGORITHM": kernel})
    assert answers(outcomes) == [[kernel]] * 3
    assert all("each rank has a device" in outcome["log"] for outcome in outcomes)
