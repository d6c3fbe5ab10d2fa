"""Time collectives through torch.distributed, side by side with Gloo in one run.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --ranks 4 --collectives all_reduce,all_gather --plot out.png
    python benchmarks/collectives.py --sizes 16M --loaded

It starts its own processes. The backends are measured in turn, round by round, so what disturbs
the machine disturbs all of them alike. A call takes as long as on its slowest rank; a round's
figure is the median of its calls, the figure shown the median of the rounds, with the lowest and
highest of them. Results are compared with the exact ones before a size is timed, and after it.
README.md beside this file says how to read what comes out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lab import benchmark, cases, report
from lab.benchmark import BusyCores, Measured
from lab.ranks import Rank

COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
SIZES = "8,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"
FEWEST, MOST = 5, 20_000  # calls a round
FEWEST_COPIED = 256 << 10  # bytes from which on a call is compared with its copies
COPY_PASSES = 3


@dataclass
class Sample:
    """One collective of one size on one backend, idle or loaded. Times are in seconds."""

    collective: str
    backend: str
    ranks: int
    size: int  # bytes
    loaded: bool
    calls: int = 0  # a round
    rounds: list[float] = field(default_factory=list)  # the median of each round's calls
    times: list[float] = field(default_factory=list)  # every call of every round
    copies: list[float] = field(default_factory=list)  # each round's: what its copies alone take

    def add(self, times: list[float]) -> None:
        self.rounds.append(statistics.median(times))
        self.times += times

    @property
    def spread(self) -> report.Spread:
        return report.Spread.of(self.rounds)

    @property
    def bandwidths(self) -> tuple[float, float]:
        return cases.bandwidths(self.collective, self.size, self.spread.median, self.ranks)

    @property
    def of_its_copies(self) -> float | None:
        """The time of its copies as a part of its own, 1.0 where it does nothing else."""
        return statistics.median(self.copies) / self.spread.median if self.copies else None

    def facts(self) -> dict[str, Any]:
        """Return what JSON gets."""
        spread, (algbw, busbw) = self.spread, self.bandwidths
        cuts = statistics.quantiles(self.times, n=100, method="inclusive")
        return {
            "collective": self.collective,
            "backend": self.backend,
            "ranks": self.ranks,
            "bytes": self.size,
            "loaded": self.loaded,
            "calls_a_round": self.calls,
            "rounds_s": self.rounds,
            "median_s": spread.median,
            "low_s": spread.low,
            "high_s": spread.high,
            "calls_p10_p50_p90_p99_s": [cuts[i - 1] for i in (10, 50, 90, 99)],
            "algbw_gb_per_s": algbw,
            "busbw_gb_per_s": busbw,
            "copies_s": self.copies,
            "of_its_copies": self.of_its_copies,
        }


def verify(rank: Rank, collective: str, count: int) -> None:
    cases.verify(collective, count, rank.index, rank.size)


def time_calls(rank: Rank, collective: str, count: int, calls: int) -> list[float]:
    """Return the seconds of each of `calls` calls on this rank, after some that do not count."""
    key = f"{collective} {count}"
    if key not in rank.kept:
        rank.kept.clear()
        case = cases.make(collective, count, rank.index, rank.size)
        for tensor in (case.given, case.result):
            tensor.zero_()  # sums of zeros stay in range however often they are summed
        rank.kept[key] = case.call
    call, clock = rank.kept[key], time.perf_counter
    times = [0.0] * calls
    gc.disable()
    dist.barrier()
    benchmark.spread(rank)
    for _ in range(min(10, calls // 5 + 1)):
        call()
    for i in range(calls):
        start = clock()
        call()
        times[i] = clock() - start
    gc.enable()
    return times


def time_copies(rank: Rank, size: int) -> list[list[float]]:
    """Return the seconds of copies of `size` bytes, plain ones and ones past the caches."""
    from ringcomm import _C

    kinds = []
    for past_caches in (False, True):
        dist.barrier()
        benchmark.spread(rank)
        kinds.append(_C.copy_seconds(size, past_caches, COPY_PASSES + 1)[1:])
    return kinds


class Bench:
    """The ranks of every backend, and the busy cores when there are any."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.options = options
        self.busy: BusyCores | None = None
        if options.loaded:
            self.busy = stack.enter_context(BusyCores(options.deadline))
        self.sets = {
            backend: stack.enter_context(Measured(options.ranks, backend, options.deadline))
            for backend in options.backends
        }
        for ranks in self.sets.values():
            ranks(benchmark.prepare)
            ranks(benchmark.join)

    def measure(self, collective: str, count: int) -> list[Sample]:
        """Verify, time every backend in turn for some rounds, and verify again."""
        size = count * cases.ELEMENT
        loads = [False, True] if self.busy else [False]
        samples = [
            Sample(collective, backend, self.options.ranks, size, loaded)
            for loaded in loads
            for backend in self.sets
        ]
        self.verify(collective, count)
        for sample in samples:
            sample.calls = self.fitting_calls(sample, count)
        for number in range(self.options.rounds):
            report.progress(f"{collective} {report.show_size(size)} round {number + 1} ")
            # Each round begins with another one: none always follows the same.
            for sample in samples[number % len(samples) :] + samples[: number % len(samples)]:
                sample.add(self.time(sample, count, sample.calls))
                if sample.backend == "ringcomm" and not sample.loaded and size >= FEWEST_COPIED:
                    sample.copies.append(self.time_of_copies(collective, size))
        self.verify(collective, count)
        report.progress("")
        return samples

    def verify(self, collective: str, count: int) -> None:
        for ranks in self.sets.values():
            ranks(verify, collective, count, seconds=self.options.limit)

    def fitting_calls(self, sample: Sample, count: int) -> int:
        """Return how many calls take about `--seconds`."""
        typical = statistics.median(self.time(sample, count, FEWEST))
        return max(FEWEST, min(MOST, int(self.options.seconds / typical)))

    def time_of_copies(self, collective: str, size: int) -> float:
        """Return what the copies of a call take with the faster kind, all ranks at once."""
        by_rank = self.sets["ringcomm"](time_copies, size, seconds=self.options.limit)
        kinds = zip(*by_rank, strict=True)
        fastest = min(statistics.median(benchmark.slowest(list(kind))) for kind in kinds)
        return cases.COPIES[collective](self.options.ranks) * fastest

    def time(self, sample: Sample, count: int, calls: int) -> list[float]:
        ranks = self.sets[sample.backend]
        if sample.loaded and self.busy:
            self.busy.run()
        times = ranks(time_calls, sample.collective, count, calls, seconds=self.options.limit)
        if self.busy:
            self.busy.pause()
        return benchmark.slowest(times)


def tables(samples: list[Sample], markdown: bool) -> None:
    """Print the samples of one collective: a table idle, and one loaded if it was measured."""
    for loaded in sorted({sample.loaded for sample in samples}):
        some = [sample for sample in samples if sample.loaded == loaded]
        state = "every core busy computing" if loaded else "idle machine"
        print(
            f"{'### ' if markdown else ''}{some[0].collective}, {some[0].ranks} ranks, float32, "
            f"{state}: µs, median [lowest-highest] of {len(some[0].rounds)} rounds; GB/s"
            + ("\n" if markdown else "")
        )
        idle = {(s.backend, s.size): s for s in samples if not s.loaded} if loaded else {}
        sizes = list(dict.fromkeys(sample.size for sample in some))
        rows = [[s for s in some if s.size == size] for size in sizes]
        copies = any(sample.copies for sample in some)
        head, cells = _head(rows[0], loaded, copies), [_cells(row, idle, copies) for row in rows]
        report.print_table(head, cells, markdown)


def _head(row: list[Sample], loaded: bool, copies: bool) -> list[str]:
    head = ["bytes"]
    for sample in row:
        head += [f"{sample.backend} µs", "[rounds]", "algbw", "busbw"]
        head += ["x idle"] if loaded else []
    if copies:
        head.append("of its copies")
    return head + [f"{sample.backend} vs gloo" for sample in _compared(row)]


def _cells(row: list[Sample], idle: dict[tuple[str, int], Sample], copies: bool) -> list[str]:
    cells = [report.show_size(row[0].size)]
    for sample in row:
        spread, (algbw, busbw) = sample.spread, sample.bandwidths
        low, high = report.show_time(spread.low), report.show_time(spread.high)
        cells += [report.show_time(spread.median), f"[{low}-{high}]"]
        cells += [report.show_bandwidth(algbw), report.show_bandwidth(busbw)]
        if idle:
            before = idle[sample.backend, sample.size].spread.median
            cells.append(f"{spread.median / before:.1f}")
    if copies:
        parts = [sample.of_its_copies for sample in row if sample.backend == "ringcomm"]
        cells.append(f"{parts[0]:.0%}" if parts and parts[0] else "-")
    return cells + [f"{speed_up(sample, row):.1f}x" for sample in _compared(row)]


def _compared(row: list[Sample]) -> list[Sample]:
    gloo = any(sample.backend == "gloo" for sample in row)
    return [sample for sample in row if gloo and sample.backend != "gloo"]


def speed_up(sample: Sample, row: list[Sample]) -> float:
    """Return how many times Gloo's median is the sample's."""
    gloo = next(other for other in row if other.backend == "gloo")
    return gloo.spread.median / sample.spread.median


def counts(collective: str, sizes: list[int], ranks: int) -> list[int]:
    """Return the numbers of elements to measure; sizes that come to the same, once."""
    return list(dict.fromkeys(cases.elements(collective, size, ranks) for size in sizes))


def run(options: argparse.Namespace) -> None:
    """Measure, printing as results come, then write what was asked for."""
    machine, samples = report.machine(), []
    with contextlib.ExitStack() as stack:
        bench = Bench(options, stack)
        for collective in options.collectives:
            some = [
                sample
                for count in counts(collective, options.sizes, options.ranks)
                for sample in bench.measure(collective, count)
            ]
            tables(some, options.markdown)
            samples += some
    body = {
        "machine": machine,
        "options": {"ranks": options.ranks, "rounds": options.rounds, "seconds": options.seconds},
        "samples": [sample.facts() for sample in samples],
    }
    report.write_json(options.json, "collectives", body)
    if options.plot:
        from plot import draw

        draw(body, options.plot)


def collective(text: str) -> str:
    """Parse the name of a collective, for argparse."""
    if text not in cases.FACTORS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(cases.FACTORS)}")
    return text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--collectives", type=report.list_of(collective), default=",".join(COLLECTIVES))
    add("--sizes", type=report.list_of(report.parse_size), default=SIZES, help="8,1K,4M,…")
    add("--backends", type=report.list_of(str), default="ringcomm,gloo")
    add("--rounds", type=report.positive, default=5)
    add("--seconds", type=float, default=0.2, help="how long a backend's round takes, about")
    add("--loaded", action="store_true", help="also with every core busy computing")
    add("--plot", type=Path, metavar="FILE.png", help="draw time and bandwidth against size")
    add("--limit", type=float, default=300, help="seconds after which a round is given up")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.plot and not find_spec("matplotlib"):  # now, not after an hour of measuring
        print("collectives.py: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    return benchmark.main(run, options)


if __name__ == "__main__":
    sys.exit(main())
