"""CUDA graphs: captured calls do their work again at each replay, beside other calls.

The simulated device captures and replays as CUDA does (tests/cpp/device/sim_graph_test.cc).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks, error_of
from lab.simulated_device import SMALL, Cuda, Graph, Memory, met, on_device

OWN_DEVICES = {"RINGCOMM_SIM_DEVICES": "3", "RINGCOMM_SIM_ROTATE": "0,1,2"}
COUNT = 3000  # elements of a part; in small windows many rounds


def inputs_of(rank: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-50, 50, (COUNT * size,), generator=generator).float()


class Tensors:
    """Input and output of a call, and parts: views are made by kernels, so before a capture."""

    def __init__(self, memory: Memory, rank: Rank) -> None:
        self.rank, self.size = rank.index, rank.size
        self.input, self.i = memory.make(COUNT * self.size)
        self.output, self.o = memory.make(COUNT * self.size)
        self.in_parts = list(self.i.split(COUNT))
        self.out_parts = list(self.o.split(COUNT))
        self.uneven_in = self.i[: self.size * (self.size + 1) // 2]
        self.uneven_out = self.o[: self.size * (self.rank + 1)]

    def at_root(self, parts: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return parts if self.rank == ROOT else None


# By name: the call, and what rank r has then, by all inputs.
Call = Callable[[Tensors], Any]
Wanted = Callable[[list[torch.Tensor], int], torch.Tensor | None]
ROOT = 1
COLLECTIVES: dict[str, tuple[Call, Wanted]] = {
    "all_reduce": (lambda t: dist.all_reduce(t.i), lambda x, r: torch.stack(x).sum(0)),
    "all_reduce_async": (
        lambda t: dist.all_reduce(t.i, op=dist.ReduceOp.MAX, async_op=True).wait(),
        lambda x, r: torch.stack(x).amax(0),
    ),
    "broadcast": (lambda t: dist.broadcast(t.i, ROOT), lambda x, r: x[ROOT]),
    "reduce": (
        lambda t: dist.reduce(t.i, ROOT),
        lambda x, r: torch.stack(x).sum(0) if r == ROOT else None,
    ),
    "all_gather": (
        lambda t: dist.all_gather_into_tensor(t.o, t.in_parts[0]),
        lambda x, r: torch.cat([src[:COUNT] for src in x]),
    ),
    "all_gather_list": (
        lambda t: dist.all_gather(t.out_parts, t.in_parts[0]),
        lambda x, r: torch.cat([src[:COUNT] for src in x]),
    ),
    "reduce_scatter": (
        lambda t: dist.reduce_scatter_tensor(t.out_parts[0], t.i),
        lambda x, r: torch.stack(x).sum(0)[r * COUNT : (r + 1) * COUNT],
    ),
    "gather": (
        lambda t: dist.gather(t.in_parts[0], t.at_root(t.out_parts), ROOT),
        lambda x, r: torch.cat([src[:COUNT] for src in x]) if r == ROOT else None,
    ),
    "scatter": (
        lambda t: dist.scatter(t.out_parts[0], t.at_root(t.in_parts), ROOT),
        lambda x, r: x[ROOT][r * COUNT : (r + 1) * COUNT],
    ),
    "all_to_all": (
        lambda t: dist.all_to_all_single(t.o, t.i),
        lambda x, r: torch.cat([src[r * COUNT : (r + 1) * COUNT] for src in x]),
    ),
    "all_to_all_list": (
        lambda t: dist.all_to_all(t.out_parts, t.in_parts),
        lambda x, r: torch.cat([src[r * COUNT : (r + 1) * COUNT] for src in x]),
    ),
    "all_to_all_splits": (
        lambda t: dist.all_to_all_single(
            t.uneven_out, t.uneven_in, [t.rank + 1] * t.size, list(range(1, t.size + 1))
        ),
        lambda x, r: torch.cat([e[r * (r + 1) // 2 : (r + 1) * (r + 2) // 2] for e in x]),
    ),
    "barrier": (lambda t: barrier(t.i.device), lambda x, r: None),
}
IN_PLACE = ("all_reduce", "all_reduce_async", "broadcast", "reduce")


def barrier(device: torch.device) -> None:
    options = dist.BarrierOptions()
    options.device = device
    options.asyncOp = False
    backend_of(device).barrier(options)


def backend_of(device: torch.device) -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(device)


class Case(Tensors):
    """A collective with its tensors, captured."""

    def __init__(self, name: str, memory: Memory, rank: Rank) -> None:
        super().__init__(memory, rank)
        self.name = name
        self.call, self.wanted = COLLECTIVES[name]
        self.graph = Graph(memory.cuda)

    def fill(self, seed: int) -> None:
        self.input.copy_(inputs_of(self.rank, self.size, seed))

    def check(self, seed: int) -> str:
        all_inputs = [inputs_of(rank, self.size, seed) for rank in range(self.size)]
        wanted = self.wanted(all_inputs, self.rank)
        if wanted is None:
            return ""
        got = (self.input if self.name in IN_PLACE else self.output)[: len(wanted)]
        return "" if torch.equal(got, wanted) else f"{self.name}, seed {seed}: {got[:4]}"


def collectives(rank: Rank, life: str, mapped: bool, settings: dict[str, str]) -> Outcome:
    """Each is captured and then replayed, with other inputs each time, mixed with calls."""

    def body(rank: Rank) -> str:
        memory = Memory(met(), mapped)
        cases = [Case(name, memory, rank) for name in COLLECTIVES]
        for case in cases:
            with case.graph:
                case.call(case)
        texts = []
        for seed in range(4):
            for case in cases:  # all graphs are alive
                case.fill(seed)
                case.call(case) if seed == 2 else case.graph.replay()
                memory.cuda.synchronize()
                texts.append(case.check(seed))
        return "".join(texts)

    return on_device(rank, life, settings, body)


DEVICES = {
    "one": {},
    "each": OWN_DEVICES,
    "over PCIe": {**OWN_DEVICES, "RINGCOMM_SIM_NVLINK": "0"},
}


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("mapped", [True, False])
def test_every_collective_is_captured(three: Ranks, mapped: bool, devices: str) -> None:
    settings = {**SMALL, **DEVICES[devices]}
    outcomes = three(collectives, f"collectives {mapped} {devices}", mapped, settings)
    assert [outcome.get("answer") for outcome in outcomes] == [""] * 3, outcomes


def replays(rank: Rank, life: str, count: int, settings: dict[str, str]) -> Outcome:
    """Two graphs and calls in turn, of sums that tell how often each was done."""

    def body(rank: Rank) -> str:
        cuda = met()
        memory = Memory(cuda, True)
        first, there = memory.make(COUNT)
        two, elsewhere = memory.make(COUNT)
        graphs = [Graph(cuda) for _ in range(2)]
        with graphs[0]:
            dist.all_reduce(there, op=dist.ReduceOp.MAX)
            dist.broadcast(elsewhere, 1)
        with graphs[1]:
            dist.all_reduce(elsewhere, op=dist.ReduceOp.MIN)
        for round_ in range(count):
            first.fill_(round_ + rank.index)
            two.fill_(round_ * 2 + rank.index)
            cuda.synchronize()
            graphs[0].replay()
            if round_ % 3 == 0:
                dist.all_reduce(there)
            graphs[1].replay()
            cuda.synchronize()
            top = round_ + rank.size - 1
            wanted = (top * rank.size if round_ % 3 == 0 else top, round_ * 2 + 1)
            if not (first.eq(wanted[0]).all() and two.eq(wanted[1]).all()):
                return f"round {round_}: {first[0]} and {two[0]}, not {wanted}"
        return ""

    return on_device(rank, life, settings, body, seconds=300)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_replays_and_calls_in_turn(three: Ranks, count: int) -> None:
    outcomes = three(replays, f"replays {count}", count, SMALL)
    assert [outcome.get("answer") for outcome in outcomes] == [""] * 3, outcomes


def first(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Ranks meet, and map one another's tensors, while they capture: no replay copies."""

    def body(rank: Rank) -> str:
        memory = Memory(cuda := Cuda(), True)
        values, tensor = memory.make(COUNT)
        assert memory.simulated is not None
        other = memory.make(COUNT)[1]
        with (graph := Graph(cuda)):
            dist.all_reduce(other)
            before = memory.simulated.copies()
            dist.all_reduce(tensor)
            copies = memory.simulated.copies() - before
        values.fill_(1)
        graph.replay()
        cuda.synchronize()
        return f"{copies} copies, {values.eq(rank.size).all()}"

    return on_device(rank, life, settings, body)


def test_a_capture_may_be_the_first_call(three: Ranks) -> None:
    outcomes = three(first, "first", SMALL)
    assert [outcome.get("answer") for outcome in outcomes] == ["0 copies, True"] * 3, outcomes


def refused(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """A call that cannot be captured is refused with a sentence, and the group goes on."""

    def body(rank: Rank) -> str:
        cuda = met()
        values, tensor = cuda.full(10, 1.0)
        texts = []
        calls: list[Callable[[], Any]] = [lambda: dist.all_reduce(tensor)]
        if "RINGCOMM_CUDA_MODE" not in settings:
            calls = [lambda: dist.isend(tensor, (rank.index + 1) % rank.size)]
        for call in calls:
            try:
                with Graph(cuda):
                    call()
            except RuntimeError as error:
                texts.append(str(error).split("\n")[0])
        dist.all_reduce(tensor)
        cuda.synchronize()
        return f"{texts} {values.eq(rank.size).all()}"

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"RINGCOMM_CUDA_MODE": "host"}, "its tensors go through memory of the host, as "),
        ({}, "messages are matched at each call"),
    ],
)
def test_what_cannot_be_captured(three: Ranks, settings: dict[str, str], why: str) -> None:
    for outcome in three(refused, f"refused {why}", {**SMALL, **settings}):
        answer = str(outcome.get("answer"))
        assert "cannot be captured into a CUDA graph: " in answer, outcome
        assert why in answer, outcome
        assert answer.endswith("True"), outcome


def differs(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """One rank captures what the others call: an error at once, and on each of them in the end."""

    def body(rank: Rank) -> str:
        cuda = met()
        _, tensor = Memory(cuda, True).make(COUNT)
        with (
            contextlib.suppress(RuntimeError),
            Graph(cuda) if rank.index == 1 else contextlib.nullcontext(),
        ):
            dist.all_reduce(tensor)
        cuda.synchronize()
        begin = time.monotonic()
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError as error:
            return "late" if time.monotonic() - begin > limit(10) else str(error)
        return "no error"

    return on_device(rank, life, settings, body)


def test_a_capture_on_one_rank_alone(three: Ranks) -> None:
    texts = [str(outcome.get("answer")) for outcome in three(differs, "differs", SMALL)]
    assert any("a CUDA graph" in text for text in texts), texts
    assert not any(text in ("no error", "late") for text in texts), texts


def captured() -> tuple[Cuda, torch.Tensor, Graph]:
    """Capture an all_reduce of mapped memory."""
    cuda = met()
    _, tensor = Memory(cuda, True).make(COUNT)
    graph = Graph(cuda)
    with graph:
        dist.all_reduce(tensor)
    return cuda, tensor, graph


def gone(rank: Rank, life: str, how: str, settings: dict[str, str]) -> Outcome:
    """A peer dies, or destroys its group, while a graph waits for it: nothing hangs."""

    def body(rank: Rank) -> str:
        cuda, tensor, graph = captured()
        graph.replay()
        cuda.synchronize()
        if rank.index == 1:
            if how == "dies":
                os._exit(0)
            dist.destroy_process_group()
            return "names it"
        begin = time.monotonic()
        for _ in range(3):
            graph.replay()
        cuda.synchronize()
        if time.monotonic() - begin > limit(10):
            return "the stream waited on"
        text = error_of(lambda: dist.all_reduce(tensor))[1]
        return "names it" if "rank 1" in text else text or "no error"

    return on_device(rank, life, settings, body)


def idle(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """A peer is there, and does not replay. Its next call fails with the group."""

    def body(rank: Rank) -> Outcome:
        cuda, tensor, graph = captured()
        graph.replay()
        cuda.synchronize()
        store = dist.distributed_c10d._get_default_store()
        if rank.index == 1:
            store.wait(["over 0", "over 2"], timedelta(seconds=limit(15)))
        else:
            graph.replay()
            cuda.synchronize()
        text = error_of(lambda: dist.all_reduce(tensor))[1]
        store.set(f"over {rank.index}", "1")
        return {"text": text}

    return on_device(rank, life, settings, body, seconds=4)


@pytest.mark.parametrize("kernel", ["two_shot", "low_latency", "device_ring"])
def test_kernels_give_up_by_themselves(three: Ranks, kernel: str) -> None:
    outcomes = three(idle, f"idle {kernel}", {**OWN_DEVICES, "RINGCOMM_ALGORITHM": kernel})
    told = "a kernel on the device waited too long for rank "  # in a ring, for a neighbour
    texts = [outcome.get("text", "") for outcome in outcomes]
    assert all(told in text for text in texts), texts
    assert kernel == "device_ring" or f"{told}1" in str(texts)


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_a_peer_that_is_gone(three: Ranks, how: str) -> None:
    outcomes = three(gone, f"gone {how}", how, SMALL)
    if how == "dies":
        outcomes = [outcomes[0], outcomes[2]]
    assert [outcome.get("answer") for outcome in outcomes] == ["names it"] * len(outcomes), outcomes


def late(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """A replay after the end of its group is an error, not a wait."""

    def body(rank: Rank) -> str:
        cuda, _, graph = captured()
        dist.barrier()
        dist.destroy_process_group()
        try:
            graph.replay()
            cuda.synchronize()
        except RuntimeError as error:
            return "an error" if "an illegal memory access" in str(error) else str(error)
        return "no error"

    return on_device(rank, life, settings, body)


def test_a_replay_after_the_group(three: Ranks) -> None:
    outcomes = three(late, "late", SMALL)
    assert [outcome.get("answer") for outcome in outcomes] == ["an error"] * 3, outcomes
