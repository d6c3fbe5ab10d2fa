"""Rows of the fault table: ranks that die, are stopped, come late, disagree or leave."""

from __future__ import annotations

import random
import signal
import time

from lab.faults.crew import End, await_end, crew, kill
from lab.faults.resources import RESOURCES
from lab.faults.table import Fault, Form, Verdict
from lab.faults.tally import HANGS, Tally, named, started, stopped, undisturbed
from lab.limits import claim
from lab.outcomes import DESTROYED

ONE_EACH, TWO_EACH = [0, 1, 2, 3], [0, 0, 1, 1]


# ---- death


def killed(form: Form) -> Verdict:
    """At a random moment of collectives and messages, on hosts with a rank each or two."""
    chance, tally = random.Random(form.seed), Tally()
    for number in range(200 if form.long else 5):
        job = started(form, "train", TWO_EACH if number % 3 == 2 else ONE_EACH)
        victim = chance.randrange(4)
        time.sleep(chance.uniform(0, 0.3))
        at = kill(job.ranks[victim].pid)
        ends = job.ends(HANGS)
        for rank, end in enumerate(ends):
            if rank != victim:
                tally.add(named(end, [f"rank {victim}"], at, tally))
        if sum(why.startswith("hangs") for why in tally.wrong.elements()) > 2:
            break
    return tally.verdict("survivors were told who died, and in which operation")


def orphaned(form: Form) -> Verdict:
    """The child is forked in the middle of the work, and lives for longer than is waited."""
    tally = Tally()
    for number in range(20 if form.long else 2):
        victim = number % 3
        places = [0, 0, 1] if number % 2 else [0, 1, 2]
        job = started(form, "train", places, "mixed", 0.0, victim)
        time.sleep(0.1)
        at = kill(job.ranks[victim].pid)
        ends = job.ends(HANGS)
        kill(job.ranks[victim].news["child"])
        for rank, end in enumerate(ends):
            if rank != victim:
                tally.add(named(end, [f"rank {victim}"], at, tally))
    return tally.verdict("survivors were told who died")


def succeeded(form: Form) -> Verdict:
    """Another job of that host has taken the port of the killed rank by the time it is missed."""
    chance, tally = random.Random(form.seed), Tally()
    env = {"RINGCOMM_PORTS": "21999"}
    for _ in range(20 if form.long else 2):
        job = started(form, "train", [0, 1], **env)
        time.sleep(chance.uniform(0, 0.3))
        at = kill(job.ranks[1].pid)
        await_end(job.ranks[1].pid)
        successor = started(form, "train", [1, 2], **env)
        tally.add(named(job.ends(2 * HANGS)[0], ["rank 1"], at, tally))
        tally.add(undisturbed(stopped(successor)))
        for rank in (*job.ranks, *successor.ranks):
            await_end(rank.pid)  # the next job needs the port
    return tally.verdict("were told who died, or not disturbed")


# ---- SIGSTOP, stragglers


def paused(form: Form) -> Verdict:
    tally = Tally()
    for seconds in (2.0, 20.0) if form.long else (2.0,):
        job = started(form, "train", [0, 1, 2])
        kill(job.ranks[2].pid, signal.SIGSTOP)
        time.sleep(seconds)
        kill(job.ranks[2].pid, signal.SIGCONT)
        time.sleep(0.5)
        ends = stopped(job)
        waited = max(end.get("longest", 0.0) for end in ends)
        tally.took("an operation of", waited)
        good = seconds - 0.5 < waited < seconds + claim(2)
        slow = None if good else f"{waited:.1f} s for {seconds} s"
        tally.add(undisturbed(ends), slow)
    return tally.verdict("pauses were waited for, results exact")


def frozen(form: Form) -> Verdict:
    """Stopped for longer than a peer that does not answer is waited for (4 s here)."""
    tally = Tally()
    job = started(form, "train", [0, 1, 2], RINGCOMM_RESUME_SECONDS="4")
    at = kill(job.ranks[2].pid, signal.SIGSTOP)
    time.sleep(14)
    kill(job.ranks[2].pid, signal.SIGCONT)
    time.sleep(0.5)
    job.ranks[0].send("stop")
    for rank, end in enumerate(job.ends(HANGS)):
        if complaint := end.get("lost") or end.get("raised"):
            tally.add(complaint)
            continue
        tally.took("destroyed in", end["destroyed"])
        told = bool(end["kind"])
        if told and rank < 2:
            tally.took("told after", end["at"] - at)
        names = "rank 2" in end["text"] if rank < 2 else "itself was stopped" in end["text"]
        tally.add(
            "an error that does not name who was stopped" if told and not names else None,
            None if end["destroyed"] < DESTROYED else "slow to be destroyed",
        )
    return tally.verdict("ranks waited, or were told who does not answer")


def straggles(form: Form) -> Verdict:
    """The last rank comes late to one operation; all of them are waited for."""
    late, tally = (60.0 if form.long else 14.0), Tally()
    job = started(form, "train", [0, 1, 2], "mixed", late)
    time.sleep(late + 0.5)
    ends = stopped(job)
    waited = min(end.get("longest", 0.0) for end in ends[:2])
    logs = [rank.log for rank in job.ranks[:2]]
    tally.add(
        undisturbed(ends),
        None if waited > late - 0.5 else "it was not waited for",
        None if all("rank 2 (" in log for log in logs) else "no log says who is waited for",
    )
    return tally.verdict(f"waited for {late:.0f} s, results exact")


# ---- disagreement, and groups that end


BOTH = {
    "shape": ["float32[12]", "float32[11]"],
    "dtype": ["float32[12]", "float64[12]"],
    "op": ["SUM", "MAX"],
    "root": ["root 0", "root 1"],
    "collective": ["barrier", "all_reduce float32[12]"],
    "order": ["all_reduce float32[12]", "broadcast float32[12] root 0"],
}


def differs(form: Form) -> Verdict:
    """Over TCP, and over shared memory and TCP, with any rank the odd one."""
    chance, tally = random.Random(form.seed), Tally()
    cases = [[0, 1], [0, 1, 2], ONE_EACH, [0, 0, 1], TWO_EACH]
    for places in cases * (5 if form.long else 1):
        odd = chance.randrange(len(places))
        # Elsewhere a mismatch may end the process.
        lives = [list(BOTH)] if form.backend == "ringcomm" else [[kind] for kind in BOTH]
        for kinds in lives:
            job = crew().job("differ", places, form.backend, [kinds, odd])
            for answer in job.ends(2 * HANGS):
                differ(kinds, answer, tally)
    return tally.verdict("calls failed with both sides' words")


def differ(kinds: list[str], answer: End, tally: Tally) -> None:
    """One rank's ends of its lives."""
    for kind, end in zip(kinds, answer.get("lives", [answer]), strict=False):
        if "at" not in end:
            tally.add(f"{kind}: {end.get('lost') or end.get('raised')}"[:120])
            continue
        complaint = named(end, BOTH[kind], end["at"] - end["seconds"], tally)
        tally.add(f"{kind}: {complaint}" if complaint else None)


KINDS = [
    "nothing waited for",
    "not joined by one",
    "messages nobody wants",
    "timeout",
    "mismatch",
]


def left(form: Form) -> Verdict:
    """Groups that are destroyed with operations and messages pending, or after they failed."""
    tally, rounds = Tally(), 40 if form.long else 1
    for _ in range(rounds):
        jobs = [
            crew().job("leave", places, form.backend, [KINDS])
            for places in ([0, 1], [2, 3], [0, 0, 1], [0, 1, 2], TWO_EACH)
        ]
        for job in jobs:
            for end in job.ends(2 * HANGS):
                if failed := end.get("lost") or end.get("raised"):
                    tally.add(str(failed)[:120])
                for life in end.get("lives", []):
                    tally.took("destroyed in", life["destroyed"])
                    slow = life["destroyed"] > DESTROYED
                    tally.add(f"slow after '{life['did']}'" if slow else None)
    return tally.verdict("groups were destroyed in time")


# ---- the store, another secret


def storeless(form: Form) -> Verdict:
    """The store is served by a process of its own, which is killed while the ranks work."""
    lab, tally = crew(), Tally()
    store = started(form, "serve_store", [0])
    job = lab.job("train", [1, 2, 3], form.backend, port=store.port)
    job.until("running")
    kill(store.ranks[0].pid)
    store.ends(HANGS)
    time.sleep(60 if form.long else 2)
    ends = stopped(job)
    for end in ends:
        tally.took("an operation of", end.get("longest", HANGS))
    tally.add(undisturbed(ends))
    return tally.verdict("jobs went on, results exact")


RANKS = [
    Fault(
        "killed",
        "a rank is killed (kill -9) at a random moment, 200 times",
        "an error on every other rank within 1 s that names the rank and the operation",
        killed,
    ),
    Fault(
        "orphaned",
        "a rank is killed while a child that it has forked lives on",
        "an error on every other rank within 1 s",
        orphaned,
    ),
    Fault(
        "succeeded",
        "a rank is killed, and another job listens at its port at once",
        "an error on every other rank within 1 s; the other job is not disturbed",
        succeeded,
    ),
    Fault(
        "paused",
        "a rank is stopped (SIGSTOP) for 2 s and for 20 s, then goes on",
        "exact results, no error",
        paused,
    ),
    Fault(
        "frozen",
        "a rank is stopped for longer than a silent peer is waited for, then goes on",
        "an error that names the rank, or patience; never a wrong result",
        frozen,
        short=False,
    ),
    Fault(
        "straggler",
        "a rank comes 60 s late to an operation",
        "it is waited for, and the log says so after 10 s",
        straggles,
    ),
    Fault(
        "mismatch",
        "a rank calls another shape, type, op, root, collective or order",
        "an error on every rank within 1 s that has both calls",
        differs,
    ),
    Fault(
        "pending",
        "groups are destroyed with operations and messages pending, 1,000 times",
        "destroyed within 2 s",
        left,
    ),
    Fault(
        "store",
        "the process that serves the store is killed while the ranks work",
        "exact results, no error",
        storeless,
    ),
    *RESOURCES,
]
