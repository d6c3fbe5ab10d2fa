"""Bandwidth as a share of what a copy reaches in the same run, and latency.

Ranks share the GPU, so the bound of an operation is the memory's speed over all bytes that all
ranks together have to read and write:

    all_reduce, one kernel   2 n S: each input is read once, each output written once
    all_gather               2 n S with S the whole output: each rank writes S, from n inputs
    broadcast                S + (n - 1) S at least

Targets of whole operations are information. Each rank's work has to get the GPU first, which takes
tens of microseconds, and up to a slice of time while others compute.
The leader's kernel alone waits for nobody, so its share is judged.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import gpu.ranks
import gpu.table
from gpu.ranks import DeviceRanks, Entry, meet, place_of
from gpu.stages import Settings, parts
from gpu.table import Row
from lab import report
from lab.benchmark import slowest
from lab.ranks import Rank
from ringcomm.tools.bench.cases import all_gather_single, reduce_scatter_single

MIB = 1 << 20
KERNEL_SHARE = 85.0  # percent of the ceiling, from LARGE on
LARGE = 64 * MIB
WHOLE_SHARES = {LARGE: 55.0, 256 * MIB: 80.0}
ENQUEUE_MICROSECONDS = 15.0
MANY = 16  # ranks: their operations end, however fast
UNDER_WAY = 32  # operations that are enqueued before the host waits
ROTATED = 256 * MIB  # buffers of small operations add up to this: more than the caches hold


def leader_bytes(size: int, ranks: int) -> int:
    return 2 * ranks * size


# ---- bandwidth


def copy_ceiling(rank: Rank, size: int) -> float:
    """Return GB/s read and written by copies on rank 0, while the others wait: the best of some."""
    meet(rank)
    best = 0.0
    if rank.index == 0:
        place = place_of(rank)
        source, target = place.full(size // 4, 1), place.full(size // 4, 2)
        place.synchronize()
        for _ in range(8):
            seconds = place.seconds(lambda: [target.copy_(source) for _ in range(4)])
            best = max(best, 4 * 2 * size / seconds / 1e9)
    meet(rank)
    return best


def time_all_reduce(rank: Rank, size: int, calls: int, rounds: int) -> list[float]:
    """Return seconds of one in-place call, a round each, as this rank's stream has it."""
    place = place_of(rank)
    number = max(1, min(8, ROTATED // size)) if place.is_cuda else 1
    tensors = [place.full(size // 4, 0) for _ in range(number)]

    def enqueue() -> None:
        for call in range(calls):
            dist.all_reduce(tensors[call % number])

    enqueue()
    times = []
    for _ in range(rounds):
        meet(rank)
        times.append(place.seconds(enqueue) / calls)
    return times


def kernel_time(rank: Rank, size: int, calls: int) -> float:
    """Return the seconds of the leader's kernels for one call, as rank 0's profiler has them."""
    tensor = place_of(rank).full(size // 4, 0)
    dist.all_reduce(tensor)
    meet(rank)
    if rank.index > 0 or not place_of(rank).is_cuda:
        for _ in range(calls):
            dist.all_reduce(tensor)
        meet(rank)
        return 0.0
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
    meet(rank)
    events = [event for event in profiled.events() if "ringcomm" in event.name]
    print(sorted({event.name for event in profiled.events()}), flush=True)
    return sum(event.time_range.elapsed_us() for event in events) / 1e6 / calls


COLLECTIVES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int, int], float]]] = {
    # call(whole, part); bytes that all ranks together read and write, at the least
    "all_gather": (all_gather_single, lambda size, n: (n + 1) * size),
    "reduce_scatter": (lambda whole, part: reduce_scatter_single(part, whole),
                       lambda size, n: (n + 1) * size),
    "broadcast": (lambda whole, part: dist.broadcast(whole, 0), lambda size, n: n * size),
    "all_to_all": (lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
                   lambda size, n: 2 * n * size),
}  # fmt: skip


def time_collective(rank: Rank, name: str, size: int, calls: int, rounds: int) -> list[float]:
    place = place_of(rank)
    count = size // 4 // rank.size
    whole, part = place.full(count * rank.size, 0), place.full(count, 0)
    call, _ = COLLECTIVES[name]
    call(whole, part)
    times = []
    for _ in range(rounds):
        meet(rank)
        times.append(place.seconds(lambda: [call(whole, part) for _ in range(calls)]) / calls)
    return times


def median(times: list[list[float]]) -> float:
    return statistics.median(slowest(times))


def shares_of(size: int, settings: Settings) -> Iterator[Row]:
    """Yield what so many ranks reach."""
    sizes: list[int] = settings.pick([MIB, 16 * MIB, LARGE, 256 * MIB], [MIB], [MIB])
    calls, rounds = settings.pick((8, 7), (2, 2), (2, 2))
    large = sizes[-1]
    with DeviceRanks(size, Entry(settings.kind, settings.library)) as ranks:
        ceiling = ranks(copy_ceiling, large, seconds=60)[0]
        yield gpu.table.info(f"{size} ranks: copy ceiling", ceiling, "GB/s", "read and written")
        for length in sizes:
            seconds = median(ranks(time_all_reduce, length, calls, rounds, seconds=60))
            rate = leader_bytes(length, size) / seconds / 1e9
            note = f"{report.show_time(seconds)} µs, {rate:.0f} GB/s"
            what = f"{size} ranks: all_reduce {report.show_size(length)}"
            yield _share(what, 100 * rate / ceiling, WHOLE_SHARES.get(length), note)
        yield from _kernel(ranks, size, sizes[-2:], ceiling)
        for name, (_, least) in COLLECTIVES.items():
            seconds = median(ranks(time_collective, name, sizes[-1], calls, 3, seconds=60))
            rate = least(sizes[-1], size) / seconds / 1e9
            what = f"{size} ranks: {name} {report.show_size(sizes[-1])}"
            note = f"{report.show_time(seconds)} µs; of the bytes that it needs at the least"
            yield _share(what, 100 * rate / ceiling, None, note)


def _share(what: str, percent: float, target: float | None, note: str) -> Row:
    unit = "% of copy"
    if target is None:
        return gpu.table.info(what, percent, unit, note)
    row = gpu.table.at_least(target, what, percent, unit, note)
    return row if target == KERNEL_SHARE else gpu.table.aim(row)


def _kernel(ranks: DeviceRanks, size: int, sizes: list[int], ceiling: float) -> Iterator[Row]:
    """Yield the leader's kernel alone: without the ranks' waiting for one another."""
    for length in sizes:
        seconds = ranks(kernel_time, length, 10, seconds=60)[0]
        what = f"{size} ranks: kernel alone {report.show_size(length)}"
        if not seconds:
            yield gpu.table.info(what, note="the profiler shows no kernel here")
            continue
        rate = leader_bytes(length, size) / seconds / 1e9
        note = f"{report.show_time(seconds)} µs"
        yield _share(what, 100 * rate / ceiling, KERNEL_SHARE if length >= LARGE else None, note)


def many(size: int, settings: Settings) -> Iterator[Row]:
    """More ranks than anybody would put on a GPU: slow perhaps, but they end."""
    length = settings.pick(LARGE, MIB, MIB)
    with DeviceRanks(size, Entry(settings.kind, settings.library)) as ranks:
        times = ranks(time_all_reduce, length, 8, 3, seconds=60)
        what = f"{size} ranks: all_reduce {report.show_size(length)} ends"
        yield gpu.table.passed(what, 1e6 * median(times), "µs")


def bandwidth(settings: Settings, size: int) -> Iterator[Row]:
    """Measure shares of the copy ceiling; for many ranks, whether they end."""
    if size >= MANY:
        yield from parts(functools.partial(many, size, settings))
        return
    yield from parts(_named(f"{size} ranks", shares_of, size, settings))
    if settings.simulated and size == 2:  # so that it is tried
        yield from parts(functools.partial(many, 3, settings))


def _named(name: str, function: Any, *args: Any) -> Callable[[], Iterator[Row]]:
    made = functools.partial(function, *args)
    made.__name__ = name  # type: ignore[attr-defined]
    return made


# ---- latency


def time_calls(rank: Rank, count: int, calls: int) -> list[float]:
    """Return seconds of each call with the host waiting for its result."""
    place = place_of(rank)
    tensor = place.full(count, 0)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        place.synchronize()
        times.append(time.perf_counter() - start)
    return times[calls // 10 :]


def time_in_stream(rank: Rank, count: int, calls: int) -> float:
    """Return seconds of a call of many that follow one another in the stream."""
    place = place_of(rank)
    tensor = place.full(count, 0)
    times = []
    for _ in range(5):
        meet(rank)
        enqueue = functools.partial(_enqueue_all, tensor, calls)
        times.append(place.seconds(enqueue) / calls)
    return statistics.median(times)


def _enqueue_all(tensor: torch.Tensor, calls: int) -> None:
    for _ in range(calls):
        dist.all_reduce(tensor)


def time_enqueueing(rank: Rank, count: int, rounds: int) -> list[float]:
    """Return the host's seconds for each asynchronous call."""
    place = place_of(rank)
    tensors = [place.full(count, 0) for _ in range(UNDER_WAY)]
    times = []
    for number in range(rounds + 1):
        meet(rank)
        works = []
        for tensor in tensors:
            start = time.perf_counter()
            works.append(dist.all_reduce(tensor, async_op=True))
            if number:  # the first round meets new memory
                times.append(time.perf_counter() - start)
        for work in works:
            work.wait()
        place.synchronize()
    return times


def time_barrier(rank: Rank, calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return times[calls // 10 :]


def latency_of(size: int, settings: Settings) -> Iterator[Row]:
    calls = settings.pick(500, 50, 20)
    with DeviceRanks(size, Entry(settings.kind, settings.library)) as ranks:
        counts: list[int] = settings.pick([2, 256, 4096, 16384], [2, 4096], [2])
        for count in counts:
            what = f"{size} ranks: all_reduce {report.show_size(4 * count)}"
            times = sorted(slowest(ranks(time_calls, count, calls, seconds=40)))
            late = 1e6 * times[int(0.99 * (len(times) - 1))]
            in_stream = 1e6 * max(ranks(time_in_stream, count, UNDER_WAY, seconds=40))
            note = f"p99 {late:.0f} µs; in a stream {in_stream:.1f} µs a call"
            yield gpu.table.info(what, 1e6 * statistics.median(times), "µs", note)
        rounds = settings.pick(12, 2, 2)
        of_ranks = ranks(time_enqueueing, 256, rounds, seconds=40)
        host = 1e6 * max(statistics.median(times) for times in of_ranks)
        worst = 1e6 * max(max(times) for times in of_ranks)
        what = f"{size} ranks: enqueueing an all_reduce"
        note = f"median of the slower rank's host; longest {worst:.0f} µs"
        yield gpu.table.aim(gpu.table.at_most(ENQUEUE_MICROSECONDS, what, host, "µs", note))
        waited = statistics.median(slowest(ranks(time_barrier, calls, seconds=40)))
        yield gpu.table.info(f"{size} ranks: barrier()", 1e6 * waited, "µs")


def latency(settings: Settings, size: int) -> Iterator[Row]:
    """Measure small operations."""
    yield from parts(_named(f"{size} ranks", latency_of, size, settings))
