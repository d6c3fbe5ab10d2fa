"""`ringcomm plan simulate` beside measured times, between hosts on this machine.

Hosts are network namespaces on links as slow as `--rate` says: root and iproute2 are needed, and
nothing outside them is touched. `ringcomm tune` measures the costs on these links.
Then every algorithm is simulated by them, and measured.

    python benchmarks/simulated.py --hosts 2,4,8 --rate 50mbit --json simulated.json

All ranks begin an operation at the same moment, by the clock that the namespaces have in common. It
ends when the last rank is there. Algorithms take turns, so what disturbs the machine disturbs them
alike; the median of all turns counts. A call before each keeps TCP's windows as they are in a
training, where connections are never idle for long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from between_hosts import call_of, parse_size, tuned

from lab.hosts import Hosts
from lab.namespaces import missing, tool
from lab.wan import Wan
from ringcomm._network import costs
from ringcomm.algorithms.call import call_of as planned
from ringcomm.tools.plan.simulate import files, topology
from ringcomm.tools.plan.simulate.engine import simulate
from ringcomm.tools.plan.source import plans_of

ALGORITHMS = {
    "all_reduce": ("ring", "doubling", "bruck"),
    "reduce_scatter": ("ring", "pairwise", "bruck"),
    "all_gather": ("ring", "pairwise", "bruck"),
    "broadcast": ("ring", "tree"),
}
AHEAD = 0.012  # seconds between the word to begin and the beginning
# The state of TCP after some steps of a training: windows that do not limit, and no slow begin.
TCP = (
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_rmem=4096 8388608 33554432",
    "net.ipv4.tcp_wmem=4096 4194304 33554432",
)
# One connection, since the links are one route; and ranks that wait leave the cores to others.
ENV = {"RINGCOMM_FLOWS": "1", "RINGCOMM_SPIN_US": "0"}


class Case(NamedTuple):
    collective: str
    algorithm: str
    bytes: int


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for collective in options.collectives.split(","):
        for algorithm in ALGORITHMS[collective]:
            for size in map(parse_size, options.sizes.split(",")):
                yield Case(collective, algorithm, size)


# ---- a rank


def be_rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    import ringcomm

    dist.init_process_group("ringcomm")
    size = dist.get_world_size()
    names = sorted({case.algorithm for case in cases(options)})
    groups = {
        name: dist.new_group(backend="ringcomm", pg_options=ringcomm.Options(algorithm=name))
        for name in names
    }
    calls = {
        case: call_of(case.collective, case.bytes, size, groups[case.algorithm])
        for case in cases(options)
    }
    time_all(list(calls.values()), options.turns)
    dist.destroy_process_group()


def time_all(calls: Sequence[Callable[[], object]], turns: int) -> None:
    """Have calls take turns. Rank 0 prints the seconds until the last rank's end, by call."""
    import torch.distributed as dist

    ends: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for number, call in enumerate(calls):
            end_of(call)  # TCP begins slowly on a connection that was idle; training is not idle
            end = end_of(call)
            if turn:
                ends[number].append(end)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, ends)
    if dist.get_rank() == 0:
        latest = [[max(some) for some in zip(*by, strict=True)] for by in zip(*told, strict=True)]
        print(json.dumps(latest), flush=True)


def end_of(call: Callable[[], object]) -> float:
    """Seconds from the moment at which all ranks begin to this rank's end."""
    import torch
    import torch.distributed as dist

    moment = torch.tensor([time.monotonic() + AHEAD], dtype=torch.float64)
    dist.barrier()
    moment[0] = time.monotonic() + AHEAD
    dist.broadcast(moment, 0)
    begin = float(moment)
    time.sleep(max(0.0, begin - time.monotonic()))
    call()
    return time.monotonic() - begin


# ---- beside the simulation


def shape(hosts: Hosts, rate: str) -> None:
    """Limit what leaves each host. A larger burst would let short messages pass at any rate."""
    for namespace in hosts.namespaces:
        words = ["qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate]
        tool("tc", "-n", namespace, *words, "burst", "3kb", "latency", "200ms")
        for setting in TCP:
            tool("ip", "netns", "exec", namespace, "sysctl", "-qw", setting)


def links(hosts: int, fabrics: costs.Fabrics) -> topology.Topology:
    """Return these links: nothing limits what comes to a host."""
    rate = 1 / fabrics.network.beta
    names = [f"host{host}" for host in range(hosts)]
    ways = [{"from": name, "to": "switch", "rate": rate, "one_way": True} for name in names]
    ways += [{"from": "switch", "to": name, "rate": rate * 1e3, "one_way": True} for name in names]
    return files.parse({"hosts": names, "links": ways}, "lab", fabrics.network.alpha)


def measure(hosts: Hosts, script: str) -> list[list[float]]:
    """Run this script as a rank on each host; what rank 0 has printed."""
    command = [sys.executable, script, "--as-rank", *sys.argv[1:]]
    first = hosts.run_ranks(command, 1, timeout=500)[0]
    lines = [line for line in first.output.splitlines() if line.startswith("[[")]
    if not lines:
        sys.exit(first.output)
    seconds: list[list[float]] = json.loads(lines[-1])
    return seconds


def simulated(case: Case, hosts: int, fabrics: costs.Fabrics) -> float:
    whole = max(case.bytes // 4, hosts) // hosts * hosts * 4  # as call_of rounds it
    group = plans_of(planned(case.collective, hosts, whole, hosts), case.algorithm)
    return simulate(group, links(hosts, fabrics), fabrics).seconds


def compare(hosts: int, fabrics: costs.Fabrics, times: list[list[float]], some: list[Case]) -> Any:
    rows = []
    for case, measured in zip(some, times, strict=True):
        model, median = simulated(case, hosts, fabrics), statistics.median(measured)
        rows.append({"hosts": hosts, **case._asdict(), "simulated": model, "measured": measured})
        low, high = min(measured) * 1e3, max(measured) * 1e3
        print(
            f"{hosts} hosts  {case.collective:14} {case.algorithm:9} {case.bytes:>8} B  simulated "
            f"{model * 1e3:7.2f} ms  measured {median * 1e3:7.2f} ms ({low:.2f}..{high:.2f})  "
            f"{model / median - 1:+6.1%}",
            flush=True,
        )
    return rows


def tell(rows: list[dict[str, Any]]) -> None:
    """By the median of the turns, and by the fastest, which nothing has disturbed."""
    for name, pick in (("median", statistics.median), ("fastest", min)):
        off = [abs(row["simulated"] / pick(row["measured"]) - 1) for row in rows]
        within = sum(error <= 0.15 for error in off)
        middle, worst = statistics.median(off), max(off)
        text = f"{within} of {len(off)} within 15 %; in the middle {middle:.1%}, worst {worst:.1%}"
        print(f"by the {name} of the turns: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", default="2,4,8", help="how many, in turn")
    parser.add_argument("--rate", default="50mbit", help="of what leaves a host")
    parser.add_argument("--wan", type=Wan.of, metavar="MBIT,MS", help="long links in their place")
    parser.add_argument("--collectives", default=",".join(ALGORITHMS))
    parser.add_argument("--sizes", default="64K,256K,1M")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_rank(options)
        return
    if reason := missing():
        sys.exit(reason)
    os.environ.update(ENV, RINGCOMM_CONGESTION=options.congestion)  # for `ringcomm tune`, too
    rows: list[dict[str, Any]] = []
    for count in map(int, options.hosts.split(",")):
        with Hosts(count, far=options.wan) as hosts, tempfile.TemporaryDirectory() as folder:
            if not options.wan:
                shape(hosts, options.rate)
            fabrics = costs.read(tuned(hosts, Path(folder), 1)).fabrics
            rows += compare(count, fabrics, measure(hosts, __file__), list(cases(options)))
    tell(rows)
    if options.json:
        body = {
            "benchmark": "simulated",
            "load": os.getloadavg(),
            "rate": options.rate,
            "congestion": options.congestion,
            "wan": options.wan,
            "rows": rows,
        }
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
