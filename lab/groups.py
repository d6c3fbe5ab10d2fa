"""Groups whose ranks change, and what becomes of them when a rank dies: what tests do with them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import ringcomm
from lab.limits import limit
from lab.ranks import Rank, Ranks, join

CPU = torch.device("cpu")
TRANSPORTS = ["", "tcp"]
DIES = 1  # one of the three ranks of `survivors`


def choose(transport: str) -> None:
    """Have this process reach the others so, unless "" is given."""
    if transport:
        os.environ["RINGCOMM_TRANSPORT"] = transport


def unconnected(rank: Rank, transport: str = "", **options: Any) -> Any:
    """The backend of a group that waits for its first change of ranks."""
    choose(transport)
    wanted = ringcomm.Options()
    wanted.enable_reconfigure = True
    join(rank, pg_options=wanted, **options)
    return dist.group.WORLD._get_backend(CPU)


def meet(rank: Rank, key: str) -> None:
    """Wait for the others, by the store of the test."""
    gather(rank, key, "")


def gather(rank: Rank, key: str, word: str) -> list[str]:
    rank.store.set(f"{key}/{rank.index}", word)
    return [rank.store.get(f"{key}/{index}").decode() for index in range(rank.size)]


def change(backend: Any, uuid: int, handles: list[str], seconds: float = limit(20)) -> None:
    backend._reconfigure(uuid, handles, timedelta(seconds=seconds))


def total(backend: Any = None) -> float:
    """The sum of what the ranks give, which is one more than their number.

    Without a backend it is that of the default group.
    """
    tensor = torch.full((4,), (backend.rank() if backend else dist.get_rank()) + 1.0)
    if backend is None:
        dist.all_reduce(tensor)
    else:
        backend.allreduce([tensor]).wait()
    return float(tensor[0])


def die() -> NoReturn:
    """By SIGKILL, when the others are in their next operation."""
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL has not ended this process")


def survivors(task: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ranks 0 and 2 of three answer to a task in which rank 1 dies."""
    some = Ranks(3, None)
    try:
        some.begin(task, *args)
        answers = some.answers(limit(60))
    finally:
        some.kill()
    assert not answers.pop(DIES, (True, ""))[0], "it was to die"
    for index in (0, 2):
        good, answer = answers.get(index, (False, f"rank {index} does not answer"))
        assert good, answer
    return [answers[0][1], answers[2][1]]
