"""The gain of several threads a rank, by collective and size, beside Gloo and a plain copy.

    python benchmarks/cores.py --ranks 2 --threads 1,2,4
    python benchmarks/cores.py --slow-cores 0.25     # needs root

The copy is that of the same bytes, by as many threads in each rank at once. With --slow-cores every
thread is put into a cgroup of its own, which gives it that share of a core's time, so that a
machine with few cores has many slow ones. Each thread keeps to one core then. "whole core" is one
thread a rank without that: four cores of a quarter can be as fast, and no faster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab import benchmark, report
from lab.benchmark import BenchmarkError, Measured
from lab.quotas import Quotas
from lab.ranks import Rank
from ringcomm.tools import svg
from ringcomm.tools.bench import cases
from ringcomm.tools.bench.traits import FACTORS

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
OURS, COPY, WHOLE = "ringcomm", "copy", "whole core"
HELPER = "ringcomm-pool"  # what the library calls such a thread
FIRST = 30  # calls that do not count: ringcomm finds out which segments are fastest

Way = tuple[str, int]  # a backend, or COPY or WHOLE, and its threads


# ---- on a rank


def enter(rank: Rank, threads: int, awake: bool) -> None:
    os.environ["RINGCOMM_THREADS"] = str(threads)
    if not awake:  # a thread that spins wastes its share
        os.environ["RINGCOMM_SPIN_US"] = "0"
    benchmark.prepare(rank)
    benchmark.join(rank)


def make(rank: Rank, collective: str, size: int, first: int) -> None:
    """Keep a call of the collective, after one that is checked and some that do not count."""
    count = cases.elements(collective, size, rank.size)
    cases.verify(collective, count, rank.index, rank.size)
    case = cases.make(collective, count, rank.index, rank.size)
    case.given.zero_()
    rank.kept["call"] = case.call
    for _ in range(first):
        case.call()


def make_copy(rank: Rank, threads: int, size: int) -> None:
    sources = torch.zeros(size // 4).chunk(threads)
    copies = [torch.zeros_like(source) for source in sources]
    pool = ThreadPoolExecutor(threads)
    rank.kept["call"] = lambda: list(pool.map(torch.Tensor.copy_, copies, sources))


def sample(rank: Rank, calls: int, whole: bool) -> float:
    """Return the seconds of a call: the median, or the mean of them as a whole."""
    call: Callable[[], Any] = rank.kept["call"]
    if not whole:
        benchmark.spread(rank)
    dist.barrier()
    times, start = [], time.perf_counter()
    for _ in range(calls):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    mean = (time.perf_counter() - start) / calls
    return mean if whole else statistics.median(times)


def confine(rank: Rank, folders: list[Path], file: str) -> int:
    """Put each thread that computes into its folder, and on one core. Returns how many."""
    threads = [os.getpid()]
    threads += sorted(
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == HELPER
    )
    cores = sorted(os.sched_getaffinity(0))
    for number, (thread, folder) in enumerate(zip(threads, folders, strict=False)):
        (folder / file).write_text(str(thread))
        os.sched_setaffinity(thread, {cores[(rank.index + number) % len(cores)]})
    return len(threads)


def process_of(_rank: Rank) -> int:
    return os.getpid()


def confine_on(rank: Rank, folders: list[list[Path]], file: str) -> int:
    return confine(rank, folders[rank.index], file)


# ---- the run


def ways_of(options: argparse.Namespace) -> list[Way]:
    ways = [(OURS, threads) for threads in options.threads]
    if options.slow_cores:
        return [*ways, (WHOLE, 1)]
    ways += [(COPY, threads) for threads in options.threads]
    return ways + [(backend, 1) for backend in options.backends]


def show(way: Way) -> str:
    return f"{way[0]} {way[1]}" if way[0] in (OURS, COPY) else way[0]


def slow(cores: Quotas, ranks: Measured, threads: int, first: int) -> None:
    """Confine the threads of the ranks, which exist after a long call."""
    ranks(make, "all_reduce", 16 << 20, first)
    cores.adopt(ranks(process_of))
    folders = [cores.folders(threads) for _ in range(ranks.size)]
    told = ranks(confine_on, folders, cores.file)
    if told != [threads] * ranks.size:
        raise BenchmarkError(f"ranks of {threads} threads have {told}: was the library changed?")


def measure(
    sets: dict[Way, Measured], options: argparse.Namespace, collective: str, size: int
) -> dict[str, Any]:
    """Return the rounds of every way, in turn."""
    whole = bool(options.slow_cores)
    for way, ranks in sets.items():
        if way[0] == COPY:
            ranks(make_copy, way[1], size)
        else:
            ranks(make, collective, size, FIRST if way[0] in (OURS, WHOLE) else 1)
    calls = {
        way: max(3, min(2000, int(options.seconds / max(ranks(sample, 3, whole)))))
        for way, ranks in sets.items()
    }
    rounds: dict[Way, list[float]] = {way: [] for way in sets}
    for number in range(options.rounds):
        report.progress(f"{collective} {report.show_size(size)} round {number + 1} ")
        for way, ranks in sets.items():
            rounds[way].append(max(ranks(sample, calls[way], whole)))
    report.progress("")
    figures = {show(way): times for way, times in rounds.items()}
    return {"collective": collective, "bytes": size, "rounds_s": figures}


def row_of(figures: dict[str, Any], ranks: int) -> list[str]:
    rounds = figures["rounds_s"]
    first = statistics.median(next(iter(rounds.values())))
    cells = [figures["collective"], report.show_size(figures["bytes"])]
    for name, times in rounds.items():
        seconds = statistics.median(times)
        factor = 1.0 if name.startswith(COPY) else FACTORS[figures["collective"]](ranks)
        speed = figures["bytes"] * factor / seconds / 1e9
        cells.append(f"{seconds * 1e6:.0f} ({speed:.2f}, {first / seconds:.2f}x)")
    return cells


def picture(every: list[dict[str, Any]], title: str) -> str:
    """Return an SVG: how much faster each way is than the first one, by collective and size."""
    bar, gap, left, full = 13, 14, 190, 420
    names = list(every[0]["rounds_s"])
    gains = [
        {n: statistics.median(some["rounds_s"][names[0]]) / statistics.median(t)
         for n, t in some["rounds_s"].items() if not n.startswith(COPY)} for some in every
    ]  # fmt: skip
    most = max(max(gain.values()) for gain in gains)
    pairs = (svg.BLUE, svg.VERMILION, svg.GREEN, svg.PINK, svg.BROWN, svg.PURPLE)
    colors = {f"way{i}": pairs[i % len(pairs)] for i in range(len(names))}
    parts, y = [svg.text(12, 24, title, "title")], 44
    for some, gain in zip(every, gains, strict=True):
        label = f"{some['collective']} {report.show_size(some['bytes'])}"
        parts.append(svg.text(12, y + 11, label))
        for number, (name, times) in enumerate(gain.items()):
            wide = full * times / most
            parts.append(svg.box(left, y, wide, bar - 2, f"way{number}"))
            parts.append(svg.text(left + wide + 6, y + 10, f"{name}: {times:.2f} times", "soft"))
            y += bar
        y += gap
    rules = tuple(f".way{i} {{ fill: var(--way{i}); }}" for i in range(len(names)))
    return svg.picture(title, left + full + 150, y, svg.style(colors, rules), parts)


@contextlib.contextmanager
def sets_of(options: argparse.Namespace) -> Iterator[dict[Way, Measured]]:
    """Start the ranks of every way; with slow cores each thread is confined."""
    with contextlib.ExitStack() as stack:
        share, period = options.slow_cores, round(options.period * 1000)
        cores = stack.enter_context(Quotas(share, period, threaded=True)) if share else None
        sets: dict[Way, Measured] = {}
        for way in ways_of(options):
            backend = {COPY: "gloo", WHOLE: OURS}.get(way[0], way[0])
            made = Measured(options.ranks, backend, options.deadline)
            sets[way] = stack.enter_context(made)
            sets[way](enter, way[1], not share)
            if cores is not None and way[0] == OURS:
                slow(cores, sets[way], way[1], FIRST)
        yield sets


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    with sets_of(options) as sets:
        every = [measure(sets, options, c, n) for c in options.collectives for n in options.sizes]
    cores = f"cores of {options.slow_cores} of their time" if options.slow_cores else "whole cores"
    print(
        f"{options.ranks} ranks, {cores}, float32: µs (GB/s of busbw, gain over the first column), "
        f"median of {options.rounds} rounds; load {os.getloadavg()[0]:.1f}\n"
    )
    rows = [row_of(figures, options.ranks) for figures in every]
    head = ["collective", "bytes", *every[0]["rounds_s"]]
    report.print_table(head, rows, options.markdown)
    if options.svg:
        options.svg.write_text(picture(every, f"{options.ranks} ranks, {cores}"))
    body = {"machine": machine, "ranks": options.ranks, "slow_cores": options.slow_cores,
            "period_ms": options.period, "figures": every}  # fmt: skip
    report.write_json(options.json, "cores", body)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser, numbers = report.parser(__doc__), report.list_of(report.positive)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--threads", type=numbers, default="1,2,4", help="of a rank; the first is compared with")
    add("--sizes", type=report.list_of(report.size), default="1M,16M,64M")
    add("--collectives", type=report.list_of(str), default=",".join(COLLECTIVES))
    add("--backends", type=report.list_of(str), default="gloo", help="measured beside")
    add("--rounds", type=report.positive, default=5)
    add("--seconds", type=float, default=0.2, help="how long a round of one way takes, about")
    add("--slow-cores", type=float, default=0, metavar="SHARE", help="of a core, for each thread")
    add("--period", type=float, default=10, help="milliseconds in which a thread has its share")
    add("--svg", type=Path, metavar="FILE", help="draw the gains")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
