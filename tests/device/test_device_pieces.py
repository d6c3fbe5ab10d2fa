"""Long operations on devices that go through memory of the host: in pieces (stream/staged.h)."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms

from lab.limits import limit
from lab.oracle import bits, raw
from lab.outcomes import SOON, Outcome, check, outcome_of, rank_of
from lab.ranks import Rank, Ranks
from lab.simulated_device import SimulatedMemory, on_device

HOST = {"RINGCOMM_CUDA_MODE": "host"}
TCP = {"RINGCOMM_TRANSPORT": "tcp"}
MIB = 1 << 20
PIECE, SLOTS = 4 * MIB, 4  # as in csrc/stream/staged.{cc,h}
FEW = {"RINGCOMM_SIM_COMMANDS": "7"}  # per stream, then calls wait for room
PINNED = SLOTS * PIECE + MIB  # and the words of operations


# ---- right results

Give = Callable[..., torch.Tensor]  # so many elements of that rank, or of this one


def all_reduce(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    tensor = give(count)
    dist.all_reduce(tensor)
    return [tensor]


def broadcast(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    tensor = give(count)
    dist.broadcast(tensor, 1)
    return [tensor]


def reduce(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    tensor = give(count)
    dist.reduce(tensor, 1, dist.ReduceOp.MAX)
    return [tensor] if me == 1 else []


def coalesced(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    tensors = [give(count // 3), give(5), give(count)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def all_gather(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    """Shards differ in size, and one is empty."""
    counts = [count // (size + rank) if rank != 1 else 0 for rank in range(size)]
    outputs = [give(count, 7)[:length].clone() for length in counts]
    dist.all_gather(outputs, give(counts[me]))
    return outputs


def all_gather_in_place(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    count //= size
    whole = give(count * size)
    dist.all_gather_into_tensor(whole, whole[me * count : (me + 1) * count])
    return [whole]


def reduce_scatter(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    counts = [count // (size + rank) for rank in range(size)]
    mine = give(counts[me], 7)
    dist.reduce_scatter(mine, [give(length) for length in counts])
    return [mine]


def reduce_scatter_in_place(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    count //= size
    whole = give(count * size)
    mine = whole[me * count : (me + 1) * count]
    dist.reduce_scatter_tensor(mine, whole)
    return [mine]


def gather(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    count //= size
    outputs = [give(count, 7) for _ in range(size)] if me == 1 else []
    dist.gather(give(count), outputs or None, 1)
    return outputs


def scatter(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    count //= size
    mine = give(count, 7)
    dist.scatter(mine, [give(count, rank) for rank in range(size)] if me == 1 else None, 1)
    return [mine]


def all_to_all(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    mine, count = give(count // size * size, 7), count // size
    dist.all_to_all_single(mine, give(count * size))
    return [mine]


def exchange(lengths: list[list[int]], me: int, give: Give, lists: bool) -> list[torch.Tensor]:
    """Rank `a` sends rank `b` so many rows as lengths[a][b] says."""
    to, got = lengths[me], [row[me] for row in lengths]
    mine, given = give(sum(got), 7), give(sum(to))
    if lists:
        outputs = [part.clone() for part in mine.split(got)]
        dist.all_to_all(outputs, list(given.split(to)))
        return outputs
    dist.all_to_all_single(mine, given, got, to)
    return [mine]


def all_to_all_uneven(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    """Some send one another nothing."""
    unit = count // 8
    parts = [[(a + 2 * b) % 4 * unit + a + b for b in range(size)] for a in range(size)]
    parts[0][0] = parts[2][1] = 0
    return [tensor for lists in (False, True) for tensor in exchange(parts, me, give, lists)]


def all_to_all_without_one(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    parts = [[0 if 1 in (a, b) else count // 3 for b in range(size)] for a in range(size)]
    return exchange(parts, me, give, me == 1)


def all_to_all_of_a_pair(me: int, size: int, count: int, give: Give) -> list[torch.Tensor]:
    """Rank 0 sends the last one much. Others have one piece."""
    parts = [
        [count - 9 if (a, b) == (0, size - 1) else 3 for b in range(size)] for a in range(size)
    ]
    return exchange(parts, me, give, False)


CALLS = [
    all_reduce, broadcast, reduce, coalesced, all_gather, all_gather_in_place, reduce_scatter,
    reduce_scatter_in_place, gather, scatter, all_to_all, all_to_all_uneven,
    all_to_all_without_one, all_to_all_of_a_pair,
]  # fmt: skip
# Bytes of a tensor, or of a shard: around a piece of each, and around all slots.
LENGTHS = {
    torch.float32: [PIECE + 4, SLOTS * PIECE + 100],
    torch.bfloat16: [3 * PIECE // 4, 3 * PIECE // 4 + 6],
    torch.uint8: [PIECE, 2 * PIECE - 77],
    torch.complex128: [PIECE + 16],
}


def records() -> list[dict[str, Any]]:
    group = dist.distributed_c10d._get_default_group()
    operations: list[dict[str, Any]] = group._get_backend(torch.device("cpu")).flight_record()
    return operations


def numbers(of: int, count: int, dtype: torch.dtype, exact: bool) -> torch.Tensor:
    """Return what a rank gives, in every process. Where `exact`, any order of sums is right."""
    return all_numbers(of, dtype, exact)[:count].clone()


@functools.cache
def all_numbers(of: int, dtype: torch.dtype, exact: bool) -> torch.Tensor:
    count = max(LENGTHS[dtype]) // dtype.itemsize
    if exact or not dtype.is_floating_point:
        return (raw(of, count, torch.uint8) % 16).to(dtype)
    return (raw(of, count, torch.int16) / 3).to(dtype)


def digests(rank: Rank, life: str, settings: dict[str, str], exact: bool) -> Outcome:
    def body(rank: Rank) -> Outcome:
        by_call: dict[str, list[str]] = {}
        for dtype, lengths in LENGTHS.items():
            for length in lengths:

                def give(count: int, of: int = rank.index) -> torch.Tensor:
                    return numbers(of, count, dtype, exact)  # noqa: B023  called in this round

                for call in CALLS:
                    count = length // dtype.itemsize
                    if call is reduce and dtype.is_complex:
                        continue
                    results = call(rank.index, rank.size, count, give)
                    by_call[f"{call.__name__} {dtype}[{count}]"] = [*map(bits, results)]
        return {"found": by_call, "last": records()[-1]["sequence"]}

    return on_device(rank, life, settings, body)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", forms(["host", "tcp"], "host"))
def test_pieces_yield_what_tensors_of_the_host_do(three: Ranks, way: str) -> None:
    settings, exact = (HOST, False) if way == "host" else (TCP, True)
    here = three(digests, f"{way} here", {**settings, "RINGCOMM_CUDA_LIBRARY": ""}, exact)
    there = three(digests, f"{way} there", settings, exact)
    for host, other in zip(here, there, strict=True):
        assert host.get("found"), host
        assert "go through memory of the host" in other.get("log", ""), other
        wrong = [name for name, these in host["found"].items() if other["found"][name] != these]
        assert not wrong
        assert host["last"] == other["last"]


# ---- memory


def held(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> Outcome:
        memory = SimulatedMemory()
        small, large = torch.ones(1000), [torch.ones(8 * PIECE // 4) for _ in range(3)]
        pinned = []
        for tensors in ([small], large, large):
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
            pinned.append(memory.pinned())
        right = all(bool(tensor.eq(rank.size**2).all()) for tensor in large)
        gathered = torch.empty(rank.size * 2 * PIECE // 4)
        dist.all_gather_into_tensor(gathered, large[0][: 2 * PIECE // 4])
        pinned.append(memory.pinned())
        dist.all_to_all_single(gathered, gathered + 1)
        return {"pinned": [*pinned, memory.pinned()], "right": right}

    return on_device(rank, life, settings, body)


def test_pinned_memory_is_that_of_a_few_pieces(two: Ranks) -> None:
    """Whatever the operations' length is, and however many are under way."""
    for outcome in two(held, "held", TCP):
        assert outcome["right"], outcome
        small, large, again, gathered, exchanged = outcome["pinned"]
        assert small < MIB, outcome
        assert SLOTS * PIECE < large == again < PINNED, outcome
        assert exchanged == gathered == again, outcome


def node(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> int:
        dist.all_reduce(torch.ones(1000))
        return SimulatedMemory().pinned_node()

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("wanted", [0, -1])
def test_pinned_memory_is_beside_the_device(two: Ranks, wanted: int) -> None:
    outcomes = two(node, f"node {wanted}", {**TCP, "RINGCOMM_SIM_NODE": str(wanted)})
    assert [outcome.get("answer") for outcome in outcomes] == [wanted] * 2, outcomes


# ---- pieces overlap


def until(happens: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + limit(seconds)
    while not happens() and time.monotonic() < end:
        time.sleep(0.001)
    return happens()


def bring(rank: Rank, life: str) -> Outcome:
    """Rank 1 calls once rank 0's device has brought as many pieces as there are slots."""

    def body(rank: Rank) -> Outcome:
        memory, tensor = SimulatedMemory(), torch.ones(6 * PIECE // 4)
        dist.all_reduce(torch.ones(1))
        if rank.index == 1:
            rank_store.wait(["brought"])
            dist.all_reduce(tensor)
            return {}
        before = memory.copied()
        work = dist.all_reduce(tensor, async_op=True)
        brought = until(lambda: memory.copied() - before >= SLOTS)
        time.sleep(0.05)  # no more come while the first piece is not over
        copied = memory.copied() - before
        rank_store.set("brought", "")
        work.wait()
        return {
            "brought": brought, "copied": copied, "all": memory.copied() - before,
            "right": bool(tensor.eq(2).all()),
        }  # fmt: skip

    rank_store = rank_of(rank, life).store
    return on_device(rank, life, TCP, body)


def test_later_pieces_come_to_the_host_while_it_works_on_the_first(two: Ranks) -> None:
    outcome = two(bring, "bring")[0]
    assert outcome == {
        "brought": True, "copied": SLOTS, "all": 12, "right": True, "log": outcome["log"],
    }  # fmt: skip


def take(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Rank 1's device is slow: rank 0 sees the first piece's result before the last piece is."""

    def body(rank: Rank) -> Outcome:
        tensor = torch.ones(8 * PIECE // 4)
        dist.all_reduce(torch.ones(1))
        work = dist.all_reduce(tensor, async_op=True)
        early = until(lambda: tensor[0].item() == 2) and tensor[-1].item() == 1
        work.wait()
        return {"early": early, "right": bool(tensor.eq(2).all())}

    return on_device(rank, life, settings, body)


def test_the_first_pieces_result_is_there_while_later_ones_are_under_way(two: Ranks) -> None:
    slow = {**TCP, "RINGCOMM_SIM_SLOW_US": "0,30000"}
    outcome = two(take, "take", slow)[0]
    assert (outcome.get("early"), outcome.get("right")) == (True, True), outcome


# ---- one operation for the user


def recorded(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> Outcome:
        tensor = torch.ones(5 * PIECE // 4 + 1)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        ended = until(lambda: records()[-1]["state"] == "done")
        return {"records": records(), "right": ended and bool(tensor.eq(4).all())}

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("fault", [{}, {"RINGCOMM_SIM_MEMOPS": "0"}, FEW])
def test_pieces_are_one_operation(two: Ranks, fault: dict[str, str]) -> None:
    for outcome in two(recorded, f"recorded {fault}", {**TCP, **fault}):
        assert outcome.get("right"), outcome
        told = [(record["operation"], record["sequence"]) for record in outcome["records"]]
        name = f"all_reduce float32[{5 * PIECE // 4 + 1}] SUM"
        assert told == [(name, 1), (name, 2)], outcome


def trouble(rank: Rank, life: str, case: str, settings: dict[str, str]) -> Outcome:
    """The second operation of the group goes wrong on rank 1."""

    def body(rank: Rank) -> Outcome:
        dist.all_reduce(torch.ones(1))
        count = 16 * PIECE // 4
        if case == "short" and rank.index == 1:
            count = 100
        elif case == "long" and rank.index == 1:
            count += 1
        elif case == "away" and rank.index == 1:
            time.sleep(5)
            return {}
        data = torch.ones(count)
        return outcome_of(lambda: dist.all_reduce(data))

    return on_device(rank, life, settings, body, seconds=2 if case in ("late", "away") else 20)


NAME = f"all_reduce float32[{16 * PIECE // 4}] SUM"


@pytest.mark.parametrize("step", [20, 50])
def test_a_rank_that_dies_in_the_middle_is_named(three: Ranks, step: int) -> None:
    faults = {"RINGCOMM_SIM_DIES_AT": str(step), "RINGCOMM_SIM_RANK": "1"}
    outcomes = three(trouble, f"die {step}", "die", {**TCP, **faults})
    assert outcomes[1] == {"killed": signal.SIGKILL}
    for outcome in (outcomes[0], outcomes[2]):
        check(outcome, "rank 1", "all_reduce #2 ", within=SOON + limit(1))


@pytest.mark.parametrize("case", ["short", "long"])
def test_ranks_that_differ(two: Ranks, case: str) -> None:
    for outcome in two(trouble, f"differ {case}", case, TCP):
        check(outcome, "#2 differs", NAME)


@pytest.mark.parametrize("case", ["late", "away"])
def test_a_rank_whose_pieces_do_not_come(two: Ranks, case: str) -> None:
    """Rank 1's device is slow, or rank 1 does not call; rank 0's call may wait for its device."""
    slow = {"RINGCOMM_SIM_SLOW_US": "0,400000"} if case == "late" else FEW
    outcome = two(trouble, case, case, {**TCP, **slow})[0]
    check(outcome, "Timed out after 2", "rank 1", "all_reduce #2 ", within=limit(4))
