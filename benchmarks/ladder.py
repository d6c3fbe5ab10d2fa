"""The price of each layer of an all_reduce: the same call timed at every height, in one run.

    python benchmarks/ladder.py
    python benchmarks/ladder.py --tcp [--rate 1gbit]     # from a socket upwards: ladder_tcp.py

From the bottom: a loop written by hand on the shared memory; the same algorithm as a plan,
interpreted; the engine, which adds the fingerprint, the plan cache and the queue; and
torch.distributed on top. A rung's price is its time minus that of the rung below. Beside them
stand torch's own floor, an all_reduce on its `fake` backend that moves nothing, and the price of
reading the clock twice, which is part of the top rung and of that floor.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from typing import Any

import ladder_tcp
import torch
import torch.distributed as dist

from lab import benchmark, report
from lab.benchmark import Measured
from lab.programs import Program
from lab.ranks import Rank
from ringcomm.tools.bench import cases

RUNGS = ["handwritten", "plan", "engine", "torch"]
FLOOR = "torch_fake"  # keys of the JSON, and heads of the table
CLOCK = "clock_pair"
SIZES = "8,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"
TCP_SIZES = "8,1K,16K,1M,16M"
FEWEST, MOST, WARM = 5, 20_000, 5  # calls

Times = list[float]  # seconds


def time_top(rank: Rank, count: int, calls: int) -> Times:
    """Return the seconds of each call on this rank; `count` is in float32 elements."""
    group = dist.new_group()
    dist.barrier()
    benchmark.spread(rank)
    times = time_torch(torch.zeros(count), calls + WARM, group)[WARM:]
    dist.barrier()
    dist.destroy_process_group(group)
    return times


def verify_top(rank: Rank, count: int) -> None:
    """Check one call's result. Raises cases.WrongResultError."""
    cases.verify("all_reduce", count, rank.index, rank.size)


def time_torch(data: torch.Tensor, calls: int, group: Any = None) -> Times:
    """Time dist.all_reduce, each call by itself."""
    times, clock, all_reduce = [0.0] * calls, time.perf_counter, dist.all_reduce
    gc.disable()
    for i in range(calls):
        start = clock()
        all_reduce(data, group=group)
        times[i] = clock() - start
    gc.enable()
    return times


def time_floor(rank: Rank, count: int, calls: int) -> Times:
    """Time torch's way to a backend and back: `fake` does nothing there."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return time_torch(torch.zeros(count), calls + WARM)[WARM:]


def time_clock(rank: Rank, calls: int) -> Times:
    """Time nothing."""
    times, clock = [0.0] * calls, time.perf_counter
    for i in range(calls):
        start = clock()
        times[i] = clock() - start
    return times


class Ladder:
    """The ranks that climb it, and one process for the floor."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.options = options
        self.ranks = stack.enter_context(Measured(options.ranks, options.backend, options.deadline))
        self.floor = stack.enter_context(Measured(1, "fake", options.deadline))
        self.ranks(benchmark.prepare)
        self.ranks(benchmark.join)
        if options.rungs != ["torch"]:
            program = Program("host_ladder", options.ranks, deadline=options.deadline)
            self.program = stack.enter_context(program)

    def measure(self, size: int) -> dict[str, Any]:
        """Return the figures of one size: each rung's rounds, in seconds."""
        count = cases.elements("all_reduce", size, self.options.ranks)
        calls = {}
        for rung in self.options.rungs:
            if rung == "torch":
                self.ranks(verify_top, count)
            typical = self.time(rung, count, FEWEST)
            calls[rung] = max(FEWEST, min(MOST, int(self.options.seconds / typical)))
        calls |= {FLOOR: 1000, CLOCK: 1000}
        rounds: dict[str, Times] = {what: [] for what in calls}
        for number in range(self.options.rounds):
            report.progress(f"{report.show_size(size)} round {number + 1} ")
            for what, times in rounds.items():
                times.append(self.time(what, count, calls[what]))
        report.progress("")
        return {"bytes": count * cases.ELEMENT, "calls_a_round": calls, "rounds_s": rounds}

    def time(self, what: str, count: int, calls: int) -> float:
        """Return the median of some calls, each as long as on its slowest rank, in seconds."""
        if what == CLOCK:
            return statistics.median(self.floor(time_clock, calls)[0])
        if what == FLOOR:
            return statistics.median(self.floor(time_floor, count, calls)[0])
        if what == "torch":
            times = self.ranks(time_top, count, calls)
            return statistics.median(benchmark.slowest(times))
        return statistics.median(self.program.ask(what, count, calls))


def run(options: argparse.Namespace) -> None:
    if options.tcp:
        ladder_tcp.run(options)
        return
    machine = report.machine()
    with contextlib.ExitStack() as stack:
        ladder = Ladder(options, stack)
        sizes = [ladder.measure(size) for size in options.sizes]
    for figures in sizes:
        rungs = [rung for rung in RUNGS if rung in figures["rounds_s"]]
        figures |= ladder_tcp.medians(figures["rounds_s"], rungs)
    print(
        f"all_reduce, {options.ranks} ranks, float32, {options.backend}: µs, median "
        f"[lowest-highest] of {options.rounds} rounds, +price over the rung before\n"
    )
    ladder_tcp.print_times(sizes, options.markdown)
    body = {"machine": machine, "ranks": options.ranks, "rounds": options.rounds, "sizes": sizes}
    report.write_json(options.json, "ladder", body)


def rung(text: str) -> str:
    """Parse the name of a rung, for argparse."""
    if text not in RUNGS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(RUNGS)}")
    return text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser, sizes = report.parser(__doc__), report.list_of(report.size)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--sizes", type=sizes, help=f"default: {SIZES}; with --tcp: {TCP_SIZES}")
    add("--rungs", type=report.list_of(rung), default=",".join(RUNGS), help="from the lowest")
    add("--backend", default="ringcomm", help="another has the top rung only")
    add("--rounds", type=report.positive, default=5)
    add("--seconds", type=float, default=0.1, help="how long a rung's round takes, about")
    add("--tcp", action="store_true", help="the ladder over TCP, two processes")
    add("--stream", type=sizes, default="16K,1M", help="with --tcp: sizes of one-way messages")
    add("--rate", help="with --tcp: two hosts linked at so much, as 1gbit, or `none`; needs root")
    add("--spin", type=int, help="with --tcp: µs to poll before sleeping, on every rung")
    options = parser.parse_args(arguments)
    options.sizes = options.sizes or sizes(TCP_SIZES if options.tcp else SIZES)
    options.rungs.sort(key=RUNGS.index)
    return options


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
