"""Ranks call the same, but for one argument: each is told, and none gets a wrong number.

Over all calls of torch.distributed that exchange something, and all their arguments that ranks must
give alike. Where they may differ, the results are right.
"""

from __future__ import annotations

import inspect
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import ringcomm
from lab.limits import seed
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, error_of, join, ranks
from lab.simulated_device import SIMULATED

OPS = ("SUM", "MAX", "MIN")
TYPES = (torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
# Types of which ringcomm knows no more than their size, and one of the same size.
MOVED = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8)
COUNTS = (12, 300, 6000, 60_000, 600_000)
# What each rank reads, at first hand or as "rank 1 failed: …".
TOLD = re.compile(
    "differs between ranks|disagree on how much they send each other"
    "|with this tag: give recv a tensor of the same dtype"
    "|between devices messages are matched in the order of the calls"
)


@dataclass(frozen=True)
class Given:
    """What one rank gives to a call. Numbers are small and whole, and so are their sums."""

    rank: int
    size: int
    group: Any = None
    dtype: torch.dtype = torch.int32
    count: int = 12
    op: str = "SUM"
    root: int = 0
    cut: tuple[int, ...] = ()  # of a list, of `count` elements in all
    types: tuple[torch.dtype, ...] = ()  # of a list
    splits: tuple[int, ...] = ()  # what each rank gets, or gives
    dims: int = 1  # sparse ones
    format: str = "int8"
    columns: bool = False  # the tensor lies in memory column by column
    strided: bool = False  # it has holes: ringcomm copies it
    nonzero: int = 3
    is_async: bool = False

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
        return values

    def empty(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8).to(dtype or self.dtype)

    def reduced(self, each: list[Tensor]) -> Tensor:
        stacked = torch.stack(each).to(torch.float64)
        if self.op == "SUM":
            return stacked.sum(0).to(each[0].dtype)
        return (stacked.amax(0) if self.op == "MAX" else stacked.amin(0)).to(each[0].dtype)

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
    wait(ringcomm.quantized_all_reduce(
        x, bits=ringcomm.quantized.WIDTHS[a.format], group=a.group, format=a.format,
        op=a.reduction, async_op=a.is_async,
    ))  # fmt: skip
    wanted = torch.stack([a.of(r) for r in a.ranks]).sum(0)
    return [(x.reshape(-1), wanted / a.size if a.op == "AVG" else wanted)]


def sparse(a: Given) -> Results:
    def tensor(rank: int) -> Tensor:
        dense = a.of(rank)
        dense[(torch.arange(a.count) * 7 + rank) % a.count >= a.nonzero] = 0
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
    wanted = [torch.cat(each) for each in zip(*(parts(a, r) for r in a.ranks), strict=True)]
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
    each = [a.of(r, a.splits[r] * a.size)[a.rank * a.splits[r] :][: a.splits[r]] for r in a.ranks]
    return list(a.splits), torch.cat(each)


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


# What is sent goes to the next rank, and comes from the one before.


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
    out = a.empty(a.count)
    for work in (
        dist.irecv(out, before, a.group),
        dist.isend(a.mine().reshape(-1), after, a.group),
    ):
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
    "all_gather_coalesced": Call(all_gather_coalesced, "cut types", "is_async"),
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
    "sparse all_reduce": Call(sparse, "dtype cut dims mean", "is_async nonzero"),
    "all_reduce with factors": Call(premultiplied, "count op", USUAL),
    "all_gather_single of a list": Call(gathers_into_tensors, "cut types"),
    "reduce_scatter_single of a list": Call(scatters_sums, "dtype cut op"),
    "a quantized all_reduce": Call(quantized, "floats count mean format", "is_async"),
}  # fmt: skip
# They exchange nothing, or make groups.
OTHERS = """
    destroy_process_group get_backend get_backend_config get_default_backend_for_device
    get_global_rank get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank
    get_world_size init_process_group is_backend_available is_gloo_available is_initialized
    is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available is_xccl_available
    new_group new_subgroups new_subgroups_by_enumeration record_comm shrink_group split_group
    supports_complex
"""
GLOOS = "monitored_barrier"  # torch lets no other backend have it


def test_no_call_of_torch_is_forgotten() -> None:
    public = {name for name in c10d.__all__ if inspect.isfunction(getattr(c10d, name, None))}
    public -= {"reduce_op"}  # a class of the past
    served = {*CALLS, *(name for call in CALLS.values() for name in call.serves.split())}
    assert public <= {*served, *OTHERS.split(), GLOOS}


# ---- what ranks give


def cuts(chance: random.Random, count: int) -> tuple[int, ...]:
    lengths = [count // 6, count // 3, count - count // 6 - count // 3]
    chance.shuffle(lengths)
    return tuple(lengths)


def drawn(chance: random.Random, name: str, most: int) -> Given:
    """What all ranks give, where they agree."""
    call, size = CALLS[name], 3
    count = chance.choice([count for count in COUNTS if count <= most])
    a = Given(0, size, dtype=chance.choice(TYPES), count=count, root=chance.randrange(size))
    a = replace(a, splits=cuts(chance, count), cut=cuts(chance, count))
    if "types" in call.must:
        a = replace(a, types=(torch.float32, torch.int32, torch.uint8))
    if "op" in call.must.split():
        a = replace(a, op=chance.choice(OPS))
    if call.run is sparse:
        a = replace(a, count=(count := min(count, 6000)), cut=(count // 6, 6))
    if call.run is premultiplied:
        a = replace(a, dtype=torch.float32, op="PREMUL_SUM")
    if call.run is quantized:
        a = replace(a, dtype=torch.float32, format=chance.choice(["bf16", "fp16"]), count=300)
    if "object" in name:
        a = replace(a, count=chance.randint(1, 5))
    return a


def varied(chance: random.Random, a: Given, what: str) -> tuple[Given, Given]:
    """Return what most ranks give, and what the odd one gives."""

    def other(values: Any, than: Any) -> Any:
        return chance.choice([value for value in values if value != than])

    if what == "dtype":  # of as many bytes, often
        twins = {torch.int32: torch.float32, torch.float32: torch.int32, torch.int64: torch.float64}
        return a, replace(a, dtype=twins.get(a.dtype) or other(TYPES, a.dtype))
    if what == "moved":
        a = replace(a, dtype=chance.choice(MOVED))
        return a, replace(a, dtype=other(MOVED, a.dtype))
    if what == "floats":
        return a, replace(a, dtype=chance.choice([torch.float16, torch.bfloat16]))
    if what == "count":
        return a, replace(a, count=a.count + 12 * chance.choice([1, 5]))
    if what == "op":
        return a, replace(a, op=other(OPS, a.op))
    if what == "mean":
        a = replace(a, op=chance.choice(["SUM", "AVG"]))
        return a, replace(a, op=other(["SUM", "AVG"], a.op))
    if what == "root":
        return a, replace(a, root=other(range(a.size), a.root))
    if what == "cut" and len(a.cut) == 2:  # the sizes of a sparse tensor
        return a, replace(a, cut=(a.cut[0] * 2, 3))
    if what == "cut":
        return a, replace(a, cut=a.cut[1:] + a.cut[:1])
    if what == "splits":
        return a, replace(a, splits=a.splits[1:] + a.splits[:1])
    if what == "types":
        return a, replace(a, types=(torch.int32, torch.float32, torch.uint8))
    if what == "format":
        return a, replace(a, format="bf16" if a.format == "fp16" else "fp16")
    return a, replace(a, **{"dims": {"dims": 2}, "columns": {"columns": True}}[what])


Each = list[tuple[str, Given]]  # by rank


def disagreement(number: int, name: str, what: str, most: int) -> tuple[str, Each]:
    """All give the same but for one rank, and that one another `what`."""
    chance = random.Random(f"{number} {name} {what} {most}")
    a = drawn(chance, name, most)
    # Of the third rank nobody hears in a message between two.
    odd = chance.randrange(2 if CALLS[name].run in (send, send_object_list) else 3)
    if what == "call":
        some = [each for each in CALLS if CALLS[each].kind == "collective" and each != name]
        instead = chance.choice(some)
        of_odd = instead, drawn(chance, instead, most)
    else:
        a, b = varied(chance, a, what)
        of_odd = name, b
    each = [of_odd if rank == odd else (name, a) for rank in range(3)]
    return f"{name}, other {what} on rank {odd}, {number}", each


def freedom(number: int, name: str, most: int) -> tuple[str, Each]:
    """Each rank is free to give something else of what ranks may choose."""
    chance = random.Random(f"{number} {name} {most}")
    a = drawn(chance, name, most)
    choices = {"is_async": (False, True), "strided": (False, True), "nonzero": (0, 1, 5)}
    each = []
    for _ in range(3):
        own = {what: chance.choice(choices[what]) for what in CALLS[name].may.split()}
        each.append((name, replace(a, **own)))
    return f"{name}, {number}", each


# ---- what comes of it


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def try_all(rank: Rank, life: str, env: dict[str, str], cases: list[tuple[str, Each]]) -> Outcome:
    """Return the problems of this rank: wrong numbers, and the errors of each case."""

    def body() -> Outcome:
        os.environ.update(env)
        join(rank_of(rank, life), "cpu:ringcomm", seconds=20)
        errors, wrong = [], []
        for title, each in cases:
            group = dist.new_group(timeout=timedelta(seconds=10))
            name, given = each[rank.index]
            mine = replace(given, rank=rank.index, group=group)
            results: Results = []
            error = error_of(lambda run=CALLS[name].run, mine=mine: results.extend(run(mine)))
            if error == ("", ""):  # a rank that only gives something may go on: its next call tells
                error = error_of(lambda group=group: dist.barrier(group))
            errors.append(error)
            wrong += [
                f"{title}: {got.view(-1)[:5].tolist()}, not {wanted.view(-1)[:5].tolist()}"
                for got, wanted in results
                if got.shape != wanted.shape or not torch.equal(bits(got), bits(wanted))
            ]
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        return {"wrong": wrong, "errors": errors}

    return in_child(body)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3, backend=None) as some:
        yield some


DEVICE = {"RINGCOMM_CUDA_LIBRARY": str(SIMULATED)}
SETTINGS: dict[str, dict[str, str]] = {
    "memory": {},
    "sockets": {"RINGCOMM_TRANSPORT": "tcp"},
    "buffers": {"RINGCOMM_SHARED_BUFFERS": "1000000"},
    "kernels": DEVICE,
    "staged": {**DEVICE, "RINGCOMM_CUDA_MODE": "host"},
}
# The simulated device is slow.
MOST = {"kernels": 60_000, "staged": 60_000}
WAYS = [way if way == "memory" else pytest.param(way, marks=pytest.mark.slow) for way in SETTINGS]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_disagree_are_told(three: Ranks, way: str, name: str) -> None:
    most = MOST.get(way, COUNTS[-1])
    whats = CALLS[name].must.split() + ["call"] * (CALLS[name].kind == "collective")
    cases = [disagreement(seed(), name, what, most) for what in whats]
    outcomes = three(try_all, f"{way} {name}", SETTINGS[way], cases, seconds=120)
    problems = []
    for rank, outcome in enumerate(outcomes):
        assert "errors" in outcome, (rank, outcome)
        problems += [f"rank {rank}: {text}" for text in outcome["wrong"]]
        for (title, _), (kind, text) in zip(cases, outcome["errors"], strict=True):
            if not TOLD.search(text):
                problems.append(f"rank {rank}: {title}: {kind} {text[:300]}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("way", WAYS)
def test_where_ranks_may_differ_results_are_right(three: Ranks, way: str) -> None:
    cases = [freedom(seed() + i, n, MOST.get(way, COUNTS[-1])) for n in CALLS for i in range(2)]
    for outcome in three(try_all, f"{way} free", SETTINGS[way], cases, seconds=120):
        assert outcome.get("wrong") == [], outcome
        failed = [(title, error) for (title, _), error in zip(cases, outcome["errors"], strict=True)
                  if error[0]]  # fmt: skip
        assert not failed
