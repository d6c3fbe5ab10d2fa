"""dist.shrink_group: the ranks that are left make a smaller group, without those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms

from lab.groups import CPU, DIES, TRANSPORTS, choose, die, survivors, total
from lab.ranks import Rank, error_of, join, ranks


def leave_one_out(rank: Rank, transport: str) -> Any:
    choose(transport)
    join(rank)
    assert total() == 10
    if rank.index == 1:
        rank.store.get("shrunk/3")
        return None
    dist.shrink_group([1])
    groups = [(dist.get_rank(), dist.get_world_size(), total())]
    if rank.index != 0:
        dist.shrink_group([0])  # and once more
        groups.append((dist.get_rank(), dist.get_world_size(), total()))
    rank.store.set(f"shrunk/{rank.index}", "")
    return groups


@pytest.mark.parametrize("transport", forms(TRANSPORTS, ""))
def test_shrink_to_those_that_are_left(transport: str) -> None:
    with ranks(4, None) as some:
        groups = some(leave_one_out, transport)
    assert groups == [[(0, 3, 6)], None, [(1, 3, 6), (0, 2, 3)], [(2, 3, 6), (1, 2, 3)]]


def lose_one(rank: Rank, transport: str) -> Any:
    choose(transport)
    join(rank)
    total()
    if rank.index == DIES:
        die()
    _, text = error_of(total)
    assert "1" in text
    dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    return dist.get_rank(), dist.get_world_size(), total()


@pytest.mark.parametrize("transport", forms(TRANSPORTS, ""))
def test_shrink_without_a_dead_rank(transport: str) -> None:
    assert survivors(lose_one, transport) == [(0, 2, 3), (1, 2, 3)]


def shrink_in_the_middle(rank: Rank) -> Any:
    """An operation hangs, since one rank does not call it: SHRINK_ABORT ends it."""
    group = dist.new_group([0, 1, 2])
    if rank.index == 2:
        rank.store.get("over")
        return None
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    smaller = dist.shrink_group([2], group, dist.distributed_c10d.SHRINK_ABORT)
    _, text = error_of(work.wait)
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=smaller)
    backend = smaller._get_backend(CPU)
    kind, why = error_of(lambda: backend.shrink([backend.rank()]))
    rank.store.set("over", "")
    return text, float(tensor[0]), kind, why, dist.get_world_size()


def test_shrink_ends_what_is_pending() -> None:
    with ranks(3) as some:
        first, second, _ = some(shrink_in_the_middle)
    for text, sum_of_two, kind, why, world in (first, second):
        assert "shrinks" in text
        assert (sum_of_two, world) == (2, 3)
        assert kind == "ValueError"
        assert "must not call it" in why
