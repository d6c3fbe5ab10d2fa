"""One rank that keeps the others waiting is named, with figures, by one rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from lab.ranks import Rank, ranks
from ringcomm._flight.stragglers import Seen, Stragglers, suspect
from ringcomm._runtime import library


def waits(rank: int, *seconds: float, at: float = 60) -> Seen:
    return Seen(rank, list(seconds), at)


@pytest.mark.parametrize(
    ("now", "slow"),
    [
        (waits(0, 0, 1, 1, 30), 3),
        (waits(1, 0, 0, 1, 30), None),  # rank 0 says it
        (waits(1, 30, 0, 1, 1), 0),
        (waits(0, 0, 1, 1, 5), None),  # less than a fifth of the time
        (waits(0, 0, 1, 15, 30), None),  # two are slow, or the network is
        (waits(0, 0, 0, 0, 0), None),
        (waits(0, 0, 0, 0, 0, at=0), None),
    ],
)
def test_who_is_suspect(now: Seen, slow: int | None) -> None:
    assert suspect(waits(now.rank, 0, 0, 0, 0, at=0), now) == slow


def check_straggler(rank: Rank, late: int) -> str:
    """Do 20 operations of which one rank is late by 0.1 s, and return who is said to be slow.

    So much in all that a busy machine, which keeps another one waiting for a moment, is no matter.
    """
    import contextlib
    import io

    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    seen, said = Stragglers(), io.StringIO()
    begin = time.monotonic()
    seen.look(library.load_library().flight_rings(), begin)
    for _ in range(20):
        if rank.index == late:
            time.sleep(0.1)
        dist.all_reduce(torch.ones(4), group=group)
    with contextlib.redirect_stderr(said):
        seen.look(library.load_library().flight_rings(), time.monotonic())
    dist.destroy_process_group(group)
    return "\n".join(line for line in said.getvalue().splitlines() if group.group_name in line)


@pytest.mark.parametrize("late", [0, 2])
def test_a_straggler_is_named_once(late: int) -> None:
    with ranks(3) as three:
        said = three(check_straggler, late)
    speaker = 1 if late == 0 else 0
    assert f"rank {late} is slow: in the last " in said[speaker]
    assert " s for it, in " in said[speaker]
    assert not any(text for rank, text in enumerate(said) if rank != speaker)
