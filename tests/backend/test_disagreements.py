"""Ranks call the same, but for one argument: each is told, and none gets a wrong number.

Over all calls of torch.distributed that exchange something, and all their arguments that ranks must
give alike. Where they may differ, the results are right. Chance draws with the seed of the day.
"""

from __future__ import annotations

import inspect
import os
import random
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lab import calls
from lab.calls import CALLS, MOVED, Given, Results
from lab.limits import seed
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, error_of, join
from lab.simulated_device import CUDA, SIMULATED, met, on_device
from ringcomm.compression.hooks import CompressionState
from ringcomm.compression.quantized import quantized_all_reduce

OPS = ("SUM", "MAX", "MIN")
TYPES = (torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
COUNTS = (12, 300, 6000, 60_000, 600_000)
# Each rank reads one of these texts, at first hand or as "rank 1 failed: …".
TOLD = re.compile(
    "differs between ranks|disagree on how much they send each other"
    "|with this tag: give recv a tensor of the same dtype"
    "|between devices messages are matched in the order of the calls"
)


# They exchange nothing, or make groups.
OTHERS = """
    destroy_process_group get_backend get_backend_config get_default_backend_for_device
    get_global_rank get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank
    get_world_size init_process_group is_backend_available is_gloo_available is_initialized
    is_mpi_available is_nccl_available is_torchelastic_launched is_ucc_available is_xccl_available
    new_group new_subgroups new_subgroups_by_enumeration record_comm shrink_group split_group
    supports_complex
"""
GLOOS = "monitored_barrier"  # torch lets no other backend have it


def test_no_call_of_torch_is_forgotten() -> None:
    public = {name for name in c10d.__all__ if inspect.isfunction(getattr(c10d, name, None))}
    public -= {"reduce_op"}  # a class of the past
    served = {*CALLS, *(name for call in CALLS.values() for name in call.serves.split())}
    assert public <= {*served, *OTHERS.split(), GLOOS}


# ---- what ranks give


def cuts(chance: random.Random, count: int) -> tuple[int, ...]:
    lengths = [count // 6, count // 3, count - count // 6 - count // 3]
    chance.shuffle(lengths)
    return tuple(lengths)


def drawn(chance: random.Random, name: str, most: int) -> Given:
    """Draw what all ranks give, where they agree."""
    call, size = CALLS[name], 3
    count = chance.choice([count for count in COUNTS if count <= most])
    a = Given(0, size, dtype=chance.choice(TYPES), count=count, root=chance.randrange(size))
    a = replace(a, splits=cuts(chance, count), cut=cuts(chance, count))
    if "types" in call.must:
        a = replace(a, types=(torch.float32, torch.int32, torch.uint8))
    if call.run is calls.all_gather_coalesced:  # torch refuses lists of several types
        a = replace(a, types=(a.dtype,) * 3)
    if "op" in call.must.split():
        a = replace(a, op=chance.choice(OPS))
    if call.run is calls.sparse:
        a = replace(a, count=(count := min(count, 6000)), cut=(count // 6, 6))
        a = replace(a, nonzero=tuple(chance.choices((0, 1, 5), k=size)))
    if call.run is calls.premultiplied:
        a = replace(a, dtype=torch.float32, op="PREMUL_SUM")
    if call.run is calls.quantized:
        a = replace(a, dtype=torch.float32, format=chance.choice(["bf16", "fp16"]), count=300)
    if "object" in name:
        a = replace(a, count=chance.randint(1, 5))
    return a


def varied(chance: random.Random, a: Given, what: str) -> tuple[Given, Given]:
    """Return what most ranks give, and what the odd one gives."""

    def other(values: Any, than: Any) -> Any:
        return chance.choice([value for value in values if value != than])

    if what == "dtype":  # often of as many bytes
        twins = {torch.int32: torch.float32, torch.float32: torch.int32, torch.int64: torch.float64}
        dtype = twins.get(a.dtype) or other(TYPES, a.dtype)
        return a, replace(a, dtype=dtype, types=(dtype,) * len(a.types))
    if what == "moved":
        a = replace(a, dtype=chance.choice(MOVED))
        return a, replace(a, dtype=other(MOVED, a.dtype))
    if what == "floats":
        return a, replace(a, dtype=chance.choice([torch.float16, torch.bfloat16]))
    if what == "count":
        more = 12 * chance.choice([1, 5])
        return a, replace(a, count=a.count + more, cut=(a.cut[0] + more, *a.cut[1:]))
    if what == "op":
        return a, replace(a, op=other(OPS, a.op))
    if what == "mean":
        a = replace(a, op=chance.choice(["SUM", "AVG"]))
        return a, replace(a, op=other(["SUM", "AVG"], a.op))
    if what == "root":
        return a, replace(a, root=other(range(a.size), a.root))
    if what == "cut" and len(a.cut) == 2:  # the sizes of a sparse tensor
        return a, replace(a, cut=(a.cut[0] * 2, 3))
    if what == "cut":
        return a, replace(a, cut=a.cut[1:] + a.cut[:1])
    if what == "splits":
        return a, replace(a, splits=a.splits[1:] + a.splits[:1])
    if what == "types":
        return a, replace(a, types=(torch.int32, torch.float32, torch.uint8))
    if what == "format":
        return a, replace(a, format="bf16" if a.format == "fp16" else "fp16")
    return a, replace(a, dims=2) if what == "dims" else replace(a, columns=True)


Each = list[tuple[str, Given]]  # by rank


def disagreement(number: int, name: str, what: str, most: int) -> tuple[str, Each]:
    """All give the same but for one rank, and that one another `what`."""
    chance = random.Random(f"{number} {name} {what} {most}")
    a = drawn(chance, name, most)
    # The third rank takes no part in a message between two.
    odd = chance.randrange(2 if CALLS[name].run in (calls.send, calls.send_object_list) else 3)
    if what == "call":
        some = [call for call in CALLS if CALLS[call].kind == "collective" and call != name]
        if most < COUNTS[-1]:  # sparse tensors would be on the CPU, and others on a device
            some.remove("sparse all_reduce")
        instead = chance.choice(some)
        of_odd = instead, drawn(chance, instead, most)
    else:
        a, b = varied(chance, a, what)
        of_odd = name, b
    by_rank = [of_odd if rank == odd else (name, a) for rank in range(3)]
    return f"{name}, other {what} on rank {odd}, {number}", by_rank


def freedom(number: int, name: str, most: int) -> tuple[str, Each]:
    """Each rank is free to give something else of what ranks may choose."""
    chance = random.Random(f"{number} {name} {most}")
    a = drawn(chance, name, most)
    choices = {"is_async": (False, True), "strided": (False, True)}
    by_rank = []
    for _ in range(3):
        own: dict[str, Any] = {w: chance.choice(choices[w]) for w in CALLS[name].may.split()}
        by_rank.append((name, replace(a, **own)))
    return f"{name}, {number}", by_rank


# ---- what comes of it


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def attempt(name: str, mine: Given) -> tuple[tuple[str, str], Results]:
    results: Results = []
    error = error_of(lambda: results.extend(CALLS[name].run(mine)))
    if error == ("", ""):  # a rank that only gives something may have gone on: its next call tells
        error = error_of(lambda: dist.barrier(mine.group))
    return error, results


def try_all(rank: Rank, life: str, env: dict[str, str], cases: list[tuple[str, Each]]) -> Outcome:
    """Return the problems of this rank: wrong numbers, and the errors of each case."""

    def body() -> Outcome:
        os.environ.update(env)
        join(rank_of(rank, life), "cpu:ringcomm", seconds=20)
        errors, wrong = [], []
        for title, by_rank in cases:
            group = dist.new_group(timeout=timedelta(seconds=10))
            name, given = by_rank[rank.index]
            mine = replace(
                given, rank=rank.index, group=group, readable=life.startswith("readable")
            )
            error, results = attempt(name, mine)
            errors.append(error)
            wrong += [
                f"{title}: {got.view(-1)[:5].tolist()}, not {wanted.view(-1)[:5].tolist()}"
                for got, wanted in results
                if got.shape != wanted.shape or not torch.equal(bits(got), bits(wanted))
            ]
            dist.destroy_process_group(group)
        dist.destroy_process_group()
        return {"wrong": wrong, "errors": errors}

    return in_child(body)


DEVICE = {"RINGCOMM_CUDA_LIBRARY": str(SIMULATED)}
SETTINGS: dict[str, dict[str, str]] = {
    "memory": {},
    "sockets": {"RINGCOMM_TRANSPORT": "tcp"},
    "readable": {},
    "kernels": DEVICE,
    "staged": {**DEVICE, "RINGCOMM_CUDA_MODE": "host"},
}
# The simulated device is slow.
MOST = {"kernels": 60_000, "staged": 60_000}
WAYS = [way if way == "memory" else pytest.param(way, marks=pytest.mark.slow) for way in SETTINGS]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_disagree_are_told(three: Ranks, way: str, name: str) -> None:
    most = MOST.get(way, COUNTS[-1])
    whats = CALLS[name].must.split() + ["call"] * (CALLS[name].kind == "collective")
    if "sparse" in name and way in MOST:
        whats.remove("call")
    cases = [disagreement(seed(), name, what, most) for what in whats]
    outcomes = three(try_all, f"{way} {name}", SETTINGS[way], cases, seconds=120)
    problems = []
    for rank, outcome in enumerate(outcomes):
        assert "errors" in outcome, (rank, outcome)
        problems += [f"rank {rank}: {text}" for text in outcome["wrong"]]
        for (title, _), (kind, text) in zip(cases, outcome["errors"], strict=True):
            if not TOLD.search(text):
                problems.append(f"rank {rank}: {title}: {kind} {text[:300]}")
    assert not problems, "\n".join(problems)


def test_types_that_change_places_are_told(three: Ranks) -> None:
    """Each list has as many bytes, in tensors of the same sizes."""
    name, types = "all_gather_single of a list", (torch.float32, torch.int32, torch.uint8)
    cuts = [(150, 50, 100), (50, 150, 100), (1, 2, 3), (64, 64, 64), (1, 1, 1)]
    lists = [Given(0, 3, cut=cut, types=types) for cut in cuts]
    others = [replace(a, types=(types[1], types[0], types[2])) for a in lists]
    cases = [
        (str(a.cut), [(name, b), (name, a), (name, a)]) for a, b in zip(lists, others, strict=True)
    ]
    for outcome in three(try_all, "types change places", {}, cases, seconds=120):
        assert outcome.get("wrong") == [], outcome
        assert all(TOLD.search(text) for _, text in outcome["errors"]), outcome["errors"]


@pytest.mark.parametrize("way", WAYS)
def test_where_ranks_may_differ_results_are_right(three: Ranks, way: str) -> None:
    cases = [freedom(seed() + i, n, MOST.get(way, COUNTS[-1])) for n in CALLS for i in range(2)]
    for outcome in three(try_all, f"{way} free", SETTINGS[way], cases, seconds=120):
        assert outcome.get("wrong") == [], outcome
        failed = [(title, error) for (title, _), error in zip(cases, outcome["errors"], strict=True)
                  if error[0]]  # fmt: skip
        assert not failed


# ---- tensors on a GPU here, and on the CPU there


def on_two_kinds(rank: Rank, life: str, mode: str, count: int) -> Outcome:
    def body(rank: Rank) -> Outcome:
        cuda = met()
        memory, tensor = cuda.full(count, rank.index + 1.0)
        dist.barrier()
        group = dist.group.WORLD

        def call() -> None:
            dist.all_reduce(tensor if rank.index == 0 else memory, group=group)
            cuda.synchronize()
            dist.barrier()  # streams go on where a peer has failed, and then it says so

        kind, text = error_of(call)
        return {"kind": kind, "text": text, "wrong": not memory.eq(6.0).all()}

    settings = {**CUDA, "RINGCOMM_CUDA_MODE": mode}
    return on_device(rank, life, settings, body, seconds=4)


@pytest.mark.parametrize("count", [1000, 4 << 20], ids=["one piece", "several"])
def test_a_call_through_memory_of_the_host_is_none_of_the_cpu(three: Ranks, count: int) -> None:
    for outcome in three(on_two_kinds, f"staged {count}", "host", count):
        assert re.search("called all_reduce .* SUM on a device[,;]", outcome["text"]), outcome


def test_a_call_on_a_device_waits_for_none_of_the_cpu(three: Ranks) -> None:
    outcomes = three(on_two_kinds, "kinds", "auto", 1000)
    for outcome in outcomes:  # those who wait the longest tell, and the others pass it on
        assert re.search("on its (device|CPU), which this rank has not", outcome["text"]), outcome


# ---- fewer bits


def differ_in_bits(rank: Rank) -> list[tuple[str, str]]:
    state = CompressionState(format=("int8", "fp8")[rank.index])
    mine = torch.ones(300 + rank.index)
    return [error_of(state.connect), error_of(lambda: quantized_all_reduce(mine))]


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_ranks_that_compress_differently_are_told(backend: str) -> None:
    some = Ranks(2, backend)
    try:
        answers = some(differ_in_bits)
    finally:
        some.kill()
    for (kind, text), (_, told) in answers:
        assert kind == "ValueError"
        assert "'format': 'int8'" in text
        assert "'format': 'fp8'" in text
        assert re.search("quantized all_reduce (#|differs between ranks)", told), told
