"""A group between hosts takes a rank's addresses for the peers that its plans talk to."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.ranks import Rank, error_of, join, ranks

MIB = 1 << 20


def addresses() -> int:
    """Bytes of addresses that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def allow(more: int) -> None:
    """Let this process use so many bytes of addresses more than now."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (addresses() + more, hard))


def work(rank: Rank, size: int) -> list[int]:
    """Join over TCP and add up; how many bytes of addresses that took, and then an all_to_all."""
    os.environ["RINGCOMM_TRANSPORT"] = "tcp"
    import ringcomm  # noqa: F401

    before = addresses()
    allow(512 * MIB)
    join(rank, seconds=limit(40))
    for count in (1, 1000, MIB):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert bool((tensor == size).all())
    taken = [addresses() - before]
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.full((size,), float(rank.index)))
    assert out.tolist() == [float(peer) for peer in range(size)]
    return [*taken, addresses() - before]


def test_a_rank_pays_for_the_peers_that_it_talks_to() -> None:
    """With a twin of every peer's whole memory, each of 16 ranks would take 1.2 GiB."""
    with ranks(16, backend=None) as some:
        taken = some(work, 16)
    print([[step // MIB for step in steps] for steps in taken])
    assert max(first for first, _ in taken) < 300 * MIB, taken
    assert max(last for _, last in taken) < 512 * MIB, taken


def add_up(_: Rank, data: torch.Tensor) -> None:
    dist.all_reduce(data)


def receive(rank: Rank, data: torch.Tensor) -> None:
    """Rank 0 writes nothing: it lacks memory for the bytes that the others send."""
    if rank.index == 0:
        dist.recv(data, 1)
    elif rank.index == 1:
        dist.send(data, 0)
    else:
        dist.barrier()


Call = Callable[[Rank, torch.Tensor], None]


def run_short(rank: Rank, call: Call) -> tuple[str, str]:
    os.environ["RINGCOMM_TRANSPORT"] = "tcp"
    join(rank, seconds=limit(20))
    data = torch.ones(4 * MIB)
    if rank.index == 0:
        allow(MIB // 2)
    error = error_of(lambda: call(rank, data))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return error


@pytest.mark.parametrize("call", [add_up, receive])
def test_a_rank_without_memory_for_a_peer_says_so(call: Call) -> None:
    """It reads from the network and cannot keep what comes: all learn why, long before a limit."""
    with ranks(4, backend=None) as some:
        errors = some(run_short, call)
        some.kill()
    for index, (_, text) in enumerate(errors):
        lack = r"reserving \d+ bytes of addresses for rank \d of another host .*: Cannot allocate"
        assert re.search(lack, text), errors
        assert index == 0 or "rank 0 failed" in text, errors
