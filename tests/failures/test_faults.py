"""Processes that are stopped, interrupted, out of memory, forked, or ended by an exception."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import OVER_TCP, Run
from torch.utils.data import DataLoader

from lab.limits import claim
from lab.outcomes import (
    DESTROYED,
    SOON,
    Outcome,
    after,
    check,
    hear,
    in_child,
    outcome_of,
    rank_of,
    tell,
)
from lab.ports import free_port
from lab.ranks import HOST, Rank, Ranks, join


def process_of(rank: Rank, peer: int, name: str) -> int:
    """The process id of a peer's child; every rank asks."""
    store = dist.PrefixStore(f"pid {name}", rank.store)
    store.set(str(rank.index), str(os.getpid()))
    return int(store.get(str(peer)))


# ---- SIGSTOP


def go_on_after(process: int, seconds: float) -> None:
    """Let a process go on once it has been stopped for so long: a SIGSTOP may come late."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(process, signal.SIGCONT)


def freeze(rank: Rank, seconds: float, timeout: float) -> Outcome:
    """Rank 2 is stopped for a while; rank 0 has an all_reduce of more than that time, or less."""

    def body() -> Outcome:
        name = f"freeze{seconds}"
        join(rank_of(rank, name), seconds=30)
        victim = process_of(rank, 2, name)
        tensor = torch.ones(50_000)
        dist.all_reduce(tensor)
        dist.group.WORLD.set_timeout(timedelta(seconds=timeout))
        if rank.index == 2:
            time.sleep(0.2)  # the others wait in their call
            os.kill(os.getpid(), signal.SIGSTOP)
        alarm = threading.Thread(target=go_on_after, args=(victim, seconds), daemon=True)
        if rank.index == 0:
            alarm.start()
        outcome = outcome_of(lambda: dist.all_reduce(tensor))
        if rank.index == 0:
            alarm.join()  # when the call failed before
        return {**outcome, "sum": tensor[-1].item()}

    return in_child(body)


def test_a_rank_that_is_stopped_for_a_while_is_waited_for(three: Ranks) -> None:
    for outcome in three(freeze, 0.7, 20.0):
        assert outcome["kind"] == "", outcome
        assert outcome["sum"] == 9


def test_a_rank_that_stays_stopped_is_named(three: Ranks) -> None:
    first, second, stopped = three(freeze, 4.0, 2.0)
    for outcome in (first, second):
        check(outcome, "Timed out", "rank 2 (", "#2", within=claim(4))
    if not OVER_TCP:  # another host cannot look
        assert "stopped by a signal" in first["text"] + second["text"]
    check(stopped, "Timed out", within=claim(3))  # what the others said, when it goes on


# ---- Ctrl-C


def interrupt(rank: Rank, where: str) -> Outcome:
    """Rank 0 is interrupted in a call that nobody else makes."""

    def body() -> Outcome:
        name = f"interrupt {where}"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        here = rank_of(rank, name)
        if where == "joining":
            if rank.index != 0:
                return {}
            after(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
            return outcome_of(lambda: join(here, seconds=30))
        join(here, seconds=30)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        if rank.index != 0:
            hear(here, "interrupted")
            return outcome_of(lambda: dist.all_reduce(tensor))
        after(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        calls: dict[str, Callable[[], Any]] = {
            "call": lambda: dist.all_reduce(tensor),
            "recv": lambda: dist.recv(tensor, 1),
        }
        if where == "wait":
            calls["wait"] = dist.all_reduce(tensor, async_op=True).wait  # the operation goes on
        outcome = outcome_of(calls[where])
        tell(here, "interrupted")
        return outcome

    return in_child(body)


@pytest.mark.parametrize("where", ["call", "wait", "recv", "joining"])
def test_ctrl_c_ends_a_call_that_hangs(three: Ranks, where: str) -> None:
    interrupted, *others = three(interrupt, where)
    assert interrupted["kind"] == "KeyboardInterrupt", interrupted
    # Rank 0 serves the store, so it stays for ranks that come late to hear why there is no group.
    stays = 2 if where == "joining" else 0
    assert interrupted["seconds"] < 0.3 + stays + SOON, interrupted
    assert interrupted["destroy"] < DESTROYED, interrupted
    for outcome in others:
        if where == "call":
            check(outcome, "rank 0", "interrupted in rank 0 by KeyboardInterrupt")
        elif where == "recv":
            check(outcome, "rank 0", within=2 * SOON)


def call_in_handler(rank: Rank) -> Outcome:
    """Rank 0's handler uses the group whose call it interrupts."""

    def body() -> Outcome:
        here = rank_of(rank, "in handler")
        join(here, seconds=30)
        if rank.index == 0:
            signal.signal(signal.SIGUSR1, lambda *_: dist.barrier())
            after(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        else:
            hear(here, "refused")
        outcome = outcome_of(lambda: dist.all_reduce(torch.ones(10)))
        if rank.index == 0:
            tell(here, "refused")
        return outcome

    return in_child(body)


def test_a_signal_handler_that_uses_its_group_is_refused(three: Ranks) -> None:
    first, *others = three(call_in_handler)
    assert first["kind"] == "RuntimeError", first
    assert "a signal handler uses group" in first["text"], first
    assert "all_reduce #1" in first["text"], first
    assert first["destroy"] < DESTROYED, first
    for outcome in others:
        check(outcome, "rank 0", "interrupted in rank 0 by RuntimeError")


def handle_alarm(rank: Rank) -> Outcome:
    def body() -> Outcome:
        seen: list[int] = []
        here = rank_of(rank, "handler")

        def handle(number: int, _: Any) -> None:
            seen.append(number)
            tell(here, "handled")

        join(here, seconds=30)
        if rank.index == 0:
            signal.signal(signal.SIGUSR1, handle)
            after(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        else:
            hear(here, "handled")
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        return {"seen": seen, "sum": tensor[0].item()}

    return in_child(body)


def test_a_signal_that_is_handled_disturbs_nothing(three: Ranks) -> None:
    first, *others = three(handle_alarm)
    assert first == {"seen": [signal.SIGUSR1], "sum": 3}
    assert all(outcome == {"seen": [], "sum": 3} for outcome in others)


# ---- the store's host, forked children


def lose_store(rank: Rank, port: int) -> Outcome:
    """Rank 0, which serves the store, dies. A group without it goes on."""

    def body() -> Outcome:
        store = dist.TCPStore(HOST, port, 3, is_master=rank.index == 0)
        join(Rank(rank.index, 3, store), seconds=30)
        pair = dist.new_group([1, 2])
        tensor = torch.ones(50_000)
        dist.all_reduce(tensor)
        if rank.index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(20):
            dist.all_reduce(tensor[:10], group=pair)
        outcome = outcome_of(lambda: dist.all_reduce(tensor))
        return {**outcome, "pair": tensor[0].item()}

    return in_child(body)


def test_the_death_of_the_rank_that_serves_the_store(three: Ranks) -> None:
    dead, *others = three(lose_store, free_port())
    assert dead == {"killed": signal.SIGKILL}
    for outcome in others:
        check(outcome, "rank 0", "all_reduce #2")
        assert outcome["pair"] == 3 * 2**20, outcome


def leave_a_loader(rank: Rank) -> Outcome:
    """Rank 1 dies while the worker of its DataLoader, a forked child, lives on."""

    def body() -> Outcome:
        join(rank_of(rank, "loader"), seconds=30)
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        loader = DataLoader(list(range(100)), num_workers=1, persistent_workers=True)
        batches = iter(loader)
        next(batches)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        if rank.index == 1:
            if os.fork() == 0:
                time.sleep(4)  # a child that does not even notice
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = outcome_of(lambda: [dist.all_reduce(tensor) for _ in range(3)])
        del batches, loader
        return outcome

    return in_child(body)


def test_a_dead_rank_whose_children_live_is_dead(three: Ranks) -> None:
    outcomes = three(leave_a_loader)
    assert outcomes[1] == {"killed": signal.SIGKILL}
    for index in (0, 2):
        check(outcomes[index], "rank 1", "all_reduce #2")


def use_in_child(rank: Rank) -> Outcome:
    """A forked child uses its parent's group: it is told so, and the group notices nothing."""

    def body() -> Outcome:
        join(rank_of(rank, "fork"), seconds=30)
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        told = in_child(lambda: outcome_of(lambda: dist.all_reduce(tensor)))
        left = in_child(lambda: {"kind": "none"})  # one that just ends
        dist.all_reduce(tensor)
        return {**told, "left": left["kind"], "sum": tensor[0].item()}

    return in_child(body)


def test_a_forked_child_cannot_use_the_group(three: Ranks) -> None:
    for outcome in three(use_in_child):
        check(outcome, "belongs to the process that forked this one")
        assert outcome["sum"] == 9
        assert outcome["left"] == "none"


# ---- the end of a program


RAISING = """
import os, sys, tempfile, time, torch, torch.distributed as dist
store = sys.argv[1] if len(sys.argv) > 1 else tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=rank, world_size=2)
tensor = torch.ones(1000)
dist.all_reduce(tensor)
if rank == 1:
    sys.stderr = open(os.devnull, "w")
    raise ZeroDivisionError("no more data\\nand so on")
begin = time.monotonic()
try:
    dist.all_reduce(tensor)
except dist.DistBackendError as error:
    print(error)
dist.destroy_process_group()
assert time.monotonic() - begin < float(os.environ["MOST"])
os.waitpid(child, 0)
"""


def test_an_exception_that_ends_one_rank_is_told_to_the_others(python: Run) -> None:
    result = python(RAISING, MOST=str(claim(2)))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("all_reduce #2 float32[1000] SUM: rank 1 failed: "), result
    assert "ended with ZeroDivisionError: no more data" in result.stdout


SENDING = """
import os, tempfile, torch, torch.distributed as dist
store = tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=rank, world_size=2)
sizes = (10, 5_000, 400_000)
if rank == 1:
    for tag, size in enumerate(sizes):
        dist.isend(torch.full((size,), float(tag + 1)), 0, tag=tag)
    raise SystemExit  # without a wait
for tag, size in reversed(list(enumerate(sizes))):
    tensor = torch.zeros(size)
    dist.recv(tensor, 1, tag=tag)
    assert tensor.eq(tag + 1).all()
os.waitpid(child, 0)
print("received")
"""


def test_what_was_sent_before_the_exit_arrives(python: Run) -> None:
    result = python(SENDING)
    assert (result.returncode, result.stdout) == (0, "received\n"), result.stderr


# ---- out of memory

LIMIT = 64 << 20  # bytes


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """A cgroup in which a process that takes more than LIMIT bytes is killed. Skips without."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in lines}
    if "memory" in own:
        folder, limit = Path("/sys/fs/cgroup/memory") / own["memory"][1:], "memory.limit_in_bytes"
    else:
        folder, limit = Path("/sys/fs/cgroup") / own.get("", "/")[1:], "memory.max"
    group = folder / f"ringcomm-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no cgroup of our own: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def eat(rank: Rank, group: str) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, "oom"), seconds=30)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        if rank.index == 1:
            (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
            kept = [bytearray(os.urandom(1 << 20)) for _ in range(4 * LIMIT >> 20)]
            return {"still here": len(kept)}
        return outcome_of(lambda: dist.all_reduce(tensor))

    return in_child(body)


def test_a_rank_that_the_oom_killer_ends_is_named(three: Ranks) -> None:
    with memory_group() as group:
        first, eaten, last = three(eat, str(group))
    assert eaten == {"killed": signal.SIGKILL}
    for outcome in (first, last):
        check(outcome, "rank 1", "all_reduce #2", within=10)  # it takes its time to eat
        assert "died" in outcome["text"]


def raise_in_one(rank: Rank) -> Outcome:
    """An exception that the program survives: the rank destroys its group and goes its way."""

    def body() -> Outcome:
        join(rank_of(rank, "raise"), seconds=30)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)

        def work() -> Any:
            if rank.index == 2:
                raise ValueError("bad batch")
            return dist.all_reduce(tensor)

        return outcome_of(work)

    return in_child(body)


def test_a_rank_that_destroyed_its_group_is_named(three: Ranks) -> None:
    first, second, raised = three(raise_in_one)
    assert raised["kind"] == "ValueError"
    for outcome in (first, second):
        check(outcome, "rank 2 has left the group")
