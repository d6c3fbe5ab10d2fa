"""Programs on the hosts of crew.py: an agent that forks ranks, and what these do.

python -m lab.faults.agent SOCKET HOST
"""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

import ringcomm  # noqa: F401
from lab import strangers
from lab.faults.place import End, Place, end_of, mixed, used
from lab.faults.trouble import TROUBLE
from lab.limits import limit

MOST_STEPS = 200_000  # whose times are remembered
LIFETIME = 1200  # seconds after which a rank ends, whatever has happened


def agent(path: str, host: int) -> None:
    """Fork a rank for each order, until nobody is there to give any."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with Client(path, "AF_UNIX") as orders:
        orders.send((host, os.getpid()))
        while True:
            try:
                order = orders.recv()
            except EOFError:
                return
            child = os.fork()
            if child == 0:
                orders.close()
                serve(path, order)
                os._exit(0)
            orders.send(child)


def serve(path: str, order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.alarm(LIFETIME)
    log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(order["env"])
    with Client(path, "AF_UNIX") as pipe:
        pipe.send(order["ticket"])
        try:
            end = TASKS[order["task"]](Place(order, pipe), *order["args"])
        except BaseException as error:  # noqa: BLE001  its starter wants to know
            end = {"raised": f"{type(error).__name__}: {error}"}
        pipe.send(("end", end))


# ---- work whose results are checked


def train(place: Place, kind: str = "mixed", late: float = 0.0, parent: int = -1) -> End:
    """Work until the starter says stop to rank 0.

    The last rank once comes `late`, so many seconds; the rank `parent` forks a child.
    """
    place.join()
    dist.all_reduce(torch.zeros(1))
    if place.rank == parent:
        place.tell("child", fork_sleeper(place))
    place.tell("running", time.monotonic())
    counts = torch.Generator().manual_seed(7)
    stop, number, longest = torch.zeros(1), 0, 0.0
    steps = array("d", [0.0]) * MOST_STEPS  # this process shall not grow by itself
    block = torch.ones(1 << 18)

    def step() -> None:
        if kind == "mixed":
            mixed(place, number, counts)
        else:
            dist.all_reduce(block)
            block.fill_(1.0)
            steps[number % MOST_STEPS] = time.monotonic()

    def work() -> None:
        nonlocal number, longest
        while stop[0] == 0:
            if late and number == 20 and place.rank == place.size - 1:
                time.sleep(late)
            before = time.monotonic()
            step()
            longest = max(longest, time.monotonic() - before)
            number += 1
            if number % 8 == 0:
                stop[0] = float(place.rank == 0 and place.pipe.poll())
                dist.all_reduce(stop)

    end = end_of(work)
    return {
        **end,
        "operations": number,
        "longest": longest,
        "steps": [at for at in steps if at],
        **used(),
    }


def fork_sleeper(place: Place) -> int:
    """A child that holds all that it has inherited, and notices nothing."""
    child = os.fork()
    if child == 0:
        os.close(place.pipe.fileno())
        time.sleep(limit(60))
        os._exit(0)
    return child


def serve_store(place: Place) -> End:
    """The store alone, in a process of its own."""
    place.store()
    place.tell("running")
    place.pipe.recv()
    return {}


# ---- ranks that differ, groups that end too soon


def differ(place: Place, kinds: list[str], odd: int) -> End:
    """One life of a group for each kind: the `odd` rank calls something else than the others."""
    ends = []
    for kind in kinds:
        place.join(kind, seconds=5)

        def call(kind: str = kind) -> None:
            dist.all_reduce(torch.ones(3))
            calls_of(place.rank == odd)[kind]()
            dist.barrier()  # for a rank whose part had ended

        ends.append(end_of(call))
    return {"lives": ends}


def calls_of(odd: bool) -> dict[str, Callable[[], object]]:
    data, other = torch.ones(12), torch.ones(11)

    def in_order() -> None:
        if odd:
            dist.broadcast(data, 0)
        dist.all_reduce(data)
        if not odd:
            dist.broadcast(data, 0)

    return {
        "shape": lambda: dist.all_reduce(other if odd else data),
        "dtype": lambda: dist.all_reduce(data.double() if odd else data),
        "op": lambda: dist.all_reduce(data, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(data, 1 if odd else 0),
        "collective": lambda: dist.barrier() if odd else dist.all_reduce(data),
        "order": in_order,
    }


def leave(place: Place, kinds: list[str]) -> End:
    """One life of a group for each kind: it is destroyed in the middle of something."""
    ends = []
    for life, kind in enumerate(kinds):
        place.join(f"{kind} {life}", seconds=20)

        def call(kind: str = kind) -> None:
            dist.all_reduce(torch.ones(3))
            PENDING[kind](place)

        ends.append({"did": kind, **end_of(call)})
    return {"lives": ends}


def nothing_waited_for(place: Place) -> None:
    for count in (3, 1000, 3_000_000):
        dist.all_reduce(torch.ones(count), async_op=True)


def not_joined_by_one(place: Place) -> None:
    if place.rank > 0:
        nothing_waited_for(place)


def messages_nobody_wants(place: Place) -> None:
    for count in (10, 1_000_000):
        dist.isend(torch.ones(count), (place.rank + 1) % place.size)
    dist.irecv(torch.ones(10), (place.rank + 1) % place.size, tag=9)


def too_late(place: Place) -> None:
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(milliseconds=100))
    if place.rank > 0:
        dist.all_reduce(torch.ones(1000))


def mismatched(place: Place) -> None:
    dist.all_reduce(torch.ones(1000 + place.rank))


PENDING: dict[str, Callable[[Place], None]] = {
    "nothing waited for": nothing_waited_for,
    "not joined by one": not_joined_by_one,
    "messages nobody wants": messages_nobody_wants,
    "timeout": too_late,
    "mismatch": mismatched,
}


TASKS: dict[str, Callable[..., End]] = {
    "train": train,
    "serve_store": serve_store,
    "differ": differ,
    "leave": leave,
    **TROUBLE,
    "record": lambda place, ports: strangers.record(place.pipe, ports),
    "bother": lambda place, *args: strangers.bother(place.pipe, *args),
    "listen": lambda place: strangers.listen(place.pipe),
}

if __name__ == "__main__":
    agent(sys.argv[1], int(sys.argv[2]))
