"""Calls of torch.distributed with what each rank gives, and what has to come: for tests of terms.

Results follow from what the rank itself gives, as if all ranks gave the same. Numbers are small and
whole, and so are their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ringcomm
from ringcomm.compression.quantized import WIDTHS, quantized_all_reduce

# Types of which ringcomm knows no more than their size, and one of the same size.
MOVED = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8)


@dataclass(frozen=True)
class Given:
    """Everything that one rank gives to a call."""

    rank: int
    size: int
    group: Any = None
    dtype: torch.dtype = torch.int32
    count: int = 12
    op: str = "SUM"
    root: int = 0
    cut: tuple[int, ...] = ()  # for a list, of `count` elements in all
    types: tuple[torch.dtype, ...] = ()  # for a list
    splits: tuple[int, ...] = ()  # what each rank gets, or gives
    dims: int = 1  # sparse ones
    format: str = "int8"
    columns: bool = False  # the tensor lies in memory column by column
    strided: bool = False  # it has holes: ringcomm copies it
    nonzero: tuple[int, ...] = (3, 3, 3)  # elements of each rank, of a sparse tensor
    is_async: bool = False
    readable: bool = False  # tensors lie where all ranks can read them

    def of(self, rank: int, count: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return what that rank's tensor holds."""
        many = self.count if count is None else count
        numbers = (torch.arange(many) * 3 + rank * 5) % 11 + 1
        kind = dtype or self.dtype
        if kind in MOVED:
            return numbers.to(torch.uint8).view(kind)
        return numbers.to(kind)

    def mine(self, count: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        values = self.of(self.rank, count, dtype)
        if self.columns:
            return values.view(2, -1).t().contiguous().t()
        if self.strided:
            return values.view(-1, 1).repeat(1, 2)[:, 0]
        return self.placed(values)

    def placed(self, values: Tensor) -> Tensor:
        return (
            ringcomm.empty(values.shape, dtype=values.dtype).copy_(values)
            if self.readable
            else values
        )

    def empty(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.placed(torch.zeros(count, dtype=torch.uint8).to(dtype or self.dtype))

    def reduced(self, tensors: list[Tensor]) -> Tensor:
        stacked = torch.stack(tensors).to(torch.float64)
        if self.op == "SUM":
            return stacked.sum(0).to(tensors[0].dtype)
        return (stacked.amax(0) if self.op == "MAX" else stacked.amin(0)).to(tensors[0].dtype)

    @property
    def ranks(self) -> range:
        return range(self.size)

    @property
    def reduction(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    @property
    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.is_async}


Results = list[tuple[Tensor, Tensor]]  # what came, and what had to come


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def all_reduce(a: Given) -> Results:
    x = a.mine()
    wait(dist.all_reduce(x, a.reduction, **a.options))
    return [(x.reshape(-1), a.reduced([a.of(r) for r in a.ranks]))]


def premultiplied(a: Given) -> Results:
    """Each rank has a factor of its own."""
    x = a.mine()
    own = a.op == "PREMUL_SUM"
    op = dist._make_nccl_premul_sum(a.rank + 1.0) if own else a.reduction
    wait(dist.all_reduce(x, op, **a.options))
    return [(x, torch.stack([a.of(r) * (r + 1 if own else 1) for r in a.ranks]).sum(0))]


def quantized(a: Given) -> Results:
    x = a.mine()
    wait(quantized_all_reduce(
        x, bits=WIDTHS[a.format], group=a.group, format=a.format,
        op=a.reduction, async_op=a.is_async,
    ))  # fmt: skip
    wanted = torch.stack([a.of(r) for r in a.ranks]).sum(0)
    return [(x.reshape(-1), wanted / a.size if a.op == "AVG" else wanted)]


def sparse(a: Given) -> Results:
    def tensor(rank: int) -> Tensor:
        dense = a.of(rank)
        dense[(torch.arange(a.count) * 7 + rank) % a.count >= a.nonzero[rank]] = 0
        return dense.view(a.cut)

    x = tensor(a.rank).to_sparse(a.dims)
    wait(dist.all_reduce(x, a.reduction, **a.options))
    wanted = torch.stack([tensor(r) for r in a.ranks]).sum(0)
    return [(x.to_dense(), (wanted / a.size if a.op == "AVG" else wanted).to(a.dtype))]


def all_reduce_coalesced(a: Given) -> Results:
    x = a.mine().reshape(-1)
    wait(dist.all_reduce_coalesced(list(x.split(a.cut)), a.reduction, **a.options))
    return [(x, a.reduced([a.of(r) for r in a.ranks]))]


def broadcast(a: Given) -> Results:
    x = a.mine()
    wait(dist.broadcast(x, a.root, **a.options))
    return [(x.reshape(-1), a.of(a.root))]


def reduce(a: Given) -> Results:
    x = a.mine()
    wait(dist.reduce(x, a.root, a.reduction, **a.options))
    return [(x.reshape(-1), a.reduced([a.of(r) for r in a.ranks]))] if a.rank == a.root else []


def all_gather(a: Given) -> Results:
    out = [a.empty(n) for n in a.splits]
    wait(dist.all_gather(out, a.mine(a.splits[a.rank]), **a.options))
    return [(out[r], a.of(r, a.splits[r])) for r in a.ranks]


def into_tensor(gather: Any) -> Callable[[Given], Results]:
    def call(a: Given) -> Results:
        out = a.empty(a.size * a.count)
        wait(gather(out, a.mine().reshape(-1), **a.options))
        return [(out, torch.cat([a.of(r) for r in a.ranks]))]

    return call


def parts(a: Given, rank: int) -> list[Tensor]:
    """Return a rank's list, of tensors of other sizes and types."""
    pairs = zip(a.cut, a.types, strict=True)
    return [a.of(rank + i, n, t) for i, (n, t) in enumerate(pairs)]


def all_gather_coalesced(a: Given) -> Results:
    out = [[torch.zeros_like(p) for p in parts(a, r)] for r in a.ranks]
    wait(dist.all_gather_coalesced(out, parts(a, a.rank), **a.options))
    return [(x, y) for r in a.ranks for x, y in zip(out[r], parts(a, r), strict=True)]


def gathers_into_tensors(a: Given) -> Results:
    mine = parts(a, a.rank)
    out = [p.new_zeros(a.size * p.numel()) for p in mine]
    a.group.allgather_into_tensor_coalesced(out, mine).wait()
    wanted = [torch.cat(shards) for shards in zip(*(parts(a, r) for r in a.ranks), strict=True)]
    return list(zip(out, wanted, strict=True))


def scatters_sums(a: Given) -> Results:
    """Sum several tensors, each over all ranks, in one call."""
    out = [a.empty(n) for n in a.cut]
    wholes = [a.of(a.rank + i, a.size * n) for i, n in enumerate(a.cut)]
    options = dist.ReduceScatterOptions()
    options.reduceOp = a.reduction
    a.group.reduce_scatter_tensor_coalesced(out, wholes, options).wait()
    wanted = [
        a.reduced([a.of(r + i, a.size * n) for r in a.ranks])[a.rank * n :][:n]
        for i, n in enumerate(a.cut)
    ]
    return list(zip(out, wanted, strict=True))


def gather(a: Given) -> Results:
    out = [a.empty(a.count) for _ in a.ranks] if a.rank == a.root else None
    wait(dist.gather(a.mine(), out, a.root, **a.options))
    return [(out[r], a.of(r)) for r in a.ranks] if out else []


def scatter(a: Given) -> Results:
    lists = [a.of(a.rank + r) for r in a.ranks] if a.rank == a.root else None
    wait(dist.scatter(out := a.empty(a.count), lists, a.root, **a.options))
    return [(out, a.of(a.root + a.rank))]


def reduce_scatter(a: Given) -> Results:
    whole = a.mine(sum(a.splits)).reshape(-1)
    out = a.empty(a.splits[a.rank])
    wait(dist.reduce_scatter(out, list(whole.split(a.splits)), a.reduction, **a.options))
    wanted = a.reduced([a.of(r, sum(a.splits)) for r in a.ranks])
    return [(out, wanted.split(a.splits)[a.rank])]


def scatter_sum(scatter: Any) -> Callable[[Given], Results]:
    def call(a: Given) -> Results:
        out = a.empty(a.count)
        wait(scatter(out, a.mine(a.size * a.count).reshape(-1), a.reduction, **a.options))
        return [(out, a.reduced([a.of(r, a.size * a.count) for r in a.ranks])[a.rank * a.count :][
            : a.count])]  # fmt: skip

    return call


def exchanged(a: Given) -> tuple[list[int], Tensor]:
    """Rank r gives each other rank splits[r] elements: what comes here."""
    shards = [a.of(r, a.splits[r] * a.size)[a.rank * a.splits[r] :][: a.splits[r]] for r in a.ranks]
    return list(a.splits), torch.cat(shards)


def all_to_all_single(a: Given) -> Results:
    got, wanted = exchanged(a)
    given = a.mine(a.splits[a.rank] * a.size).reshape(-1)
    out = a.empty(sum(got))
    wait(dist.all_to_all_single(out, given, got, [a.splits[a.rank]] * a.size, **a.options))
    return [(out, wanted)]


def all_to_all(a: Given) -> Results:
    got, wanted = exchanged(a)
    given = list(a.mine(a.splits[a.rank] * a.size).reshape(-1).chunk(a.size))
    out = [a.empty(n) for n in got]
    wait(dist.all_to_all(out, given, **a.options))
    return [(torch.cat(out), wanted)]


def barrier(a: Given) -> Results:
    dist.barrier(a.group)
    return []


# Each rank sends to the next one, and receives from the one before.


def send(a: Given) -> Results:
    out, x = a.empty(a.count), a.mine()
    if a.rank == 0:
        dist.send(x, 1, a.group)
    elif a.rank == 1:
        dist.recv(out, 0, a.group)
        return [(out, a.of(0))]
    return []


def isend(a: Given) -> Results:
    after, before = (a.rank + 1) % a.size, (a.rank - 1) % a.size
    out, mine = a.empty(a.count), a.mine().reshape(-1)

    def post_receive() -> Any:
        return dist.irecv(out, before, a.group)

    # Not all in one order: the two ranks of a message meet first, where they have devices.
    works = [] if a.rank == 0 else [post_receive()]
    works.append(dist.isend(mine, after, a.group))
    for work in works if a.rank else [*works, post_receive()]:
        wait(work)
    return [(out, a.of(before))]


def batch(a: Given) -> Results:
    after, before = (a.rank + 1) % a.size, (a.rank - 1) % a.size
    out, mine = a.empty(a.count), a.mine().reshape(-1)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine, after, a.group),
        dist.P2POp(dist.irecv, out, before, a.group),
    ])  # fmt: skip
    for work in works:
        wait(work)
    return [(out, a.of(before))]


# Objects, of as many bytes as each rank likes; lists of them are of one length.


def objects(a: Given, rank: int, count: int) -> list[Any]:
    return [f"{rank} {i} " * (rank + i) for i in range(count)]


def same(a: Any, b: Any) -> Results:
    return [(torch.tensor(a == b), torch.tensor(True))]


def all_gather_object(a: Given) -> Results:
    out: list[Any] = [None] * a.size
    dist.all_gather_object(out, objects(a, a.rank, 3), a.group)
    return same(out, [objects(a, r, 3) for r in a.ranks])


def gather_object(a: Given) -> Results:
    out: list[Any] | None = [None] * a.size if a.rank == a.root else None
    dist.gather_object(objects(a, a.rank, 3), out, a.root, a.group)
    return same(out, [objects(a, r, 3) for r in a.ranks]) if out else []


def broadcast_object_list(a: Given) -> Results:
    out = objects(a, a.rank, len(a.splits) + a.count)
    dist.broadcast_object_list(out, a.root, a.group)
    return same(out, objects(a, a.root, len(a.splits) + a.count))


def scatter_object_list(a: Given) -> Results:
    out: list[Any] = [None]
    dist.scatter_object_list(out, objects(a, a.rank, a.size), a.root, a.group)
    return same(out, [objects(a, a.root, a.size)[a.rank]])


def send_object_list(a: Given) -> Results:
    out = objects(a, a.rank, a.count)
    if a.rank == 0:
        dist.send_object_list(out, 1, a.group)
    elif a.rank == 1:
        dist.recv_object_list(out, 0, a.group)
    return same(out, objects(a, 0, a.count)) if a.rank == 1 else []


class Call(NamedTuple):
    run: Callable[[Given], Results]
    must: str = ""  # what ranks give alike, beside the call itself
    may: str = ""  # in what they may differ
    serves: str = ""  # other names of torch.distributed's
    kind: str = "collective"


USUAL = "is_async strided"
CALLS = {
    "all_reduce": Call(all_reduce, "dtype count op columns", USUAL),
    "all_reduce_coalesced": Call(all_reduce_coalesced, "dtype count op cut", USUAL),
    "broadcast": Call(broadcast, "dtype moved count root columns", USUAL),
    "reduce": Call(reduce, "dtype count op root columns", USUAL),
    "all_gather": Call(all_gather, "dtype moved splits", USUAL),
    "all_gather_single": Call(
        into_tensor(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor),
        "dtype moved count", USUAL, "all_gather_into_tensor",
    ),
    "all_gather_coalesced": Call(all_gather_coalesced, "dtype cut", "is_async"),
    "gather": Call(gather, "dtype moved count root", USUAL),
    "scatter": Call(scatter, "dtype moved count root", USUAL),
    "reduce_scatter": Call(reduce_scatter, "dtype splits op", USUAL),
    "reduce_scatter_single": Call(
        scatter_sum(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor),
        "dtype count op", USUAL, "reduce_scatter_tensor",
    ),
    "all_to_all_single": Call(all_to_all_single, "dtype moved splits", USUAL),
    "all_to_all": Call(all_to_all, "dtype moved splits", USUAL),
    "barrier": Call(barrier),
    "send": Call(send, "dtype moved count", "strided", "recv", "message"),
    "isend": Call(isend, "dtype moved count", "", "irecv", "message"),
    "batch_isend_irecv": Call(batch, "dtype moved count", "", "", "message"),
    "all_gather_object": Call(all_gather_object),
    "gather_object": Call(gather_object, "root"),
    "broadcast_object_list": Call(broadcast_object_list, "root count"),
    "scatter_object_list": Call(scatter_object_list, "root"),
    "send_object_list": Call(send_object_list, "count", "", "recv_object_list", "message"),
    # They have no names of their own.
    "sparse all_reduce": Call(sparse, "dtype cut dims mean", "is_async"),
    "all_reduce with factors": Call(premultiplied, "count op", USUAL),
    "all_gather_single of a list": Call(gathers_into_tensors, "cut types"),
    "reduce_scatter_single of a list": Call(scatters_sums, "dtype cut op"),
    "a quantized all_reduce": Call(quantized, "floats count mean format", "is_async"),
}  # fmt: skip
