"""Plans that `ringcomm plan search` finds beside the ring, between hosts whose links differ.

Hosts are network namespaces on this machine: root and iproute2 are needed, and nothing outside them
is touched. Their links are shaped as a file of `examples/topologies` says.

    python benchmarks/searched.py --topologies uplink,sites --json searched.json

All ranks begin an operation at the same moment, by the clock that the namespaces have in common. It
ends when the last rank is there. The ring, the library's choice and the plan take turns, so what
disturbs the machine disturbs them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from between_hosts import call_of, parse_size
from simulated import ENV, end_of

from lab.hosts import Hosts
from lab.namespaces import missing, tool
from ringcomm._network.costs import Network
from ringcomm.tools.plan.search import tries, writing
from ringcomm.tools.plan.search.command import CHUNKS, TRIES, ring_of
from ringcomm.tools.plan.search.tries import Task
from ringcomm.tools.plan.simulate import files
from ringcomm.tools.plan.simulate.topology import Topology
from ringcomm.tools.plan.source import load

FOLDER = Path(__file__).parent.parent / "examples" / "topologies"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
WIRE = 1514 / 1448 * 8  # bits on the wire for a byte of a message: the headers of Ethernet and TCP
RING, CHOICE, FOUND = "ring", "the library's choice", "found"


class Case(NamedTuple):
    collective: str
    bytes: int


def cases(options: argparse.Namespace) -> list[Case]:
    sizes = [parse_size(word) for word in options.sizes.split(",")]
    return [Case(name, size) for name in options.collectives.split(",") for size in sizes]


def rounded(size: int, ranks: int) -> int:
    """Return the bytes that `call_of` makes of it."""
    return max(size // 4, ranks) // ranks * ranks * 4


# ---- a rank


def be_rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    import ringcomm

    dist.init_process_group("ringcomm")
    size = dist.get_world_size()
    groups = {RING: group_of("ring"), CHOICE: dist.new_group(backend="ringcomm")}
    calls: dict[tuple[Case, str], Callable[[], object]] = {}
    for case in cases(options):
        name = f"found_{case.collective}_{case.bytes}"
        file = f"{options.folder}/{name}.py:{case.collective}"
        ringcomm.algorithms.register_algorithm(name, load(file), [case.collective])
        for way, group in {**groups, FOUND: group_of(name)}.items():
            calls[case, way] = call_of(case.collective, case.bytes, size, group)
    ends: list[list[float]] = [[] for _ in calls]
    for turn in range(options.turns + 1):
        for number, call in enumerate(calls.values()):
            end = end_of(call)
            if turn:  # plans and connections are made in the first one
                ends[number].append(end)
    told: list[Any] = [None] * size
    dist.all_gather_object(told, ends)
    if dist.get_rank() == 0:
        latest = [[max(some) for some in zip(*by, strict=True)] for by in zip(*told, strict=True)]
        print(json.dumps(latest), flush=True)
    dist.destroy_process_group()


def group_of(algorithm: str) -> Any:
    import torch.distributed as dist

    import ringcomm

    options = ringcomm.Options(algorithm=algorithm)
    return dist.new_group(backend="ringcomm", pg_options=options)


# ---- links


def shape(hosts: Hosts, where: Topology) -> None:
    """Give the links of a topology to hosts: each is at one switch, and switches at one another.

    A larger burst would let short messages pass at any rate.
    """
    space, switches = hosts.switch, sorted({link.target for link in where.links} - set(where.hosts))
    bridge = {name: f"switch{i}" if i else "switch" for i, name in enumerate(switches)}
    for name in list(bridge.values())[1:]:
        tool("ip", "-n", space, "link", "add", "name", name, "type", "bridge", "mcast_snooping", 0)
        tool("ip", "-n", space, "link", "set", name, "up")
    for link in where.links:
        if link.source in where.hosts:
            host = where.hosts.index(link.source)
            tool("ip", "-n", space, "link", "set", f"port{host}", "master", bridge[link.target])
            limit(hosts.namespaces[host], "eth0", link.rate)
        elif link.target in where.hosts:
            limit(space, f"port{where.hosts.index(link.target)}", link.rate)
        else:
            near, far = f"{link.source}-{link.target}", f"{link.target}-{link.source}"
            if link.source < link.target:  # the other way is the same cable
                words = ["link", "add", "name", near, "type", "veth", "peer", "name", far]
                tool("ip", "-n", space, *words)
                for end, name in ((near, link.source), (far, link.target)):
                    tool("ip", "-n", space, "link", "set", end, "master", bridge[name], "up")
            limit(space, near, link.rate)


def limit(space: str, device: str, rate: float) -> None:
    words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate * WIRE:.0f}bit"]
    tool("tc", "-n", space, *words, "burst", "16kb", "latency", "200ms")


# ---- all of it


def write_plans(where: Topology, options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Search a plan for each case, write it, and return what the simulation says of it."""
    rows = []
    for case in cases(options):
        size = rounded(case.bytes, len(where.hosts))
        task = Task(case.collective, size, 0, where, Network())
        best = tries.search(task, CHUNKS, TRIES, 0)
        text = writing.text_of(best.form, best.steps, f"{case.collective} on {where.name}.")
        Path(f"{folder}/found_{case.collective}_{case.bytes}.py").write_text(text)
        ring = ring_of(tries.library(task)).seconds
        simulated = {RING: ring, FOUND: best.seconds}
        parts = best.form.parts
        rows.append({**case._asdict(), "bytes": size, "parts": parts, "simulated": simulated})
    return rows


def measure(where: Topology, options: argparse.Namespace) -> list[dict[str, Any]]:
    with Hosts(len(where.hosts)) as hosts, tempfile.TemporaryDirectory() as folder:
        shape(hosts, where)
        rows = write_plans(where, options, folder)
        words = [*sys.argv[1:], "--folder", folder]
        command = [sys.executable, __file__, "--as-rank", *words]
        first = hosts.run_ranks(command, 1, ENV, timeout=500)[0]
    lines = [line for line in first.output.splitlines() if line.startswith("[[")]
    if not lines:
        sys.exit(first.output)
    times = iter(json.loads(lines[-1]))
    for row in rows:
        row["measured"] = {way: next(times) for way in (RING, CHOICE, FOUND)}
        tell(where, row)
    return rows


def tell(where: Topology, row: dict[str, Any]) -> None:
    measured = row["measured"]
    medians = {way: statistics.median(some) for way, some in measured.items()}
    print(f"{where.name}  {row['collective']} of {row['bytes']} B")
    for way, some in measured.items():
        text = f"{medians[way] * 1e3:7.1f} ms ({min(some) * 1e3:.1f}..{max(some) * 1e3:.1f})"
        if way in row["simulated"]:
            text += f", simulated {row['simulated'][way] * 1e3:7.1f} ms"
        print(f"  {way:21} {text}")
    print(
        f"  the ring takes {medians[RING] / medians[FOUND]:.2f} times as long as found", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--topologies", default="uplink,sites", help="files of examples/topologies")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default="1536K", help="of the whole message")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_rank(options)
        return
    if reason := missing():
        sys.exit(reason)
    body: dict[str, Any] = {"benchmark": "searched", "load": os.getloadavg()}
    body |= {"turns": options.turns, "topologies": {}}
    for name in options.topologies.split(","):
        where = files.read(FOLDER / f"{name}.json", Network().fabrics.network.alpha)
        body["topologies"][name] = measure(where, options)
    if options.json:
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
