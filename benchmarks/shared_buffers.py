"""The gain of collectives that read the other ranks' tensors: nothing is copied into windows.

    python benchmarks/shared_buffers.py

Tensors of `torch.empty` take turns with tensors of `ringcomm.empty`, in the same processes.
all_reduce is as DDP calls it with its buckets, and all_gather in place, as FSDP2 does.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from lab import benchmark, report
from lab.benchmark import Measured
from lab.ranks import Rank
from ringcomm.tools.bench.cases import ELEMENT, all_gather_single, reduce_scatter_single

OWN, READABLE = KINDS = ("torch.empty", "ringcomm.empty")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather")
FIRST = 5  # turns that do not count: ringcomm finds out which segments are fastest


def enter(rank: Rank) -> None:
    benchmark.prepare(rank)
    benchmark.join(rank)


def make(rank: Rank, collective: str, count: int) -> None:
    """Keep a function for each kind of buffers, which calls the collective."""
    rank.kept.clear()
    for kind in KINDS:
        made = torch.empty if kind == OWN else ringcomm.empty
        whole, part = made(count).fill_(0), made(count // rank.size).fill_(0)
        parts = list(whole.chunk(rank.size))
        at_root = parts if rank.index == 0 else None
        rank.kept[kind] = {
            "all_reduce": functools.partial(dist.all_reduce, whole),
            "broadcast": functools.partial(dist.broadcast, whole, 0),
            "all_gather": functools.partial(all_gather_single, whole, parts[rank.index]),
            "reduce_scatter": functools.partial(reduce_scatter_single, part, whole),
            "scatter": functools.partial(dist.scatter, part, at_root),
            "gather": functools.partial(dist.gather, part, at_root),
        }[collective]


def turn(rank: Rank, kind: str, calls: int) -> list[float]:
    """Return the seconds of each call on this rank, after one that does not count."""
    call, times = rank.kept[kind], []
    gc.disable()
    dist.barrier()
    benchmark.spread(rank)
    for _ in range(calls + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    gc.enable()
    return times[1:]


def measure(ranks: Measured, options: argparse.Namespace, what: str, size: int) -> dict[str, Any]:
    """Return the figures of a collective: the median of each turn, by kind."""
    ranks(make, what, size // ELEMENT // ranks.size * ranks.size)
    turns: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(FIRST + options.turns):
        report.progress(f"{what} {report.show_size(size)} turn {number + 1}")
        for kind, medians in turns.items():
            times = benchmark.slowest(ranks(turn, kind, options.calls))
            medians += [statistics.median(times)] * (number >= FIRST)
    report.progress("")
    pairs = zip(*turns.values(), strict=True)
    return {"ranks": ranks.size, "collective": what, "bytes": size, "turns_s": turns,
            "ratio": statistics.median(own / readable for own, readable in pairs)}  # fmt: skip


def run(options: argparse.Namespace) -> None:
    machine, measured = report.machine(), []
    for size in options.ranks:
        with Measured(size, "ringcomm", options.deadline) as ranks:
            ranks(enter)
            measured += [
                measure(ranks, options, what, n) for what in COLLECTIVES for n in options.sizes
            ]
    rows = []
    for figures in measured:
        spreads = [report.Spread.of(figures["turns_s"][kind]) for kind in KINDS]
        times = [
            f"{report.show_time(spread.median)} "
            f"({report.show_time(spread.low)} to {report.show_time(spread.high)})"
            for spread in spreads
        ]
        bytes_, ratio = report.show_size(figures["bytes"]), f"{figures['ratio']:.2f}"
        rows.append([str(figures["ranks"]), figures["collective"], bytes_, *times, ratio])
    print(
        f"float32, µs, median and range of {options.turns} turns; load {os.getloadavg()[0]:.1f}\n"
    )
    report.print_table(["ranks", "collective", "bytes", *KINDS, "ratio"], rows, options.markdown)
    report.write_json(options.json, "shared_buffers", {"machine": machine, "figures": measured})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser, sizes = report.parser(__doc__), report.list_of(report.size)
    add = parser.add_argument
    add("--ranks", type=report.list_of(report.positive), default="2,4")
    add("--sizes", type=sizes, default="4M,25M,64M", help="bytes of the larger buffer")
    add("--turns", type=report.positive, default=9)
    add("--calls", type=report.positive, default=7, help="of a turn")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
