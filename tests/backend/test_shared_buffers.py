"""Tensors that all ranks of a host can read: results are as with others, and nothing crashes."""

from __future__ import annotations

import copy
import functools
import gc
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ringcomm
from lab.ranks import Rank, Ranks, ranks

CPU = torch.device("cpu")
COUNT = 4 * 3 * 5 * 40_003  # elements, in as many parts as there are ranks: no power of two
MAPPED = "memfd:ringcomm-bell"
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


@pytest.fixture(scope="module")
def sets() -> Iterator[dict[int, Ranks]]:
    with ranks(2) as two, ranks(3) as three:
        yield {2: two, 3: three}


def group_of(**options: Any) -> Any:
    return dist.new_group(backend="ringcomm", pg_options=ringcomm.Options(**options))


def reads(group: Any = None) -> int:
    """Return how many collectives of the group have read tensors where they lie."""
    return int(ringcomm.backend_of(group)._readable_operations())


def is_mapped(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor lies in memory that other processes have mapped, too."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= at < last:
            return MAPPED in line and " rw-s " in line
    return False


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=made).mul(50).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


Call = Callable[[torch.Tensor, torch.Tensor, Rank, Any, Any], Any]
# Each gets all shards, one shard, the rank, the op and the group.
CALLS: dict[str, Call] = {
    "all_reduce": lambda whole, _, __, op, group: dist.all_reduce(whole, op, group, True),
    "broadcast": lambda whole, _, rank, __, group: dist.broadcast(
        whole, rank.size - 1, group, True
    ),
    "reduce": lambda whole, _, __, op, group: dist.reduce(whole, 1, op, group, True),
    "all_gather": lambda whole, _, rank, __, group: dist.all_gather_single(
        whole, whole.chunk(rank.size)[rank.index], group, True
    ),
    "all_gather apart": lambda whole, part, _, __, group: dist.all_gather_single(
        whole, part, group, True
    ),
    "reduce_scatter": lambda whole, part, _, op, group: dist.reduce_scatter_single(
        part, whole, op, group, True
    ),
    "scatter": lambda whole, part, rank, _, group: dist.scatter(
        part, list(whole.chunk(rank.size)) if rank.index == 1 else None, 1, group, True
    ),
    "gather": lambda whole, part, rank, _, group: dist.gather(
        part, list(whole.chunk(rank.size)) if rank.index == 1 else None, 1, group, True
    ),
}


def both(rank: Rank, name: str, dtype: torch.dtype, op: Any, elsewhere: int) -> None:
    """Compare with the same call of other tensors, bit by bit. One rank's may be `elsewhere`."""
    group = group_of()
    results = []
    for readable in (False, True):
        make = ringcomm.empty if readable and rank.index != elsewhere else torch.empty
        whole, part = make(COUNT, dtype=dtype), make(COUNT // rank.size, dtype=dtype)
        before = reads(group)
        for again in (0, 10):
            whole.copy_(values(rank.index + again, COUNT, dtype))
            part.copy_(values(100 + rank.index + again, part.numel(), dtype))
            CALLS[name](whole, part, rank, op, group).wait()
            results.append((whole.clone(), part.clone()))
        assert reads(group) == before + (2 if readable and elsewhere < 0 else 0)
    for plain, shared in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(plain, shared, strict=True))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_the_results_are_the_same(sets: dict[int, Ranks], size: int, name: str) -> None:
    sets[size](both, name, torch.float32, SUM, -1)


@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float32, AVG), (torch.bfloat16, SUM), (torch.int64, MAX)]
)
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "reduce"])
def test_all_types_and_operations(
    sets: dict[int, Ranks], name: str, dtype: torch.dtype, op: Any
) -> None:
    sets[3](both, name, dtype, op, -1)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_one_rank_has_it_elsewhere(sets: dict[int, Ranks], name: str) -> None:
    sets[3](both, name, torch.float32, SUM, 1)


def only_the_root(rank: Rank) -> None:
    before = reads()
    tensor = (ringcomm.empty if rank.index == 0 else torch.empty)(COUNT).fill_(rank.index + 1)
    dist.broadcast(tensor, 0)
    assert (tensor == 1).all()
    assert reads() == before + 1


def test_a_broadcast_needs_only_the_root_s(sets: dict[int, Ranks]) -> None:
    sets[3](only_the_root)


def mixed(rank: Rank) -> None:
    """Sizes below and above the least, parts that differ, and a part of another tensor."""
    for count in (0, 1, 7, 60_000, 300_001, 600_001):
        tensor = ringcomm.empty(rank.size, count)
        part = tensor[rank.index].fill_(rank.index + 1)
        dist.all_gather_single(tensor, part)
        assert all((tensor[index] == index + 1).all() for index in range(rank.size))
    sizes = [600_000 + 5 * index for index in range(rank.size)]
    parts = [ringcomm.empty(count) for count in sizes]
    dist.all_gather(parts, parts[rank.index].fill_(rank.index))
    assert all((part == index).all() for index, part in enumerate(parts))
    large = ringcomm.empty(3 * COUNT).fill_(rank.index)
    before = reads()
    dist.all_reduce(large[1 + rank.index : 1 + rank.index + COUNT])  # not at the same place
    assert reads() == before + 1
    total = rank.size * (rank.size - 1) // 2
    assert (large[1 + rank.index : 1 + rank.index + COUNT] == total).all()
    assert (large[: 1 + rank.index] == rank.index).all()
    assert (large[1 + rank.index + COUNT :] == rank.index).all()


def test_mixed_sizes(sets: dict[int, Ranks]) -> None:
    sets[2](mixed)
    sets[3](mixed)


def reused(_: Rank) -> None:
    """Freed memory is taken again; where there is no room, memory is that of the process."""
    group = group_of(shared_buffers=1 << 20)
    allocate = functools.partial(
        ringcomm.backend_of(group).allocate_tensor, dtype=torch.float32, device=CPU
    )
    first, second = allocate(1 << 17), allocate(1 << 17)
    other = allocate(16)
    assert is_mapped(first)
    assert is_mapped(second)
    assert not is_mapped(other)
    at = first.data_ptr()
    del first
    some = [allocate(1 << 10) for _ in range(3)]
    assert [tensor.data_ptr() - at for tensor in some] == [0, 4096, 8192]
    del some[1]
    assert allocate(1 << 11).data_ptr() == at + 3 * 4096
    dist.destroy_process_group(group)


def test_freed_memory_is_taken_again(sets: dict[int, Ranks]) -> None:
    sets[2](reused)


def outlive(_: Rank) -> None:
    group = group_of()
    tensor = ringcomm.empty(1 << 20).fill_(3)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    dist.barrier()
    before = reads()
    dist.all_reduce(tensor)  # of another group
    assert reads() == before + 1
    assert (tensor == 12).all()


def test_tensors_outlive_their_group(sets: dict[int, Ranks]) -> None:
    sets[2](outlive)


def kibibytes_of_shared_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1])
    raise AssertionError("no such line")


def given_back(rank: Rank) -> None:
    """The default group goes, although an optimizer was made meanwhile: see _prepare_torch."""
    before = kibibytes_of_shared_memory()
    dist.init_process_group("ringcomm", store=rank.store, rank=rank.index, world_size=rank.size)
    parameter = nn.Parameter(torch.zeros(4))
    parameter.sum().backward()
    torch.optim.AdamW([parameter]).step()
    tensor = ringcomm.empty(16 << 20).fill_(1)
    dist.all_reduce(tensor)
    assert kibibytes_of_shared_memory() > before + (60 << 10)
    del tensor
    dist.destroy_process_group()
    gc.collect()
    ends = time.monotonic() + 60
    while kibibytes_of_shared_memory() >= before + 1024:  # a worker may still have the group
        assert time.monotonic() < ends, kibibytes_of_shared_memory() - before
        time.sleep(0.01)


def test_memory_is_given_back() -> None:
    with ranks(2, None) as two:
        two(given_back)


def refused(rank: Rank) -> str:
    whole = ringcomm.empty((2 + 2 * rank.index) << 20)
    with pytest.raises(RuntimeError) as error:
        dist.all_gather_single(whole, whole.chunk(2)[rank.index])
    return str(error.value)


def test_ranks_that_call_different_things() -> None:
    with ranks(2) as two:
        for said in two(refused):
            assert "all_gather float32[2097152]" in said
            assert "all_gather float32[4194304]" in said


def turned_off(rank: Rank) -> None:
    """A rank that wants none shares none, and the others do without."""
    group = group_of(shared_buffers=0 if rank.index == 0 else None)
    backend = ringcomm.backend_of(group)
    assert backend.supports_tensor_alloc(CPU) == (rank.index != 0)
    tensor = backend.allocate_tensor(COUNT, dtype=torch.float32, device=CPU).fill_(1)
    assert is_mapped(tensor) == (rank.index != 0)
    dist.all_reduce(tensor, group=group)
    assert (tensor == 2).all()
    assert reads(group) == 0
    dist.destroy_process_group(group)


def test_one_rank_has_turned_it_off(sets: dict[int, Ranks]) -> None:
    sets[2](turned_off)


def short_of_addresses(rank: Rank) -> None:
    """A process with little address space, or a limit on files, has ordinary tensors."""
    import resource

    if rank.index == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    elif rank.index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
    dist.init_process_group("ringcomm", store=rank.store, rank=rank.index, world_size=rank.size)
    tensor = ringcomm.empty(COUNT).fill_(rank.index)
    assert is_mapped(tensor) == (rank.index == 2)
    for _ in range(2):
        dist.all_reduce(tensor.fill_(rank.index))
        assert (tensor == 3).all()
    assert reads() == 0


def test_processes_with_limits() -> None:
    with ranks(3, None) as three:
        three(short_of_addresses)


def forked(rank: Rank) -> None:
    """A forked child reads and writes its own copy, frees it, and ends, and nothing is harmed."""
    tensor = ringcomm.empty(COUNT).fill_(rank.index)
    alone = ringcomm.empty(1 << 10).fill_(7)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            right = bool((tensor == rank.index).all())
            tensor.fill_(99)
            right = right and bool((tensor == 99).all())
            right = right and not is_mapped(tensor)
            del alone
            gc.collect()
            code = 0 if right else 2
        finally:
            os.write(writing, b"x")
            os._exit(code)
    os.read(reading, 1)
    dist.all_reduce(tensor)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    total = rank.size * (rank.size - 1) // 2
    assert (tensor == total).all()
    assert (alone == 7).all()
    os.close(reading)
    os.close(writing)


def test_a_forked_child_has_a_copy(sets: dict[int, Ranks]) -> None:
    sets[2](forked)


class Gradients(torch.utils.data.Dataset[torch.Tensor]):
    """Items that are made of a tensor of the training process."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.source[index : index + 3] + index


def loaded(rank: Rank) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    tensor = ringcomm.empty(COUNT).fill_(1)
    loader = DataLoader(Gradients(tensor), num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for index, item in enumerate(loader):
            assert (item == index + 1).all()
    dist.all_reduce(tensor)
    assert (tensor == rank.size).all()


def test_workers_of_a_data_loader_read_it(sets: dict[int, Ranks]) -> None:
    sets[2](loaded)


def moved(rank: Rank) -> None:
    """Sharing by torch.multiprocessing moves a tensor; copies and checkpoints are ordinary."""
    tensor = ringcomm.empty(COUNT).fill_(rank.index + 1)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file), tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)
    before = reads()
    tensor.share_memory_()
    assert tensor.is_shared()
    assert not is_mapped(tensor)
    dist.all_reduce(tensor)
    assert reads() == before
    assert (tensor == sum(range(1, rank.size + 1))).all()


def test_a_tensor_that_moves(sets: dict[int, Ranks]) -> None:
    sets[2](moved)


def sizes(_: Rank) -> None:
    assert ringcomm.empty(2, 3).shape == (2, 3)
    assert ringcomm.empty((4, 5)).shape == (4, 5)
    assert ringcomm.empty([6]).shape == (6,)
    assert ringcomm.empty().shape == ()
    assert ringcomm.empty(0).numel() == 0
    assert ringcomm.empty(3, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert ringcomm.empty(3).dtype == torch.get_default_dtype()
    assert is_mapped(ringcomm.empty(3))
    with pytest.raises(RuntimeError, match="negative"):
        ringcomm.empty(-1)


def test_sizes_and_types(sets: dict[int, Ranks]) -> None:
    sets[2](sizes)


def trained(rank: Rank, group: Any, shared: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(900, 900) for _ in range(3)))
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model, model):
        fsdp.fully_shard(module, mesh=mesh)
        module.set_allocate_memory_from_process_group_for_comm(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank.index)
    for _ in range(4):
        model(torch.randn(8, 900)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def sharded(rank: Rank) -> None:
    group = group_of()
    plain = trained(rank, group, False)
    before = reads(group)
    shared = trained(rank, group, True)
    assert reads(group) > before
    assert all(map(torch.equal, plain, shared))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp2_trains_to_the_same_parameters(sets: dict[int, Ranks], size: int) -> None:
    sets[size](sharded)


def stepped(rank: Rank, view: bool) -> tuple[list[torch.Tensor], int]:
    """Train by DDP. Return the parameters, and the collectives that have read buckets."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(900, 900) for _ in range(4))), gradient_as_bucket_view=view
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank.index)
    before = reads()
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 900)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], reads() - before


def trains(rank: Rank, view: bool) -> None:
    """DDP asks for its buckets by itself, unless somebody has said that it should not."""
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "0"
    shared, read = stepped(rank, view)
    assert read >= 4
    os.environ["DDP_DISABLE_COMM_MEM"] = "1"
    plain, read = stepped(rank, view)
    assert read == 0
    os.environ["DDP_DISABLE_COMM_MEM"] = "0"
    assert all(map(torch.equal, plain, shared))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ddp_takes_its_buckets_from_here(sets: dict[int, Ranks], size: int, view: bool) -> None:
    sets[size](trains, view)


def asked_not_to(rank: Rank) -> None:
    os.environ["DDP_DISABLE_COMM_MEM"] = "1"
    dist.init_process_group("ringcomm", store=rank.store, rank=rank.index, world_size=rank.size)
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "1"


def test_a_user_who_wants_ordinary_buckets_has_them() -> None:
    with ranks(2, None) as two:
        two(asked_not_to)
