"""`ringcomm tune`: measures what messages cost between the ranks of a job, for RINGCOMM_COSTS.

Start it as the job itself is: `torchrun ... -m ringcomm tune --output FILE`. It measures alpha,
beta and gamma of costs.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm import costs, model
from ringcomm.costs import Costs

MOST_PAIRS = 16  # of hosts, in each fabric
ROUNDS, SECONDS = 7, 0.02  # of a measurement; its fastest counts, others were disturbed
LARGE = 8 << 20
BLOCK = 256 << 10  # bytes, that a core adds up out of its cache

Pair = tuple[int, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="rank 0 writes it")


def run(options: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        raise ValueError("start it as the job is: torchrun ... -m ringcomm tune --output FILE")
    dist.init_process_group("ringcomm")
    try:
        return tune(options.output)
    finally:
        dist.destroy_process_group()


def tune(output: Path | None) -> int:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host_name(dist.get_rank()))
    network, memory = pairs_of(hosts)
    if not network:
        raise ValueError(
            "all ranks are on one host, and there is no network to measure "
            "(RINGCOMM_TRANSPORT=tcp measures TCP inside it)"
        )
    measured = {"memory": measure(memory, False), "network": measure(network, True)}
    if dist.get_rank() == 0:
        found = {name: median(some) for name, some in measured.items()}
        tell(hosts, measured, found)
        if output:
            write(output, hosts, found)
    return 0


def host_name(rank: int) -> str:
    """What ranks that share memory have in common: as csrc/transport/rendezvous.cc decides it."""
    if os.environ.get("RINGCOMM_TRANSPORT") == "tcp":
        return str(rank)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


def pairs_of(hosts: list[str]) -> tuple[list[Pair], list[Pair]]:
    """Neighbouring hosts, by their first ranks, and the first two ranks of each host."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    firsts = [some[0] for some in ranks.values()]
    between = list(zip(firsts, firsts[1:] + firsts[:1], strict=True))
    if len(firsts) < 3:
        between = between[: len(firsts) - 1]
    inside = [(some[0], some[1]) for some in ranks.values() if len(some) > 1]
    return between[:MOST_PAIRS], inside[:MOST_PAIRS]


def measure(pairs: list[Pair], across: bool) -> list[Costs]:
    """Measure one pair after another, while the other ranks wait; all get all figures."""
    rank, found = dist.get_rank(), []
    for pair in pairs:
        group = dist.new_group(list(pair))
        figures: list[Any] = [None]
        if rank in pair:
            figures = [measure_pair(group, across)]
            dist.destroy_process_group(group)
        dist.broadcast_object_list(figures, pair[0])
        found.append(Costs(*figures[0]))
    return found


def measure_pair(group: Any, across: bool) -> list[float]:
    """Alpha by the smallest all_reduce, which is one round; beta by a large all_gather."""
    small, mine = torch.ones(2), torch.ones(LARGE // 8)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    call = time_call(alone, lambda: dist.all_reduce(small, group=alone))  # and no message
    dist.destroy_process_group(alone)
    smallest = time_call(group, lambda: dist.all_reduce(small, group=group))
    alpha = max(smallest - call, smallest / 10)
    halves = list(torch.ones(LARGE // 4).chunk(2))
    large = time_call(group, lambda: dist.all_gather(halves, mine, group=group))
    work = costs.in_memory("all_gather", LARGE, 2)
    if across:
        work = costs.work("all_gather", "ring", LARGE, 2)
    beta = max(large - work.rounds * alpha, large / 10) / work.sent
    return [alpha, beta, time_sum()]


def time_call(group: Any, call: Callable[[], object]) -> float:
    """Seconds of a call, by the same number of them on both ranks."""
    began = time.perf_counter()
    for _ in range(3):
        call()
    typical = torch.tensor((time.perf_counter() - began) / 3)
    dist.broadcast(typical, group_src=0, group=group)
    calls = max(3, min(1000, int(SECONDS / float(typical))))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls)
    return min(times)


def time_sum() -> float:
    """Gamma: seconds a byte of an addition on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    total, part = torch.ones(BLOCK // 4), torch.zeros(BLOCK // 4)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(100):
            total += part
        times.append((time.perf_counter() - began) / 100 / BLOCK)
    torch.set_num_threads(threads)
    return min(times)


def median(some: list[Costs]) -> Costs | None:
    return (
        Costs(*(statistics.median(column) for column in zip(*some, strict=True))) if some else None
    )


def tell(
    hosts: list[str], measured: dict[str, list[Costs]], found: dict[str, Costs | None]
) -> None:
    count = len(set(hosts))
    print(f"{count} hosts, {len(hosts)} ranks")
    for name, cost in found.items():
        if cost is None:
            print(f"{name}: not measured, each host has one rank")
            continue
        low, high = (
            Costs(*(end(c) for c in zip(*measured[name], strict=True))) for end in (min, max)
        )
        print(f"{name}: {model.describe(cost)}")
        if len(measured[name]) > 1:
            print(f"  {len(measured[name])} pairs, from: {model.describe(low)}")
            print(f"  to: {model.describe(high)}")
    network = found["network"]
    assert network is not None
    hosts_then = max(count, 4)  # between two of them there is little to choose
    print(f"chosen between {hosts_then} hosts:")
    for name, limit in costs.limits(network, hosts_then).items():
        print(f"  {name} up to {'any number of' if limit == costs.ANY_SIZE else limit} bytes")


def write(output: Path, hosts: list[str], found: dict[str, Costs | None]) -> None:
    body = {
        "ringcomm": ringcomm.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hosts": len(set(hosts)),
        "ranks": len(hosts),
        **{name: cost and cost._asdict() for name, cost in found.items()},
    }
    output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}: RINGCOMM_COSTS={output}, at rank 0, makes a job choose by it")
