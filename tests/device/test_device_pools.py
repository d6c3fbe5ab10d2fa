"""Memory that is registered: all ranks have mapped it before its first operation, and keep it so.

The simulated device counts copies: where a tensor is mapped, an all_reduce makes none. Ranks share
a device, so those of rank 1 are counted, whose tensors rank 0 maps; or each has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks, error_of
from lab.simulated_device import CUDA, Cuda, SimulatedMemory, on_device, pretend

MIB = 1 << 18  # elements
OWN = {"RINGCOMM_SIM_DEVICES": "2", "RINGCOMM_SIM_ROTATE": "0,1"}
SMALL_DEVICE = {"RINGCOMM_SIM_MEMORY_BYTES": str(64 << 20)}  # others map 32 MiB of a rank

OF_ONE_EACH = {"RINGCOMM_SIM_SEGMENT_BYTES": "0"}  # each tensor is an allocation
MOST, SMALL = 768, 1 << 14  # allocations that are registered; elements of a small one


class Pool:
    """As much of a torch.cuda.MemPool as ringcomm asks for; each tensor is a segment."""

    made = 0

    def __init__(self, *tensors: torch.Tensor, device: int = 0) -> None:
        Pool.made += 1
        self.id = (0, Pool.made)
        self.segments = [
            {"device": device, "address": t.data_ptr(), "total_size": t.nbytes, "blocks": []}
            for t in tensors
        ]

    def snapshot(self) -> list[dict[str, Any]]:
        return self.segments


def run(rank: Rank, life: str, settings: dict[str, str], seconds: float = limit(20)) -> Outcome:
    case = CASES[life.split(",")[0]]
    return on_device(rank, life, settings, lambda rank: case(rank, SimulatedMemory()), seconds)


def backend_of(device: str = "cpu") -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device(device))


def said_by(function: Callable[[], Any]) -> str:
    return ": ".join(error_of(function))


def summed(memory: SimulatedMemory, tensor: torch.Tensor, rank: Rank) -> int:
    """The copies of an all_reduce, whose result is right."""
    tensor.fill_(rank.index + 1.0)
    before = memory.copies()
    dist.all_reduce(tensor)
    copies = memory.copies() - before
    assert tensor.eq(3).all()
    return copies


# ---- cases, on each rank


def first_use(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """Registered, and not; then registered after the group has met."""
    tensors = [memory.empty(2 * MIB) for _ in range(4)]
    backend_of().register_mem_pool(Pool(tensors[0]))  # the group's first call
    copies = [summed(memory, tensor, rank) for tensor in tensors[:2]]
    backend_of().register_mem_pool(Pool(tensors[2]), symm=True)
    backend_of().register_tensors([tensors[3][:5], tensors[3]])
    return copies + [summed(memory, tensor, rank) for tensor in tensors[2:]]


def several(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """Segments of 2, 6 and 3 MiB, and what is used of them; then the pool grows."""
    tensors = [memory.empty(size * MIB - 128) for size in (2, 6, 3, 2)]
    pool = Pool(*tensors[:3])
    backend_of().register_mem_pool(pool)
    parts = [tensors[0], tensors[1][: 2 * MIB], tensors[1][5 * MIB :], tensors[2][MIB + 5 : -7]]
    copies = [summed(memory, part, rank) for part in parts]
    pool.segments = Pool(*tensors).segments
    backend_of().register_mem_pool(pool)
    return [*copies, *(summed(memory, part, rank) for part in (*tensors[2:], tensors[0]))]


def deregistered(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """There is room for one of two tensors: registered, it is that one."""
    ours, other = memory.empty(20 * MIB), memory.empty(20 * MIB)
    pool = Pool(ours)
    backend_of().register_mem_pool(pool)
    copies = []
    for _ in range(2):
        copies += [summed(memory, other, rank) for _ in range(3)][-1:]
        copies += [summed(memory, ours, rank)]
        if pool.segments:
            backend_of().deregister_mem_pool(pool)
            pool.segments = []
            copies += [summed(memory, other, rank) for _ in range(4)][-1:]
    return copies


def freed(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """Freed memory is withdrawn; another tensor may come to its place."""
    dist.all_reduce(warm := memory.empty(8))
    before = memory.used()
    tensor = memory.empty(2 * MIB)
    address = tensor.data_ptr()
    pool = Pool(tensor)
    backend_of().register_mem_pool(pool)
    copies = [summed(memory, tensor, rank)]
    memory.release(tensor)
    assert memory.empty_cache() == 1
    tensor = memory.empty(2 * MIB)
    assert tensor.data_ptr() == address
    copies += [summed(memory, tensor, rank) for _ in range(3)][-1:]
    backend_of().register_tensors(tensor)
    backend_of().deregister_mem_pool(pool)  # its memory has gone: nothing of the other's
    memory.release(tensor)
    memory.empty_cache()
    for _ in range(300):  # what was not used for 128 operations is looked at, piece by piece
        dist.all_reduce(warm)
    dist.barrier()
    return [*copies, memory.used() - before]


def alone(rank: Rank, memory: SimulatedMemory) -> str:
    dist.all_reduce(memory.empty(8))
    store = dist.distributed_c10d._get_default_store()
    if rank.index == 1:
        store.wait(["said"])
        return ""
    text = said_by(lambda: backend_of().register_mem_pool(Pool()))
    store.set("said", "1")
    return text


def against(rank: Rank, memory: SimulatedMemory) -> str:
    """The other calls something else."""
    tensor = memory.empty(8)
    dist.all_reduce(tensor)
    if rank.index == 1:
        return said_by(lambda: dist.all_reduce(tensor))
    return said_by(lambda: backend_of().register_tensors(tensor))


def too_much(rank: Rank, memory: SimulatedMemory) -> list[int]:
    tensors = [memory.empty(20 * MIB) for _ in range(2)]
    backend_of().register_mem_pool(Pool(*tensors))
    return [summed(memory, tensor, rank) for tensor in tensors]


def too_many(rank: Rank, memory: SimulatedMemory) -> list[int]:
    tensors = [memory.empty(SMALL) for _ in range(MOST + 2)]
    backend_of().register_mem_pool(Pool(*tensors))
    # Memory that is not registered is staged at its first use.
    return [summed(memory, tensor, rank) for tensor in (tensors[MOST - 1], tensors[-1])]


def unknown(rank: Rank, memory: SimulatedMemory) -> list[int]:
    """Memory that nobody can export, beside some that all can."""
    tensors = [torch.empty(2 * MIB), memory.empty(2 * MIB)]
    backend_of().register_mem_pool(Pool(*tensors))
    return [summed(memory, tensor, rank) for tensor in tensors]


def wrong(rank: Rank, memory: SimulatedMemory) -> list[str]:
    tensor = memory.empty(8)
    dist.all_reduce(tensor.fill_(1.0))
    backend, pool = backend_of(), Pool(tensor)
    far = Pool(tensor, device=1)
    both = Pool(tensor)
    both.segments += far.segments
    said = [
        said_by(call)
        for call in (
            lambda: backend.register_mem_pool(tensor),
            lambda: backend.deregister_mem_pool(None),
            lambda: backend.deregister_mem_pool(pool),
            lambda: backend.register_mem_pool(both),
            lambda: backend.register_mem_pool(far),
            lambda: backend.register_tensors([]),
            lambda: backend.register_tensors([tensor, 3]),
            lambda: backend.register_tensors(tensor[:0]),
            lambda: backend.deregister_tensors(tensor),
        )
    ]
    assert summed(memory, tensor, rank) >= 0  # the group goes on
    return said


def graph(rank: Rank, memory: SimulatedMemory) -> list[float]:
    """Memory of a graph stays mapped, also when it is not registered any more."""
    cuda = Cuda()
    host, other = memory.empty(20 * MIB), memory.empty(20 * MIB)
    tensor, another = cuda.module.cuda_view(host), cuda.module.cuda_view(other)
    backend_of("cuda").register_tensors(tensor)
    stream = cuda.module.new_stream()
    before = cuda.module.use_stream(stream)
    cuda.module.begin_capture("global")
    dist.all_reduce(tensor)
    captured = cuda.module.end_capture()
    cuda.module.use_stream(before)
    backend_of("cuda").deregister_tensors(tensor)
    means = []
    for turn in range(3):
        for _ in range(3):
            dist.all_reduce(another)  # it would take that place
        cuda.synchronize()
        host.fill_(rank.index + turn + 1.0)
        copies = memory.copies()
        cuda.module.launch_graph(captured)
        cuda.synchronize()
        assert memory.copies() == copies
        means.append(float(host.sum()) / host.numel())
    dist.barrier()
    return means


def through_host(rank: Rank, memory: SimulatedMemory) -> int:
    tensor = memory.empty(MIB)
    pool = Pool(tensor)
    backend_of().register_mem_pool(pool)
    assert summed(memory, tensor, rank) > 0
    backend_of().deregister_mem_pool(pool)
    return 0


def allocated(rank: Rank, memory: SimulatedMemory) -> list[Any]:
    """A first use of what the group allocates, and of what torch does."""
    cuda = pretend()
    device = torch.device("cuda", 0)
    backend = backend_of("cuda")
    warm = cuda.full(3, 1.0)[1]
    first = backend.allocate_tensor(5, dtype=torch.float32, device=device)  # nobody has met
    dist.all_reduce(warm)
    cuda.synchronize()
    cuda.module.allocate_there()
    plain = torch.empty(3 * MIB, device=device)
    given = backend.allocate_tensor(2 * MIB, dtype=torch.float32, device=device)
    dist.all_reduce(warm)  # others map it
    cuda.synchronize()
    told: list[Any] = [backend.supports_tensor_alloc(device), first.numel() + given.numel()]
    for tensor in (plain, given):
        tensor.fill_(rank.index + 1.0)
        before = memory.copies()
        dist.all_reduce(tensor)
        cuda.synchronize()
        told.append(memory.copies() - before)
        assert tensor.eq(3).all()
    return told


CASES: dict[str, Callable[[Rank, SimulatedMemory], Any]] = {
    function.__name__: function
    for function in (
        first_use, several, deregistered, freed, alone, against, too_much, too_many, unknown,
        wrong, graph, through_host, allocated,
    )
}  # fmt: skip


# ---- what they find


def answers(outcomes: list[Outcome]) -> list[Any]:
    assert all("answer" in outcome for outcome in outcomes), outcomes
    return [outcome["answer"] for outcome in outcomes]


def logs(outcomes: list[Outcome], text: str) -> list[int]:
    return [outcome["log"].count(text) for outcome in outcomes]


def test_the_first_operation_copies_nothing(two: Ranks) -> None:
    outcomes = two(run, "first_use", {})
    assert answers(outcomes) == [[0] * 4, [0, 2, 0, 0]]
    assert logs(outcomes, "2097152 bytes are registered") == [3, 3]


def test_so_it_is_where_each_rank_has_a_device(two: Ranks) -> None:
    for kernel in ("hand_over", "two_shot"):
        by_rank = answers(two(run, f"first_use,{kernel}", {**OWN, "RINGCOMM_ALGORITHM": kernel}))
        for copies in by_rank:
            assert copies[1] > 0
            assert [copies[0], *copies[2:]] == [0] * 3


@pytest.mark.parametrize("chunks", ["0", "262144"])
def test_pools_have_several_segments_and_grow(two: Ranks, chunks: str) -> None:
    settings = {"RINGCOMM_SIM_CHUNK_BYTES": chunks}
    assert answers(two(run, f"several,{chunks}", settings)) == [[0] * 7] * 2


def test_no_other_takes_the_place_of_what_is_registered(two: Ranks) -> None:
    other, ours, later, last, _ = answers(two(run, "deregistered", SMALL_DEVICE))[1]
    assert other > 0
    assert ours == 0
    assert later == 0  # once it is not registered
    assert last == 0


def test_what_is_freed_is_not_held(two: Ranks) -> None:
    assert answers(two(run, "freed", {})) == [[0, 0, 0]] * 2


def test_a_rank_that_does_not_come_is_named(two: Ranks) -> None:
    said = answers(two(run, "alone", {}, limit(2)))[0]
    assert said.startswith("DistBackendError: ")
    assert "register_mem_pool: Timed out after " in said
    assert "rank 1 (alive, " in said


def test_a_rank_that_calls_something_else_is_told(two: Ranks) -> None:
    for said in answers(two(run, "against", {})):
        assert "registration" in said
        assert "all_reduce" in said


@pytest.mark.parametrize("case", ["too_much", "too_many"])
def test_what_does_not_fit_is_said(two: Ranks, case: str) -> None:
    outcomes = two(run, case, SMALL_DEVICE if case == "too_much" else OF_ONE_EACH)
    first, *copies = answers(outcomes)[1]
    assert first == 0
    assert copies[-1] > 0
    left = 20 << 20 if case == "too_much" else 2 * 4 * SMALL
    assert logs(outcomes, f": {left} of ") == [1, 1]
    assert logs(outcomes, f"a rank registers at most {MOST} pieces of memory") == [1, 1]


def test_what_cannot_be_exported_is_said(two: Ranks) -> None:
    outcomes = two(run, "unknown", {})
    staged, mapped = answers(outcomes)[1]
    assert staged > 0
    assert mapped == 0
    assert logs(outcomes, "2097152 of 4194304 bytes are not registered") == [1, 1]
    assert logs(outcomes, "no memory of the device is there") == [1, 1]


def test_who_cannot_map_it_is_named(two: Ranks) -> None:
    settings = {"RINGCOMM_SIM_IPC_OPENS": "1", "RINGCOMM_SIM_RANK": "0"}
    outcomes = two(run, "first_use,refused", settings)
    assert all(copies > 0 for copies in answers(outcomes)[1])
    assert logs(outcomes, "register_mem_pool: rank 0 has not mapped all of it") == [0, 2]


WRONG = (
    "TypeError: register_mem_pool: give a torch.cuda.MemPool, not Tensor",
    "TypeError: deregister_mem_pool: give a torch.cuda.MemPool, not NoneType",
    "ValueError: deregister_mem_pool: this pool was not registered with this group",
    "ValueError: register_mem_pool: the pool has memory on devices [0, 1]: a rank uses one device",
    "RuntimeError: group",
    "",  # a rank may have nothing to register
    "TypeError: register_tensors: give tensors, not int",
    "ValueError: register_tensors: a tensor of [0] has no memory of its own",
    "ValueError: deregister_tensors: a tensor of [8] was not registered with this group",
)


def test_wrong_arguments(two: Ranks) -> None:
    for said in answers(two(run, "wrong", {})):
        for text, wanted in zip(said, WRONG, strict=True):
            assert text.startswith(wanted)
            assert "\n" not in text


def test_graphs_keep_what_was_registered(two: Ranks) -> None:
    settings = {**CUDA, **SMALL_DEVICE}
    assert answers(two(run, "graph", settings)) == [[3.0, 5.0, 7.0]] * 2


def test_through_memory_of_the_host_it_does_nothing(two: Ranks) -> None:
    outcomes = two(run, "through_host", {"RINGCOMM_CUDA_MODE": "host"})
    assert answers(outcomes) == [0, 0]
    assert logs(outcomes, ": register_mem_pool does nothing: tensors go through") == [1, 1]


def test_tensors_of_the_group_are_mapped_before_their_first_use(two: Ranks) -> None:
    for bytes_ in ("0", "1048576"):
        settings = {**CUDA, "RINGCOMM_SHARED_BUFFERS": bytes_}
        supported, count, plain, given = answers(two(run, f"allocated,{bytes_}", settings))[1]
        assert supported == (bytes_ != "0")
        assert count == 2 * MIB + 5
        assert plain > 0
        assert given == 0
