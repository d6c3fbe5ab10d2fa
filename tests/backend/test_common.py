"""What torch.distributed promises on any backend: groups, ranks, numbers, types, objects.

Most of it runs on Gloo too: there, a failure says that the test is wrong.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.ranks import Rank, Ranks, error_of

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


def refused(found: tuple[str, str], wanted: str) -> bool:
    return found[0] == "ValueError" and wanted in found[1]


def gathered(value: int, group: Any) -> list[int]:
    outputs = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, torch.tensor([value]), group=group)
    return [int(output) for output in outputs]


# ---- who is in a group


def check_membership(rank: Rank) -> None:
    group = dist.new_group([1, 3])
    if rank.index in (1, 3):
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert dist.get_group_rank(group, 3) == 1
        assert dist.get_global_rank(group, 1) == 3
        assert dist.get_rank(group) == rank.index // 2
        assert gathered(rank.index, group) == [1, 3]
        for found in (
            error_of(lambda: dist.get_group_rank(group, 0)),
            error_of(lambda: dist.get_global_rank(group, 2)),
        ):
            assert refused(found, "not part of group"), found
    else:
        assert group is NOBODY
        assert dist.get_rank(group) == -1
        for call in (partial(dist.all_reduce, torch.ones(1)), dist.barrier):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call(group=group)
            assert "does not belong to the given group" in str(seen[-1].message)
    wrong = {"duplicate": [0, 0], "out of range": [0, 4], "size": [0, 1, 2, 3, 4]}
    for wanted, ranks in wrong.items():
        found = error_of(partial(dist.new_group, ranks))
        assert refused(found, wanted), found
    destroy(group)


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


# ---- types


def check_dtypes(rank: Rank) -> None:
    tensor, half = torch.ones(2, 2), torch.ones(2, 2).half()
    same = [torch.zeros(2, 2) for _ in range(4)]
    mixed = [same[0], half, *same[2:]]
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather(mixed, tensor),
        lambda: dist.all_gather(same, half),
        lambda: dist.all_gather_coalesced([mixed], same),
        lambda: dist.all_reduce_coalesced(mixed),
        lambda: dist.reduce_scatter(tensor, mixed),
        lambda: dist.reduce_scatter(half, same),
        lambda: dist.all_to_all_single(half, tensor),
        lambda: dist.all_to_all(mixed, same),
        lambda: dist.all_to_all(same, mixed),
        lambda: dist.scatter(tensor, mixed),
        lambda: dist.scatter(half, same),
        lambda: dist.gather(tensor, mixed),
        lambda: dist.gather(half, same),
    ]
    for number, call in enumerate(calls):
        found = error_of(call)
        assert refused(found, "tensors with different dtypes"), (number, found)
    flags = torch.tensor([True, False, False, True])
    sent = flags.clone() if rank.index == 0 else torch.zeros(4, dtype=torch.bool)
    dist.broadcast(sent, 0)
    assert sent.equal(flags)
    parts = [torch.zeros(4, dtype=torch.bool) for _ in range(4)]
    dist.all_gather(parts, flags.roll(rank.index))
    assert all(part.equal(flags.roll(other)) for other, part in enumerate(parts))


def check_complex(rank: Rank) -> None:
    """A complex tensor may stand beside floats: it is seen as pairs of them."""
    pair = torch.tensor([1.0 + rank.index, -2.0])
    for is_complex in (False, True):
        mine = torch.view_as_complex(pair) if is_complex else pair
        outputs = [torch.zeros(2) for _ in range(4)]
        mixed = [*outputs[:3], torch.view_as_complex(outputs[3])]
        dist.all_gather(mixed, mine)
        assert [output.tolist() for output in outputs] == [[1.0 + r, -2.0] for r in range(4)]
    tensor = torch.full((3,), complex(rank.index, 1))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6 + 4j] * 3
    for op in ("MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        found = error_of(partial(dist.all_reduce, tensor, getattr(dist.ReduceOp, op)))
        assert refused(found, "complex"), (op, found)


# ---- objects


def check_objects(rank: Rank) -> None:
    members = [1, 2, 3]
    group = dist.new_group(members)
    if group is not NOBODY:
        mine = {"from": rank.index, "x": "y" * 2000 * rank.index}
        everybody: list[Any] = [None] * 3
        dist.all_gather_object(everybody, mine, group=group)
        assert [len(item["x"]) for item in everybody] == [2000, 4000, 6000]
        at: list[Any] = [None] * 3
        dist.gather_object(mine, at if rank.index == 2 else None, dst=2, group=group)
        assert rank.index != 2 or [item["from"] for item in at] == members
        two: list[Any] = ["a", torch.arange(5)] if rank.index == 3 else [None, None]
        dist.broadcast_object_list(two, group_src=2, group=group)
        assert (two[0], two[1].tolist()) == ("a", [0, 1, 2, 3, 4])
        one: list[Any] = [None]
        dist.scatter_object_list(one, [[m] for m in members], src=1, group=group)
        assert one == [[rank.index]]
        into: list[Any] = [None, None]
        if rank.index == 1:
            dist.send_object_list([mine, 5], 3, group=group)
        elif rank.index == 3:
            assert dist.recv_object_list(into, 1, group=group) == 1
            assert (into[0]["from"], into[1]) == (1, 5)
    destroy(group)


CHECKS = [
    check_membership,
    check_local_groups,
    check_order,
    check_dtypes,
    check_complex,
    check_objects,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_common(four: Ranks, check: Callable[[Rank], None]) -> None:
    four(check)
