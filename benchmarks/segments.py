"""In which segments an all_reduce passes the windows: what each size of them costs, in one run.

    python benchmarks/segments.py

The plan is interpreted as in `ladder.py`, with nothing above it and no choice by measurement: what
csrc/exec/tuner.h chooses among. Rounds of all segments are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from lab import benchmark, report
from lab.programs import Program
from ringcomm.tools.bench import cases

SIZES = "256K,1M,4M,16M,64M"
SEGMENTS = "64K,128K,256K,512K"
FEWEST, MOST = 5, 2000  # calls


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    sizes: list[dict[str, Any]] = []
    with Program("host_ladder", options.ranks, deadline=options.deadline) as program:
        for size in options.sizes:
            count = cases.elements("all_reduce", size, options.ranks)
            rounds: dict[int, list[float]] = {segment: [] for segment in options.segments}
            typical = statistics.median(program.ask("plan", count, FEWEST))
            calls = max(FEWEST, min(MOST, int(options.seconds / typical)))
            for number in range(options.rounds):
                report.progress(f"{report.show_size(size)} round {number + 1} ")
                for segment, times in rounds.items():
                    asked = program.ask(f"plan/{segment}", count, calls)
                    times.append(statistics.median(asked))
            report.progress("")
            sizes.append({"bytes": count * cases.ELEMENT, "calls_a_round": calls,
                          "rounds_s": rounds})  # fmt: skip
    print(
        f"all_reduce, {options.ranks} ranks, float32, a plan: µs, median [lowest-highest] of "
        f"{options.rounds} rounds, by the bytes of a segment\n"
    )
    head = ["bytes", *(report.show_size(segment) for segment in options.segments)]
    rows = []
    for figures in sizes:
        spreads = [report.Spread.of(times) for times in figures["rounds_s"].values()]
        cells = [
            f"{report.show_time(spread.median)} "
            f"[{report.show_time(spread.low)}-{report.show_time(spread.high)}]"
            for spread in spreads
        ]
        rows.append([report.show_size(figures["bytes"]), *cells])
    report.print_table(head, rows, options.markdown)
    body = {"machine": machine, "ranks": options.ranks, "rounds": options.rounds, "sizes": sizes}
    report.write_json(options.json, "segments", body)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser, sizes = report.parser(__doc__), report.list_of(report.size)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--sizes", type=sizes, default=SIZES)
    add("--segments", type=sizes, default=SEGMENTS, help="64K to 512K")
    add("--rounds", type=report.positive, default=5)
    add("--seconds", type=float, default=0.1, help="how long a segment's round takes, about")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
