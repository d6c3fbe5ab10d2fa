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
    one, twice = torch.full((4,), rank.index + 1.0), torch.ones(2)
    dist.all_reduce_coalesced([one, twice, torch.zeros(0)], async_op=True).wait()
    assert one.eq(total).all()
    assert twice.eq(rank.size).all()
    whole = torch.ones(6)
    dist.all_reduce_coalesced([whole[:3], whole[3:]])  # views side by side
    assert whole.eq(rank.size).all()


def test_coalesced_tensors(ranks: Ranks) -> None:
    ranks(coalesced)


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
    return [
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
        ("shares memory with an input: give it its own", together([t3, t3])),
        ("share", together([t3, t3[1:]])),
    ]


def check_wrong_calls(rank: Rank) -> list[tuple[str, str]]:
    found = [(wanted, error_of(call)[1]) for wanted, call in wrong_calls(rank)]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group still works
    assert tensor.item() == rank.size
    return found


def test_wrong_lists_are_refused(ranks: Ranks) -> None:
    for found in ranks(check_wrong_calls):
        for wanted, text in found:
            assert wanted in text, f"{wanted}: {text}"


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
