"""Groups in an order of their own, and the numbers of calls, as torch promises on any backend.

Most of it runs on Gloo too: there, a failure says that the test is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.ranks import Rank, Ranks

NOBODY = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture(scope="module", params=["ringcomm", "gloo"])
def four(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(4, request.param)
    yield some
    some.leave()


def destroy(*groups: Any) -> None:
    dist.barrier()
    for group in groups:
        if group is not None and group is not NOBODY:
            dist.destroy_process_group(group)


def gathered(value: int, group: Any) -> list[int]:
    outputs = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, torch.tensor([value]), group=group)
    return [int(output) for output in outputs]


# ---- who is in a group


def check_local_groups(rank: Rank) -> None:
    """Only members make them; every rank makes others, and some twice."""
    me, groups = rank.index, []
    for distance in (1, 2, 3, 1):  # pairs that overlap
        partner = me ^ distance
        ranks = sorted([me, partner])
        outside = [other for other in range(4) if other not in ranks]
        assert dist.new_group(outside, use_local_synchronization=True) in (None, NOBODY)
        groups.append(dist.new_group(ranks[::-1], use_local_synchronization=True))
        assert dist.get_process_group_ranks(groups[-1]) == ranks
    assert gathered(me, groups[1]) == sorted([me, me ^ 2])
    order = list(enumerate((1, 2, 3, 1)))
    tensors = [torch.full((100,), float(me)) for _ in order]
    works = {}
    for number, _ in order if me % 2 else reversed(order):  # each rank in an order of its own
        works[number] = dist.all_reduce(tensors[number], group=groups[number], async_op=True)
    for number, distance in order:
        works[number].wait()
        assert tensors[number].eq(me + (me ^ distance)).all()
    destroy(*groups)


def check_order(rank: Rank) -> None:
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        return
    order = [2, 0, 3, 1]
    group = dist.new_group(order, sort_ranks=False)
    assert dist.get_process_group_ranks(group) == order
    assert dist.get_group_rank(group, rank.index) == order.index(rank.index)
    assert gathered(rank.index, group) == order
    tensor = torch.tensor([rank.index])
    dist.broadcast(tensor, group_src=2, group=group)
    assert tensor.item() == 3
    part = torch.empty(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, torch.arange(4), group=group)
    assert part.item() == 4 * order.index(rank.index)
    destroy(group)


# ---- numbers that calls have


def count(rank: Rank, ranks: list[int] | None) -> list[int]:
    """The numbers that this rank saw in a group of its own."""
    group = dist.new_group(ranks)
    seen = []
    if group is not NOBODY:
        backend, tensor = group._get_backend(torch.device("cpu")), torch.ones(3)
        seen.append(backend._get_sequence_number_for_group())
        works = []
        for turn in range(6):
            works.append(dist.all_reduce(torch.ones(3), group=group, async_op=turn % 2 == 0))
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
            seen.append(backend._get_sequence_number_for_group())
        for work in works[::2]:
            work.wait()
        if dist.get_rank(group) == 1:  # ahead by one, until the others follow
            ahead = dist.all_reduce(tensor, group=group, async_op=True)
        seen.append(backend._get_sequence_number_for_group())
        dist.barrier()
        if dist.get_rank(group) == 1:
            ahead.wait()
        else:
            dist.all_reduce(tensor, group=group)
        seen.append(backend._get_sequence_number_for_group())
    else:
        dist.barrier()
    destroy(group)
    return seen


@pytest.mark.parametrize("members", [None, [0, 2, 3]])
def test_calls_are_numbered_alike_on_every_rank(four: Ranks, members: list[int] | None) -> None:
    answers = four(count, members)
    for place, index in enumerate(members or range(4)):
        first = answers[index][0]
        last = 13 if place == 1 else 12
        assert [n - first for n in answers[index]] == [0, 2, 4, 6, 8, 10, 12, last, 13]
    assert len({answers[index][0] for index in members or range(4)}) == 1


@pytest.mark.parametrize("check", [check_local_groups, check_order])
def test_groups(four: Ranks, check: Callable[[Rank], None]) -> None:
    four(check)
