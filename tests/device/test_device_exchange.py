"""Long all_to_alls on devices that go through memory of the host (stream/staged.cc).

Only pairs of ranks know what they exchange. So a rank may have fewer pieces than others, and takes
part in all of them.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
from conftest import forms
from test_device_pieces import FEW, MIB, PIECE, PINNED, SLOTS, TCP, records, until

import ringcomm
from lab.by_hand import example
from lab.limits import limit
from lab.outcomes import SOON, Outcome, check, outcome_of
from lab.ranks import Rank, Ranks
from lab.simulated_device import SimulatedMemory, on_device

Lengths = list[list[int]]  # how many rows each rank sends each


def pair(much: int) -> Lengths:
    """Rank 0 and rank 2 exchange that much, and rank 1 nothing."""
    return [[0, 0, much], [0, 0, 0], [much, 0, 0]]


def exchange(
    me: int, lengths: Lengths, width: int = 1, group: dist.ProcessGroup | None = None
) -> bool:
    """Are the results right? Rows hold numbers that tell whose they are, and where they lay."""
    size = len(lengths)

    def rows(rank: int) -> torch.Tensor:
        places = torch.arange(sum(lengths[rank]) * width) % (1 << 20)
        return (places + (rank << 21)).float().reshape(-1, width)

    got = [lengths[rank][me] for rank in range(size)]
    output = torch.full((sum(got), width), -1.0)
    dist.all_to_all_single(output, rows(me), got, lengths[me], group)
    wanted = [rows(rank).split(lengths[rank])[me] for rank in range(size)]
    return torch.equal(output, torch.cat(wanted))


# ---- memory, and one operation for the user


def held(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """The all_to_alls are the group's first operations."""

    def body(rank: Rank) -> Outcome:
        memory, pinned, right = SimulatedMemory(), [], []
        even = [[PIECE // 2] * 3 for _ in range(3)]  # 8 MiB from each to each
        for lengths in (pair(100), even, even, pair(PIECE), pair(0)):
            right.append(exchange(rank.index, lengths))
            pinned.append(memory.pinned())
        right.append(exchange(rank.index, pair(MIB // 4 + 1), 7))
        last = torch.ones(1)
        dist.all_reduce(last)
        ended = until(lambda: records()[-1]["state"] == "done")
        return {
            "pinned": pinned, "right": [*right, ended, last.item() == 3], "records": records(),
        }  # fmt: skip

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("fault", forms([{}, {"RINGCOMM_SIM_MEMOPS": "0"}, FEW], {}))
def test_pinned_memory_is_that_of_a_few_pieces(three: Ranks, fault: dict[str, str]) -> None:
    """Whatever ranks exchange. And pieces are one operation, however many a rank has of its own."""
    for outcome in three(held, f"held {fault}", {**TCP, **fault}):
        assert all(outcome.get("right", [False])), outcome
        small, even, *others = outcome["pinned"]
        assert small < MIB, outcome
        assert SLOTS * PIECE < even < PINNED, outcome
        assert set(others) == {even}, outcome
        told = [(row["operation"].split()[0], row["sequence"]) for row in outcome["records"]]
        assert told == [*[("all_to_all", number) for number in range(1, 7)], ("all_reduce", 7)]


def by_hand(rank: Rank, life: str) -> Outcome:
    def body(rank: Rank) -> Outcome:
        example_of = example("bruck", "all_to_all")
        ringcomm.algorithms.register_algorithm("bruck_all", example_of, "all_to_all")
        group = dist.new_group(pg_options=ringcomm.Options(algorithm="bruck_all"))
        uneven = pair(2 * MIB)
        uneven[1][2] = 3  # after the first piece rank 1 has as much for all: nothing
        return {
            "right": [exchange(rank.index, lengths, group=group)
                      for lengths in ([[1000] * 3] * 3, uneven)],
        }  # fmt: skip

    return on_device(rank, life, TCP, body)


def test_an_algorithm_by_hand_is_for_equal_parts(three: Ranks) -> None:
    for outcome in three(by_hand, "by hand"):
        assert outcome.get("right") == [True, True], outcome


# ---- failures


def trouble(rank: Rank, life: str, case: str, settings: dict[str, str]) -> Outcome:
    """The second operation of the group goes wrong."""

    def body(rank: Rank) -> Outcome:
        dist.all_reduce(torch.ones(1))
        lengths = pair(2 * PIECE)
        if rank.index == 2 and case == "away":
            time.sleep(5)
            return {}
        if rank.index == 2 and case in ("short", "long"):
            lengths[0][2] = 100 if case == "short" else lengths[0][2] + 1
        return outcome_of(lambda: exchange(rank.index, lengths))

    return on_device(rank, life, settings, body, seconds=2 if case in ("late", "away") else 20)


@pytest.mark.parametrize("step", [10, 20, 34])
def test_a_rank_that_dies_in_the_middle_is_named(three: Ranks, step: int) -> None:
    """Also by the one that exchanges nothing."""
    faults = {"RINGCOMM_SIM_DIES_AT": str(step), "RINGCOMM_SIM_RANK": "2"}
    outcomes = three(trouble, f"die {step}", "die", {**TCP, **faults})
    assert outcomes[2] == {"killed": signal.SIGKILL}
    for outcome in outcomes[:2]:
        check(outcome, "rank 2", "all_to_all #2 ", within=SOON + limit(1))


@pytest.mark.parametrize("case", ["short", "long"])
def test_ranks_that_disagree(three: Ranks, case: str) -> None:
    """In the first piece, or in the last one. Rank 1 is told."""
    for outcome in three(trouble, f"disagree {case}", case, TCP):
        check(outcome, "all_to_all #2 ", "disagree on how much", "rank 0", "rank 2")


@pytest.mark.parametrize("case", ["late", "away"])
def test_a_rank_whose_pieces_do_not_come(three: Ranks, case: str) -> None:
    """Rank 2's device is slow, or rank 2 does not call."""
    slow = {"RINGCOMM_SIM_SLOW_US": "0,0,400000"} if case == "late" else FEW
    for outcome in three(trouble, case, case, {**TCP, **slow})[:2]:
        check(outcome, "rank 2", "all_to_all #2 ", within=limit(4))
