"""Rows of the fault table: connections that are reset, and networks that are dead for a while."""

from __future__ import annotations

import functools
import random
import time

from lab.faults.job import LIMIT, Job, Span, quantile, speed, stalls
from lab.faults.table import Fault, Form, Verdict
from lab.faults.wire import WIRE
from lab.hosts import Hosts
from lab.limits import claim
from lab.wan import round_trip

HEADERS = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its timestamps, a packet


def resets(form: Form) -> Verdict:
    """Slices with resets and without take turns: what disturbs the machine disturbs both.

    On long links there are fewer, since one costs three round trips and then a slow start.
    """
    kills, seconds, operations = (1000, 5.0, 10_000) if form.long else (100, 1.0, 1)
    pause = (0.3 if form.long else 0.05) + 80 * round_trip()
    if round_trip():
        kills, seconds, operations = kills // 10, 4 * pause, operations // 100
    chance, killed = random.Random(form.seed), 0
    quiet: list[Span] = []
    rough: list[Span] = []

    def faults() -> None:
        nonlocal killed
        while killed < kills or not job.count("enough"):
            for spans, harmful in ((quiet, False), (rough, True)):
                begin = time.monotonic()
                if harmful and not rough:
                    job.begins()
                while time.monotonic() < begin + seconds:
                    host = chance.randrange(hosts.count)
                    connections = job.connections(host)
                    some = chance.sample(connections, min(len(connections), chance.randint(1, 3)))
                    if harmful:
                        killed += job.kill(host, some)
                    else:
                        hosts.connections(host)  # looking costs the same in both
                    if not job.rest(pause):
                        return
                spans.append((begin, time.monotonic()))

    with Hosts(4) as hosts:
        job = Job(hosts, "mixed", form, OPERATIONS=str(operations))
        job.run(faults, limit=1200 if form.long else 120)
    if not job.clean:
        return job.verdict()
    fast = speed(job.calls(rough), job.calls(quiet))
    late = quantile(stalls(job.calls(rough), job.calls(quiet)), 0.99)
    told = f"{killed} resets, all exact, {fast:.0%} of the speed, stalls {late * 1e3:.0f} ms (p99)"
    least, most = (0.9, 0.1) if form.long else (0.5, claim(0.5))  # a short run tells less
    if round_trip():
        least, most = 0.5, most + 20 * round_trip()
    return job.verdict(told, fast >= least and late < most)


def flows(form: Form) -> Verdict:
    """All connections of a session at once, again as soon as all are back."""
    times, done, count = (200 if form.long else 20), 0, 4
    quiet: list[Span] = []
    rough: list[Span] = []

    def faults() -> None:
        nonlocal done
        begin = time.monotonic()
        job.rest(1)
        quiet.append((begin, time.monotonic()))
        wanted = len(job.connections(0))
        begin = time.monotonic()
        job.begins()
        while done < times and job.until(lambda: len(job.connections(0)) >= wanted, 5):
            done += job.kill(0, job.connections(0)) == wanted
            job.rest(0.1)
        rough.append((begin, time.monotonic()))

    with Hosts(2) as hosts:
        job = Job(hosts, "mixed", form, RINGCOMM_FLOWS=str(count))
        job.run(faults, limit=300 if form.long else 60)
    if not job.clean:
        return job.verdict()
    longest = max(stalls(job.calls(rough), job.calls(quiet)), default=0.0)
    told = f"{done} times, all exact, longest stall {longest * 1e3:.0f} ms"
    return job.verdict(told, done == times and longest < (0.3 if form.long else claim(0.6)))


def black_hole(form: Form) -> Verdict:
    """Packets vanish for some seconds; nobody is told."""
    told = []
    for outage in (3, 10, 20) if form.long else (3,):
        with Hosts(2) as hosts:
            job = Job(hosts, "all_reduces", form)
            job.run(functools.partial(vanish, job, outage), patience=60)
        if not job.clean or job.longest > outage + claim(1):
            return job.verdict(f"{outage} s: lasts {job.longest:.1f} s", good=False)
        told.append(f"{outage} s: {job.longest:.1f} s")
    return Verdict(True, "all exact; longest operation after " + ", ".join(told))


def vanish(job: Job, seconds: float) -> None:
    job.hosts.cut(1)
    job.rest(seconds)
    job.hosts.heal(1)
    job.rest(1)


def dead_for_good(form: Form) -> Verdict:
    """Packets vanish and never come again: who is told what, and when."""
    resume = 30 if form.long else 4
    with Hosts(3) as hosts:
        job = Job(hosts, "all_reduces", form, RINGCOMM_RESUME_SECONDS=str(resume))

        def faults() -> None:
            hosts.cut(2)
            job.until(lambda: job.count("ended") == job.world, LIMIT + resume, stop=False)

        job.run(faults, limit=120)
    if job.hung or len(job.errors) < job.world:
        return Verdict(False, job.trouble())
    after = max(answer["told"] for answer in job.answers) - job.faulted
    named = all("rank 2" in answer["error"] for answer in job.answers[:2])
    told = f"error on every rank after {after:.1f} s, "
    told += "which names the rank" if named else "no rank named"
    return Verdict(named and after <= resume + claim(1), told)


def rejected(form: Form) -> Verdict:
    """A firewall answers every packet of a host with a reset, for half a second."""
    times = 20 if form.long else 1
    with Hosts(2) as hosts:
        job = Job(hosts, "all_reduces", form)

        def faults() -> None:
            for _ in range(times):
                hosts.reject(1, 0.5)
                if not job.rest(1.5):
                    return

        job.run(faults)
    return job.verdict("all exact", stall=claim(2))


def counted(form: Form) -> Verdict:
    """Compare the bytes that leave a host for all_reduce with the bound of 2 (n-1)/n.

    What the kernel's TCP says twice, since a queue on the way was full, is not the backend's. The
    bound is that of rings. On long links, others send more and wait for fewer round trips.
    """
    seconds = 60 if form.long else 2
    with Hosts(4) as hosts:
        env = {"RINGCOMM_ALGORITHM": "ring"} if hosts.far else {}
        job = Job(hosts, "large", form, 1, **env)
        before = [left(hosts, host) for host in range(hosts.count)]
        job.run(lambda: job.rest(seconds))
        sent = [left(hosts, host) - before[host] for host in range(hosts.count)]
    if not job.clean:
        return job.verdict()
    bound = job.answers[0]["operations"] * (16 << 20) * 2 * (hosts.count - 1) / hosts.count
    most = max(sent) / bound
    return job.verdict(f"{most:.2%} of the bound", good=most <= 1.015)


def left(hosts: Hosts, host: int) -> int:
    """Bytes of payload that have left a host's eth0, each once."""
    headers = HEADERS * hosts.packets_sent(host)
    again = hosts.segments_resent(host) * (hosts.mtu - 52) if hosts.far else 0
    return hosts.bytes_sent(host) - headers - again


NETWORK = [
    Fault("resets", "connections are reset at random", "exact, ≥ 90 % of the speed", resets),
    Fault("flows", "all connections of two processes at once", "exact, stalls < 0.3 s", flows),
    Fault("blackhole", "packets vanish for 3 s (long: 10 s, 20 s)", "exact, 1 s more", black_hole),
    Fault(
        "dead",
        "packets vanish for good; 4 s (long: 30 s) allowed",
        "an error 1 s later that names the rank",
        dead_for_good,
    ),
    Fault("rejected", "a firewall resets everything for 0.5 s", "exact", rejected),
    Fault("counted", "bytes sent by all_reduce of 16 MiB", "≤ 101.5 % of the bound", counted),
    *WIRE,
]
