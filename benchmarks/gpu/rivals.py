"""The same operations by ringcomm, by NCCL and by Gloo on CUDA tensors, in nccl-tests' columns.

NCCL refuses ranks that share a GPU. If it takes each rank for a host of its own, it goes over
sockets, and works; how fast that is, is no question of NCCL's making. With one rank it has the GPU
to itself. What fails of a rival is information.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import gpu.table
from gpu.ranks import DeviceRanks, Entry, gpus, meet, place_of
from gpu.stages import Settings, last_line, of_a_rival, parts
from gpu.table import Row
from lab import report
from lab.benchmark import slowest
from lab.ranks import Rank
from ringcomm.tools.bench.cases import (
    ELEMENT,
    all_gather_single,
    bandwidths,
    elements,
    reduce_scatter_single,
)
from ringcomm.tools.bench.nccl import APART

OURS = "ringcomm"
COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
SUMS = {"all_reduce", "reduce_scatter"}
SECONDS = 0.1  # of each round, about
ROUNDS = 3
MOST = 50  # calls of a round
# Ranks of NCCL on one GPU spin in kernels and take turns, so they may crawl.
LIMIT_SECONDS = 25.0
HEAD = f"{'size':>12} {'count':>12} {'type':>6} {'redop':>6} {'time':>10} {'algbw':>8} {'busbw':>8}"
UNITS = f"{'(B)':>12} {'(elements)':>12} {'':>6} {'':>6} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8}"


@dataclass(frozen=True)
class Sample:
    """A collective by a backend: `count` elements of the larger of a rank's two buffers."""

    backend: str
    collective: str
    ranks: int
    count: int
    seconds: float

    def line(self) -> str:
        """Write it as nccl-tests does: the columns of HEAD."""
        size = self.count * ELEMENT
        algbw, busbw = bandwidths(self.collective, size, self.seconds, self.ranks)
        redop = "sum" if self.collective in SUMS else "none"
        return (
            f"{size:12} {self.count:12} {'float':>6} {redop:>6} "
            f"{1e6 * self.seconds:10.2f} {algbw:8.2f} {busbw:8.2f}"
        )


def of_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def table_of(samples: list[Sample]) -> str:
    """Write samples as nccl-tests does, a table for each backend and collective."""
    lines = []
    before = None
    for sample in samples:
        table = f"# {sample.collective}, {sample.backend}, {of_ranks(sample.ranks)}"
        if table != before:
            lines += ["", table, f"#{HEAD}", f"#{UNITS}"]
            before = table
        lines.append(f" {sample.line()}")
    return "\n".join(lines[1:]) + "\n"


def call_of(rank: Rank, collective: str, count: int) -> Any:
    """Return a function that runs it once, on buffers of its own."""
    place = place_of(rank)
    whole, part = place.full(count, 0), place.full(count // rank.size, 0)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if collective == "all_gather":
        return lambda: all_gather_single(whole, part)
    if collective == "reduce_scatter":
        return lambda: reduce_scatter_single(part, whole)
    if collective == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    other = place.full(count, 0)
    return lambda: dist.all_to_all_single(other, whole)


def time_rounds(rank: Rank, collective: str, count: int, most: int) -> list[float] | str:
    """Return seconds of a call, a round each; or what this backend says that it cannot."""
    place = place_of(rank)
    try:
        call = call_of(rank, collective, count)
        call()
        meet(rank)
        first = place.seconds(call)
    except Exception as error:  # noqa: BLE001  the caller decides whether that is information
        return last_line(error)
    rank.store.set(f"first/{rank.index}", str(first))
    dist.barrier()
    known = max(float(rank.store.get(f"first/{other}")) for other in range(rank.size))
    calls = max(1, min(most, int(SECONDS / max(known, 1e-6))))
    times = []
    for _ in range(ROUNDS):
        meet(rank)
        times.append(place.seconds(lambda: [call() for _ in range(calls)]) / calls)
    return times


def samples_of(
    backend: str, size: int, entry: Entry, lengths: list[int], most: int
) -> Iterator[Sample | Row]:
    """Measure a backend; a collective that it does not have is a row."""
    with DeviceRanks(size, entry, backend) as ranks:
        for collective in COLLECTIVES:
            for length in lengths:
                count = elements(collective, length, size)
                answers = ranks(time_rounds, collective, count, most, seconds=LIMIT_SECONDS)
                if said := [answer for answer in answers if isinstance(answer, str)]:
                    row = gpu.table.failed if backend == OURS else gpu.table.info
                    yield row(f"{of_ranks(size)}: {backend}: {collective}", note=said[0])
                    break
                times = [answer for answer in answers if not isinstance(answer, str)]
                seconds = statistics.median(slowest(times))
                yield Sample(backend, collective, size, count, seconds)


def nccl_entry(size: int) -> dict[str, str]:
    """Return what ranks of NCCL must be told where several share a GPU."""
    return APART if size > gpus() else {}


def entries(size: int, settings: Settings) -> dict[str, Entry]:
    """Return how the ranks of each backend begin. Without a GPU there is no NCCL."""
    ours = Entry(settings.kind, settings.library)
    if settings.simulated:
        return {OURS: ours, "gloo": Entry("cpu")}
    apart = nccl_entry(size)
    return {OURS: ours, "gloo": Entry(settings.kind), "nccl": Entry("cuda", environment=apart)}


def compared(size: int, settings: Settings) -> Iterator[Row]:
    """Measure the backends one after the other; yield a row for each figure of ringcomm's."""
    kib, mib = 1 << 10, 1 << 20
    lengths = settings.pick(
        [kib, 64 * kib, mib, 16 * mib, 64 * mib], [kib, 64 * kib], [kib]
    )  # fmt: skip
    samples: list[Sample] = []

    def rows_of(backend: str, entry: Entry) -> Iterator[Row]:
        for found in samples_of(backend, size, entry, lengths, settings.pick(MOST, 5, 2)):
            if isinstance(found, Row):
                yield found
            else:
                samples.append(found)
                path = settings.tables / f"rivals_{size}.txt"  # anew, as it may be the last
                path.write_text(table_of(samples), encoding="utf-8")

    for backend, entry in entries(size, settings).items():
        function = functools.partial(rows_of, backend, entry)
        if backend == OURS:
            yield from function()
        else:
            yield from of_a_rival(f"{of_ranks(size)}: {backend}", function)
    yield from beside(samples)


def beside(samples: list[Sample]) -> Iterator[Row]:
    """Yield a row for each of ringcomm's samples, with the others' figures as its note."""
    for ours in (sample for sample in samples if sample.backend == OURS):
        notes = [
            f"{other.backend} {report.show_time(other.seconds)} µs, "
            f"{other.seconds / ours.seconds:.2f} times as long"
            for other in samples
            if other.backend != OURS
            and (other.collective, other.count) == (ours.collective, ours.count)
        ]
        what = f"{of_ranks(ours.ranks)}: {ours.collective} {report.show_size(ours.count * ELEMENT)}"
        yield gpu.table.info(what, 1e6 * ours.seconds, "µs", "; ".join(notes))


def rivals(settings: Settings, size: int) -> Iterator[Row]:
    """Compare; with the fewest ranks also one that has the GPU to itself."""
    steps = []
    for count in (1, size) if size == 2 else (size,):
        function = functools.partial(compared, count, settings)
        function.__name__ = of_ranks(count)  # type: ignore[attr-defined]
        steps.append(function)
    yield from parts(*steps)
