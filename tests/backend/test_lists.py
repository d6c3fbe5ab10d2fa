"""Lists of tensors: a call takes one of each rank, as NCCL's do; coalesced calls take several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lab.ranks import Rank, Ranks, error_of


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(request.param)
    yield some
    some.leave()


def backend_of() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def coalesced(rank: Rank) -> None:
    total = rank.size * (rank.size + 1) / 2
    mine, twice = torch.full((4,), rank.index + 1.0), torch.ones(2)
    dist.all_reduce_coalesced([mine, twice, torch.zeros(0)], async_op=True).wait()
    assert mine.eq(total).all()
    assert twice.eq(rank.size).all()
    whole = torch.ones(6)
    dist.all_reduce_coalesced([whole[:3], whole[3:]])  # views side by side
    assert whole.eq(rank.size).all()


def test_coalesced_tensors(ranks: Ranks) -> None:
    ranks(coalesced)


def overlapping(count: int) -> list[torch.Tensor]:
    """Tensors of which each shares an element with the next."""
    whole = torch.zeros(count + 1)
    return [whole[i : i + 2] for i in range(count)]


def wrong_calls(rank: Rank) -> list[tuple[str, Callable[[], Any]]]:
    n, me, here = rank.size, rank.index, backend_of()
    t1, t2 = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    t3, t4 = torch.zeros(2), torch.sparse_coo_tensor([[0]], [1.0], size=(1,))

    def reduced(tensors: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: here.allreduce(tensors, options(c10d.AllreduceOptions))

    def sent(tensors: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: here.broadcast(tensors, options(c10d.BroadcastOptions, rootRank=me))

    def rooted(tensors: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: here.reduce(tensors, options(c10d.ReduceOptions, rootRank=me))

    def gathered(outputs: Any, inputs: Any) -> Callable[[], Any]:
        return lambda: here.allgather(outputs, inputs, options(c10d.AllgatherOptions))

    def together(tensors: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: here.allreduce_coalesced(tensors, options(c10d.AllreduceCoalescedOptions))

    gather, scatter = options(c10d.GatherOptions), options(c10d.ScatterOptions)
    neighbors = gathered([overlapping(n)], [torch.zeros(2)])
    return [
        *([("share some of their memory", neighbors)] if n > 1 else []),
        ("requires a single-element tensor list, this one has 0", reduced([])),
        ("has 2: make a call for each, or a coalesced one", reduced([t1, t1.clone()])),
        ("requires a single-element tensor list", reduced([t4, t4])),
        ("requires a single-element tensor list", sent([])),
        ("requires a single-element tensor list", sent([t1, t3])),
        ("requires a single-element tensor list", rooted([t1, t1])),
        ("requires a single-element input tensor list", gathered([], [])),
        ("requires a single-element input tensor list", gathered([[t1] * n] * 2, [t1, t1])),
        ("requires a single-element output tensor list", gathered([], [t1])),
        ("requires a single-element output tensor list", gathered([[t1] * n] * 2, [t1])),
        ("output tensor list size", gathered([[t1] * (n + 1)], [t1])),
        ("requires a single-element input tensor list", lambda: here.gather([], [t1, t1], gather)),
        (
            "requires a single-element output tensor list",
            lambda: here.scatter([t1, t1], [], scatter),
        ),
        ("requires non-empty tensor list", together([])),
        ("tensors must all have the same type", together([t1, t2])),
        ("invalid tensor layout at index", together([t1, t4])),
        ("share", together([t3, t3[1:]])),
    ]


def check_wrong_calls(rank: Rank) -> list[tuple[str, str]]:
    errors = [(wanted, error_of(call)[1]) for wanted, call in wrong_calls(rank)]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group still works
    assert tensor.item() == rank.size
    return errors


def test_wrong_lists_are_refused(ranks: Ranks) -> None:
    for errors in ranks(check_wrong_calls):
        for wanted, text in errors:
            assert wanted in text, f"{wanted}: {text}"


# ---- one tensor several times


def repeated(rank: Rank) -> None:
    """As over Gloo: the last result stays in it."""
    n, me = rank.size, rank.index
    output = torch.zeros(5)
    dist.all_gather([output] * n, torch.full((5,), float(me)))
    assert output.eq(n - 1).all()

    own = torch.full((3, 3), float(me))  # which is the input as well
    dist.all_gather([own] * n, own)
    assert own.eq(n - 1).all()

    first, second = torch.zeros(4), torch.zeros(4)
    lists = [first, second, first][:n]
    dist.all_gather(lists, torch.full((4,), float(me)), async_op=True).wait()
    assert first.eq(2 if n == 3 else 0).all()
    assert second.eq(min(n - 1, 1)).all()

    big, root = torch.zeros(300_000), n - 1
    dist.gather(torch.full((300_000,), float(me)), [big] * n if me == root else None, root)
    assert big.eq(root if me == root else 0).all()

    moved = torch.zeros(7, 2).T  # it is copied in any case
    dist.all_gather([moved] * n, torch.full((2, 7), float(me)))
    assert moved.eq(n - 1).all()

    into = torch.zeros(2)
    dist.all_to_all([into] * n, [torch.full((2,), 10.0 * me + to) for to in range(n)])
    assert into.eq(10 * (n - 1) + me).all()

    into = torch.zeros(n)
    with dist._coalescing_manager():
        for number in (1.0, 2.0):
            dist.all_gather_into_tensor(into, torch.full((1,), number))
    assert into.eq(2).all()

    tied = torch.full((6,), me + 1.0)  # summed once
    dist.all_reduce_coalesced([tied, torch.ones(2), tied])
    assert tied.eq(n * (n + 1) / 2).all()

    none = torch.zeros(0)
    dist.all_gather([none] * n, none)


def test_one_tensor_several_times(ranks: Ranks) -> None:
    ranks(repeated)


# ---- a call that names a device where there is none


def barriers(rank: Rank) -> None:
    for is_async in (False, True):
        work = dist.barrier(device_ids=[0], async_op=is_async)
        if work is not None:
            work.wait()
    cuda = options(c10d.BarrierOptions, device_ids=[rank.index])
    backend_of().barrier(cuda).wait()
    cuda.device = torch.device("cuda", 0)
    backend_of().barrier(cuda).wait()


def test_barrier_of_a_device_that_is_not_there(ranks: Ranks) -> None:
    ranks(barriers)
