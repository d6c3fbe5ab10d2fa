"""Rows of the fault table: what happens to single packets, bytes and network interfaces."""

from __future__ import annotations

import functools
import itertools
import random
import re
import time

from lab.faults.job import LIMIT, STORE, Job, Span, speed
from lab.faults.sweep import every_byte
from lab.faults.table import Fault, Form, Verdict
from lab.hosts import Hosts
from lab.limits import claim
from lab.namespaces import tool

KEY = "ip {0}addr . tcp {0}port . ip {1}addr . tcp {1}port".format
STORES = f"tcp dport {min(STORE)}-{max(STORE)} accept\ntcp sport {min(STORE)}-{max(STORE)} accept"
NO_STORE = "tcp sport != {0} tcp dport != {0}".format(f"{min(STORE)}-{max(STORE)}")
LEAVING = "type filter hook output priority 0"


def firewall(hosts: Hosts, host: int, name: str, lines: str) -> None:
    hosts.inside(host, "nft", "-f", "-", text=f"table inet {name} {{\n{lines}\n}}\n")


def stateful(hosts: Hosts, host: int, seconds: int) -> None:
    """Drop, without a word, packets of connections that were silent for so long."""
    fields = "ipv4_addr . inet_service . ipv4_addr . inet_service"
    limits = f"flags dynamic,timeout; timeout {seconds}s; size 999"
    chains = [f"set known {{\ntype {fields}; {limits};\n}}"]
    for hook, key in (("output", KEY("s", "d")), ("input", KEY("d", "s"))):
        chains.append(
            f"chain {hook} {{\ntype filter hook {hook} priority 0\nmeta l4proto != tcp accept\n"
            f"{'oif' if hook == 'output' else 'iif'} lo accept\n{STORES}\n"
            f"tcp flags & (syn|ack) == syn update @known {{ {key} }}\n"
            f"{key} @known update @known {{ {key} }} accept\ndrop\n}}"
        )
    firewall(hosts, host, "state", "\n".join(chains))


def idle_dropped(form: Form) -> Verdict:
    """Idle for much longer than the firewall remembers."""
    remembers, idle = (60, 600) if form.long else (2, 4)
    with Hosts(2) as hosts:
        stateful(hosts, 1, remembers)
        job = Job(hosts, "idle", form)

        def faults() -> None:
            if job.until(lambda: job.count("idle") == job.world, LIMIT) and job.rest(idle):
                job.begins()
                (job.folder / "wake").touch()
                job.rest(1)

        job.run(faults, limit=idle + 60, patience=LIMIT + 5)
    if not job.clean:
        return job.verdict()
    took = after_idling(job)
    return job.verdict(f"the next operation takes {took * 1e3:.0f} ms", took < claim(1))


def after_idling(job: Job) -> float:
    """How long the first operation after the silence took."""
    began, ended = job.answers[0]["calls"][20][:2]
    return float(ended - began)


def forgotten(form: Form) -> Verdict:
    """The firewall forgets all connections: while they work, and while they are idle."""
    took = {}
    for kind in ("all_reduces", "idle") if form.long else ("all_reduces",):
        with Hosts(2) as hosts:
            stateful(hosts, 1, 3600)
            job = Job(hosts, kind, form)
            job.run(functools.partial(forget, job, kind), patience=LIMIT + 5)
        if not job.clean:
            return job.verdict()
        took[kind] = job.longest if kind != "idle" else after_idling(job)
    busy, idle = took["all_reduces"], took.get("idle", 0.0)
    told = f"exact; longest operation {busy:.1f} s"
    told += f", after 4 s of idleness {idle * 1e3:.0f} ms" if form.long else ""
    return Verdict(busy < claim(3) and idle < claim(1), told)


def forget(job: Job, kind: str) -> None:
    if kind == "idle":
        job.until(lambda: job.count("idle") == job.world, LIMIT)
    job.hosts.inside(1, "nft", "flush", "set", "inet", "state", "known")
    job.rest(4 if kind == "idle" else 3)
    (job.folder / "wake").touch()
    job.rest(0.5)


def lossy(form: Form) -> Verdict:
    """1 % and then 5 % of the packets vanish, 5 % are late, on links of 100 Mbit/s."""
    seconds = 900.0 if form.long else 2.0
    seen: list[int] = []
    with Hosts(2, rate="100mbit") as hosts:
        for host in range(hosts.count):
            late_packets(hosts, host)
        job = Job(hosts, "all_reduces", form)

        def faults() -> None:
            for percent in (1, 5):
                for host in range(hosts.count):
                    lose(hosts, host, percent)
                if not job.rest(seconds):
                    return
            seen.extend(counted(hosts, host, "loss") for host in range(hosts.count))
            for host in range(hosts.count):
                lose(hosts, host, 0)

        job.run(faults, limit=2 * seconds + 60, patience=60)
    return job.verdict(f"{sum(seen)} packets lost, all exact")


def late_packets(hosts: Hosts, host: int) -> None:
    """A twentieth of the packets takes a slow lane of its own: it arrives late and out of order."""
    at = hosts.namespaces[host]
    tool("ip", "-n", at, "link", "set", "eth0", "gso_max_segs", 1)
    tool(
        "tc",
        "-n",
        at,
        "qdisc",
        "replace",
        "dev",
        "eth0",
        "root",
        "handle",
        "1:",
        "htb",
        "default",
        10,
    )
    for lane, rate in ((10, "90mbit"), (20, "4mbit")):
        words = ["parent", "1:", "classid", f"1:{lane}", "htb", "rate", rate, "ceil", rate]
        tool("tc", "-n", at, "class", "add", "dev", "eth0", *words)
        words = ["parent", f"1:{lane}", "handle", f"{lane}:", "pfifo", "limit", "100"]
        tool("tc", "-n", at, "qdisc", "add", "dev", "eth0", *words)
    rule = "oifname eth0 meta l4proto tcp numgen random mod 100 < 5 meta priority set 1:20"
    firewall(hosts, host, "lanes", f"chain out {{\ntype filter hook output priority 0\n{rule}\n}}")


def lose(hosts: Hosts, host: int, percent: int) -> None:
    hosts.inside(host, "nft", "-f", "-", text="table inet loss\nflush table inet loss\n")
    rule = f"iifname eth0 meta l4proto tcp numgen random mod 100 < {percent} counter drop"
    chain = f"chain arrive {{\ntype filter hook input priority 0\n{rule}\n}}"
    if percent:
        firewall(hosts, host, "loss", chain)


def counted(hosts: Hosts, host: int, table: str) -> int:
    """Return what the counters of a table have counted."""
    text = hosts.inside(host, "nft", "list", "table", "inet", table)
    return sum(int(packets) for packets in re.findall(r"counter packets (\d+)", text))


def corrupted(form: Form) -> Verdict:
    """4 bytes of a packet change on the way: payloads, headers of frames, handshakes."""
    wanted, hits, opened = (1000 if form.long else 50), 0, 0
    chance = random.Random(form.seed)

    def faults() -> None:
        nonlocal hits, opened
        for host in range(hosts.count):
            rule = f"oifname eth0 tcp flags & (syn|ack) == (syn|ack) {NO_STORE} counter"
            firewall(hosts, host, "opened", f"chain leave {{\n{LEAVING}\n{rule}\n}}")
        for number in itertools.count():
            for host in range(hosts.count):
                change(hosts, host, chance, number % 2 == 0)
            alive = job.rest(0.4)
            hits += sum(counted(hosts, host, "change") for host in range(hosts.count))
            if not alive or hits >= wanted:
                break
        for host in range(hosts.count):
            hosts.inside(host, "nft", "delete", "table", "inet", "change")
        job.rest(0.5)
        opened = sum(counted(hosts, host, "opened") for host in range(hosts.count))

    with Hosts(2) as hosts:
        job = Job(hosts, "all_reduces", form)
        job.run(faults, limit=600 if form.long else 60)
    told = f"{hits} packets changed, {opened} connections made anew, all exact"
    # A change of what is never read, behind another one, has no connection of its own.
    noticed = opened > hits / 2 and "arrived changed" in job.output
    return job.verdict(told, hits >= wanted and (noticed or form.backend != "ringcomm"))


def change(hosts: Hosts, host: int, chance: random.Random, large: bool) -> None:
    """From now on, change 20 packets a second that leave a host: large ones, or headers alone."""
    at = chance.randrange(32, 1200, 4) if large else chance.randrange(32, 92, 4)
    rule = f"oifname eth0 {NO_STORE} meta length {'1260-65535' if large else '112-1200'} "
    rule += f"limit rate 20/second burst 1 packets counter @th,{8 * at},32 set 0xdeadbeef"
    hosts.inside(host, "nft", "-f", "-", text="table inet change\ndelete table inet change\n")
    firewall(hosts, host, "change", f"chain leave {{\n{LEAVING}\n{rule}\n}}")


def sent(hosts: Hosts, device: str) -> int:
    return int(hosts.inside(1, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"))


def two_networks(form: Form) -> Verdict:
    """Two flows, two interfaces; one is without its cable for a while."""
    outage = 60 if form.long else 10
    spans: dict[str, Span] = {}
    shares: list[float] = []

    def during(name: str, seconds: float) -> bool:
        begin = time.monotonic()
        alive = job.rest(seconds)
        spans[name] = begin, time.monotonic()
        return alive

    with Hosts(2, rate="200mbit") as hosts:
        hosts.second_network("200mbit")
        job = Job(hosts, "mixed", form, RINGCOMM_FLOWS="2")

        def faults() -> None:
            job.rest(1)
            before = [sent(hosts, device) for device in ("eth0", "eth1")]
            if during("both", 10):
                after = [sent(hosts, device) for device in ("eth0", "eth1")]
                moved = [end - begin for begin, end in zip(before, after, strict=True)]
                shares.append(moved[1] / sum(moved))
                hosts.cut(1, carrier=True)
                alive = during("one", outage)
                hosts.heal(1)
                if alive and job.rest(2):
                    during("again", 10)

        job.run(faults, limit=outage + 60)
    if not job.clean:
        return job.verdict()
    both = job.calls([spans["both"]])
    single, again = (speed(job.calls([spans[name]]), both) for name in ("one", "again"))
    told = f"all exact, {single:.0%} of the speed on one, {again:.0%} when it is back "
    told += f"({shares[0]:.0%} of the bytes went over the second)"
    return job.verdict(told, single >= 0.45 and again >= 0.95 and 0.3 < shares[0] < 0.7)


def slow_flow(form: Form) -> Verdict:
    """Two flows, two interfaces; one carries a tenth of what the other does, then nothing."""
    seconds = 30 if form.long else 10
    spans: dict[str, Span] = {}

    with Hosts(2, rate="200mbit") as hosts:
        hosts.second_network("20mbit")
        job = Job(hosts, "mixed", form, RINGCOMM_FLOWS="2")

        def faults() -> None:
            for name in ("both", "one"):
                begin = time.monotonic()
                job.rest(seconds)
                spans[name] = begin, time.monotonic()
                for namespace in hosts.namespaces:
                    tool("ip", "-n", namespace, "link", "set", "eth1", "down")
                job.rest(3)

        job.run(faults, limit=2 * seconds + 60)
    if not job.clean:
        return job.verdict()
    share = speed(job.calls([spans["both"]]), job.calls([spans["one"]]))
    return job.verdict(f"all exact, {share:.0%} of the speed without the slow one", share >= 0.9)


WIRE = [
    Fault(
        "bytes",
        "a reset after each byte of handshake and frames",
        "exact",
        every_byte,
        namespaces=False,
        elsewhere=False,
    ),
    Fault(
        "idle",
        "a firewall forgets what is idle",
        "the next operation < 1 s",
        idle_dropped,
    ),
    Fault("forgotten", "a firewall forgets every connection", "exact, < 3 s longer", forgotten),
    Fault("lossy", "100 Mbit/s, 1 % and 5 % lost, some out of order", "exact", lossy),
    Fault("corrupted", "bytes are changed on the way", "exact", corrupted),
    Fault(
        "networks",
        "one of two network cards without cable",
        "exact, ≥ 45 % of the speed, then ≥ 95 %",
        two_networks,
        short=False,
    ),
    Fault(
        "uneven",
        "one of two flows is ten times as slow",
        "exact, ≥ 90 % of the speed of the fast one alone",
        slow_flow,
        elsewhere=False,
        short=False,
    ),
]
