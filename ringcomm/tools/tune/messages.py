"""`ringcomm tune` in a job: what messages cost between its hosts, and inside them."""

from __future__ import annotations

import argparse
import datetime
import itertools
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
from ringcomm import _planner
from ringcomm._network import costs, order, probes
from ringcomm._network.costs import Costs, Fabrics, Hosts
from ringcomm._runtime import host as this_host

MOST_PAIRS = 4  # per kind: "near" in one site, "far" between two, "memory" in one host
ENDS = ("near", "far")
ROUNDS, SECONDS = 7, 0.02  # per measurement; its fastest counts, others were disturbed
LONGEST = 1.0  # seconds that its rounds take, where links are slow
LARGE = 8 << 20
SEGMENT = _planner.LIMITS["segment_bytes"]
BLOCK = 256 << 10  # bytes, that a core adds up out of its cache

Pair = tuple[int, int]


def run(options: argparse.Namespace) -> int:
    if "RANK" not in os.environ:
        raise ValueError("start it as the job is: torchrun ... -m ringcomm tune --output FILE")
    dist.init_process_group("ringcomm")
    try:
        return tune(options.output)
    finally:
        dist.destroy_process_group()


def tune(output: Path | None) -> int:
    mine = this_host.key(dist.get_rank()), this_host.name()
    told: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    ranks: dict[str, list[int]] = {}  # by host
    for rank, (host, _) in enumerate(told):
        ranks.setdefault(host, []).append(rank)
    if len(ranks) < 2:
        raise ValueError(
            "all ranks are on one host, and there is no network to measure "
            "(RINGCOMM_TRANSPORT=tcp measures TCP inside it)"
        )
    firsts = [some[0] for some in ranks.values()]
    began = time.monotonic()
    latency, rate = probes.measure(firsts)
    took = time.monotonic() - began
    pairs = pairs_of(list(ranks.values()), order.laid_out(latency, rate))
    measured = {name: measure(some, name != "memory") for name, some in pairs.items()}
    if dist.get_rank() == 0:
        network = measured["near"] + measured["far"]
        medians = {name: median(some) for name, some in {**measured, "network": network}.items()}
        names = [told[rank][1] for rank in firsts]
        costs_now = Fabrics(medians["memory"] or costs.DEFAULT.memory, median_of(network))
        hosts = Hosts(names, latency, rate, *(medians[n] or costs_now.network for n in ENDS))
        print(f"{len(firsts)} hosts, {len(told)} ranks")
        tell_pairs(hosts, took)
        tell(len(firsts), {**measured, "network": network}, medians)
        if output:
            write(output, len(told), hosts, medians)
    return 0


def pairs_of(hosts: list[list[int]], along: list[tuple[int, int]]) -> dict[str, list[Pair]]:
    """Return neighbours along the ring, of one site and of two; and two ranks of each host."""
    ring = list(zip(along, along[1:] + along[:1], strict=True))[: None if len(hosts) > 2 else 1]
    pairs: dict[str, list[Pair]] = {"near": [], "far": [], "memory": []}
    for (host, site), (other, other_site) in ring:
        name = "near" if site == other_site else "far"
        pairs[name].append((hosts[host][0], hosts[other][0]))
    pairs["memory"] = [(some[0], some[1]) for some in hosts if len(some) > 1]
    return {name: some[:MOST_PAIRS] for name, some in pairs.items()}


def measure(pairs: list[Pair], across: bool) -> list[Costs]:
    """Measure one pair after another, while the other ranks wait; all get all figures."""
    rank, figures_of_pairs = dist.get_rank(), []
    for pair in pairs:
        group = dist.new_group(list(pair))
        figures: list[Any] = [None]
        if rank in pair:
            figures = [measure_pair(group, across)]
            dist.destroy_process_group(group)
        dist.broadcast_object_list(figures, pair[0])
        figures_of_pairs.append(Costs(*figures[0]))
    return figures_of_pairs


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
    # Across hosts a half is one message. In memory it is copied in and out, segment by segment.
    rounds, sent = (1, LARGE // 2) if across else (LARGE // 2 // SEGMENT, LARGE)
    beta = max(large - rounds * alpha, large / 10) / sent
    return [alpha, beta, time_sum()]


def time_call(group: Any, call: Callable[[], object]) -> float:
    """Return the seconds of a call, by the same number of them on both ranks."""
    call()
    began = time.perf_counter()
    call()
    typical = torch.tensor(time.perf_counter() - began)
    dist.broadcast(typical, group_src=0, group=group)
    calls = max(1, min(1000, int(SECONDS / float(typical))))
    times = []
    for _ in range(max(2, min(ROUNDS, int(LONGEST / (calls * float(typical)))))):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls)
    return min(times)


def time_sum() -> float:
    """Return gamma: seconds a byte of an addition on one core."""
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
    return median_of(some) if some else None


def median_of(some: list[Costs]) -> Costs:
    return Costs(*(statistics.median(column) for column in zip(*some, strict=True)))


def tell_pairs(hosts: Hosts, took: float) -> None:
    count = len(hosts.names)
    delays = [hosts.latency[a][b] * 1e6 for a, b in itertools.combinations(range(count), 2)]
    rates = [hosts.rate[a][b] * 8e-6 for a, b in itertools.combinations(range(count), 2)]
    print(
        f"{len(delays)} pairs in {took:.1f} s: {min(delays):.0f} to {max(delays):.0f} us one way,"
    )
    print(f"  {min(rates):.0f} to {max(rates):.0f} Mbit/s both ways at once")
    along = order.laid_out(hosts.latency, hosts.rate)
    print(f"ring: {' '.join(hosts.names[host] for host, _ in along)}")
    sites: dict[int, list[str]] = {}
    for host, site in along:
        sites.setdefault(site, []).append(hosts.names[host])
    if len(sites) < count:
        print(f"sites: {'; '.join(' '.join(names) for names in sites.values())}")


def tell(count: int, measured: dict[str, list[Costs]], medians: dict[str, Costs | None]) -> None:
    for name, cost in medians.items():
        if cost is None:
            print(f"{name}: not measured, there is no such pair")
            continue
        low, high = (
            Costs(*(end(c) for c in zip(*measured[name], strict=True))) for end in (min, max)
        )
        print(f"{name}: {cost.text}")
        if len(measured[name]) > 1:
            print(f"  {len(measured[name])} pairs, from: {low.text}")
            print(f"  to: {high.text}")
    hosts_then = max(count, 4)  # between two of them there is little to choose
    print(f"chosen between {hosts_then} hosts:")
    any_size = _planner.LIMITS["any_size"]
    for name, limit in costs.limits(median_of(measured["network"]), hosts_then).items():
        print(f"  {name} up to {'any number of' if limit == any_size else limit} bytes")


def write(output: Path, ranks: int, hosts: Hosts, medians: dict[str, Costs | None]) -> None:
    body: dict[str, Any] = {
        "ringcomm": ringcomm.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hosts": len(hosts.names),
        "ranks": ranks,
        **{name: cost and cost._asdict() for name, cost in medians.items()},
    }
    if len(set(hosts.names)) == len(hosts.names):
        body |= {"names": hosts.names, "latency": hosts.latency, "rate": hosts.rate}
    else:
        print("hosts have the same name, so the file has no order: give each its RINGCOMM_HOST")
    output.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}: RINGCOMM_COSTS={output}, at rank 0, makes a job choose by it")
