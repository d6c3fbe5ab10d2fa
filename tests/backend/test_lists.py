"""Lists of several tensors of one rank, with the semantics of ProcessGroupGloo.

all_reduce reduces the list and the ranks, broadcast fills the list from one of its tensors,
all_gather takes as many tensors of each rank as there are; reduce, gather and scatter take one.
The checks and the words are those of torch's own tests of Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lab.oracle import bits
from lab.ranks import Rank, Ranks, error_of

OPERATIONS = {
    "SUM": torch.sum,
    "PRODUCT": torch.prod,
    "MIN": torch.amin,
    "MAX": torch.amax,
}
DTYPES = (torch.float32, torch.int64, torch.bfloat16)


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


def done(work: Any) -> Any:
    """Wait for what was started; return the value of its future, None for what was done at once."""
    if work is None:
        return None
    work.wait()
    return work.get_future().value()


def number(rank: int, place: int, count: int) -> torch.Tensor:
    """Ones and twos: sums and products are exact in every order, and in every type."""
    return (torch.arange(count) * (rank + 1) + place) % 2 + 1.0


def all_reduces(rank: Rank) -> list[str]:
    digests = []
    cases = product(OPERATIONS.items(), DTYPES, (2, 3), (True, False))
    for (name, function), dtype, count, is_async in cases:
        every = [number(r, i, 5) for r in range(rank.size) for i in range(count)]
        wanted = function(torch.stack(every).to(dtype), 0).to(dtype)
        tensors = [number(rank.index, i, 5).to(dtype) for i in range(count)]
        op = getattr(dist.ReduceOp, name)
        opts = options(c10d.AllreduceOptions, reduceOp=op, asyncOp=is_async)
        told = done(backend_of().allreduce(tensors, opts))
        assert told is None or len(told) == count
        for tensor in tensors:
            assert tensor.equal(wanted), (name, dtype, tensor, wanted)
            digests.append(bits(tensor))
    return digests


def test_all_reduce_of_several(ranks: Ranks) -> None:
    assert len({tuple(digests) for digests in ranks(all_reduces)}) == 1


def bits_of_rounding(rank: Rank) -> list[str]:
    generator = torch.Generator().manual_seed(rank.index)
    tensors = [torch.randn(1000, generator=generator).half() for _ in range(3)]
    tensors.append(torch.randn(20, 50, generator=generator).half().t().reshape(1000))
    backend_of().allreduce(tensors, options(c10d.AllreduceOptions)).wait()
    return [bits(tensor) for tensor in tensors]


def test_every_tensor_of_every_rank_has_the_same_bits(ranks: Ranks) -> None:
    assert len({digest for digests in ranks(bits_of_rounding) for digest in digests}) == 1


def layouts(rank: Rank) -> None:
    a, b = torch.ones(4, 6)[:, ::2], torch.ones(3, 4).t()  # strided, and transposed
    again = torch.ones(4, 3)
    backend_of().allreduce([a, b, again, again], options(c10d.AllreduceOptions)).wait()
    for tensor in (a, b, again):
        assert tensor.eq(4 * rank.size).all()
    backend_of().broadcast([again, a, b], options(c10d.BroadcastOptions, rootTensor=0)).wait()
    conjugate = torch.full((2,), 1 + 1j * (rank.index + 1)).conj()
    plain = torch.zeros(2, dtype=conjugate.dtype)
    backend_of().broadcast([plain, conjugate], options(c10d.BroadcastOptions, rootTensor=1)).wait()
    assert plain.eq(1 - 1j).all()
    assert conjugate.eq(1 - 1j).all()


def test_tensors_of_any_layout(ranks: Ranks) -> None:
    ranks(layouts)


def sparse(rank: Rank) -> None:
    parts = [torch.eye(3).mul(rank.index + i).to_sparse() for i in range(2)]
    backend_of().allreduce(parts, options(c10d.AllreduceOptions)).wait()
    wanted = sum(r + i for r in range(rank.size) for i in range(2))
    for part in parts:
        assert part.to_dense().equal(torch.eye(3) * wanted)


def test_all_reduce_of_several_sparse_tensors(ranks: Ranks) -> None:
    ranks(sparse)


def broadcasts(rank: Rank) -> None:
    for root, place, is_async in product(range(rank.size), range(3), (True, False)):
        tensors = [torch.tensor([rank.index * 3.0 + i]) for i in range(3)]
        fields = {"rootRank": root, "rootTensor": place, "asyncOp": is_async}
        told = done(backend_of().broadcast(tensors, options(c10d.BroadcastOptions, **fields)))
        for some in (tensors, told or tensors):
            assert [tensor.item() for tensor in some] == [root * 3 + place] * 3


def test_broadcast_to_several(ranks: Ranks) -> None:
    ranks(broadcasts)


def all_gathers(rank: Rank) -> None:
    for count, is_async in product((1, 2, 3), (True, False)):
        inputs = [torch.tensor([count * rank.index + i + 0.0]) for i in range(count)]
        outputs = [list(torch.zeros(count * rank.size, 1)) for _ in range(count)]
        opts = options(c10d.AllgatherOptions, asyncOp=is_async)
        told = done(backend_of().allgather(outputs, inputs, opts))
        if count == 1 and told:
            told = [told]
        for lists in (outputs, told or outputs):
            found = [[tensor.item() for tensor in row] for row in lists]
            assert found == [list(range(count * rank.size))] * count


def test_all_gather_of_several(ranks: Ranks) -> None:
    ranks(all_gathers)


def coalesced(rank: Rank) -> None:
    total = rank.size * (rank.size + 1) / 2
    one = torch.tensor([rank.index + 1.0])
    work = dist.all_reduce_coalesced([one, one], async_op=True)
    work.wait()
    assert one.item() == total
    once, twice = torch.full((4,), rank.index + 1.0), torch.ones(2)
    dist.all_reduce_coalesced([once, twice, once, once])
    assert once.eq(total).all()
    assert twice.eq(rank.size).all()
    square = torch.ones(3, 4).t()  # dense, in another order: the copy is of the same
    dist.all_reduce_coalesced([square, square] if rank.index == 0 else [square, square.clone()])
    assert square.eq(rank.size).all()
    whole = torch.ones(6)
    dist.all_reduce_coalesced([whole[:4], whole[2:]])  # views that overlap
    assert whole.eq(rank.size).all()


def test_coalesced_tensors_that_share_memory(ranks: Ranks) -> None:
    ranks(coalesced)


def wrong_calls(rank: Rank) -> list[tuple[str, Callable[[], Any]]]:
    n, me, here = rank.size, rank.index, backend_of()
    t1, t2 = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    t3, t4 = torch.zeros(2), torch.sparse_coo_tensor([[0]], [1.0], size=(1,))

    def reduced(tensors: list[torch.Tensor], op: Any = dist.ReduceOp.SUM) -> Callable[[], Any]:
        return lambda: here.allreduce(tensors, options(c10d.AllreduceOptions, reduceOp=op))

    def sent(tensors: list[torch.Tensor], place: int = 0) -> Callable[[], Any]:
        opts = options(c10d.BroadcastOptions, rootRank=me, rootTensor=place)
        return lambda: here.broadcast(tensors, opts)

    def rooted(tensors: list[torch.Tensor], place: int = 0) -> Callable[[], Any]:
        opts = options(c10d.ReduceOptions, rootRank=me, rootTensor=place)
        return lambda: here.reduce(tensors, opts)

    def gathered(outputs: Any, inputs: Any) -> Callable[[], Any]:
        return lambda: here.allgather(outputs, inputs, options(c10d.AllgatherOptions))

    def together(tensors: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: here.allreduce_coalesced(tensors, options(c10d.AllreduceCoalescedOptions))

    gather, scatter = options(c10d.GatherOptions), options(c10d.ScatterOptions)
    return [
        ("requires non-empty tensor list", reduced([])),
        ("invalid tensor type", reduced([t1, t2])),
        ("invalid tensor size", reduced([t1, t3])),
        ("invalid tensor layout", reduced([t1, t4])),
        ("torch.stack() them", reduced([t1, t1.clone()], dist.ReduceOp.AVG)),
        ("invalid root tensor", sent([t1], -1)),
        ("invalid root tensor", sent([t1], 1)),
        ("invalid root tensor", sent([])),
        ("invalid tensor type", sent([t1, t2])),
        ("invalid tensor size", sent([t1, t3])),
        ("invalid root tensor", rooted([t1], -1)),
        ("invalid root tensor", rooted([t1], 1)),
        ("requires a single-element tensor list", rooted([t1, t1])),
        ("requires non-empty input tensor list", gathered([], [])),
        ("input/output tensor lists to have the same length", gathered([], [t1])),
        ("input/output tensor lists to have the same length", gathered([[t1] * n] * 2, [t1])),
        ("invalid output tensor list", gathered([[t1] * (n + 1)], [t1])),
        ("invalid tensor type", gathered([[t1, t1] * n] * 2, [t1, t2])),
        ("invalid tensor size", gathered([[t1, t1] * n] * 2, [t1, t3])),
        ("requires a single-element input tensor list", lambda: here.gather([], [t1, t1], gather)),
        (
            "requires a single-element output tensor list",
            lambda: here.scatter([t1, t1], [], scatter),
        ),
        ("requires non-empty tensor list", together([])),
        ("tensors must all have the same type", together([t1, t2])),
        ("invalid tensor layout at index", together([t1, t4])),
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
