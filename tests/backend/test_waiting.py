"""A thread that waits holds no other up, and the thing that it waits for ends with the wait."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.outcomes import DESTROYED, Outcome, hear, in_child, outcome_of, rank_of, tell
from lab.ranks import Rank, Ranks, error_of, join

FOLDER = Path(__file__).resolve().parent


# ---- a thread that waits for a message


Times = list[dict[str, list[float]]]


@pytest.fixture
def times(torchrun: Any, tmp_path: Path) -> Callable[..., Times]:
    """Seconds of collectives, by rank, without and with a thread that waits."""

    def measure(turns: int, calls: int, **environment: str) -> Times:
        rank = FOLDER / "waiter_rank.py"
        done = torchrun(2, rank, tmp_path, str(turns), str(calls), **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((tmp_path / f"rank{index}").read_text()) for index in range(2)]

    return measure


def test_a_thread_that_waits_for_a_message_slows_no_collective(
    times: Callable[..., Times],
) -> None:
    ratios = []
    for _ in range(5):  # where other processes want the processors, both vary
        for rank in times(10, 150):
            alone, beside = statistics.median(rank["alone"]), statistics.median(rank["beside"])
            ratios.append(beside / alone)
        if max(ratios[-2:]) < 3:
            return
    raise AssertionError(f"{ratios}: it did 10 to 20 times, always, when sleepers held a lock")


@pytest.fixture(scope="module")
def delay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("delay") / "delay.so"
    words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(FOLDER / "delay.c"), "-ldl"]
    subprocess.run(words, check=True)
    return library


@pytest.mark.slow  # a preloaded library: three interpreters of their own
def test_no_wake_up_is_lost(times: Callable[..., Times], delay: Path) -> None:
    """Threads lose their processor again and again; who misses his wake-up looks after 20 ms."""
    for rank in times(8, 150, LD_PRELOAD=str(delay), DELAY_ONE_IN="200", DELAY_US="2000"):
        late = {turn: sum(1 for s in rank[turn] if s > 0.04) for turn in ("alone", "beside")}
        assert late["beside"] <= late["alone"] + 3, late


# ---- what the handler of a signal ends


class LateError(Exception):
    """The program has a time limit of its own."""


def alarm(seconds: float) -> None:
    def handle(*_: Any) -> None:
        raise LateError

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def interrupted_recv(rank: Rank, count: int) -> Outcome:
    """Rank 0 gives up a receive before anything comes; then two messages do."""

    def body() -> Outcome:
        join(rank_of(rank, f"recv {count}"), seconds=30)
        dist.barrier()
        if rank.index == 1:
            dist.barrier()
            dist.send(torch.full((count,), 1.0), 0)
            dist.send(torch.full((count,), 2.0), 0)
            return outcome_of(dist.barrier)
        abandoned, first, second = (torch.zeros(count) for _ in range(3))
        alarm(0.2)
        kind, _ = error_of(lambda: dist.recv(abandoned, 1))
        dist.barrier()
        dist.recv(first, 1)
        dist.recv(second, 1)
        values = [tensor[-1].item() for tensor in (abandoned, first, second)]
        return {"interrupted": kind, "values": values, **outcome_of(dist.barrier)}

    return in_child(body)


@pytest.mark.parametrize("count", [3, 500_000])
def test_a_receive_that_a_handler_ends_takes_no_message(two: Ranks, count: int) -> None:
    first, second = two(interrupted_recv, count)
    assert first["interrupted"] == "LateError", first
    assert first["values"] == [0, 1, 2], first
    assert (first["kind"], second["kind"]) == ("", ""), (first, second)


def interrupted_send(rank: Rank, wanted_first: bool) -> Outcome:
    """Rank 0 gives up a large send that rank 1 never asked for, and sends another."""

    def body() -> Outcome:
        join(rank_of(rank, f"send {wanted_first}"), seconds=30)
        tensor = torch.zeros(500_000)
        dist.barrier()
        if rank.index == 0:
            alarm(0.2)
            kind, _ = error_of(lambda: dist.send(torch.ones(500_000), 1))
            dist.barrier()
            dist.send(torch.full((500_000,), 2.0), 1)
            return {"interrupted": kind, **outcome_of(dist.barrier)}
        dist.barrier()
        dist.recv(tensor, 0)
        return {"value": tensor[-1].item(), **outcome_of(dist.barrier)}

    return in_child(body)


def test_a_send_that_a_handler_ends_is_revoked(two: Ranks) -> None:
    first, second = two(interrupted_send, False)
    assert first["interrupted"] == "LateError", first
    assert second["value"] == 2, second
    assert (first["kind"], second["kind"]) == ("", ""), (first, second)


def blocking_calls(rank: Rank) -> dict[str, Callable[[], Any]]:
    tensor = torch.ones(10)
    return {
        "sparse": lambda: dist.all_reduce(torch.eye(4).to_sparse()),
        "hook": lambda: dist.all_reduce(tensor, group=dist.group.WORLD),
        "barrier": lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=20)),
    }


def interrupted_call(rank: Rank, name: str) -> Outcome:
    """Rank 0 gives up a call that the others make later."""

    def body() -> Outcome:
        here = rank_of(rank, f"call {name}")
        join(here, seconds=30)
        if name == "hook":
            dist.group.WORLD._register_on_completion_hook(lambda info: None)
        dist.barrier()
        call = blocking_calls(rank)[name]
        if rank.index == 1:
            hear(here, "given up")
            return outcome_of(call)
        alarm(0.2)
        outcome = outcome_of(call)
        tell(here, "given up")
        return outcome

    return in_child(body)


@pytest.mark.parametrize("name", ["sparse", "hook", "barrier"])
def test_a_blocking_call_that_a_handler_ends_fails_the_group(two: Ranks, name: str) -> None:
    first, second = two(interrupted_call, name)
    assert first["kind"] == "LateError", first
    assert first["destroy"] < DESTROYED, first
    assert second["kind"] == "DistBackendError", second
    assert "interrupted in rank 0 by LateError" in second["text"], second


# ---- deadlines of messages


def early_irecv(rank: Rank) -> Outcome:
    """A receive is posted, and its message comes after more than the group's timeout."""

    def body() -> Outcome:
        join(rank_of(rank, "early"), seconds=30)
        message, total = torch.zeros(4), torch.ones(4)
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
        work = dist.irecv(message, 1, tag=7) if rank.index == 0 else None
        dist.group.WORLD.set_timeout(timedelta(seconds=30))  # the others' calls have to be in time
        for _ in range(8):
            time.sleep(0.2)
            dist.all_reduce(total)
        if work is None:
            dist.send(torch.full((4,), 7.0), 0, tag=7)
        else:
            work.wait(timedelta(seconds=30))
        return {"value": message[0].item(), **outcome_of(dist.barrier)}

    return in_child(body)


def test_a_receive_that_nobody_waits_for_has_no_deadline(two: Ranks) -> None:
    first, second = two(early_irecv)
    assert first["value"] == 7, first
    assert (first["kind"], second["kind"]) == ("", ""), (first, second)


def late_message(rank: Rank, sends: bool, own: bool) -> Outcome:
    """Rank 0 waits for a message that does not come in time, or is not taken in time."""

    def body() -> Outcome:
        join(rank_of(rank, f"late {sends} {own}"), seconds=30)
        count = 100_000
        tensor = torch.full((count,), 1.0)
        dist.barrier()
        if rank.index == 0:
            if not own:
                dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
            most = (timedelta(seconds=0.3),) if own else ()
            work = dist.isend(tensor, 1, tag=3) if sends else dist.irecv(tensor, 1, tag=3)
            kind, text = error_of(lambda: work.wait(*most))
            dist.group.WORLD.set_timeout(timedelta(seconds=30))
            dist.barrier()
            move = dist.send if sends else dist.recv
            move(torch.full((count,), 2.0) if sends else tensor, 1, tag=3)
            outcome = {"late": kind, "text": text, "value": tensor[0].item()}
        else:
            dist.barrier()
            other = torch.full((count,), 2.0)
            (dist.recv if sends else dist.send)(other, 0, tag=3)
            outcome = {"value": other[0].item()}
        return {**outcome_of(dist.barrier), **outcome}

    return in_child(body)


@pytest.mark.parametrize("own", [False, True], ids=["group's", "own"])
@pytest.mark.parametrize("sends", [False, True], ids=["recv", "send"])
def test_a_message_that_is_late_ends_alone(two: Ranks, sends: bool, own: bool) -> None:
    first, second = two(late_message, sends, own)
    assert first["late"] == "DistBackendError", first
    waited = "the receiver" if sends else "the sender"
    for word in ("float32[100000] tag 3", "Timed out after", f"waiting for {waited} (rank 1"):
        assert word in first["text"], first
    assert (first["kind"], second["kind"]) == ("", ""), (first, second)
    assert second["value"] == 2, second
    assert first["value"] == (1 if sends else 2), first


# ---- looks by the clock


def busy_messages(rank: Rank) -> Outcome:
    """Rank 0 waits for a collective that never comes, while messages of the group fly."""

    def body() -> Outcome:
        join(rank_of(rank, "busy"), seconds=30)
        dist.barrier()
        tensor, over = torch.zeros(16), threading.Event()

        def talk() -> None:
            while not over.is_set():
                first, second = (
                    (dist.send, dist.recv) if rank.index == 0 else (dist.recv, dist.send)
                )
                first(tensor, 1 - rank.index)
                second(tensor, 1 - rank.index)

        talker = threading.Thread(target=lambda: error_of(talk))
        talker.start()
        begin = time.monotonic()
        outcome = {"kind": "", "text": ""}
        if rank.index == 0:
            dist.group.WORLD.set_timeout(timedelta(seconds=1))
            work = dist.all_reduce(torch.ones(4), async_op=True)
            outcome["kind"], outcome["text"] = error_of(work.wait)
            over.set()
        talker.join()
        return {**outcome, "seconds": time.monotonic() - begin}

    return in_child(body)


def test_messages_hide_no_timeout(two: Ranks) -> None:
    first, _ = two(busy_messages)
    assert "Timed out after" in first["text"], first
    assert first["seconds"] < limit(10), first
