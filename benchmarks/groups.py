"""The cost of groups that do nothing: memory, descriptors, threads, CPU, and time to make.

    python benchmarks/groups.py
    python benchmarks/groups.py --groups 0 --init 2,4,8,16,32

Makes many groups in each rank's process and looks at /proc after every stage; each figure is the
highest of the ranks'. Then makes the default group with more and more ranks: seconds from the
moment when every rank has imported everything to the end of the first barrier on the slowest.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab import benchmark, report
from lab.benchmark import Measured
from lab.ranks import Rank
from ringcomm.tools.bench import cases

MIB = 1 << 20
USED = 1 * MIB  # bytes of the all_reduce that uses a group
COLUMNS = {  # what JSON calls it: what the table calls it
    "rss_bytes": "RSS MiB",
    "shared_mapped_bytes": "mapped MiB",
    "shared_touched_bytes": "touched MiB",
    "descriptors": "descriptors",
    "threads": "threads",
    "seconds": "s to make",
}


def footprint() -> dict[str, float]:
    """Return this process's memory in bytes, and its descriptors and threads.

    Shared memory is that of memfds: all that is mapped, peers' included, and this process's
    share of what has been touched (pages mapped by two processes count half for each).
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    mapped, touched = shared_memory(Path("/proc/self/smaps").read_text(encoding="utf-8"))
    return {
        "rss_bytes": 1024 * number_after("VmRSS:", status),
        "shared_mapped_bytes": mapped,
        "shared_touched_bytes": touched,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())) - 1,  # the listing's own
        "threads": number_after("Threads:", status),
    }


def number_after(word: str, text: str) -> int:
    match = re.search(rf"^{word}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def shared_memory(smaps: str) -> tuple[int, int]:
    """Return (bytes mapped, bytes touched: this process's share) of memfds, from smaps' text."""
    mapped = touched = 0
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE):
        if "/memfd:" in area.partition("\n")[0]:
            mapped += 1024 * number_after("Size:", area)
            touched += 1024 * number_after("Pss:", area)
    return mapped, touched


def look(rank: Rank) -> dict[str, float]:
    return footprint()


def make_groups(rank: Rank, count: int) -> float:
    """Make `count` groups of all ranks; returns seconds."""
    start = time.perf_counter()
    rank.kept["groups"] = [dist.new_group() for _ in range(count)]
    return time.perf_counter() - start


def use_groups(rank: Rank) -> None:
    """Sum once in each group, and check the sums."""
    count = USED // cases.ELEMENT
    expected = torch.stack([cases.values(other, count) for other in range(rank.size)]).sum(0)
    for number, group in enumerate(rank.kept["groups"]):
        data = cases.values(rank.index, count)
        dist.all_reduce(data, group=group)
        cases.check(f"group {number}", data, expected)


def idle(rank: Rank, seconds: float) -> float:
    """Do nothing for a while; returns the CPU seconds, of all threads, that a second took."""
    used, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.perf_counter() - start)


def join_again(rank: Rank, turn: int) -> float:
    """Make the default group anew on the same store; returns seconds."""
    benchmark.leave(rank)
    rank.store = dist.PrefixStore(f"turn{turn}", rank.store)
    return benchmark.join(rank)


def highest(stage: str, ranks: Measured, seconds: float = 0) -> dict[str, Any]:
    """Return a stage's row: the highest figures of all ranks."""
    seen = ranks(look)
    figures = {key: max(rank[key] for rank in seen) for key in seen[0]}
    return {"stage": stage, **figures, "seconds": seconds}


def measure_groups(backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row a stage, and the CPU an idle process takes, for `backend`."""
    with Measured(options.ranks, backend, options.deadline, fresh=True) as ranks:
        ranks(benchmark.prepare)
        stages = [highest("imported", ranks)]
        seconds = max(ranks(benchmark.join))
        stages.append(highest("default group", ranks, seconds))
        seconds = max(ranks(make_groups, options.groups))
        stages.append(highest(f"+ {options.groups} groups", ranks, seconds))
        burnt = {"unused": max(ranks(idle, options.idle))}
        ranks(use_groups)
        stages.append(highest(f"each used, {report.show_size(USED)}", ranks))
        burnt["used"] = max(ranks(idle, options.idle))
    return {"backend": backend, "stages": stages, "idle_cpu_s_per_s": burnt}


def measure_init(backend: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds `size` ranks take to make the default group, at first and again."""
    report.progress(f"{backend}, {size} ranks ")
    with Measured(size, backend, options.deadline) as ranks:
        ranks(benchmark.prepare)  # ends when the last rank has imported everything
        first = max(ranks(benchmark.join))
        again = [max(ranks(join_again, turn)) for turn in range(1, options.rounds)]
    report.progress("")
    return {"backend": backend, "ranks": size, "first_s": first, "again_s": again}


def print_stages(figures: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"{figures['backend']}, {options.ranks} ranks, a process (the highest of the ranks)\n")
    rows = []
    for stage in figures["stages"]:
        cells = [
            f"{stage[key] / MIB:.1f}" if key.endswith("bytes") else f"{stage[key]:.4g}"
            for key in COLUMNS
        ]
        rows.append([stage["stage"], *cells])
    report.print_table(["after", *COLUMNS.values()], rows, options.markdown)
    burnt = figures["idle_cpu_s_per_s"]
    print(
        f"idle for {options.idle:g} s with all groups: {1e3 * burnt['unused']:.2f} ms of CPU a "
        f"second before they are used, {1e3 * burnt['used']:.2f} ms after\n"
    )


def print_init(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    print("seconds until the default group has met once, counted after the imports\n")
    table = []
    for row in rows:
        again = f"{statistics.median(row['again_s']):.3f}" if row["again_s"] else "-"
        table.append([row["backend"], str(row["ranks"]), f"{row['first_s']:.3f}", again])
    head = ["backend", "ranks", "first", f"again, median of {options.rounds - 1}"]
    report.print_table(head, table, options.markdown)


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    stages = []
    for backend in options.backends if options.groups else []:
        stages.append(measure_groups(backend, options))
        print_stages(stages[-1], options)
    init = [
        measure_init(backend, size, options)
        for size in options.init
        for backend in options.backends
    ]
    if init:
        print_init(init, options)
    body = {
        "machine": machine,
        "ranks": options.ranks,
        "groups": options.groups,
        "backends": stages,
        "init": init,
    }
    report.write_json(options.json, "groups", body)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2, help="that make the groups")
    add("--groups", type=int, default=64, help="a process; 0 leaves this part out")
    add("--idle", type=float, default=3, help="seconds to watch idle groups")
    add(
        "--init",
        type=report.list_of(report.positive),
        default="2,4,8,16,32",
        help="numbers of ranks whose start is timed; '' leaves this part out",
    )
    add("--rounds", type=report.positive, default=3, help="starts of each number of ranks")
    add("--backends", type=report.list_of(str), default="ringcomm,gloo")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
