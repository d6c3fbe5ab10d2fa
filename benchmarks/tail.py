"""How late small collectives can be: the quantiles of very many calls, beside their median.

    python benchmarks/tail.py
    python benchmarks/tail.py --calls 1000000 --bytes 8,1K --json tail.json

Every call is timed on every rank and takes as long as on its slowest one. A backend's calls are
made in turns of 10,000, so what disturbs the machine disturbs the backends alike.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from array import array
from typing import Any

from lab import benchmark, report
from lab.benchmark import Measured
from lab.ranks import Rank
from ringcomm.tools.bench import cases
from ringcomm.tools.bench.collectives import time_calls
from ringcomm.tools.bench.sample import Workload

TURN = 10_000  # calls
QUANTILES = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999, "slowest": 1.0}


def time_turn(rank: Rank, size: int, calls: int) -> bytes:
    """Return the seconds of each call, as the bytes of doubles."""
    count = cases.elements("all_reduce", size, rank.size)
    workload = Workload("all_reduce", count, rank.size, cases.Form(in_place=True))
    return array("d", time_calls(rank, workload, calls)).tobytes()


def turn(ranks: Measured, size: int, calls: int) -> list[float]:
    """Return the seconds of each call on its slowest rank."""
    times = [list(array("d", answer)) for answer in ranks(time_turn, size, calls)]
    return benchmark.slowest(times)


def quantiles(times: list[float]) -> dict[str, float]:
    """Return, for each of QUANTILES, the time that this share of the calls does not exceed."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {name: ordered[min(last, round(share * last))] for name, share in QUANTILES.items()}


def measure(
    sets: dict[str, Measured], size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {backend: [] for backend in sets}
    wanted = {b: options.calls if b == "ringcomm" else options.others for b in sets}
    while any(len(times[backend]) < wanted[backend] for backend in sets):
        for backend, ranks in sets.items():
            missing = wanted[backend] - len(times[backend])
            if missing > 0:
                times[backend] += turn(ranks, size, min(TURN, missing))
                report.progress(f"{backend} {report.show_size(size)}: {missing} calls to go ")
    report.progress("")
    return [
        {"backend": backend, "bytes": size, "calls": len(some), "seconds": quantiles(some)}
        for backend, some in times.items()
    ]


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    with contextlib.ExitStack() as stack:
        sets = {
            backend: stack.enter_context(Measured(options.ranks, backend, options.deadline))
            for backend in options.backends
        }
        for ranks in sets.values():
            ranks(benchmark.prepare)
            ranks(benchmark.join)
        rows = [row for size in options.bytes for row in measure(sets, size, options)]
    print(f"all_reduce, {options.ranks} ranks, microseconds\n")
    table = [
        [
            report.show_size(row["bytes"]),
            row["backend"],
            str(row["calls"]),
            *(report.show_time(row["seconds"][name]) for name in QUANTILES),
        ]
        for row in rows
    ]
    report.print_table(["bytes", "backend", "calls", *QUANTILES], table, options.markdown)
    report.write_json(
        options.json, "tail", {"machine": machine, "ranks": options.ranks, "rows": rows}
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--bytes", type=report.list_of(report.size), default="8,1K")
    add("--calls", type=report.positive, default=1_000_000, help="of ringcomm, a size")
    add("--others", type=report.positive, default=100_000, help="of each other backend")
    add("--backends", type=report.list_of(str), default="ringcomm,gloo")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
