"""Every collective on the device: bit for bit what plans give on the CPU.

Processes that share the device and as many on the CPU run the same cases; digests of all results
are compared. Floating-point inputs are random, so a sum in another order would show. Kernels sum in
rank order, as the CPU's direct plans do.

Kernels that meet are for ranks with a GPU each. They run on one GPU, too, where its time slices let
the processes take turns: right, and slowly. So ranks are told to take the one for one of their own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import gpu.ranks
import gpu.table
from gpu.ranks import DeviceRanks, Entry, place_of
from gpu.stages import Settings, parts
from gpu.table import Row
from lab.ranks import Rank
from ringcomm._runtime.backend import backend_of
from ringcomm.tools.bench.cases import all_gather_single, reduce_scatter_single

INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
FLOATS = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
DTYPES = [torch.bool, *INTEGERS, *FLOATS, torch.complex64, torch.complex128]
REDUCING = ["all_reduce", "reduce_scatter", "reduce"]
COLLECTIVES = [*REDUCING, "all_gather", "broadcast", "gather", "scatter", "all_to_all", "send_recv"]
EQUAL = {"all_reduce", "all_gather", "broadcast"}  # all ranks hold the same
MOST = 8  # ranks for which all cases are run: more only show that they end
LARGEST = "64 MiB"
MEETING = ["two_shot", "one_shot", "low_latency", "device_ring"]
BYTES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, LARGEST: 64 << 20}


@dataclass(frozen=True)
class Case:
    collective: str
    dtype: torch.dtype
    op: str
    size: str  # elements, or a key of BYTES

    @property
    def count(self) -> int:
        """Return the elements of the larger buffer; those in parts are rounded."""
        return BYTES[self.size] // self.dtype.itemsize if self.size in BYTES else int(self.size)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.collective} {dtype}[{self.size}] {self.op}"


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM"]
    if dtype.is_floating_point:
        return ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]
    bitwise = ["BAND", "BOR", "BXOR"]
    return ["SUM", "PRODUCT", "MIN", "MAX", *bitwise, *([] if dtype == torch.bool else ["AVG"])]


def cases_of(collective: str, ranks: int, settings: Settings) -> list[Case]:
    """Return the cases of a collective, in the order in which every rank runs them."""
    reduces = collective in REDUCING
    few = [torch.float32, torch.bfloat16]
    dtypes = settings.pick(DTYPES, DTYPES, few) if reduces else [torch.float32, torch.uint8]
    if ranks > MOST and reduces:
        dtypes = few
    sizes = settings.pick(["0", "1", "1001", "1 KiB"], ["0", "1", "1001"], ["0", "1001"])
    cases = [Case(collective, dtype, "SUM", size) for dtype in dtypes for size in sizes]
    if reduces:  # every operation
        cases += [
            Case(collective, dtype, op, "1001") for dtype in dtypes for op in ops_of(dtype)[1:]
        ]
    large = settings.pick(["1 MiB", LARGEST], ["1 MiB"], [])
    if ranks > MOST and collective != "all_reduce":
        large = large[:1]
    return cases + [
        Case(collective, dtype, "SUM", size)
        for size in large
        for dtype in (few[:1] if size == LARGEST else few)
    ]


@functools.lru_cache(maxsize=4)
def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what `rank` gives, the same on every place."""
    seeded = torch.Generator().manual_seed(1000 * rank + count % 997)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(count, generator=seeded, dtype=wide).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=seeded).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=seeded, dtype=torch.uint8)
    return raw.view(dtype)


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha1(flat.numpy(), usedforsecurity=False).hexdigest()[:12]


def perform(rank: Rank, case: Case, group: Any) -> torch.Tensor | None:
    """Run a case; returns this rank's result, None where it has none."""
    place, n, root = place_of(rank), rank.size, rank.size - 1
    part = (case.count + n - 1) // n
    whole = case.collective in ("all_reduce", "broadcast", "reduce")
    mine = values(rank.index, case.count if whole else part * n, case.dtype)
    op = getattr(dist.ReduceOp, case.op)
    if whole:
        data = place.copy_of(mine)
        if case.collective == "all_reduce":
            dist.all_reduce(data, op, group=group)
        elif case.collective == "reduce":
            dist.reduce(data, root, op, group=group)
        else:
            dist.broadcast(data, root, group=group)
        return data if case.collective != "reduce" or rank.index == root else None
    if case.collective in ("reduce_scatter", "all_to_all", "scatter"):
        data, result = place.copy_of(mine), place.empty(part, case.dtype)
        if case.collective == "reduce_scatter":
            reduce_scatter_single(result, data, op, group=group)
        elif case.collective == "scatter":
            given = list(data.chunk(n)) if rank.index == root and part else None
            given = [data] * n if given is None and rank.index == root else given
            dist.scatter(result, given, root, group=group)
        else:
            result = place.empty(part * n, case.dtype)
            dist.all_to_all_single(result, data, group=group)
        return result
    return _from_a_part(rank, case, group, place.copy_of(mine[:part].clone()))


def _from_a_part(rank: Rank, case: Case, group: Any, data: torch.Tensor) -> torch.Tensor | None:
    place, n, root = place_of(rank), rank.size, rank.size - 1
    part = data.numel()
    if case.collective == "all_gather":
        result = place.empty(part * n, case.dtype)
        all_gather_single(result, data, group=group)
        return result
    if case.collective == "gather":
        pieces = [place.empty(part, case.dtype) for _ in range(n)] if rank.index == root else None
        dist.gather(data, pieces, root, group=group)
        return torch.cat([piece.view(torch.uint8) for piece in pieces]) if pieces else None
    result = place.empty(part, case.dtype)
    following, before = (rank.index + 1) % n, (rank.index - 1) % n
    messages = [
        dist.P2POp(dist.isend, data, following, group=group),
        dist.P2POp(dist.irecv, result, before, group=group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return result


def make_group(rank: Rank, algorithm: str | None) -> None:
    rank.kept["group"] = gpu.ranks.group_by(algorithm)


def run_cases(rank: Rank, cases: list[Case]) -> list[str]:
    """Run cases, twice where they are small: memory that was used must not matter."""
    digests = []
    for case in cases:
        texts = []
        for _ in range(1 if case.size == LARGEST else 2):
            result = perform(rank, case, rank.kept["group"])
            texts.append("" if result is None else digest(result))
        digests.append(texts[0] if len(set(texts)) == 1 else " then ".join(texts))
    return digests


def compare(cases: list[Case], here: list[list[str]], there: list[list[str]]) -> list[str]:
    """Return what is wrong with the digests, of each rank, on the device and on the CPU."""
    wrong = []
    for number, case in enumerate(cases):
        of_ranks = [digests[number] for digests in here]
        if case.collective in EQUAL and len(set(of_ranks)) > 1:
            wrong.append(f"{case}: ranks differ")
        elif of_ranks != [digests[number] for digests in there]:
            wrong.append(f"{case}: not as on the CPU")
    return wrong


def judge(what: str, cases: list[Case], wrong: list[str]) -> Row:
    if wrong:
        print("\n".join(wrong), flush=True)
        return gpu.table.failed(what, f"{len(wrong)} wrong, first: {wrong[0]}", len(cases), "cases")
    return gpu.table.passed(what, len(cases), "cases")


def of_size(size: int, settings: Settings) -> Iterator[Row]:
    """Yield the rows for so many processes on one device."""
    entry = Entry(settings.kind, settings.library)
    limit = float(settings.pick(120, 60, 30))
    with DeviceRanks(size, entry) as here, DeviceRanks(size, Entry("cpu")) as there:
        here(make_group, None, seconds=limit)
        there(make_group, "direct", seconds=limit)
        for collective in COLLECTIVES:
            cases = cases_of(collective, size, settings)
            digests = here(run_cases, cases, seconds=limit)
            wrong = compare(cases, digests, there(run_cases, cases, seconds=limit))
            yield judge(f"{size} ranks: {collective}", cases, wrong)


def plans(settings: Settings, size: int) -> Iterator[Row]:
    """Compare device and CPU."""
    function = functools.partial(of_size, size, settings)
    function.__name__ = f"{size} ranks"  # type: ignore[attr-defined]
    yield from parts(function)


# ---- kernels that meet


def meeting_cases(kernel: str, settings: Settings) -> list[Case]:
    """Return what the kernel serves. A ring adds up in an order of its own: integers show it."""
    dtypes = [torch.int32] if kernel == "device_ring" else [torch.float32, torch.bfloat16]
    sizes = ["0", "1", "1001", *([] if settings.short else ["4096", "1 MiB"])]
    fitting = sizes if kernel in ("two_shot", "device_ring") else sizes[:4]
    return [
        Case(collective, dtype, "SUM", size)
        for collective in ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast")
        for dtype in dtypes
        for size in fitting
    ]


def end_group(rank: Rank) -> str:
    """Destroy the group, so that the next finds multiprocessors; returns the last one's kernel."""
    group = rank.kept.pop("group")
    backend = backend_of(group, place_of(rank).device)
    kernel: str = backend.flight_record()[-1]["algorithm"]
    dist.destroy_process_group(group)
    return kernel


def meetings(settings: Settings, size: int) -> Iterator[Row]:
    """Compare each kernel that meets with the CPU, between processes on one device."""
    entry = Entry(settings.kind, settings.library, apart=True)
    limit = float(settings.pick(100, 60, 30))
    with DeviceRanks(size, entry) as here, DeviceRanks(size, Entry("cpu")) as there:
        there(make_group, "direct", seconds=limit)
        for kernel in MEETING:
            here(make_group, kernel, seconds=limit)
            cases = meeting_cases(kernel, settings)
            digests = here(run_cases, cases, seconds=limit)
            wrong = compare(cases, digests, there(run_cases, cases, seconds=limit))
            used = set(here(end_group, seconds=limit))
            wrong += [f"it was {other}" for other in sorted(used - {kernel})]
            yield judge(f"{size} ranks on one device: {kernel}", cases, wrong)
