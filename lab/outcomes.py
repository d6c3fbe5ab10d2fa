"""For the tests of failures: a rank as a child that may die, and how its calls ended."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lab.limits import claim, limit
from lab.ranks import Rank, error_of

SOON = claim(1)  # seconds within which death and mismatch are errors everywhere
DESTROYED = claim(2)  # seconds within which destroy_process_group returns, whatever happened

Outcome = dict[str, Any]


def in_child(body: Callable[[], Outcome]) -> Outcome:
    """Run `body` in a forked child; what it returned, or {"killed": signal}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(round(limit(60)))
        # A fork mends its pool of threads at the first use: two threads may not race for that.
        torch.set_num_threads(1)
        try:
            answer = body()
        except BaseException as error:  # noqa: BLE001  the parent reports it
            answer = {"raised": repr(error)}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    os.set_inheritable(reader, False)
    status = os.waitpid(child, 0)[1]  # a grandchild may hold the pipe open for longer
    os.set_blocking(reader, False)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read() or b""
    return json.loads(text) if text else {"killed": os.WTERMSIG(status)}


def rank_of(rank: Rank, life: str) -> Rank:
    """The same place in a group of its own."""
    return Rank(rank.index, rank.size, dist.PrefixStore(life, rank.store))


def tell(rank: Rank, what: str) -> None:
    """Say to the other ranks of this place's group that something is done here."""
    rank.store.set(f"told {what}", "1")


def hear(rank: Rank, what: str) -> None:
    """Wait until a rank has told that it is done."""
    rank.store.wait([f"told {what}"], timedelta(seconds=limit(30)))


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """How `call` failed, how long that took, and how long destroying the group took."""
    begin = time.monotonic()
    try:
        kind, text = error_of(call)
    except KeyboardInterrupt as error:
        kind, text = "KeyboardInterrupt", str(error)
    failed = time.monotonic()
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "kind": kind,
        "text": text,
        "seconds": failed - begin,
        "destroy": time.monotonic() - failed,
    }


def check(outcome: Outcome, *words: str, within: float = SOON) -> None:
    """Raise AssertionError unless the call ended with an error that holds all `words`, in time."""
    assert outcome.get("kind") == "DistBackendError", outcome
    for word in words:
        assert word in outcome["text"], outcome
    assert outcome["seconds"] < within, outcome
    assert outcome["destroy"] < DESTROYED, outcome


def after(seconds: float, action: Callable[[], Any]) -> None:
    """Do something on another thread, once this one waits."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
