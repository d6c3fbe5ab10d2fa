"""Rows of the fault table: what a job leaves behind, secrets, descriptors, clocks, restarts."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.faults.crew import FOLDER, Crew, RankGroup, crew
from lab.faults.strangers import STRANGERS, ports_of
from lab.faults.table import Fault, Form, Verdict
from lab.faults.tally import HANGS, Tally, started, stopped, undisturbed
from lab.limits import limit

# ---- what killed jobs leave behind


def gone(form: Form) -> Verdict:
    """Jobs of four ranks on two hosts, all killed at once, some while they join."""
    lab, chance, tally = crew(), random.Random(form.seed), Tally()
    before = traces(lab)
    for number in range(500 if form.long else 20):
        job = lab.job("train", [0, 0, 1, 1], form.backend)
        if number % 4:
            job.until("running")
            tally.add(None if not shm_of(job) else "files in /dev/shm while it runs")
        time.sleep(chance.uniform(0, 0.1))
        job.close()
    end = time.monotonic() + 5  # the kernel takes its time to remove processes
    while (left := traces(lab) - before) and time.monotonic() < end:
        time.sleep(0.05)
    tally.add(f"left behind: {sorted(left)[:5]}" if left else None)
    job = started(form, "train", [0, 0, 1, 1])
    ends = stopped(job)
    tiny = {end.get("shm_bytes") for end in ends} == {64 << 10}
    tally.add(undisturbed(ends), None if tiny else "/dev/shm is not tiny here")
    return tally.verdict("looks found nothing; a /dev/shm of 64 KB is enough")


def shm_of(job: RankGroup) -> list[str]:
    """List the /dev/shm that the ranks see: the agent's, of 64 KB."""
    return [path.name for path in Path(f"/proc/{job.ranks[0].pid}/root/dev/shm").iterdir()]


def traces(lab: Crew) -> set[str]:
    """Processes, sockets, descriptors and files in /dev/shm on the first two hosts."""
    seen: set[str] = set()
    for host in (0, 1):
        agent = lab.agents[host][0]
        processes = subprocess.run(
            ["ip", "netns", "pids", lab.hosts.namespaces[host]], capture_output=True, text=True
        )
        seen |= {f"process {pid}" for pid in processes.stdout.split()}
        seen |= {str(path) for path in Path(f"/proc/{agent}/root/dev/shm").iterdir()}
        seen |= {str(path) for path in Path(f"/proc/{agent}/fd").iterdir()}
        sockets = lab.hosts.inside(host, "ss", "-Haxtn", "exclude", "time-wait")
        seen |= {" ".join(line.split()) for line in sockets.splitlines()}
    return seen


# ---- another secret


def secretive(form: Form) -> Verdict:
    """Two ranks that have different secrets."""
    lab, tally = crew(), Tally()
    env = {"RINGCOMM_RESUME_SECONDS": "1"}
    job = lab.job("differ_in_secret", [0, 1], form.backend, env=env)
    for end in job.ends(HANGS):
        text = str(end.get("text", end))
        known = "no answer from" in text and "does not know the secret of this job" in text
        tally.add(None if known else f"told: {text[:200]}")
    return tally.verdict("ranks were refused and say why")


# ---- descriptors, clocks, threads


def full(form: Form) -> Verdict:
    """Strangers knock meanwhile, and cannot be let in."""
    lab, tally = crew(), Tally()
    job = lab.job("fill", [0, 1], form.backend, [10.0 if form.long else 1.5])
    job.until("full")
    knocks = lab.job("knock", [2], args=[lab.hosts.addresses[0], ports_of(lab, 0, job), 50])
    knocks.until("running")
    for rank in job.ranks:
        rank.send("go on")
    ends = job.ends(HANGS)
    knocks.ranks[0].send("stop")
    knocked = knocks.ends(HANGS)[0]
    busy = max(end.get("busy", 0.0) for end in ends)
    taken = max(end.get("taken", 0) for end in ends)
    tally.add(
        undisturbed(ends),
        None if taken > 50 else "descriptors were not used up",
        None if knocked.get("connected") else "nobody could knock",
        None if busy < 0.1 else f"{100 * busy:.0f} % of a core while it waits",
    )
    return tally.verdict(f"jobs went on, results exact; {100 * busy:.1f} % of a core while idle")


def misled(form: Form) -> Verdict:
    """The wall clock of all ranks goes an hour forth, then back, and back by two."""
    lab, tally = crew(), Tally()
    for shift in (3600, -3600) * (10 if form.long else 1):
        job = started(form, "train", [0, 1, 2])
        seen = []
        try:
            for hours in (shift, 0, -shift):
                lab.shift.write_bytes(struct.pack("l", hours))
                time.sleep(0.4)
            ends = stopped(job)
        finally:
            lab.shift.write_bytes(bytes(8))
        for end in ends:
            tally.took("an operation of", end.get("longest", HANGS))
            seen.append(end.get("wall", 0.0) - time.time())
        wrong = [error for error in seen if abs(error + shift) > 60]
        tally.add(undisturbed(ends), f"the clock was not shifted: {wrong}" if wrong else None)
    return tally.verdict("jobs went on, results exact")


def stalled(form: Form) -> Verdict:
    """All threads of a rank but the program's own: it computes meanwhile, and then it works."""
    tally = Tally()
    job = crew().job("stand_still", [0, 1], form.backend, [form.long])
    ends = job.ends(3 * HANGS)
    threads = max(end.get("stopped", 0) for end in ends)
    tally.add(undisturbed(ends), None if threads else "no thread was stopped")
    return tally.verdict("jobs went on, results exact")


# ---- torchrun


def restarted(form: Form) -> Verdict:
    """Two ranks of one host; every other life is over TCP. Imports are not counted."""
    kills, tally = 50 if form.long else 2, Tally()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--local-addr", "127.0.0.1", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
        words += ["--max-restarts", str(kills), str(FOLDER / "restart.py")]
        words += [folder, form.backend, str(kills)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            words, capture_output=True, text=True, env=env, timeout=limit(60 * kills)
        )
        said = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    for life in range(1, kills + 1):
        killed = [
            answer["killed"] for answer in said if answer["life"] == life - 1 and "killed" in answer
        ]
        ranks = [answer for answer in said if answer["life"] == life]
        if not killed or not ranks or not all(answer["exact"] for answer in ranks):
            tally.add("the next life did not come to a result")
            continue
        imports = max(answer["imported"] - answer["began"] for answer in ranks)
        took = max(answer["ready"] for answer in ranks) - killed[0]
        tally.took("result again after", took - imports)
        tally.took("and imports of", imports)
        most = 3 if form.long else limit(3)  # a busy machine takes as long as it takes
        tally.add("slow to recover" if took - imports > most else None)
    if done.returncode:
        tally.add("torchrun failed")
    return tally.verdict("kills were recovered from, and the job ended well")


RESOURCES = [
    Fault(
        "leftovers",
        "500 jobs are killed, where /dev/shm has 64 KB",
        "nothing left: no process, socket, descriptor or file",
        gone,
    ),
    STRANGERS,
    Fault(
        "secret",
        "ranks have different secrets",
        "an error on each that says so",
        secretive,
        elsewhere=False,
    ),
    Fault(
        "descriptors",
        "a rank's program has used up its descriptors, and strangers knock",
        "exact results, no error, no spinning",
        full,
    ),
    Fault(
        "clock",
        "the wall clock jumps an hour forth and back",
        "exact results, no error",
        misled,
        elsewhere=False,  # the preloaded library changes reads, and not waits in the kernel
    ),
    Fault(
        "stall",
        "all threads of a rank but the program's own stand still for 5 s",
        "exact results, no error",
        stalled,
    ),
    Fault(
        "restarts",
        "ranks are killed 50 times under torchrun --max-restarts, over shared memory and TCP",
        "results again within 3 s and the time of the imports",
        restarted,
        namespaces=False,
    ),
]
