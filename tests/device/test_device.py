"""Tensors of a device, where there is none: the whole path of CUDA tensors on a simulated device.

Tensors of the CPU stand in for those of a device (tests/sim). Variables RINGCOMM_SIM_* choose
the failures of devices: tests/sim/sim_options.h.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import run_again

from lab.oracle import COMPLEX, FLOAT8, FLOATS, bits, raw
from lab.outcomes import SOON, Outcome, check, in_child, outcome_of, rank_of
from lab.ranks import Rank, Ranks, join, ranks
from lab.simulated_device import SIMULATED, SMALL, SimulatedMemory, on_device

# The tests of one host once more, on devices.
WHOLE = ["collectives", "ddp", "failures", "stack_compile", "stack_sharded"]
WHOLE += ["stack_parallel"]
CASES: list[Any] = [("collectives", "[3"), ("ddp", "plain")]  # collectives of 3 ranks
CASES += [pytest.param(name, "", marks=pytest.mark.slow) for name in WHOLE]


@pytest.mark.timeout(1230)
@pytest.mark.parametrize(("name", "only"), CASES)
def test_on_devices(name: str, only: str) -> None:
    run_again(name, only, RINGCOMM_CUDA_LIBRARY=str(SIMULATED))


# ---- in a child with a device


def some_of_all(rank: Rank) -> str:
    """A bit of every kind of operation; "" when all was right."""
    n, me = rank.size, rank.index
    total = float(sum(range(n)))
    for count in (0, 1, 1000, 300_001):
        tensor = torch.full((count,), float(me))
        dist.all_reduce(tensor)
        if not tensor.eq(total).all():
            return f"all_reduce of {count}"
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        if not tensor.eq(total * n**3).all():
            return f"three all_reduce of {count}"
    outputs = [torch.empty(77) for _ in range(n)]
    dist.all_gather(outputs, torch.full((77,), float(me)))
    if [output[5].item() for output in outputs] != list(range(n)):
        return "all_gather"
    mine = torch.empty(5)
    dist.reduce_scatter_tensor(mine, torch.arange(5.0 * n))
    if not mine.eq(n * torch.arange(5.0 * me, 5.0 * me + 5)).all():
        return "reduce_scatter"
    received = torch.empty(n)
    dist.all_to_all_single(received, torch.full((n,), float(me)))
    if received.tolist() != list(range(n)):
        return "all_to_all"
    root = torch.full((10,), float(me))
    dist.broadcast(root, n - 1)
    if not root.eq(n - 1).all():
        return "broadcast"
    after, before = (me + 1) % n, (me - 1) % n
    big, got = torch.full((200_000,), float(me)), torch.empty(200_000)
    batch = [dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, got, before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    if not got.eq(before).all():
        return "batch_isend_irecv"
    dist.barrier()
    return ""


def everything(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    return on_device(rank, life, settings, some_of_all)


def run_everything(some: Ranks, life: str, **settings: str) -> list[Outcome]:
    outcomes = some(everything, life, settings)
    assert [outcome.get("answer") for outcome in outcomes] == [""] * some.size, outcomes
    return outcomes


@pytest.mark.parametrize("seed", [1, 2])
def test_streams_at_random(four: Ranks, seed: int) -> None:
    delays = {"RINGCOMM_SIM_RANDOM_US": "300", "RINGCOMM_SIM_SEED": str(seed)}
    for outcome in run_everything(four, f"random{seed}", **SMALL, **delays):
        assert "over simulated device IPC, ranks share one device" in outcome["log"]


@pytest.mark.parametrize(
    ("cards", "words"),
    [("0,1,2,3", "each rank has a device"), ("0,0,1,1", "ranks share several devices")],
)
def test_several_devices(four: Ranks, cards: str, words: str) -> None:
    settings = {"RINGCOMM_SIM_DEVICES": "4", "RINGCOMM_SIM_ROTATE": cards}
    for outcome in run_everything(four, f"cards {cards}", **SMALL, **settings):
        assert words in outcome["log"]


@pytest.mark.parametrize("size", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_many_ranks_on_one_device(size: int) -> None:
    with ranks(size, backend=None) as some:
        run_everything(some, "many", **SMALL)


# ---- PREMUL_SUM: torch multiplies what is on a device, and the reductions what is on the host

FACTORS = (1.0, -1.0, 0.5, 0.1, 3.0, 1e30, 1e-30, 0.0, 2.0**-14, 2.0**-149)


def premultiply(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> Outcome:
        sums = {}
        for dtype in [*FLOATS, *FLOAT8, *COMPLEX]:
            for factor in FACTORS:
                tensor = raw(rank.index, 5000, dtype)
                dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
                sums[f"{dtype} {factor}"] = bits(tensor)
        return {"sums": sums}

    return on_device(rank, life, settings, body)


def test_factors_on_a_device_as_on_the_host(two: Ranks) -> None:
    here = two(premultiply, "premul here", {"RINGCOMM_CUDA_LIBRARY": ""})
    there = two(premultiply, "premul there", SMALL)
    assert "over shared memory" in here[0]["log"]
    assert "over simulated device IPC" in there[0]["log"]
    for host, other in zip(here, there, strict=True):
        assert host["sums"] == other["sums"]
    assert len(here[0]["sums"]) == 8 * len(FACTORS)


# ---- what goes wrong with devices: the host helps


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"RINGCOMM_SIM_IPC": "fails", "RINGCOMM_SIM_RANK": "1"}, "rank 1: cudaIpcOpenMemHandle"),
        ({"RINGCOMM_SIM_IPC": "lies"}, "memory is another's"),
        ({"RINGCOMM_SIM_MEMOPS": "0"}, "and calls wait for them: rank 0: cuStreamWriteValue32"),
        ({"RINGCOMM_SIM_REGISTER": "0"}, "rank 0: cudaHostRegister"),
        ({"RINGCOMM_CUDA_MODE": "host"}, "RINGCOMM_CUDA_MODE=host"),
        ({"RINGCOMM_TRANSPORT": "tcp"}, "ranks are on several hosts"),
    ],
)
def test_through_the_host(two: Ranks, fault: dict[str, str], words: str) -> None:
    for outcome in run_everything(two, f"host {words}", **SMALL, **fault):
        assert "go through memory of the host" in outcome["log"]
        assert words in outcome["log"]


# ---- ranks that die, differ, or never come


def die(rank: Rank, life: str, settings: dict[str, str], victim: int, calls: int) -> Outcome:
    def body(rank: Rank) -> Outcome:
        data = torch.ones(50_000)
        for _ in range(3):
            dist.all_reduce(data)
        if rank.index == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome_of(lambda: [dist.all_reduce(data) for _ in range(calls)])

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize(("victim", "calls"), [(0, 5), (2, 5), (2, 1)])
def test_a_killed_rank_is_named(four: Ranks, victim: int, calls: int) -> None:
    """By each of the others: who is let go by one that noticed first has no result either."""
    outcomes = four(die, f"die {victim} {calls}", SMALL, victim, calls)
    assert outcomes[victim] == {"killed": signal.SIGKILL}
    for index, outcome in enumerate(outcomes):
        if index != victim:
            check(outcome, f"rank {victim}")


def die_in_a_stream(rank: Rank, life: str, step: int) -> Outcome:
    faults = {"RINGCOMM_SIM_DIES_AT": str(step), "RINGCOMM_SIM_RANK": "1"}

    def body(rank: Rank) -> Outcome:
        data = torch.ones(50_000)
        return outcome_of(lambda: [dist.all_reduce(data) for _ in range(200)])

    return on_device(rank, life, {**SMALL, **faults}, body)


@pytest.mark.parametrize("step", [40, 77])
def test_a_rank_that_dies_in_its_stream_is_named(two: Ranks, step: int) -> None:
    outcomes = two(die_in_a_stream, f"step {step}", step)
    assert outcomes[1] == {"killed": signal.SIGKILL}
    check(outcomes[0], "rank 1", within=SOON + 1)  # the operations before it take their time


def differ(rank: Rank, life: str, case: str) -> Outcome:
    def body(rank: Rank) -> Outcome:
        dist.all_reduce(torch.ones(10))
        me = rank.index

        def call() -> None:
            if case == "op":
                dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX if me else dist.ReduceOp.SUM)
            elif case == "count":
                dist.all_reduce(torch.ones(10 + me))
            elif case == "splits":
                splits = [5, 5] if me else [5, 6]
                dist.all_to_all_single(torch.empty(10), torch.ones(sum(splits)), [5, 5], splits)
            elif me == 0:
                dist.send(torch.ones(10), 1, tag=1)
            else:
                tag = {"tag": 0, "far tag": 129}.get(case, 1)
                dist.recv(torch.ones(12 if case == "message" else 10), 0, tag=tag)

        return outcome_of(call)

    return on_device(rank, life, SMALL, body)


TOLD = {
    "op": "differs",
    "count": "differs",
    "splits": "disagree",
    "message": "40 bytes",
    "tag": "another type or tag",
    "far tag": "another type or tag",
}


@pytest.mark.parametrize("case", TOLD)
def test_ranks_that_differ(two: Ranks, case: str) -> None:
    outcomes = two(differ, f"differ {case}", case)
    if case in ("message", "tag", "far tag"):  # a short one is sent before anybody knows
        outcomes = outcomes[1:]
    for outcome in outcomes:
        check(outcome, TOLD[case])


def stay_away(rank: Rank, life: str, first: bool) -> Outcome:
    """Rank 1 never calls: at the group's first operation on a device, or at a later one."""

    def body(rank: Rank) -> Outcome:
        if not first:
            dist.all_reduce(torch.ones(10))
        if rank.index == 1:
            time.sleep(4)
            return {}
        return outcome_of(lambda: dist.all_reduce(torch.ones(10)))

    return on_device(rank, life, SMALL, body, seconds=1.5)


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_never_comes(two: Ranks, first: bool) -> None:
    outcomes = two(stay_away, f"away {first}", first)
    check(outcomes[0], "Timed out after 1.5", "rank 1", within=3.5)


# ---- memory


def reuse(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> str:
        memory = SimulatedMemory()
        n = rank.size
        for turn in range(30):
            tensor = memory.empty(1 + 977 * turn)
            tensor.fill_(float(turn + rank.index))
            dist.all_reduce(tensor)
            if not tensor.eq(float(n * turn + sum(range(n)))).all():
                return f"turn {turn}: {tensor[:4]}"
            memory.release(tensor)
            if turn % 3 == 2:  # the next tensor is another allocation at the same addresses
                memory.empty_cache()
        return ""

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("chunks", ["0", "65536", "8192"])
def test_memory_that_is_freed_and_allocated_again(two: Ranks, chunks: str) -> None:
    outcomes = two(reuse, f"reuse {chunks}", {**SMALL, "RINGCOMM_SIM_CHUNK_BYTES": chunks})
    assert [outcome.get("answer") for outcome in outcomes] == ["", ""], outcomes


# ---- no device


def refused(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    def child() -> Outcome:
        os.environ.update(settings, RINGCOMM_CUDA_LIBRARY=str(SIMULATED))
        join(rank_of(rank, life))
        return outcome_of(lambda: dist.all_reduce(torch.ones(3)))

    return in_child(child)


@pytest.mark.parametrize(
    ("driver", "words"), [("none", "there is no NVIDIA driver"), ("11040", "update the driver")]
)
def test_without_a_driver(two: Ranks, driver: str, words: str) -> None:
    for outcome in two(refused, f"driver {driver}", {"RINGCOMM_SIM_DRIVER": driver}):
        assert outcome["kind"] == "RuntimeError"
        assert words in outcome["text"]
