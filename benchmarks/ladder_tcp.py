"""The ladder over TCP, `ladder.py --tcp`: what each layer between a socket and torch costs.

From the bottom: sockets that block, woken by the kernel once a message; sockets polled for a while
and then slept on, as on all rungs above; the session, whose frames are numbered and acknowledged,
without a checksum of what they carry; with it; the network, which has a thread and a lock;
torch.distributed's send and recv on top, with Gloo's beside it. `ping` is half of there and back,
`stream` goes one way, `connect` lasts until the first answer over a new connection. For all of them
the processor time of both processes is counted too, the kernel's included.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lab import benchmark, report
from lab.benchmark import BenchmarkError, Measured
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.programs import Program
from lab.ranks import Rank
from ringcomm.tools.bench import cases

RUNGS = ["blocking", "socket", "session", "checksum", "network"]
CONNECTS = ["socket", "handshake", "network"]
TOP = {"torch": "ringcomm", "gloo": "gloo"}  # rungs that are backends of torch
CLONE_NEWNET = 0x40000000
FEWEST, MOST = 3, 5000  # calls
SHOWN_FROM = 16 << 10  # bytes, for processor time: below, a GB is very many calls
SPIN = 50  # microseconds, a group's own choice between hosts


class Sample(NamedTuple):
    """Seconds of a call (the median), and of user and system time of all calls."""

    seconds: float
    user: float
    system: float


# ---- ranks


def enter(rank: Rank, namespaces: list[str], variables: dict[str, str]) -> None:
    """Take the environment, and move to one's own host: what was connected before stays."""
    os.environ.update(variables)
    if namespaces:
        with Path("/run/netns", namespaces[rank.index]).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


def measured(call: Callable[[], list[float]]) -> Sample:
    before = resource.getrusage(resource.RUSAGE_SELF)
    times = call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return Sample(statistics.median(times), user, system)


def message(sender: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * 31 + torch.arange(size) // 251 + sender).to(torch.uint8)


def exchange(rank: Rank, pattern: str, size: int, calls: int) -> Sample:
    """Send and receive with the other rank, as net_ladder does; once before, to look at it."""
    out, into, word = message(rank.index, size), torch.empty(size, dtype=torch.uint8), torch.ones(1)

    def there_and_back(first: torch.Tensor, back: torch.Tensor) -> None:
        for tensor, sender in ((first, 0), (back, 1)):
            if sender == rank.index:
                dist.send(tensor, 1 - sender)
            else:
                dist.recv(tensor, sender)

    def ping() -> list[float]:
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            there_and_back(*((out, into) if rank.index == 0 else (into, out)))
            times.append((time.perf_counter() - began) / 2)
        return times

    def stream() -> list[float]:
        began = time.perf_counter()
        for _ in range(calls - 1):
            _ = dist.send(out, 1) if rank.index == 0 else dist.recv(into, 0)
        there_and_back(out if rank.index == 0 else into, word)
        return [(time.perf_counter() - began) / calls]

    there_and_back(*((out, into) if rank.index == 0 else (into, out)))
    if not torch.equal(into, message(1 - rank.index, size)):
        raise cases.WrongResultError(f"send and recv of {size} bytes: other bytes came")
    benchmark.spread(rank)
    return measured(ping if pattern == "ping" else stream)


def all_reduce(rank: Rank, size: int, calls: int) -> Sample:
    """Time dist.all_reduce, each call by itself; once before, to look at it."""
    data = torch.zeros(cases.elements("all_reduce", size, rank.size))

    def reduce() -> list[float]:
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            dist.all_reduce(data)
            times.append(time.perf_counter() - began)
        return times

    cases.verify("all_reduce", len(data), rank.index, rank.size)
    benchmark.spread(rank)
    return measured(reduce)


# ---- the ladder


class Ladder:
    """All who climb it; `stack` ends them."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.options = options
        namespaces: list[str] = []
        variables = {"RINGCOMM_TRANSPORT": "tcp", "RINGCOMM_IFNAME": "lo"}
        if options.rate:
            namespaces = stack.enter_context(linked(options.rate)).namespaces
            variables = {"GLOO_SOCKET_IFNAME": "eth0", "RINGCOMM_IFNAME": "eth0"}
        if options.spin is not None:
            variables["RINGCOMM_SPIN_US"] = str(options.spin)
        spin = SPIN if options.spin is None else options.spin
        program = Program("net_ladder", spin, *namespaces, deadline=options.deadline)
        self.program = stack.enter_context(program)
        self.top = {
            rung: stack.enter_context(Measured(2, backend, options.deadline))
            for rung, backend in TOP.items()
        }
        for ranks in self.top.values():
            ranks(enter, namespaces, variables)
            ranks(benchmark.prepare)
            ranks(benchmark.join)

    def time(self, rung: str, pattern: str, size: int, calls: int) -> Sample:
        if rung not in self.top:
            return Sample(*self.program.ask(rung, pattern, size, calls))
        if pattern == "all_reduce":
            both = self.top[rung](all_reduce, size, calls)
        else:
            both = self.top[rung](exchange, pattern, size, calls)
        user, system = sum(s.user for s in both), sum(s.system for s in both)
        first = both[0].seconds
        slowest = max(s.seconds for s in both)
        return Sample(slowest if pattern == "all_reduce" else first, user, system)

    def measure(self, pattern: str, size: int) -> dict[str, Any]:
        """Return the figures of one pattern and size: each rung's rounds."""
        rungs = {"connect": CONNECTS, "all_reduce": [*TOP]}.get(pattern, [*RUNGS, *TOP])
        calls, rounds = {}, {rung: list[Sample]() for rung in rungs}
        for rung in rungs:
            typical = self.time(rung, pattern, size, FEWEST).seconds
            calls[rung] = max(FEWEST, min(MOST, int(self.options.seconds / typical)))
        for number in range(self.options.rounds):
            report.progress(f"{pattern} {report.show_size(size)} round {number + 1} ")
            for rung in rungs[number % len(rungs) :] + rungs[: number % len(rungs)]:
                rounds[rung].append(self.time(rung, pattern, size, calls[rung]))
        report.progress("")
        figures = {"pattern": pattern, "bytes": size, "calls_a_round": calls}
        return figures | summary(pattern, size, calls, rounds)


def linked(rate: str) -> Hosts:
    """Two hosts, linked at that rate, or as fast as it goes."""
    if reason := missing():
        raise BenchmarkError(reason)
    return Hosts(2, rate=None if rate == "none" else rate)


def summary(
    pattern: str, size: int, calls: dict[str, int], rounds: dict[str, list[Sample]]
) -> dict[str, Any]:
    """Return medians, spreads and prices, and processor time a call and a GB."""
    busy = {
        rung: report.Spread.of([(s.user + s.system) / calls[rung] for s in some])
        for rung, some in rounds.items()
    }
    user = {r: statistics.median(s.user / calls[r] for s in some) for r, some in rounds.items()}
    moved = size * (1 if pattern == "stream" else 2)  # per call, in both directions
    seconds = {rung: [sample.seconds for sample in some] for rung, some in rounds.items()}
    return {
        "rounds": {rung: [s._asdict() for s in some] for rung, some in rounds.items()},
        **medians(seconds, [rung for rung in rounds if rung != "gloo"]),
        "cpu_s_a_call": {rung: spread.median for rung, spread in busy.items()},
        "cpu_low_s": {rung: spread.low for rung, spread in busy.items()},
        "cpu_high_s": {rung: spread.high for rung, spread in busy.items()},
        "user_s_a_call": user,
        "cpu_s_a_gb": {rung: spread.median / moved * 1e9 for rung, spread in busy.items()},
    }


def medians(rounds: dict[str, list[float]], rungs: list[str]) -> dict[str, dict[str, float]]:
    """Return medians and spreads of all, and the price of each rung over the one before."""
    spreads = {what: report.Spread.of(times) for what, times in rounds.items()}
    return {
        "median_s": {what: spread.median for what, spread in spreads.items()},
        "low_s": {what: spread.low for what, spread in spreads.items()},
        "high_s": {what: spread.high for what, spread in spreads.items()},
        "price_s": {b: spreads[b].median - spreads[a].median for a, b in itertools.pairwise(rungs)},
    }


def print_times(some: list[dict[str, Any]], markdown: bool) -> None:
    """Print a row a size: every rung with its spread and its price."""
    head, rows = ["bytes"], []
    for rung in some[0]["median_s"]:
        head += [rung, "[rounds]"] + (["+price"] if rung in some[0]["price_s"] else [])
    for figures in some:
        row = [report.show_size(figures["bytes"])]
        for rung, median in figures["median_s"].items():
            ends = (report.show_time(figures[end][rung]) for end in ("low_s", "high_s"))
            row += [report.show_time(median), f"[{'-'.join(ends)}]"]
            if rung in figures["price_s"]:
                price = figures["price_s"][rung]
                row.append(f"{'+' if price >= 0 else ''}{report.show_time(price)}")
        rows.append(row)
    report.print_table(head, rows, markdown)


def print_processor_time(some: list[dict[str, Any]], markdown: bool) -> None:
    """Print a row a size: processor time of both processes, a GB, and user time's part of it."""
    head, rows = ["bytes"], []
    for rung in some[0]["cpu_s_a_gb"]:
        head += [rung, "[rounds]", "user"]
    for figures in some:
        row = [report.show_size(figures["bytes"])]
        for rung, median in figures["cpu_s_a_gb"].items():
            scale = median / (figures["cpu_s_a_call"][rung] or 1)
            ends = (f"{figures[end][rung] * scale:.2f}" for end in ("cpu_low_s", "cpu_high_s"))
            share = figures["user_s_a_call"][rung] * scale
            row += [f"{median:.2f}", f"[{'-'.join(ends)}]", f"{share:.2f}"]
        rows.append(row)
    report.print_table(head, rows, markdown)


def show(measured: list[dict[str, Any]], options: argparse.Namespace) -> None:
    where = f"two hosts linked at {options.rate}" if options.rate else "loopback"
    print(f"{where}; median [lowest-highest] of {options.rounds} rounds\n")
    for pattern in dict.fromkeys(figures["pattern"] for figures in measured):
        some = [figures for figures in measured if figures["pattern"] == pattern]
        large = [figures for figures in some if figures["bytes"] >= SHOWN_FROM]
        print(f"{pattern}: µs, +price over the rung before\n")
        print_times(some, options.markdown)
        if large:
            print(f"{pattern}: processor seconds a GB, both processes\n")
            print_processor_time(large, options.markdown)


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    with contextlib.ExitStack() as stack:
        ladder = Ladder(options, stack)
        measured = [ladder.measure("connect", 1)]
        measured += [ladder.measure("ping", size) for size in options.sizes]
        measured += [ladder.measure("stream", size) for size in options.stream]
        measured += [ladder.measure("all_reduce", size) for size in options.sizes]
    show(measured, options)
    body = {"machine": machine, "rate": options.rate, "spin_us": options.spin}
    body |= {"rounds": options.rounds, "measured": measured}
    report.write_json(options.json, "ladder", body)
