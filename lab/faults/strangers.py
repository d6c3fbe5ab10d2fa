"""The row of the fault table whose connections to a rank come from nobody of the job."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.faults.crew import Crew, RankGroup, crew
from lab.faults.table import Fault, Form, Verdict
from lab.faults.tally import HANGS, started, stopped, undisturbed
from lab.limits import claim
from lab.strangers import Address
from lab.wan import round_trip

FIXED = 21_000, 21_063  # ports, none that the kernel chooses
# Strangers that are kept, and some that go or come while /proc is read.
KEPT = 64 + 8
MEMORY = {"off": 1024, "on": 8192}  # KiB, by RINGCOMM_TLS
JOB, CONTROL, NOBODY = range(3)  # whom they bother in a window
# A part of the control's speed; the short form has few windows to tell it from chance, and beside
# other tests there is more of that.
LOSS = {True: 0.05, False: min(claim(0.25), 0.6)}


def paced() -> tuple[float, int]:
    """Return strangers a second, and in a window. Each waits for answers."""
    return (4.0, 12) if round_trip() else (250.0, 125)


@dataclass
class Watch:
    """A process of the job in windows of time, in which strangers come or do not."""

    pid: int
    windows: dict[int, list[tuple[float, float]]] = field(
        default_factory=lambda: {JOB: [], CONTROL: [], NOBODY: []}
    )
    before: tuple[int, int] = 0, 0  # descriptors and KiB
    most: tuple[int, int] = 0, 0

    def look(self, whom: int) -> None:
        """For one window."""
        began, (pace, visits) = time.monotonic(), paced()
        while time.monotonic() < began + visits / pace:
            now = footprint(self.pid)
            self.most = max(self.most[0], now[0]), max(self.most[1], now[1])
            time.sleep(0.05)
        self.windows[whom].append((began, time.monotonic()))
        self.before = self.before if any(self.before) else footprint(self.pid)

    def loss(self, steps: list[float], beside: int) -> float:
        """How much slower the steps are with strangers; the median of pairs of windows."""
        rates = {
            whom: [sum(begin <= at < end for at in steps) / (end - begin) for begin, end in windows]
            for whom, windows in self.windows.items()
        }
        pairs = zip(rates[JOB], rates[beside], strict=True)
        return 1 - statistics.median(with_ / max(without, 1e-9) for with_, without in pairs)


def bothered(form: Form) -> Verdict:
    """A third of the time they bother the job, a third a listener that has nothing to do with it.

    What both have in common is what strangers cost the machine; the rest is what they cost the job.
    """
    lab, rounds, (pace, visits) = crew(), 80 if form.long else 8, paced()
    recorder = lab.job("record", [1], args=[FIXED])
    recorder.until("running")
    job = started(form, "train", [0, 1], "blocks", RINGCOMM_PORTS=f"{FIXED[0]}-{FIXED[1]}")
    target, said = whom_to_bother(form, lab, job, recorder)
    host = lab.hosts.addresses.index(target[0])
    listener = lab.job("listen", [host])
    listener.until("running")
    addresses = [target, (target[0], listener.ranks[0].news["running"])]
    strangers = lab.job("bother", [2], args=[addresses, said, pace])
    strangers.until("running")
    visitor, watch = strangers.ranks[0], Watch(job.ranks[host].pid)
    for _ in range(rounds):
        for whom in (NOBODY, CONTROL, JOB):
            visitor.news.pop("done", None)
            if whom != NOBODY:
                visitor.send((whom, visits))
            watch.look(whom)
            if whom != NOBODY:
                strangers.until("done")
    visitor.send(None)
    listener.ranks[0].send(None)
    told, plain = strangers.ends(HANGS)[0], listener.ends(HANGS)[0]
    ends = stopped(job)
    wrong = undisturbed(ends) or denied(told, rounds, bool(said)) or plain.get("raised")
    if wrong:
        return Verdict(False, str(wrong))
    return judged(form, watch, ends[0]["steps"], plain["cpu"])


def denied(told: dict[str, Any], rounds: int, knowing: bool) -> str | None:
    """Return the fault in the way strangers were received."""
    if told.get("count") != [rounds * paced()[1]] * 2:
        return f"strangers failed: {told}"
    if knowing and not all(told["challenged"]):
        return "nobody was asked for proof"
    return f"{told['let in']} were let in" if told["let in"] else None


def judged(form: Form, watch: Watch, steps: list[float], cpu: float) -> Verdict:
    """`cpu` is what the listener took, in seconds: the comparison hides no more than that."""
    more, kib = watch.most[0] - watch.before[0], watch.most[1] - watch.before[1]
    loss, all_in_all = watch.loss(steps, CONTROL), watch.loss(steps, NOBODY)
    share = cpu / sum(end - begin for begin, end in watch.windows[CONTROL])
    count = len(watch.windows[JOB]) * paced()[1]
    memory = MEMORY[os.environ.get("RINGCOMM_TLS", "off")]
    if round_trip():
        memory += 4096  # the job's own, which uses more of its large inboxes by and by
    told = f"exact, {count} of them, {more} descriptors and {kib} KiB more at most, {loss:.1%} "
    told += f"slower than when they bother another process (at most {LOSS[form.long]:.0%} asked), "
    told += f"which takes {share:.1%} of a core, and {all_in_all:.1%} slower than without them"
    return Verdict(
        more <= KEPT and kib <= memory and loss <= LOSS[form.long],
        told,
    )


def whom_to_bother(
    form: Form, lab: Crew, job: RankGroup, recorder: RankGroup
) -> tuple[Address, bytes]:
    """A listener of the job, and what a rank said to it; nothing where that is not known."""
    recorder.ranks[0].send("stop")
    record = recorder.ends(HANGS)[0]
    if form.backend == "ringcomm":
        assert "said" in record, "no handshake was seen"
        return record["address"], record["said"]
    return (lab.hosts.addresses[1], ports_of(lab, 1, job)[0]), b""


def ports_of(lab: Crew, host: int, job: RankGroup) -> list[int]:
    """Where a host's processes listen, but for the job's store."""
    lines = lab.hosts.inside(host, "ss", "-Hltn").splitlines()
    ports = [int(line.split()[3].rpartition(":")[2]) for line in lines]
    return [port for port in ports if port != job.port]


def footprint(pid: int) -> tuple[int, int]:
    """Descriptors and resident KiB of a process."""
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return descriptors, pages * os.sysconf("SC_PAGE_SIZE") // 1024


STRANGERS = Fault(
    "strangers",
    "10,000 connections of strangers: scans, silent, slow, random, forged, replayed, half-open",
    "64 kept, 1 MB more (TLS: 8 MB), 5 % slower than when they bother another process",
    bothered,
)
