"""Kernels of ranks with a device each, on the simulated device: which one, and its results."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks, error_of
from lab.simulated_device import SimulatedMemory, on_device
from ringcomm import _C
from ringcomm._flight import records
from ringcomm.tools.tune.kernels import KERNELS

OWN = {"RINGCOMM_SIM_DEVICES": "4", "RINGCOMM_SIM_ROTATE": "0,1,2,3"}
COLLECTIVES = (
    "all_reduce",
    "scatter_sum",
    "gather_all",
    "broadcast",
    "reduce",
    "all",
    "exchange",
    "scatter",
    "gather",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


def input_of(rank: int, number: int, count: int, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if dtype.is_floating_point and not whole:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, (count,), generator=generator).to(dtype)


def summed(inputs: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, with one rounding."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = inputs[0].to(wide)
    for tensor in inputs[1:]:
        total = total + tensor.to(wide)
    return total.to(dtype)


def one_of_many(rank: Rank, number: int, choose: random.Random, whole: bool) -> str:
    """Do a random operation; what is wrong with its result.

    Whole numbers have the same sums in any order, also in a ring's.
    """
    n, me = rank.size, rank.index
    dtype = choose.choice(DTYPES)
    count = choose.choice((0, 1, 3, 1000, 5001, 20_000))
    inputs = [input_of(r, number, count * n, dtype, whole) for r in range(n)]
    mine, root = inputs[me].clone(), choose.randrange(n)
    name = choose.choice(COLLECTIVES)
    if name == "all_reduce":
        dist.all_reduce(mine)
        got, wanted = mine, summed(inputs)
    elif name == "scatter_sum":
        got = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(got, mine)
        wanted = summed(inputs)[me * count :][:count]
    elif name == "gather_all":
        got = torch.empty(count * n * n, dtype=dtype)
        dist.all_gather_into_tensor(got, mine)
        wanted = torch.cat(inputs)
    elif name == "broadcast":
        dist.broadcast(mine, root)
        got, wanted = mine, inputs[root]
    elif name == "reduce":
        dist.reduce(mine, root)
        got, wanted = mine, summed(inputs) if me == root else mine
    elif name == "exchange":  # uneven: rank r gets r + 1 shares of each
        sent = [count // n * (to + 1) for to in range(n)]
        parts = list(inputs[me][: sum(sent)].split(sent))
        got = torch.empty(n * sent[me], dtype=dtype)
        dist.all_to_all(list(got.split([sent[me]] * n)), parts)
        wanted = torch.cat([input_[: sum(sent)].split(sent)[me] for input_ in inputs])
    elif name == "scatter":
        got = torch.empty(count, dtype=dtype)
        dist.scatter(got, list(mine.split([count] * n)) if me == root else None, root)
        wanted = inputs[root][me * count :][:count]
    elif name == "gather":
        parts = [torch.empty(count * n, dtype=dtype) for _ in range(n)]
        dist.gather(mine, parts if me == root else None, root)
        got, wanted = (torch.cat(parts), torch.cat(inputs)) if me == root else (mine, mine)
    else:
        parts = [torch.empty(count * n, dtype=dtype) for _ in range(n)]
        dist.all_gather(parts, mine)  # outputs in several pieces
        got, wanted = torch.cat(parts), torch.cat(inputs)
    return "" if torch.equal(got, wanted) else f"{number}: {name} of {count} {dtype}"


def many(
    rank: Rank, life: str, settings: dict[str, str], steps: int, whole: bool = False
) -> Outcome:
    def body(rank: Rank) -> Outcome:
        choose = random.Random(7)
        wrong = [one_of_many(rank, number, choose, whole) for number in range(steps)]
        dist.barrier()
        used: set[str] = set()
        for ring in _C.flight_rings():
            record = records.read_ring(ring)
            used |= {operation.algorithm for operation in record.operations if record.device}
        return {"wrong": [text for text in wrong if text], "used": sorted(used)}

    return on_device(rank, life, {**OWN, **settings}, body)


def check(outcomes: list[Any]) -> set[str]:
    for outcome in outcomes:
        assert outcome.get("wrong") == [], outcome
    return set(outcomes[0]["used"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_gives_what_the_others_do(four: Ranks, kernel: str) -> None:
    """Bit by bit; where one has no room, another takes its place."""
    whole = kernel == "device_ring"
    used = check(four(many, kernel, {"RINGCOMM_ALGORITHM": kernel}, 60, whole))
    assert kernel in used
    assert used <= ({"hand_over"} if kernel == "hand_over" else set(KERNELS))


def test_links_and_lengths_decide(four: Ranks) -> None:
    outcomes = four(many, "links", {}, 60)
    assert check(outcomes) == {"two_shot", "one_shot", "low_latency", "hand_over"}  # all_to_all
    assert "all_reduce: low_latency up to 32768 B, one_shot up to " in outcomes[0]["log"]
    over_pcie = check(four(many, "pcie", {"RINGCOMM_SIM_NVLINK": "0"}, 60, True))
    assert "two_shot" not in over_pcie
    assert {"device_ring", "copy_engines", "low_latency"} <= over_pcie


def test_rules_are_for_kernels_too(four: Ranks, tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("all_reduce:0-1K=one_shot\nall_reduce=hand_over\ntwo_shot\n")
    used = check(four(many, "rules", {"RINGCOMM_ALGORITHM": f"@{rules}"}, 60))
    assert used == {"one_shot", "hand_over", "two_shot", "low_latency"}  # a barrier


def mapped(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Operands in memory that others map: the two-shot kernel copies nothing."""

    def body(rank: Rank) -> Outcome:
        memory = SimulatedMemory()
        tensor = memory.empty(100_000)
        copies = []
        for _ in range(6):
            tensor.fill_(rank.index + 1)
            before = memory.copies()
            dist.all_reduce(tensor)
            assert tensor.eq(10).all()
            copies.append(memory.copies() - before)
        return {"copies": copies}

    return on_device(rank, life, {**OWN, **settings}, body)


def test_nothing_is_copied_once_it_is_mapped(four: Ranks) -> None:
    for outcome in four(mapped, "mapped", {"RINGCOMM_ALGORITHM": "two_shot"}):
        assert outcome["copies"][-1] == 0, outcome


def differ(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> Outcome:
        tensor = torch.ones(10 + rank.index // 3)  # the last rank has one more
        kind, text = error_of(lambda: (dist.all_reduce(tensor), dist.barrier()))
        return {"kind": kind, "told": text}

    return on_device(rank, life, {**OWN, **settings}, body)


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_length_is_an_error(four: Ranks, kernel: str) -> None:
    told = [
        outcome["told"]
        for outcome in four(differ, f"differ {kernel}", {"RINGCOMM_ALGORITHM": kernel})
    ]
    assert all(told), told
    assert any("all_reduce float32[11]" in text for text in told), told


def algorithm_in(name: str) -> str:
    """Return the kernel of the group's first operation on a device."""
    for ring in _C.flight_rings():
        record = records.read_ring(ring)
        if record.device and record.group == name:
            return str(record.operations[0].algorithm)
    return ""


def several_groups(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Each group takes as many multiprocessors as it may, as long as there are some."""

    def body(rank: Rank) -> Outcome:
        def kernel_of(group: dist.ProcessGroup) -> str:
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(rank.size).all()
            dist.barrier(group=group)
            return algorithm_in(group.group_name)

        groups = [dist.new_group(range(rank.size)) for _ in range(4)]
        first = [kernel_of(group) for group in groups]
        for group in groups[:2]:
            dist.destroy_process_group(group)
        return {"first": first, "again": kernel_of(dist.new_group(range(rank.size)))}

    return on_device(rank, life, {**OWN, **settings}, body)


def test_groups_share_the_multiprocessors(four: Ranks) -> None:
    outcomes = four(several_groups, "groups", {"RINGCOMM_SIM_MULTIPROCESSORS": "40"})
    for outcome in outcomes:
        assert outcome.get("first") == [*["low_latency"] * 3, "hand_over"], outcome
        assert outcome["again"] == "low_latency"
        assert "other groups have the multiprocessors" in outcome["log"]


def in_pairs(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Sum over two of four ranks; the kernel that did it."""

    def body(rank: Rank) -> Outcome:
        groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        mine = groups[rank.index // 2]
        if rank.index >= 2:
            dist.barrier()  # the others sum before these use their device at all
        tensor = torch.full((1000,), float(rank.index))
        dist.all_reduce(tensor, group=mine)
        assert tensor.eq(4 * (rank.index // 2) + 1).all()
        if rank.index < 2:
            dist.barrier()
        lost = SimulatedMemory().lost_slices()
        return {"kernel": algorithm_in(mine.group_name), "lost": lost}

    return on_device(rank, life, settings, body)


def test_kernels_wait_for_no_rank_that_takes_turns_with_others(four: Ranks, tmp_path: Path) -> None:
    """A group with a device for each of its ranks, but ranks outside of it use these, too."""
    for outcome in four(in_pairs, "own", OWN):
        assert outcome.get("kernel") == "low_latency", outcome
    shared = {"RINGCOMM_SIM_DEVICES": "2", "RINGCOMM_SIM_ROTATE": "0,1,0,1"}
    shared["RINGCOMM_SIM_SLICES"] = str(tmp_path)
    for outcome in four(in_pairs, "shared", shared):
        assert outcome.get("kernel") == "hand_over", outcome
        assert outcome["lost"] == 0
        assert "ranks outside of this group use these devices, too" in outcome["log"]


APART = {**OWN, "RINGCOMM_SIM_IPC": "fails"}


def test_devices_that_cannot_map_one_another_still_add_up(four: Ranks) -> None:
    """By the ring, through memory of the host; what adds nothing goes through the host."""
    outcomes = four(many, "apart", APART, 60, True)
    assert check(outcomes) == {"device_ring"}
    for outcome in outcomes:
        assert "though kernels of the devices still add them up: rank" in outcome["log"]


def test_one_rank_that_maps_nobody_is_enough(four: Ranks) -> None:
    some = {**APART, "RINGCOMM_SIM_RANK": "2"}
    assert check(four(many, "one apart", some, 30, True)) == {"device_ring"}


def test_another_length_is_an_error_through_the_host(four: Ranks) -> None:
    told = [outcome["told"] for outcome in four(differ, "apart differ", APART)]
    assert all(told), told
    assert any("all_reduce float32[11]" in text for text in told), told
