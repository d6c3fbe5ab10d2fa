"""Groups run algorithms by hand that are registered by name: over shared memory, and over TCP."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from lab.by_hand import WAYS, example, go
from lab.oracle import bits
from lab.outcomes import in_child
from lab.ranks import Rank, error_of, join, ranks
from ringcomm import _C, _planner
from ringcomm._flight import records
from ringcomm.algorithms import Algorithm, Chunk, Shape, copy, reduce, send
from ringcomm.algorithms.program import INPUT, OUTPUT, SLOT, Move, Operand, Recorder, Signal, Wait
from ringcomm.algorithms.schedule import record

SIZES = (1, 5, 1000, 70_001, 600_000)
Function = Callable[[Shape], None]


On = Callable[..., list[Any]]


def alone(rank: Rank, life: str, size: int, task: Callable[..., Any], args: Any) -> Any:
    """Run a task in a child of each of the first `size` ranks: what it registers ends with it."""
    if rank.index >= size:
        return None
    here = Rank(rank.index, size, dist.PrefixStore(life, rank.store))
    outcome = in_child(lambda: {"answer": task(here, *args)})
    assert "answer" in outcome, outcome
    return outcome["answer"]


@pytest.fixture(scope="module")
def on() -> Iterator[On]:
    """Run a task on some ranks, `on(2, task, argument)`; what each of them returns."""
    lives = itertools.count()
    with ranks(4, backend=None) as four:

        def run(size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
            return four(alone, f"life {next(lives)}", size, task, args)[:size]

        yield run


# ---- what the algorithm itself says


def chunks_of(total: int, parts: int) -> list[slice]:
    """As Shape::cut: on cache lines, where there is one for each part."""
    unit = 16 if total * 4 >= 64 * parts else 1
    units = -(-total // unit)
    ends = [min(total, units * i // parts * unit) for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def by_the_words(algorithm: Algorithm, shape: Shape, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return rank 0's output of an all_reduce, added up as the algorithm is written."""
    recorder = record(algorithm, shape)
    cuts = chunks_of(inputs[0].numel(), shape.parts)
    outputs = [torch.zeros_like(tensor) for tensor in inputs]
    slots: dict[Operand, torch.Tensor] = {}
    for rank, operation in in_some_order(recorder):
        if not isinstance(operation, Move):
            continue
        places = {INPUT: inputs[rank], OUTPUT: outputs[rank]}
        values = [
            slots[src] if src.space == SLOT else places[src.space][cuts[src.chunk]].clone()
            for src in operation.src
        ]
        total = values[0]
        for value in values[1:]:
            total = total + value
        for operand in operation.dst:
            if operand.space == OUTPUT:
                outputs[rank][cuts[operand.chunk]] = total
            else:
                slots[operand] = total
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    return outputs[0]


def in_some_order(recorder: Recorder) -> Iterator[tuple[int, Move | Signal | Wait]]:
    place, sent, moved = [0] * recorder.ranks, set(), True
    while moved:
        moved = False
        for rank, program in enumerate(recorder.programs):
            while place[rank] < len(program):
                step = program[place[rank]]
                if isinstance(step, Wait) and (step.link.number, step.number) not in sent:
                    break
                if isinstance(step, Signal):
                    sent.add((step.message.link.number, step.message.lane))
                place[rank] += 1
                moved = True
                yield rank, step


def mine_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count * 97 + rank))


# ---- ranks


def run_by(rank: Rank, way: str, name: str, function: str) -> list[str]:
    """Digests of sums of all sizes by one algorithm; twice, blocking and not."""
    go(way)
    os.environ["RINGCOMM_ALGORITHM"] = "by_hand"
    ringcomm.algorithms.register_algorithm("by_hand", example(name, function), ["all_reduce"])
    join(rank)
    results = []
    for count in SIZES:
        tensor, other = mine_of(rank.index, count), mine_of(rank.index, count)
        dist.all_reduce(tensor)
        work = dist.all_reduce(other, async_op=True)
        work.wait()
        assert torch.equal(tensor, other)
        results.append(bits(tensor))
    dist.destroy_process_group()
    return results


EXAMPLES = ["ring", "ring:pipelined", "swing", "halving_doubling", "torus_2d"]
SHORT = [*((name, "auto") for name in EXAMPLES), ("torus_2d", "tcp"), ("swing", "device")]


@pytest.mark.parametrize(("name", "way"), forms(itertools.product(EXAMPLES, WAYS), *SHORT))
def test_sums_are_those_of_the_algorithm(on: On, way: str, name: str) -> None:
    """Bit by bit, in its own order of additions."""
    file, _, function = name.partition(":")
    results = on(4, run_by, way, file, function)
    for i, count in enumerate(SIZES):
        inputs = [mine_of(rank, count) for rank in range(4)]
        wanted = by_the_words(example(file, function), Shape("all_reduce", 4, 0, 4 * count), inputs)
        for rank in range(4):
            assert results[rank][i] == bits(wanted), count


def others_by_hand(rank: Rank, way: str) -> list[bool]:
    """The other collectives, each by an example, among those that the library does its own way."""
    go(way)
    register = ringcomm.algorithms.register_algorithm
    register("pat", example("pat"), ["all_gather", "reduce_scatter"])
    register("bine", example("bine"), ["broadcast", "reduce"])
    register("bruck_all", example("bruck", "all_to_all"), "all_to_all")
    join(rank)
    n, right = rank.size, []
    for name in ("pat", "bine", "bruck_all"):
        group = dist.new_group(pg_options=ringcomm.Options(algorithm=name))
        for count in (3, 5000, 200_000):
            mine = mine_of(rank.index, count * n)
            all_ = [mine_of(r, count * n) for r in range(n)]
            out = torch.zeros(n * n * count)
            dist.all_gather_into_tensor(out, mine, group=group)
            right.append(torch.equal(out, torch.cat(all_)))
            dist.all_to_all_single(out := torch.zeros(n * count), mine, group=group)
            theirs = [tensor[rank.index * count :][:count] for tensor in all_]
            right.append(torch.equal(out, torch.cat(theirs)))
            dist.broadcast(got := mine.clone(), 2, group=group)
            right.append(torch.equal(got, all_[2]))
            dist.reduce(got := torch.full((count,), float(rank.index)), 1, group=group)
            right.append(rank.index != 1 or bool((got == 6).all()))
            dist.reduce_scatter_tensor(
                out := torch.zeros(count), torch.ones(n * count), group=group
            )
            right.append(bool((out == n).all()))
            average = torch.full((count,), float(rank.index))
            dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
            right.append(bool((average == 1.5).all()))
    # Parts that differ keep the library's own way.
    send_to = [rank.index + to + 1 for to in range(n)]
    out = torch.zeros(sum(send_to))
    dist.all_to_all_single(out, torch.ones(sum(send_to)), send_to, send_to, group=group)
    return [*right, bool((out == 1).all())]


@pytest.mark.parametrize("way", forms(WAYS, "auto", "device"))
def test_other_collectives_by_hand(on: On, way: str) -> None:
    for right in on(4, others_by_hand, way):
        assert all(right), right


def train(rank: Rank, algorithm: str | None) -> list[list[float]]:
    if algorithm:
        ringcomm.algorithms.register_algorithm(algorithm, example(algorithm), ["all_reduce"])
    join(rank, pg_options=ringcomm.Options(algorithm=algorithm))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(30, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        inputs = torch.full((4, 30), float(step + 1)) * (rank.index + 1)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_ddp_trains_by_it(on: On) -> None:
    by_hand = on(4, train, "swing")
    assert all(other == by_hand[0] for other in by_hand)
    for mine, theirs in zip(by_hand[0], on(4, train, None)[0], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))


# ---- wrong ones


def exchanged(shape: Shape) -> list[list[Chunk]]:
    """Return the chunks that each rank has, once all have sent: then outputs may be written."""
    n = shape.ranks
    shape.cut(1)
    return [
        [send(shape.input(q), to=r) if q != r else shape.input(r) for q in range(n)]
        for r in range(n)
    ]


def straight(shape: Shape) -> None:
    """Every rank sends to every other, and adds in the order of the ranks."""
    for rank, got in enumerate(exchanged(shape)):
        copy(reduce(*got), shape.output(rank))


def backwards(shape: Shape) -> None:
    """The same, and adds the last rank's first."""
    for rank, got in enumerate(exchanged(shape)):
        copy(reduce(*reversed(got)), shape.output(rank))


def forgetful(shape: Shape) -> None:
    """Rank 0 gets nothing."""
    shape.cut(1)
    got = send(shape.input(0), to=1)
    copy(reduce(got, shape.input(1)), shape.output(1))


def swinging(shape: Shape) -> None:
    """Swing, as ranks can be told of it."""
    example("swing")(shape)


def called(rank: Rank, functions: list[Function], options: dict[str, Any]) -> tuple[str, str]:
    """Each rank registers its own; returns how an all_reduce ends."""
    ringcomm.algorithms.register_algorithm(
        "mine", functions[rank.index % len(functions)], ["all_reduce"], **options
    )
    join(rank, seconds=20, pg_options=ringcomm.Options(algorithm="mine"))
    data = torch.ones(1000)
    told = error_of(lambda: dist.all_reduce(data))
    return told if told[0] else ("", str(data[0].item()))


def test_other_code_on_a_rank_is_one_sentence(on: On) -> None:
    assert on(2, called, [straight], {}) == [["", "2.0"]] * 2
    told = on(2, called, [straight, backwards], {})
    for kind, text in told:
        assert kind == "DistBackendError"
        assert "have registered other code as the algorithm 'mine'" in text


def served(rank: Rank) -> tuple[str, str]:
    """Rank 0 has registered it for all_reduce, and rank 1 for another collective."""
    go("device")
    collective = ["all_reduce", "broadcast"][rank.index]
    ringcomm.algorithms.register_algorithm("mine", straight, [collective])
    join(rank, seconds=20, pg_options=ringcomm.Options(algorithm="mine"))
    return error_of(lambda: (dist.all_reduce(torch.ones(1000)), dist.barrier()))


def test_other_collectives_on_a_rank_are_one_sentence(on: On) -> None:
    """Where devices reach one another, one rank would run a kernel, and the other the plan."""
    told = on(2, served)
    for kind, text in told:
        assert kind == "DistBackendError"
        assert "by mine" in text
        assert "by a kernel" in text


def noted(rank: Rank) -> list[str]:
    ringcomm.algorithms.register_algorithm("mine", straight, ["all_reduce"])
    join(rank, pg_options=ringcomm.Options(algorithm="mine"))
    for _ in range(2):
        dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(1000), 0)
    record = records.read_ring(_C.flight_rings()[0])
    return [f"{operation.collective} {operation.algorithm}" for operation in record.operations]


def test_flight_records_have_its_name(on: On) -> None:
    for told in on(2, noted):
        assert told == ["all_reduce mine", "all_reduce mine", "broadcast direct"]


def test_a_wrong_one_raises_with_its_line(on: On) -> None:
    told = on(2, called, [forgetful], {})
    for kind, text in told:
        assert kind == "RuntimeError"
        assert f"test_registered.py:{forgetful.__code__.co_firstlineno}:" in text
        assert "rank 0's output at byte 0 was never written" in text
        assert "`ringcomm plan verify" in text


def test_a_wrong_number_of_ranks_is_told(on: On) -> None:
    told = on(3, called, [swinging], {})
    for kind, text in told:
        assert kind == "RuntimeError"
        assert "swing is for a power of two of ranks, not 3" in text


def test_it_runs_unverified_where_that_is_said(on: On) -> None:
    """A wrong result is the caller's fault then: rank 0 keeps what it had."""
    told = on(2, called, [forgetful], {"verify": False})
    assert told == [["", "1.0"], ["", "2.0"]]


def built_in(rank: Rank) -> dict[str, str]:
    """Register functions by each name of the library's own; what is said of it."""
    register = functools.partial(
        ringcomm.algorithms.register_algorithm, function=straight, collectives=["all_reduce"]
    )
    names = (*_planner.ALGORITHMS, *_planner.KERNELS)
    return {name: error_of(functools.partial(register, name))[1] for name in names}


def test_names_of_the_library_are_refused(on: On) -> None:
    """All of them: a function by such a name would never run."""
    (told,) = on(1, built_in)
    assert {"ring", "graph", "device_ring", "copy_engines"} <= told.keys()
    for name, text in told.items():
        assert f"ringcomm has an algorithm '{name}' of its own" in text


def misnamed(rank: Rank) -> list[str]:
    wrong = [
        ("Mine!", ["all_reduce"]),
        ("mine", ["all_sum"]),
        ("mine", []),
    ]
    register = functools.partial(ringcomm.algorithms.register_algorithm, function=straight)
    told = [error_of(functools.partial(register, name, collectives=to)) for name, to in wrong]
    ringcomm.algorithms.register_algorithm("mine", straight, ["all_reduce"])
    told.append(
        error_of(lambda: ringcomm.algorithms.register_algorithm("mine", straight, ["all_reduce"]))
    )
    told.append(error_of(lambda: ringcomm.Options(algorithm="other")))
    return [text for _, text in told]


def test_names_are_checked(on: On) -> None:
    (told,) = on(1, misnamed)
    wanted = [
        "'Mine!' is no name",
        "there is no collective 'all_sum'",
        "there is no collective ''",
        "'mine' is registered already",
        "there is no algorithm 'other': use one of",
    ]
    for text, part in zip(told, wanted, strict=True):
        assert part in text
