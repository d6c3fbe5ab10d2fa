"""Tensors that a group allocates: ranks read one another's, and results are as with all others."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from lab.ranks import Rank, Ranks, ranks

CPU = torch.device("cpu")
ROOM = 64 << 20
COUNT = 4 * 3 * 100_003  # elements, in as many parts as there are ranks: no power of two


@pytest.fixture(scope="module")
def sets() -> Iterator[dict[int, Ranks]]:
    with ranks(2) as two, ranks(3) as three:
        yield {2: two, 3: three}


def group_of(bytes_: int = ROOM, **options: Any) -> Any:
    from ringcomm import Options

    return dist.new_group(backend="ringcomm", pg_options=Options(shared_buffers=bytes_, **options))


def allocate(group: Any, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor: torch.Tensor = group._get_backend(CPU).allocate_tensor(count, dtype=dtype, device=CPU)
    return tensor


def calls(group: Any) -> int:
    """Return how many operations the group has had. Where ranks ask for tensors there are two."""
    count: int = group._get_backend(CPU)._get_sequence_number_for_group()
    return count


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=made).mul(50).to(dtype)


def both(rank: Rank, dtype: torch.dtype, op: Any, elsewhere: int) -> None:
    """Compare with the same calls of other tensors, bit by bit. One rank's may be `elsewhere`."""
    group = group_of()
    place = torch.empty if rank.index == elsewhere else functools.partial(allocate, group)
    mine = values(rank.index, COUNT, dtype)
    whole, part = place(COUNT, dtype=dtype), mine.new_empty(COUNT // rank.size)
    whole.copy_(mine)
    expected = torch.empty_like(part)
    dist.reduce_scatter_single(expected, mine, op, group)
    before = calls(group)
    for async_op in (False, True):
        work = dist.reduce_scatter_single(part.zero_(), whole, op, group, async_op)
        if work:
            work.wait()
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(whole.view(torch.uint8), mine.view(torch.uint8))
    assert calls(group) == before + 4
    inside = whole.chunk(rank.size)[rank.index]
    dist.reduce_scatter_single(inside, whole, op, group)  # in place
    assert torch.equal(inside.view(torch.uint8), expected.view(torch.uint8))
    gathered = torch.empty_like(mine)
    dist.all_gather_single(gathered, expected, group)
    dist.all_gather_single(whole, inside, group)
    assert torch.equal(whole.view(torch.uint8), gathered.view(torch.uint8))
    again = torch.empty_like(mine)
    dist.all_gather_single(again, inside, group)  # not in place
    assert torch.equal(again.view(torch.uint8), gathered.view(torch.uint8))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, dist.ReduceOp.AVG),
        (torch.bfloat16, dist.ReduceOp.SUM),
        (torch.int64, dist.ReduceOp.MAX),
    ],
)
def test_the_results_are_the_same(
    sets: dict[int, Ranks], size: int, dtype: torch.dtype, op: Any
) -> None:
    sets[size](both, dtype, op, -1)


def test_one_rank_has_it_elsewhere(sets: dict[int, Ranks]) -> None:
    sets[3](both, torch.float32, dist.ReduceOp.SUM, 1)


def mixed(rank: Rank) -> None:
    """Sizes below and above the least, lists of parts that differ, and a group of one's own."""
    group = group_of()
    for count in (0, 1, 7, 60_000, 300_001):
        tensor = allocate(group, rank.size * count)
        part = tensor.chunk(rank.size)[rank.index] if count else tensor
        part.fill_(rank.index + 1)
        dist.all_gather_single(tensor, part, group)
        wanted = torch.arange(1.0, rank.size + 1).repeat_interleave(count)
        assert torch.equal(tensor, wanted)
    sizes = [300_000 + 5 * index for index in range(rank.size)]
    parts = [allocate(group, count) for count in sizes]
    dist.all_gather(parts, parts[rank.index].fill_(rank.index), group)
    assert all((part == index).all() for index, part in enumerate(parts))
    dist.destroy_process_group(group)


def test_mixed_sizes(sets: dict[int, Ranks]) -> None:
    sets[2](mixed)
    sets[3](mixed)


def reused(rank: Rank) -> None:
    """Freed memory is taken again; where there is no room, memory is that of the process."""
    group = group_of(1 << 20)
    first, second = (allocate(group, 1 << 17) for _ in range(2))
    other = allocate(group, 16)
    inside = range(first.data_ptr(), first.data_ptr() + (1 << 20))
    assert second.data_ptr() in inside
    assert other.data_ptr() not in inside
    at = first.data_ptr()
    del first
    assert [allocate(group, 1 << 10).data_ptr() for _ in range(3)] == [at] * 3
    some = [allocate(group, 1 << 10) for _ in range(3)]
    assert [tensor.data_ptr() - at for tensor in some] == [0, 4096, 8192]
    del some[1]
    assert allocate(group, 1 << 11).data_ptr() == at + 3 * 4096
    dist.destroy_process_group(group)


def test_freed_buffers_are_taken_again(sets: dict[int, Ranks]) -> None:
    sets[2](reused)


def outlive(rank: Rank) -> None:
    group = group_of()
    tensor = allocate(group, 1 << 20).fill_(3)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    dist.barrier()
    assert tensor.add_(1).sum().item() == 4 << 20
    del tensor
    gc.collect()
    dist.barrier()


def test_tensors_may_outlive_their_group(sets: dict[int, Ranks]) -> None:
    sets[2](outlive)


def refused(rank: Rank) -> str:
    group = group_of()
    whole = allocate(group, (2 + 2 * rank.index) << 20)
    with pytest.raises(RuntimeError) as error:
        dist.all_gather_single(whole, whole.chunk(2)[rank.index], group)
    return str(error.value)


def test_ranks_that_call_different_things() -> None:
    with ranks(2) as two:
        for said in two(refused):
            assert "all_gather float32[2097152]" in said
            assert "all_gather float32[4194304]" in said


def unlike(rank: Rank) -> str:
    with pytest.raises(RuntimeError) as error:
        group_of(1 << (20 + rank.index))
    return str(error.value)


def test_ranks_with_other_settings() -> None:
    with ranks(2) as two:
        assert any("with the same RINGCOMM_SHARED_BUFFERS?" in said for said in two(unlike))


def trained(rank: Rank, group: Any, shared: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(3)))
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model, model):
        fsdp.fully_shard(module, mesh=mesh)
        module.set_allocate_memory_from_process_group_for_comm(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank.index)
    for _ in range(4):
        model(torch.randn(8, 700)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def sharded(rank: Rank) -> None:
    group = group_of()
    plain, shared = (trained(rank, group, kind) for kind in (False, True))
    assert all(map(torch.equal, plain, shared))
    assert group._get_backend(CPU).supports_tensor_alloc(CPU)
    assert not dist.group.WORLD._get_backend(CPU).supports_tensor_alloc(CPU)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2, 3])
def test_fsdp2_trains_to_the_same_parameters(sets: dict[int, Ranks], size: int) -> None:
    sets[size](sharded)
