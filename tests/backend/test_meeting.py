"""Ranks of one machine that cannot share memory use TCP; a rank without descriptors says so."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab.outcomes import Outcome, in_child, outcome_of, rank_of
from lab.ranks import Rank, Ranks, error_of, join

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="it needs root")
NOBODY = 65534


# ---- not shown to be one host


def call(name: str, *args: object) -> None:
    """Call a function of the C library."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def become_another_root() -> None:
    """User 0 in a namespace, where it is nobody outside: cards agree, the kernel does not."""
    become_nobody()
    call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self is its own again
    call("unshare", 0x10000000)  # CLONE_NEWUSER
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {NOBODY} 1")):
        Path("/proc/self", file).write_text(text)
    assert os.geteuid() == 0


def hide_the_system() -> None:
    """See processes alone in /proc, as with systemd's ProcSubset=pid, in a mount namespace."""
    call("unshare", 0x20000)  # CLONE_NEWNS
    call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    call("mount", b"proc", b"/proc", b"proc", 0, b"subset=pid")


ODD: dict[str, tuple[Callable[[], None], str]] = {
    "user": (become_nobody, f"rank 0 runs as user 0 and rank 1 as user {NOBODY}"),
    "user namespace": (become_another_root, "the peer belongs to another user"),
    "hidden boot id": (hide_the_system, "rank 1 cannot read /proc/sys/kernel/random/boot_id"),
}


def work_with_an_odd_one(rank: Rank, how: str, odd: list[int]) -> Outcome:
    def body() -> Outcome:
        if rank.index in odd:
            ODD[how][0]()
        here = rank_of(rank, f"{how}{odd}")
        with tempfile.TemporaryFile("w+") as log:
            os.dup2(log.fileno(), 2)
            join(here, seconds=20)
            tensor = torch.arange(70_000.0) + rank.index
            dist.all_reduce(tensor)
            exact = tensor.equal(3 * torch.arange(70_000.0) + 3)
            part = torch.full((5,), float(rank.index))
            dist.broadcast(part, 1)
            again = dist.new_group(list(range(rank.size)))  # with the results of the first
            dist.all_reduce(part, group=again)
            dist.destroy_process_group()
            log.seek(0)
            said = [line for line in log if " WARNING " in line]
        return {"exact": exact and part.eq(3).all().item(), "said": said}

    return in_child(body)


@as_root
@pytest.mark.parametrize(
    ("how", "odd"),
    [
        ("user", [1]),
        ("user namespace", [1]),
        ("hidden boot id", [1]),
        ("hidden boot id", [0, 1, 2]),
    ],
)
def test_ranks_that_cannot_share_memory_use_tcp(three: Ranks, how: str, odd: list[int]) -> None:
    outcomes = three(work_with_an_odd_one, how, odd)
    assert all(outcome.get("exact") for outcome in outcomes), outcomes
    assert not outcomes[1]["said"]
    assert not outcomes[2]["said"]
    warnings = outcomes[0]["said"]
    assert warnings, "rank 0 says why"
    for line in warnings:
        assert "use TCP, as if they were on two hosts" in line
    why = ODD[how][1].replace("rank 1 cannot", "cannot" if len(odd) > 1 else "rank 1 cannot")
    assert why in warnings[0], warnings
    assert len(warnings) == 1, "once"


# ---- without memfd_create


def forbid_memfd() -> None:
    """As a strict seccomp profile does: the call says that there is none."""
    number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
    steps = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x00050000 | errno.ENOSYS),
        (0x06, 0, 0, 0x7FFF0000),  # all others are allowed
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(steps), ctypes.addressof(code))
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP, a filter


def work_without_memfd(rank: Rank, odd: list[int]) -> Outcome:
    def body() -> Outcome:
        if rank.index in odd:
            forbid_memfd()
        with tempfile.TemporaryFile("w+") as log:
            os.dup2(log.fileno(), 2)
            join(rank_of(rank, f"memfd{odd}"), seconds=20)
            data = torch.arange(70_000.0)
            dist.all_reduce(data)
            dist.destroy_process_group()
            log.seek(0)
            said = [line for line in log if "memfd_create" in line]
        return {"exact": data.equal(3 * torch.arange(70_000.0)), "said": said}

    return in_child(body)


@pytest.mark.parametrize("odd", [[1], [0, 1, 2]])
def test_a_rank_that_may_not_share_memory_uses_tcp_and_says_why(
    three: Ranks, odd: list[int]
) -> None:
    for index, outcome in enumerate(three(work_without_memfd, odd)):
        assert outcome.get("exact"), outcome
        assert len(outcome["said"]) == (index in odd), outcome
        assert all("allow that call in the seccomp profile" in line for line in outcome["said"])


# ---- out of descriptors


def run_out(rank: Rank, victim: int) -> Outcome:
    """The rank that has none left makes a second group; then its limit is raised, and it works."""

    def body() -> Outcome:
        join(rank_of(rank, f"descriptors{victim}"), seconds=20)
        dist.barrier()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank.index == victim:
            free = os.dup(0)  # the lowest that is free
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        kind, text = error_of(lambda: dist.new_group(list(range(rank.size))))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        data = torch.ones(3)
        dist.all_reduce(data)  # the group that there was is as it was
        dist.barrier()
        again = outcome_of(lambda: None)
        return {"kind": kind, "text": text, "sum": data[0].item(), "destroy": again["destroy"]}

    return in_child(body)


def begin_without(rank: Rank, victim: int) -> Outcome:
    """The rank has none left when it makes its first group."""

    def body() -> Outcome:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)

        def start() -> None:
            join(rank_of(rank, f"first{victim}"), seconds=20)

        ringcomm.Options()  # the library is loaded
        if rank.index == victim:
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        kind, text = error_of(start)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return {"kind": kind, "text": text}

    return in_child(body)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_without_descriptors_for_its_first_group_says_so(three: Ranks, victim: int) -> None:
    for index, outcome in enumerate(three(begin_without, victim)):
        assert "Too many open files" in outcome["text"], outcome
        assert index == victim or f"rank {victim} failed: " in outcome["text"]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_without_descriptors_says_so(three: Ranks, victim: int) -> None:
    for index, outcome in enumerate(three(run_out, victim)):
        assert outcome.get("kind") == (
            "DistNetworkError" if index == victim else "DistBackendError"
        ), outcome
        assert "Too many open files" in outcome["text"]
        assert "ulimit -n" in outcome["text"]
        assert index == victim or f"rank {victim} failed: " in outcome["text"]
        assert "died" not in outcome["text"]
        assert outcome["sum"] == 3
