"""Collectives beside those of other libraries, on a machine that may have other things to do.

    python benchmarks/peers.py --backends ringcomm,gloo,openmpi,mpich,deepspeed
    python benchmarks/peers.py --busy 1,2               # processes that compute all the time
    python benchmarks/peers.py --busy 1,2 --transport tcp
    python benchmarks/peers.py --quota 0.5              # of a core, for each rank; needs root
    python benchmarks/peers.py --row 100 --type bfloat16 --sizes 16K,64K,128K
                                                        # as a model makes a token
    python benchmarks/peers.py --collectives ddp --sizes 16M --busy 0,4

Busy processes run on whichever core the kernel puts them. Each figure is the median of all calls
and the mean of the rounds' means; a call's time is that of its slowest rank. "share" is the time
that the busy processes got beside ringcomm, of what the scheduler would give them if the ranks
computed, too. MPI needs mpirun and `pip install mpi4py`, DeepSpeed's kernel needs
`pip install deepspeed`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from lab import benchmark, report
from lab.benchmark import BusyCores
from lab.peers import Call, Peer, Settings, peer
from lab.quotas import Quotas


class Watched:
    """The time that busy processes have, of what they could have."""

    def __init__(self, busy: BusyCores, ranks: int) -> None:
        self.busy = busy
        count, cores = len(busy.processes), len(os.sched_getaffinity(0))
        self.fair = min(1.0, cores / (count + ranks)) if count else 0.0
        self.had, self.could = 0.0, 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.busy.run()
        before, start = self.busy.seconds(), time.perf_counter()
        yield
        self.had += self.busy.seconds() - before
        self.could += (time.perf_counter() - start) * self.fair * len(self.busy.processes)
        self.busy.pause()

    @property
    def share(self) -> float | None:
        return self.had / self.could if self.could else None


def measure(
    peers: dict[str, Peer], busy: BusyCores, options: argparse.Namespace, call: Call
) -> dict[str, Any]:
    """Return the figures of every peer, which are measured in turn."""
    watched = {name: Watched(busy, options.ranks) for name in peers}
    rounds: dict[str, list[list[float]]] = {name: [] for name in peers}
    for number in range(options.rounds):
        text = f"{call.collective} {report.show_size(call.size)} {len(busy.processes)} busy"
        report.progress(f"{text} round {number + 1}")
        for name, measured in peers.items():
            with watched[name]():
                rounds[name].append(measured.times(call, options.seconds))
    report.progress("")
    figures = {
        name: {
            "median_s": statistics.median(itertools.chain(*of)),
            "mean_s": statistics.mean(statistics.mean(times) for times in of),
            "rounds_s": [(statistics.median(times), statistics.mean(times)) for times in of],
            "share": watched[name].share,
        }
        for name, of in rounds.items()
        if of[0]
    }
    return {"collective": call.collective, "bytes": call.size, "in_a_row": call.row,
            "type": call.type, "busy": len(busy.processes), "peers": figures}  # fmt: skip


def row_of(figures: dict[str, Any], names: list[str]) -> list[str]:
    peers = figures["peers"]
    cells = [figures["collective"], report.show_size(figures["bytes"]), str(figures["busy"])]
    for name in names:
        figure = peers.get(name)
        times = (figure["median_s"], figure["mean_s"]) if figure else ()
        cells.append(" ".join(f"{seconds * 1e6:.1f}" for seconds in times))
    first = peers.get(names[0])
    others = [figure for name, figure in peers.items() if name != names[0]]
    for kind in ("median_s", "mean_s"):
        best = min((figure[kind] for figure in others), default=0.0)
        cells.append(f"{first[kind] / best:.2f}" if first and best else "")
    share = first["share"] if first else None
    cells.append(f"{share:.0%}" if share is not None else "")
    return cells


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    every = []
    with contextlib.ExitStack() as stack:
        quotas = stack.enter_context(Quotas(options.quota)) if options.quota else None
        settings = Settings(options.ranks, options.transport, options.deadline, quotas)
        peers = {name: stack.enter_context(peer(name, settings)) for name in options.backends}
        calls = [
            Call(what, size, options.row, options.type)
            for what in options.collectives
            for size in options.sizes
        ]
        for count in options.busy:
            with BusyCores(options.deadline, count) as busy:
                every += [measure(peers, busy, options, call) for call in calls]
    first = options.backends[0]
    quota = f", {options.quota} of a core each" if options.quota else ""
    print(
        f"{options.ranks} ranks on {len(os.sched_getaffinity(0))} cores{quota}, {options.type}, "
        f"transport {options.transport}: median and mean of the calls of {options.rounds} rounds, "
        f"µs; and how many times as long as the best of the others {first} takes\n"
    )
    head = ["collective", "bytes", "busy", *options.backends, "median", "mean", "share"]
    report.print_table(head, [row_of(some, options.backends) for some in every], options.markdown)
    body = {"machine": machine, "ranks": options.ranks, "transport": options.transport,
            "quota": options.quota, "figures": every}  # fmt: skip
    report.write_json(options.json, "peers", body)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--busy", type=report.list_of(int), default="0", help="processes that compute")
    add("--sizes", type=report.list_of(report.size), default="8,16K,256K,4M,16M,64M")
    add("--collectives", type=report.list_of(str), default="all_reduce",
        help="ddp: a step of training, with gradients of that size")  # fmt: skip
    add("--type", default="float32", help="of the elements; MPI has float32 alone")
    add("--row", type=report.positive, default=1, help="collectives in a row are a call")
    add("--backends", type=report.list_of(str), default="ringcomm,gloo",
        help="openmpi,mpich,deepspeed; the first is compared with the others")  # fmt: skip
    add("--transport", choices=["auto", "tcp"], default="auto", help="of ringcomm")
    add("--quota", type=float, default=0, metavar="SHARE", help="of a core, for each rank")
    add("--rounds", type=report.positive, default=5)
    add("--seconds", type=float, default=0.3, help="how long a round of one way takes, about")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
