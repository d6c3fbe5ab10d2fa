"""A rank that dies, differs, is late or never comes: a named error on every rank, in time."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import claim
from lab.namespaces import NAME
from lab.outcomes import DESTROYED, Outcome, check, hear, in_child, outcome_of, rank_of, tell
from lab.ranks import Rank, Ranks, error_of, join, ranks

# ---- death


def die(rank: Rank, victim: int, life: str, after: int) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, life), seconds=30)
        data = torch.ones(50_000)
        for _ in range(after):
            dist.all_reduce(data)
        if rank.index == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome_of(lambda: [dist.all_reduce(data) for _ in range(5)])

    return in_child(body)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named(three: Ranks, victim: int) -> None:
    outcomes = three(die, victim, f"die{victim}", 3)
    assert outcomes[victim] == {"killed": signal.SIGKILL}
    for index, outcome in enumerate(outcomes):
        if index != victim:
            check(outcome, f"rank {victim}", "all_reduce #", "float32[50000]")


def die_at_random(rank: Rank, seed: int) -> Outcome:
    """Every rank issues the same mix; the victim kills itself at a moment that the seed chose."""

    def body() -> Outcome:
        chance = random.Random(seed)
        victim, moment = chance.randrange(rank.size), chance.uniform(0, 0.2)
        here = rank_of(rank, f"random{seed}")
        while_joining = seed % 5 == 0

        def die_soon() -> None:
            if rank.index == victim:
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                signal.setitimer(signal.ITIMER_REAL, moment)

        def work() -> None:
            if while_joining:
                die_soon()
            join(here, seconds=4)  # a rank that dies before never comes
            if not while_joining:
                die_soon()
            for _ in range(100_000):
                dist.all_reduce(torch.ones(1000))
                dist.broadcast(torch.ones(10), 0)
                works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (3, 30_000)]
                for item in works:
                    item.wait()

        kind, text = error_of(work)
        begin = time.monotonic()
        if dist.is_initialized():
            dist.destroy_process_group()
        return {"kind": kind, "text": text, "destroy": time.monotonic() - begin, "victim": victim}

    return in_child(body)


def kills(some: Ranks, seeds: range) -> None:
    for seed in seeds:
        outcomes = some(die_at_random, seed, seconds=30)
        dead = [i for i, outcome in enumerate(outcomes) if "killed" in outcome]
        assert len(dead) == 1, (seed, outcomes)
        for index, outcome in enumerate(outcomes):
            if index == dead[0]:
                continue
            assert outcome["victim"] == dead[0], (seed, outcome)
            assert outcome["kind"] in {"DistBackendError", "DistNetworkError"}, (seed, outcome)
            assert f"rank {dead[0]}" in outcome["text"], (seed, outcome)
            assert outcome["destroy"] < DESTROYED, (seed, outcome)


# Files and folders of other tests, which run beside this one; ringcomm-UID has flight records.
OF_TESTS = re.compile(
    rf"ringcomm-(?:crew|zygote|test|rehearsal|quotas)-|ringcomm-\d+$|{NAME.pattern}"
)


def files_of_ringcomm() -> set[str]:
    names = [path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()]
    ours = {name for name in names if "ringcomm" in name or "memfd" in name}
    return {name for name in ours if not OF_TESTS.match(name)}


def test_kills_at_random_moments_leave_nothing_behind(three: Ranks) -> None:
    before = files_of_ringcomm()
    kills(three, range(8))
    assert files_of_ringcomm() <= before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_kills(three: Ranks) -> None:
    kills(three, range(100, 300))


def raise_in_hook(rank: Rank) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, "hook"), seconds=30)
        group = dist.new_group()
        group._register_on_completion_hook(lambda info: info.nonsense)
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        dist.all_reduce(torch.ones(10), group=group)
        work.wait()
        begin = time.monotonic()
        dist.destroy_process_group(group)
        return {"seconds": time.monotonic() - begin, **outcome_of(lambda: None)}

    return in_child(body)


def test_a_hook_that_raises_holds_nothing_up(three: Ranks) -> None:
    for outcome in three(raise_in_hook):
        assert outcome.get("kind") == "", outcome
        assert outcome["seconds"] < DESTROYED, outcome


# ---- mismatch


def calls_of(odd: bool, size: int, me: int) -> dict[str, Callable[[], Any]]:
    """Each kind of disagreement: what a rank calls, and what the odd one calls."""
    data, other, n = torch.ones(12), torch.ones(11), size
    shard = data[:3] if odd else data[:4]
    splits = [2] * n
    if odd:
        splits[(me + 1) % n] += 1
    pair: list[Callable[[], Any]] = [lambda: dist.all_reduce(data), lambda: dist.broadcast(data, 0)]

    def in_order() -> None:
        for call in reversed(pair) if odd else pair:
            call()

    return {
        "size": lambda: dist.all_reduce(other if odd else data),
        "dtype": lambda: dist.all_reduce(data.double() if odd else data),
        "op": lambda: dist.all_reduce(data, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(data, 1 if odd else 0),
        "collective": lambda: dist.barrier() if odd else dist.all_reduce(data),
        "order": in_order,
        "gather": lambda: dist.all_gather_into_tensor(torch.empty(len(shard) * n), shard),
        "splits": lambda: dist.all_to_all_single(
            torch.empty(2 * n), torch.ones(sum(splits)), [2] * n, splits
        ),
        "asynchronous": lambda: dist.all_reduce(other if odd else data, async_op=True).wait(),
    }


WORDS = {
    "size": ["float32[12]", "float32[11]"],
    "dtype": ["float32[12]", "float64[12]"],
    "op": ["SUM", "MAX"],
    "root": ["root 0", "root 1"],
    "collective": ["barrier", "all_reduce float32[12]"],
    "order": ["all_reduce float32[12]", "broadcast float32[12] root 0"],
    "gather": ["all_gather float32["],
    "splits": ["split"],
    "asynchronous": ["float32[12]", "float32[11]"],
}


def differ(rank: Rank, how: str) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, f"{how}{rank.size}"), seconds=30)
        odd = rank.index == rank.size - 1
        calls = calls_of(odd, rank.size, rank.index)

        def call() -> None:
            dist.all_reduce(torch.ones(3))
            calls[how]()
            dist.barrier()  # for a rank whose part had ended

        return outcome_of(call)

    return in_child(body)


@pytest.fixture(scope="module", params=[2, 3, 4, 5], ids="{} ranks".format)
def several(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param, backend=None) as some:
        yield some


@pytest.mark.parametrize("how", WORDS)
def test_a_mismatch_is_described_on_every_rank(several: Ranks, how: str) -> None:
    for outcome in several(differ, how):
        check(outcome, "#2", *WORDS[how])


# ---- absence


def be_late(rank: Rank) -> Outcome:
    def body() -> Outcome:
        here = rank_of(rank, "late")
        join(here, seconds=30)
        data = torch.ones(10)
        dist.all_reduce(data)
        dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=4))
        if rank.index == 2:
            hear(here, "0")
            hear(here, "1")
        outcome = outcome_of(lambda: dist.all_reduce(data))
        tell(here, str(rank.index))
        return outcome

    return in_child(body)


def test_a_late_rank_is_named_by_those_who_waited(three: Ranks) -> None:
    first, second, late = three(be_late)
    for outcome in (first, second):
        words = ["all_reduce #2 float32[10]", "Timed out after 4", "rank 2"]
        check(outcome, *words, within=claim(6))
    assert "has not called #2" in first["text"] + second["text"]
    check(late, "Timed out")


def never_come(rank: Rank) -> Outcome:
    def body() -> Outcome:
        if rank.index == 2:
            return {}
        begin = time.monotonic()
        kind, text = error_of(lambda: join(rank_of(rank, "absent"), seconds=4))
        return {"kind": kind, "text": text, "seconds": time.monotonic() - begin}

    return in_child(body)


def test_a_rank_that_never_comes_is_named(three: Ranks) -> None:
    for outcome in three(never_come)[:2]:
        assert outcome["kind"] == "DistBackendError", outcome
        assert "rank 2" in outcome["text"], outcome
        assert outcome["seconds"] < claim(8), outcome


# ---- the end of a process


SCRIPT = r"""
import os, torch, torch.distributed as dist
dist.init_process_group("ringcomm")
x = torch.ones(1000)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
os.write(1, b"fine\n")  # in one piece, beside other ranks
"""


def test_exit_without_destroy_is_silent(torchrun: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = torchrun(2, script, ZYGOTE_WHOLE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
    lines = [line for line in done.stderr.splitlines() if "OMP_NUM_THREADS" not in line]
    assert not [line for line in lines if "ringcomm" in line or "Error" in line], done.stderr


def be_idle(rank: Rank) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, "idle"), seconds=30)
        dist.all_reduce(torch.ones(10), async_op=True).wait()  # the worker exists
        before = time.process_time()
        time.sleep(1)
        return {"busy": time.process_time() - before}

    return in_child(body)


def test_an_idle_group_burns_no_cpu(three: Ranks) -> None:
    for outcome in three(be_idle):
        assert outcome["busy"] < 0.02, outcome
