"""Several threads of a rank copy and sum one message: the same bits with any number of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.ranks import Rank, Ranks, ranks
from ringcomm import Options
from ringcomm.tools.bench.cases import all_gather_single, reduce_scatter_single

THREADS = (1, 2, 3, 4)
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8),
    *(torch.complex64, torch.bool),
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)
LENGTH = 1_300_013  # bytes a rank, or so: many segments, the last one short


@pytest.fixture(scope="module", params=[2, 3])
def some(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as made:
        made(make_groups)
        yield made


def make_groups(rank: Rank) -> None:
    for threads in THREADS:
        options = Options(threads=threads)
        rank.kept[str(threads)] = dist.new_group(backend="ringcomm", pg_options=options)
    options = Options(threads=1 + 3 * (rank.index % 2))  # rank 0 decides on segments for all
    rank.kept["mixed"] = dist.new_group(backend="ringcomm", pg_options=options)


def numbers(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Numbers whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def results(rank: Rank, group: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Every collective, and its result on this rank."""
    size, count = rank.size, LENGTH // torch.empty((), dtype=dtype).element_size()
    given = numbers(rank.index, dtype, count * size)
    part = given[:count].clone()
    for op in OPS:
        if dtype in (torch.bool, torch.complex64) and op != dist.ReduceOp.SUM:
            continue
        yield from reductions(rank, group, given, op)
    whole = torch.empty(count * size, dtype=dtype)
    all_gather_single(whole, part, group=group)
    yield whole
    dist.broadcast(part, size - 1, group=group)
    yield part.clone()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    yield received.clone()
    parts = list(received.chunk(size))
    dist.gather(part, parts if rank.index == 0 else None, 0, group=group)
    dist.scatter(part, list(given.chunk(size)) if rank.index == 0 else None, 0, group=group)
    yield from (received, part)


def reductions(
    rank: Rank, group: Any, given: torch.Tensor, op: dist.ReduceOp.RedOpType
) -> Iterator[torch.Tensor]:
    total = given.clone()
    dist.all_reduce(total, op, group=group)
    late = given[3:].clone()  # begins in the middle of a line of the cache
    work = dist.all_reduce(late, op, group=group, async_op=True)
    work.wait()
    at_root = given.clone()
    dist.reduce(at_root, 0, op, group=group)
    shard = torch.empty(given.numel() // rank.size, dtype=given.dtype)
    reduce_scatter_single(shard, given, op, group=group)
    yield from (total, late, shard)
    if rank.index == 0:
        yield at_root


def compare(rank: Rank, dtype: torch.dtype) -> None:
    alone = list(results(rank, rank.kept["1"], dtype))
    for threads in (*THREADS[1:], "mixed"):
        together = results(rank, rank.kept[str(threads)], dtype)
        for number, (got, expected) in enumerate(zip(together, alone, strict=True)):
            same = torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
            assert same, f"result {number} of {dtype} differs with {threads} threads"


def helpers() -> int:
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().strip() == "ringcomm-pool" for task in tasks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_threads_gives_the_same_bits(some: Ranks, dtype: torch.dtype) -> None:
    some(compare, dtype)


def scaled(rank: Rank) -> None:
    """PREMUL_SUM multiplies what it reads, and works alone."""
    given = numbers(rank.index, torch.float32, LENGTH // 4)
    sums = []
    for threads in THREADS:
        total = given.clone()
        dist.all_reduce(total, dist._make_nccl_premul_sum(0.3), group=rank.kept[str(threads)])
        sums.append(total)
    assert all(torch.equal(total, sums[0]) for total in sums)


def test_scaled_inputs(some: Ranks) -> None:
    some(scaled)


def count_helpers(rank: Rank) -> int:
    dist.all_reduce(numbers(rank.index, torch.float32, LENGTH), group=rank.kept["4"])
    return helpers()


def test_a_process_has_one_pool(some: Ranks) -> None:
    assert some(count_helpers) == [3] * some.size


def in_a_child(rank: Rank) -> int:
    """How many helpers a forked child has."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, bytes([helpers()]))
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reading, 1)[0]


def test_a_forked_child_has_no_helpers(some: Ranks) -> None:
    assert some(in_a_child) == [0] * some.size


def automatic(rank: Rank) -> int:
    group = dist.new_group(backend="ringcomm", pg_options=Options())
    total = torch.full((LENGTH,), float(rank.index + 1))
    dist.all_reduce(total, group=group)
    assert total.eq(rank.size * (rank.size + 1) / 2).all()
    return helpers()


def test_a_rank_with_a_core_of_its_own_works_alone() -> None:
    """As many ranks as there are cores: `auto` is one thread."""
    cores = len(os.sched_getaffinity(0))
    if cores > 4:
        pytest.skip(f"would need {cores} ranks")
    with ranks(max(cores, 2)) as made:
        assert made(automatic) == [0] * made.size
