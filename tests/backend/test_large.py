"""More than 2³¹ elements, more than 4 GiB: no count is an int on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.ranks import Rank, Ranks, ranks

MANY = 2**31 + 1001  # elements
BIG = 2**30 + 70_001  # float32: more than 4 GiB
NEEDED = 18 << 30  # bytes of memory, for both ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}["MemAvailable"]
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory, there are {free >> 30}")
    with ranks(2) as some:
        yield some


def add_pattern(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Add a period that divides no power of two, so that a part in the wrong place shows."""
    period = torch.arange(251, dtype=torch.uint8).add(seed).remainder(100).to(tensor.dtype)
    whole = tensor.numel() // 251 * 251
    tensor[:whole].view(-1, 251).add_(period)
    tensor[whole:].add_(period[: tensor.numel() - whole])
    return tensor


def pattern(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return add_pattern(torch.zeros(count, dtype=dtype), seed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, without a third of their size."""
    size = 1 << 26
    return a.numel() == b.numel() and all(
        torch.equal(a[i : i + size], b[i : i + size]) for i in range(0, a.numel(), size)
    )


def many_elements(rank: Rank) -> None:
    mine = pattern(MANY, torch.uint8, rank.index)
    dist.all_reduce(mine)
    expected = add_pattern(pattern(MANY, torch.uint8, 0), 1)
    assert same(mine, expected)
    dist.broadcast(mine if rank.index == 1 else mine.zero_(), 1)
    assert same(mine, expected)


def many_bytes(rank: Rank) -> None:
    mine = pattern(BIG, torch.float32, rank.index)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    expected = add_pattern(pattern(BIG, torch.float32, 0), 1)
    assert same(mine, expected)


def large_shards(rank: Rank) -> None:
    whole = torch.empty(2 * (MANY // 2), dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, pattern(MANY // 2, torch.uint8, rank.index))
    for other, part in enumerate(whole.chunk(2)):
        assert same(part, pattern(MANY // 2, torch.uint8, other))
    mine = torch.empty(MANY // 2, dtype=torch.uint8)
    dist.reduce_scatter_tensor(mine, whole, dist.ReduceOp.MAX)
    assert same(mine, pattern(MANY // 2, torch.uint8, rank.index))


def large_exchange(rank: Rank) -> None:
    """Rank 0 sends much and receives little."""
    rows = [[1000, MANY], [17, 2000]]  # rows[i][j] go from i to j
    sent = pattern(sum(rows[rank.index]), torch.uint8, rank.index)
    received = torch.empty(rows[0][rank.index] + rows[1][rank.index], dtype=torch.uint8)
    dist.all_to_all_single(received, sent, [row[rank.index] for row in rows], rows[rank.index])
    start = 0
    for other in range(2):
        count = rows[other][rank.index]
        before = sum(rows[other][: rank.index])
        whole = pattern(sum(rows[other]), torch.uint8, other)
        assert same(received[start : start + count], whole[before : before + count])
        start += count


def large_message(rank: Rank) -> None:
    if rank.index == 0:
        dist.send(pattern(BIG, torch.float32, 5), 1)
    else:
        tensor = torch.empty(BIG)
        dist.recv(tensor, 0)
        assert same(tensor, pattern(BIG, torch.float32, 5))


@pytest.mark.parametrize(
    "check", [many_elements, many_bytes, large_shards, large_exchange, large_message]
)
def test_large(two: Ranks, check: object) -> None:
    two(check, seconds=300)  # type: ignore[arg-type]
