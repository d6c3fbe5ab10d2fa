"""Collectives between hosts, ringcomm beside Gloo.

Hosts are network namespaces with links as slow as `--rate` says: root, iproute2 and nftables are
needed, and nothing outside them is touched.

    python benchmarks/between_hosts.py --hosts 2,4 --rate 1gbit
    python benchmarks/between_hosts.py --hosts 2 --local 4 --rate 1gbit --sizes 16M --json b.json
    python benchmarks/between_hosts.py --wan 300,25,0.1 --collectives all_reduce --sizes 1M,32M
    RINGCOMM_FLOWS=2 python benchmarks/between_hosts.py --hosts 2 --rate 200mbit --second 20mbit
    python benchmarks/between_hosts.py --hosts 4 --sites 2 --wan 100,5 --sizes 64K,16M
    python benchmarks/between_hosts.py --hosts 2 --rate 1gbit --tls

With `--sites` the hosts are spread over so many. Inside a site links are as `--rate` says, and each
host has a long one to the other sites. First `ringcomm tune` measures them. Then the plans by its
file are beside a flat ring in the order of the ranks, which is made before there is such a file.
With `--tls` jobs whose connections are encrypted take turns with jobs whose are not.

Both backends are in the same processes and take turns, so what disturbs the machine disturbs them
alike. The bound is 2 (n-1)/n bytes for all_reduce, (n-1)/n for the others, n hosts, over what one
plain TCP connection carries both ways between two of them in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import report
from lab.benchmark import ask_ranks
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.wan import Wan

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
PLAIN_BYTES = 32 << 20
JOBS = 3  # per kind, with --tls
parse_size = report.size
ENCRYPTED = {"RINGCOMM_TLS": "on", "RINGCOMM_SECRET": "of this benchmark"}


def connect(rank: int, address: str) -> socket.socket:
    """Return a connection between the first rank of each of two hosts."""
    if rank == 0:
        with socket.create_server(("", 40999)) as server:
            return server.accept()[0]
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((address, 40999))
        time.sleep(0.05)
    raise TimeoutError("the first host does not listen")


def plain_tcp(rank: int, local: int, address: str) -> list[float]:
    """Bytes a second of one TCP connection between two hosts, both ways at once, of four times.

    The first is slower: TCP begins slowly. The congestion control is that of ringcomm.
    """
    if rank not in (0, local):
        return []
    rates, data, into = [], bytes(PLAIN_BYTES), bytearray(1 << 20)
    with connect(rank, address) as stream:
        if name := os.environ.get("RINGCOMM_CONGESTION"):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        for _ in range(4):
            began, got = time.perf_counter(), 0
            writer = threading.Thread(target=stream.sendall, args=(data,))
            writer.start()
            while got < PLAIN_BYTES:
                got += stream.recv_into(into, min(len(into), PLAIN_BYTES - got))
            writer.join()
            stream.sendall(b".")
            stream.recv(1)
            rates.append(PLAIN_BYTES / (time.perf_counter() - began))
    return rates


def call_of(
    collective: str, size: int, ranks: int, group: Any, kind: str = "float32"
) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    dtype: torch.dtype = getattr(torch, kind)
    count = max(size // dtype.itemsize, ranks) // ranks * ranks
    whole, shard = torch.zeros(count, dtype=dtype), torch.zeros(count // ranks, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }
    return calls[collective]


def groups_to_compare(options: argparse.Namespace) -> dict[str, Any]:
    """The one that others are compared with comes first."""
    import torch.distributed as dist

    dist.init_process_group("ringcomm" if options.tls else "gloo")
    if options.tls:
        return {"encrypted" if "RINGCOMM_TLS" in os.environ else "in clear": dist.group.WORLD}
    if options.sites == 1:
        return {"gloo": dist.group.WORLD, "ringcomm": dist.new_group(backend="ringcomm")}
    import ringcomm

    ring = ringcomm.Options(algorithm="ring")
    groups = {"flat ring": dist.new_group(backend="ringcomm", pg_options=ring)}
    if dist.get_rank() == 0:  # it reads the file for each group anew
        tuned = Path(os.environ["RINGCOMM_COSTS"])
        shutil.copy(tuned.with_name("tuned.json"), tuned)
    return {**groups, "by sites": dist.new_group(backend="ringcomm")}


def be_rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    plain = plain_tcp(rank, local, os.environ["MASTER_ADDR"])
    groups = groups_to_compare(options)
    rows = []
    for collective in options.collectives.split(","):
        for size in map(parse_size, options.sizes.split(",")):
            calls = {
                backend: call_of(collective, size, dist.get_world_size(), group, options.type)
                for backend, group in groups.items()
            }
            repeat = 2 if size >= 1 << 20 else 5 if options.wan else 100
            times: dict[str, list[float]] = {backend: [] for backend in groups}
            for turn in range(options.turns + 1):
                for backend, call in calls.items():
                    dist.barrier(groups[backend])
                    began = time.perf_counter()
                    for _ in range(repeat):
                        call()
                    if turn:
                        times[backend].append((time.perf_counter() - began) / repeat)
            rows.append({"collective": collective, "bytes": size, "times": times})
    if rank == 0:
        print(json.dumps({"plain": plain, "rows": rows}), flush=True)
    dist.destroy_process_group()


def show(answer: dict[str, Any], hosts: int, local: int) -> list[dict[str, Any]]:
    results = []
    for row in answer["rows"]:
        other, ours = row["times"]
        medians = {backend: statistics.median(t) for backend, t in row["times"].items()}
        moved = row["bytes"] * (hosts - 1) / hosts * (2 if row["collective"] == "all_reduce" else 1)
        if row["collective"] == "broadcast":
            moved = row["bytes"]
        bound = moved / statistics.median(answer["plain"][1:])
        spread = {b: f"{min(t) * 1e3:.3g}..{max(t) * 1e3:.3g}" for b, t in row["times"].items()}
        ratio = medians[other] / medians[ours]
        in_full = row["bytes"] >= 1 << 20 and ours in ("ringcomm", "encrypted")
        share = f"{bound / medians[ours]:.0%} of the bound" if in_full else ""
        print(
            f"{hosts} x {local}  {row['collective']:14} {row['bytes']:>9} B  "
            f"{ours} {medians[ours] * 1e3:8.3g} ms ({spread[ours]})  "
            f"{other} {medians[other] * 1e3:8.3g} ms ({spread[other]})  {ratio:5.2f}x  {share}"
        )
        results.append({**row, "hosts": hosts, "local": local, "ratio": ratio, "bound": bound})
    return results


def tuned(hosts: Hosts, folder: Path, local: int) -> Path:
    """Run `ringcomm tune` on the hosts. The result has its costs alone; tuned.json has all."""
    whole, costs = folder / "tuned.json", folder / "costs.json"
    words: list[str | Path] = [sys.executable, "-m", "ringcomm", "tune", "--output", whole]
    first = hosts.run_ranks(words, local, timeout=200)[0]
    if first.returncode != 0:
        sys.exit(first.output)
    print(first.output, end="")
    body = json.loads(whole.read_text())
    costs.write_text(json.dumps({name: body[name] for name in ("memory", "network")}))
    return costs


def run_in_turn(hosts: Hosts, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of several jobs as those of one."""
    answers = [
        ask_ranks(hosts, __file__, options.local, env)
        for _ in range(JOBS)
        for env in ({}, ENCRYPTED)
    ]
    whole: dict[str, Any] = answers[0]
    for answer in answers[1:]:
        whole["plain"] += answer["plain"][1:]
        for row, more in zip(whole["rows"], answer["rows"], strict=True):
            for name, times in more["times"].items():
                row["times"][name] = row["times"].get(name, []) + times
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", default="2,4", help="how many, in turn")
    parser.add_argument("--local", type=int, default=1, help="ranks on each host")
    parser.add_argument("--rate", default="1gbit", help="of each link; empty: as fast as it goes")
    parser.add_argument(
        "--wan",
        type=Wan.of,
        metavar="MBIT,MS[,PERCENT]",
        help="long links: rate, delay one way, packets lost",
    )
    parser.add_argument("--sites", type=int, default=1, help="the hosts are spread over them")
    parser.add_argument("--tls", action="store_true", help="encrypted beside in clear")
    parser.add_argument("--second", help="the rate of a second network between them, if any")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default="1K,64K,16M")
    parser.add_argument("--type", default="float32", help="of the elements")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_rank(options)
        return
    if reason := missing():
        sys.exit(reason)
    results = []
    for count in map(int, options.hosts.split(",")):
        far = options.sites > 1
        rate = options.rate or None if far or not options.wan else None
        site_of = [host * options.sites // count for host in range(count)] if far else []
        with (
            Hosts(count, rate=rate, far=options.wan, site_of=site_of) as hosts,
            tempfile.TemporaryDirectory() as folder,
        ):
            if options.second:
                hosts.second_network(options.second)
            env = {"RINGCOMM_COSTS": str(tuned(hosts, Path(folder), options.local))} if far else {}
            answer = (
                run_in_turn(hosts, options)
                if options.tls
                else ask_ranks(hosts, __file__, options.local, env)
            )
        plain = answer["plain"]
        shown = " ".join(f"{PLAIN_BYTES / rate:.3g}" for rate in plain)
        print(f"plain TCP, {PLAIN_BYTES >> 20} MiB both ways: {shown} s")
        results += show(answer, count, options.local)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
