"""Tasks of agent.py: descriptors that run out, threads that stand still, other secrets."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from lab.faults.place import End, Place, end_of, mixed

TGKILL = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine, -1)  # the system call's number


@contextlib.contextmanager
def no_descriptors() -> Iterator[int]:
    """All descriptors that this process may have are in use; how many others took."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield len(taken)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def fill(place: Place, seconds: float) -> End:
    """Work, idle and work again while rank 0 can open nothing; then work once more."""
    place.join()
    counts = torch.Generator().manual_seed(7)
    busy = taken = 0.0

    def some() -> None:
        for number in range(60):
            mixed(place, number, counts)

    def work() -> None:
        nonlocal busy, taken
        some()
        with no_descriptors() if place.rank == 0 else contextlib.nullcontext(0) as taken:
            place.tell("full")
            some()
            place.pipe.recv()  # now others knock at the door
            before = time.process_time()
            time.sleep(seconds)
            busy = (time.process_time() - before) / seconds
            some()
        some()

    return {**end_of(work), "busy": busy, "taken": taken}


def stand_still(place: Place, also_working: bool) -> End:
    """All threads but this one of rank 1 stand still for 5 s while it computes, or works."""
    ctypes.CDLL(os.environ["LD_PRELOAD"]).ready_to_stand_still()
    place.join()
    counts = torch.Generator().manual_seed(7)
    stopped = 0

    def work() -> None:
        nonlocal stopped
        for computes in (True, False)[: 2 if also_working else 1]:
            for number in range(60):
                mixed(place, number, counts)
            if place.rank == 1:
                stopped += stop_threads()
                if computes:
                    time.sleep(5.2)
            for number in range(60):
                mixed(place, number, counts)

    return {**end_of(work), "stopped": stopped}


def stop_threads() -> int:
    """Tell all threads but this one to stand still; how many."""
    tids = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    others = [tid for tid in tids if tid != threading.get_native_id()]
    for tid in others:
        ctypes.CDLL(None).syscall(TGKILL, os.getpid(), tid, signal.SIGUSR2)
    return len(others)


# ---- who is not of the job


def differ_in_secret(place: Place) -> End:
    os.environ["RINGCOMM_SECRET"] = f"secret {place.rank}"
    place.join()
    return end_of(lambda: dist.all_reduce(torch.ones(3)))


def knock(place: Place, address: str, ports: list[int], count: int) -> End:
    """Connect, and stay until told to go."""
    sockets = []
    for number in range(count):
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex((address, ports[number % len(ports)]))
        sockets.append(stranger)
    time.sleep(0.1)
    connected = sum(
        stranger.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 for stranger in sockets
    )
    place.tell("running")
    place.pipe.recv()
    return {"connected": connected}


TROUBLE: dict[str, Callable[..., End]] = {
    "fill": fill,
    "stand_still": stand_still,
    "differ_in_secret": differ_in_secret,
    "knock": knock,
}
