"""Ranks that pass different things in one call: each gets an error that says so, never a number.

Each case is a call with two variants of one argument. A sample of pairs is drawn with the seed of
the day; which rank gives which variant is drawn, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lab.limits import seed
from lab.ranks import Rank, error_of, ranks

Call = Callable[[Any], Any]


def ones(*sizes: int, **options: Any) -> torch.Tensor:
    return torch.ones(*sizes, **options)


def lists(sizes: tuple[int, ...], **options: Any) -> list[torch.Tensor]:
    return [ones(size, **options) for size in sizes]


def sparse(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (4,)) -> torch.Tensor:
    values = ones(2, *sizes[1:], dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, sizes)


def gathered(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros(2 * tensor.numel(), dtype=tensor.dtype) for tensor in tensors]


def coalesced(cut: tuple[int, ...]) -> Call:
    return lambda group: dist.all_reduce_coalesced(lists(cut), group=group)


def into_several(cut: tuple[int, ...]) -> Call:
    def call(group: Any) -> None:
        inputs = lists(cut)
        group.allgather_into_tensor_coalesced(gathered(inputs), inputs).wait()

    return call


def scatter_several(cut: tuple[int, ...]) -> Call:
    def call(group: Any) -> None:
        outputs = lists(cut)
        group.reduce_scatter_tensor_coalesced(outputs, gathered(outputs)).wait()

    return call


def gather_several(cut: tuple[int, ...]) -> Call:
    def call(group: Any) -> None:
        inputs = lists(cut)
        dist.all_gather_coalesced([lists(cut), lists(cut)], inputs, group=group)

    return call


CASES: dict[str, list[Call]] = {
    "all_reduce": [
        lambda group: dist.all_reduce(ones(30), group=group),
        lambda group: dist.all_reduce(ones(30), ReduceOp.AVG, group=group),
        lambda group: dist.all_reduce(ones(30, dtype=torch.int32), group=group),
        lambda group: dist.all_reduce(ones(31), group=group),
        lambda group: dist.all_reduce(ones(5, 6).t(), group=group),
        lambda group: dist.all_reduce(sparse(), group=group),
        coalesced((10, 20)),
        lambda group: dist.broadcast(ones(30), 0, group=group),
    ],
    "all_reduce_coalesced": [
        coalesced((10, 20)),
        coalesced((20, 10)),
        coalesced((10, 10, 10)),
        coalesced((30,)),
    ],
    "all_reduce of sparse tensors": [
        lambda group: dist.all_reduce(sparse(), group=group),
        lambda group: dist.all_reduce(sparse(), ReduceOp.AVG, group=group),
        lambda group: dist.all_reduce(sparse(torch.int32), group=group),
        lambda group: dist.all_reduce(sparse(torch.float64), group=group),
        lambda group: dist.all_reduce(sparse(sizes=(5,)), group=group),
        lambda group: dist.all_reduce(sparse(sizes=(4, 2)), group=group),
    ],
    "broadcast": [
        lambda group: dist.broadcast(ones(30), 0, group=group),
        lambda group: dist.broadcast(ones(30), 1, group=group),
        lambda group: dist.broadcast(ones(15), 0, group=group),
        lambda group: dist.broadcast(ones(30, dtype=torch.int32), 0, group=group),
    ],
    "reduce": [
        lambda group: dist.reduce(ones(30), 0, group=group),
        lambda group: dist.reduce(ones(30), 1, group=group),
        lambda group: dist.reduce(ones(30), 0, ReduceOp.MAX, group=group),
        lambda group: dist.reduce(ones(60, dtype=torch.float16), 0, group=group),
    ],
    "all_gather": [
        lambda group: dist.all_gather(lists((3, 3)), ones(3), group=group),
        lambda group: dist.all_gather(lists((4, 4)), ones(4), group=group),
        lambda group: dist.all_gather(
            lists((3, 3), dtype=torch.int32), ones(3, dtype=torch.int32), group=group
        ),
        lambda group: dist.all_gather_into_tensor(ones(10), ones(5), group=group),
    ],
    "all_gather of several": [into_several((4, 8)), into_several((8, 4)), into_several((12,))],
    "all_gather_coalesced": [gather_several((1, 5)), gather_several((5, 1)), gather_several((6,))],
    "reduce_scatter of several": [
        scatter_several((4, 8)),
        scatter_several((8, 4)),
        scatter_several((12,)),
    ],
    "reduce_scatter": [
        lambda group: dist.reduce_scatter_tensor(ones(3), ones(6), group=group),
        lambda group: dist.reduce_scatter_tensor(ones(3), ones(6), ReduceOp.MIN, group=group),
        lambda group: dist.reduce_scatter_tensor(ones(4), ones(8), group=group),
    ],
    "all_to_all_single": [
        lambda group: dist.all_to_all_single(ones(4), ones(4), group=group),
        lambda group: dist.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3], group=group),
        lambda group: dist.all_to_all_single(ones(8), ones(8), group=group),
        lambda group: dist.all_to_all_single(
            ones(4, dtype=torch.int32), ones(4, dtype=torch.int32), group=group
        ),
    ],
}


def differ(rank: Rank, number: int) -> list[tuple[str, str]]:
    """Call variants that differ, each pair in a group of its own; return the errors."""
    chance = random.Random(number)
    pairs = []
    for name, variants in CASES.items():
        every = [(a, b) for a in range(len(variants)) for b in range(len(variants)) if a != b]
        pairs += [(name, pair) for pair in chance.sample(every, min(6, len(every)))]
    groups = [dist.new_group() for _ in pairs]

    def try_pair(group: Any, name: str, pair: tuple[int, int]) -> tuple[str, str]:
        mine = CASES[name][pair[rank.index]]
        kind, text = error_of(lambda: mine(group))
        return f"{name} {pair}", f"{kind}: {text}"

    with ThreadPoolExecutor(len(groups)) as pool:  # each takes a moment to find the mismatch
        return list(pool.map(lambda group, pair: try_pair(group, *pair), groups, pairs))


def test_what_ranks_pass_differently_is_told() -> None:
    with ranks(2) as some:
        results = some(differ, seed())
    for told in results:
        assert len(told) > 40
        for case, text in told:
            assert "DistBackendError: " in text, f"{case}: {text}"
