"""Does anything grow? All kinds of calls at random for a long time; memory and descriptors flat.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 1 --ranks 3 --seed 5 --json soak.json

Every rank draws the same calls from one seed: collectives of all kinds and sizes, synchronous and
not, messages with tags, sparse sums, groups that come and go. Results are checked. Memory,
descriptors and threads are read every few seconds; the run fails when their highest value in the
last third exceeds that of the second third by more than --slack MiB, by one thread (a second worker
is made when it is first needed), or by any descriptor.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from typing import Any

import groups
import torch
import torch.distributed as dist

from lab import benchmark, report
from lab.benchmark import BenchmarkError, Measured
from lab.ranks import Rank
from ringcomm.tools.bench import cases, traits

COLLECTIVES = [name for name in traits.FACTORS if name != "barrier"]
LARGEST = 22  # log2 of bytes
SLICE = 5.0  # seconds between looks


def some_calls(rank: Rank, seed: int, seconds: float) -> int:
    """Make random calls for so long by rank 0's clock; returns how many."""
    chance, calls = random.Random(seed), 0
    end = time.monotonic() + seconds
    while True:
        over = torch.tensor([float(time.monotonic() > end)])
        dist.broadcast(over, 0)
        if over.item():
            return calls
        for _ in range(50):
            one_call(rank, chance)
            calls += 1


def one_call(rank: Rank, chance: random.Random) -> None:
    kind, size = chance.random(), int(2 ** chance.uniform(2, LARGEST))
    if kind < 0.7:
        name = chance.choice(COLLECTIVES)
        cases.verify(name, cases.elements(name, size, rank.size), rank.index, rank.size)
    elif kind < 0.85:
        several_at_once(rank, [size >> i for i in range(4)])
    elif kind < 0.9:
        dense = torch.eye(max(2, min(500, size >> 12)))
        tensor = dense.to_sparse()
        dist.all_reduce(tensor)
        cases.check("sparse all_reduce", tensor.to_dense().flatten(), dense.flatten() * rank.size)
    elif kind < 0.97:
        messages(rank, size, chance.randrange(100))
    else:
        group = dist.new_group()
        tensor = torch.ones(max(1, size >> 8))
        dist.all_reduce(tensor, group=group)
        cases.check("a new group", tensor, torch.full_like(tensor, rank.size))
        dist.destroy_process_group(group)


def several_at_once(rank: Rank, sizes: list[int]) -> None:
    tensors = [torch.ones(max(1, size // cases.ELEMENT)) for size in sizes]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for tensor in tensors:
        cases.check("asynchronous", tensor, torch.full_like(tensor, rank.size))


def messages(rank: Rank, size: int, tag: int) -> None:
    """Everybody to everybody, small and large."""
    others = [other for other in range(rank.size) if other != rank.index]
    count = max(1, size // cases.ELEMENT // 4)
    into = {other: torch.empty(count) for other in others}
    works: list[Any] = [dist.irecv(into[other], other, tag=tag) for other in others]
    works += [dist.isend(torch.full((count,), float(rank.index)), o, tag=tag) for o in others]
    for work in works:
        work.wait()
    for other, tensor in into.items():
        cases.check("a message", tensor, torch.full_like(tensor, other))


def look(rank: Rank) -> dict[str, float]:
    gc.collect()
    return groups.footprint()


def growth(looks: list[dict[str, float]]) -> dict[str, float]:
    """How much the highest of the last third exceeds the highest of the second third."""
    third = max(1, len(looks) // 3)
    middle, last = looks[third : 2 * third], looks[-third:]
    return {
        key: max(0.0, max(x[key] for x in last) - max(x[key] for x in middle)) for key in looks[0]
    }


def run(options: argparse.Namespace) -> None:
    machine, calls, looks = report.machine(), 0, []
    slices = max(6, round(60 * options.minutes / SLICE))
    with Measured(options.ranks, options.backend, options.deadline) as ranks:
        ranks(benchmark.prepare)
        ranks(benchmark.join)
        for number in range(slices):
            seconds = 60 * options.minutes / slices
            calls += ranks(some_calls, options.seed + number, seconds, seconds=seconds + 120)[0]
            seen = ranks(look)
            looks.append({key: max(rank[key] for rank in seen) for key in seen[0]})
            report.progress(f"{number + 1} of {slices}, {calls} calls ")
    report.progress("")
    grown = growth(looks)
    shown = {"rss_bytes": "RSS MiB", "descriptors": "descriptors", "threads": "threads"}
    table = [
        [
            name,
            *(f"{look[key] / (groups.MIB if key == 'rss_bytes' else 1):.4g}"
              for look in (looks[0], looks[len(looks) // 2], looks[-1])),
            f"{grown[key] / (groups.MIB if key == 'rss_bytes' else 1):.3g}",
        ]
        for key, name in shown.items()
    ]  # fmt: skip
    print(f"{options.ranks} ranks, {options.minutes:g} minutes, {calls} calls, all right\n")
    report.print_table(["highest of the ranks", "first", "half", "last", "growth"], table,
                       options.markdown)  # fmt: skip
    body = {"machine": machine, "ranks": options.ranks, "minutes": options.minutes,
            "seed": options.seed, "calls": calls, "looks": looks, "growth": grown}  # fmt: skip
    report.write_json(options.json, "soak", body)
    limits = {"rss_bytes": options.slack * groups.MIB, "descriptors": 0, "threads": 1}
    if worse := [shown[key] for key, most in limits.items() if grown[key] > most]:
        raise BenchmarkError(f"what grew: {', '.join(worse)}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=3)
    add("--minutes", type=float, default=30)
    add("--seed", type=int, default=1)
    add("--slack", type=float, default=4, help="MiB that memory may grow in the last third")
    add("--backend", default="ringcomm")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
