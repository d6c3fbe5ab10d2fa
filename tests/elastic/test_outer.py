"""DiLoCo in an elastic world: codes of pseudo-gradients, and rounds over deaths and entrances."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lab.course import Starters, starters
from lab.limits import claim, limit
from lab.trainee import CLASSES, FEATURES, Log, digest
from ringcomm import elastic
from ringcomm.elastic import transfer
from ringcomm.elastic.outer import Contribution, Outer, Terms, _cut, _outer_copy, _refuse
from ringcomm.elastic.outer_codec import Codec, codec_for

# ---- codes

WAYS = [(16, None), (8, None), (4, None), (2, None), (32, 64), (4, 64), (2, 64)]


def codec_of(way: tuple[int, int | None]) -> Codec:
    codec = codec_for(*way)
    assert codec is not None
    return codec


def draws() -> dict[str, torch.Tensor]:
    """Numbers as pseudo-gradients may be: also with heavy tails, equal ones, and mostly zeros."""
    draw = torch.Generator().manual_seed(1)
    normal = torch.randn(10_000, generator=draw)
    return {
        "normal": normal,
        "heavy": normal**5,
        "tiny": normal * 1e-12,
        "equal": torch.full((9_000,), -3.0),
        "sparse": torch.where(torch.rand(10_000, generator=draw) < 0.001, normal, 0.0),
        "zeros": torch.zeros(5_000),
        "few": normal[:3].clone(),
    }


@pytest.mark.parametrize(
    ("way", "whole", "rest"),
    [
        ((16, None), 8192, 512),
        ((8, None), 16 * 260, 260),
        ((4, None), 16 * (4 + 128), 132),
        ((2, None), 16 * (4 + 64), 68),
        ((32, 64), 64 * 4 + 96, 352),
        ((4, 64), 4 + 32 + 96, 132),
        ((2, 64), 4 + 16 + 96, 116),
    ],
)
def test_sizes(way: tuple[int, int | None], whole: int, rest: int) -> None:
    """Codes of 4,096 numbers, and of one number more."""
    codec = codec_of(way)
    for count, size in ((4096, whole), (4097, whole + rest), (1, rest)):
        assert codec.bytes_of(count) == codec.encode(torch.ones(count)).numel() == size


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", draws())
def test_codes_come_nearer(way: tuple[int, int | None], kind: str) -> None:
    """The rest is less than there was; with error feedback, SGD converges for that."""
    numbers, codec = draws()[kind], codec_of(way)
    left = numbers - codec.decode(codec.encode(numbers), numbers.numel())
    before, after = (float(x.double().square().sum()) for x in (numbers, left))
    assert after < before or before == after == 0


@pytest.mark.parametrize("way", WAYS)
def test_error_feedback_loses_nothing(way: tuple[int, int | None]) -> None:
    """After any number of rounds, what was sent and what is left make up all that there was."""
    codec, draw = codec_of(way), torch.Generator().manual_seed(2)
    left, sent, there = (torch.zeros(5000, dtype=torch.float64) for _ in range(3))
    for _ in range(20):
        numbers = torch.randn(5000, generator=draw)
        there += numbers
        total = numbers + left.float()
        decoded = codec.decode(codec.encode(total), 5000)
        left = (total - decoded).double()
        sent += decoded
    assert torch.allclose(sent + left, there, atol=1e-4)


def test_normal_numbers_lose_as_little_as_they_can() -> None:
    """As Max (1960) has it: 0.0115 of the variance with 16 levels, 0.119 with 4."""
    numbers = torch.randn(1 << 18, generator=torch.Generator().manual_seed(3))
    for bits, least in ((4, 0.01154), (2, 0.1188)):
        codec = codec_of((bits, None))
        left = numbers - codec.decode(codec.encode(numbers), numbers.numel())
        assert float(left.square().mean()) == pytest.approx(least, rel=0.03)


def test_the_largest_are_taken() -> None:
    numbers = draws()["heavy"]
    codec = codec_of((32, 64))
    decoded = codec.decode(codec.encode(numbers), numbers.numel())
    for chunk, codes in zip(numbers.split(4096), decoded.split(4096), strict=True):
        largest = chunk.abs().topk(64).indices
        assert torch.equal(codes[largest], chunk[largest])
        assert int(codes.count_nonzero()) == 64


@pytest.mark.parametrize("way", [(3, None), (8, 64), (2, 6), (2, 8192), (2, 0)])
def test_codes_that_there_are_not(way: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match=r"bits=|topk="):
        codec_for(*way)


# ---- rounds

DIES, GROWS, ENDS, EVERY = 3, 5, 8, 6  # rounds, and inner steps of one


def batch(number: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data that only this member has."""
    draw = torch.Generator().manual_seed(1000 * number + step)
    x = torch.randn(8, FEATURES, generator=draw)
    return x, torch.randint(0, CLASSES, (8,), generator=draw)


def parts(number: int) -> tuple[Any, Any, Any]:
    """A model, which is another one on each member, and its optimizers."""
    torch.manual_seed(number)
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, CLASSES))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, inner, torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def inner_step(net: Any, inner: Any, number: int, step: int) -> None:
    x, y = batch(number, step)
    inner.zero_grad()
    F.cross_entropy(net(x), y).backward()
    inner.step()


def rig(outer: Outer, log: Log, world: elastic.World, dies: str) -> None:
    """Write down the weights of contributions; member 1 may die in the exchange of a round."""
    average, make = outer._average, outer._make_round

    def making() -> None:
        assert outer._mine is not None
        log("brings", weight=outer._mine.weight, fragment=outer._mine.fragment)
        make()

    def averaging(mine: Any, data: Any) -> Any:
        at = dies if world.step_number == DIES else ""
        if at == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = average(mine, data)
        if at == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    outer._make_round, outer._average = making, averaging  # type: ignore[method-assign]


def train(
    world: elastic.World, log: Log, place: str = "", options: dict[str, Any] | None = None
) -> None:
    """Train until round `ENDS`. `place`: where member 1 dies or leaves, or a joiner is awaited."""
    number = int(os.environ["RANK"])
    net, inner, outer_opt = parts(number)
    mine = place if number == 1 else ""
    original = Outer._begin
    Outer._begin = lambda outer: (rig(outer, log, world, mine), original(outer))[1]  # type: ignore
    outer = world.outer(net, inner, outer_opt, **{"every": EVERY, **(options or {})})
    begun = threading.Event()
    if place == "sends":
        send_while_training(outer, log, begun)
    log(
        "tracked",
        rounds=outer.rounds,
        equal=digest(net.parameters()) == digest(outer.model.parameters()),
    )
    while outer.rounds < ENDS:
        before = outer.rounds
        if mine == "between" and before == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if before == {"leaves": DIES - 1, "leaves later": DIES}.get(mine):
            world.leave()
        if place in ("grows", "sends") and (before, number, world.size) == (GROWS, 0, 2):
            await_guest(world, begun)
        while place == "sends" and not (
            outer._idle is None or outer._idle.done() or begun.is_set()
        ):
            time.sleep(0.001)  # else all inner steps may be made before the state is sent
        inner_step(net, inner, number, outer.steps)
        if outer.rounds > before:
            log(
                "step",
                step=outer.rounds,
                size=world.size,
                digest=digest(outer.model.parameters()),
                own=digest(net.parameters()),
            )
    outer.wait()
    states = [v for state in outer_opt.state.values() for v in state.values() if torch.is_tensor(v)]
    log("end", rounds=world.step_number, digest=digest([*outer.model.parameters(), *states]))


def send_while_training(outer: Outer, log: Log, begun: threading.Event) -> None:
    """Have the state for a joiner wait for inner steps of this member."""
    send = transfer.send

    def sending(*arguments: Any) -> int:
        before, deadline = outer.steps, time.monotonic() + limit(5)
        begun.set()
        while outer.steps < before + 2:
            assert time.monotonic() < deadline, "no inner step is made while the state is sent"
            time.sleep(0.001)
        log("sends", steps=outer.steps - before)
        return send(*arguments)

    transfer.send = sending  # type: ignore[assignment]


def await_guest(world: elastic.World, begun: threading.Event) -> None:
    """Wait for a guest, unless one is coming in: that goes on beside inner steps."""
    deadline, changes = time.monotonic() + limit(60), world._at

    def comes() -> bool:
        at_hand = changes.watch.wants_change or changes.epochs.guests
        return world.size > 2 or bool(at_hand) or begun.is_set()

    while not comes():
        assert time.monotonic() < deadline, "no guest has come"
        time.sleep(0.002)


def play(place: str, count: int = 3, joiners: int = 0, **options: Any) -> Starters:
    """Run it, and require that no round was lost and all members had the same in each."""
    with starters(count, partial(train, place=place, options=options)) as some:
        if joiners:
            some.await_events(list(range(count)), "tracked")
            some.start(joiners)
        goes = place in ("before", "after", "between", "leaves", "leaves later")
        stay = [n for n in range(count + joiners) if not (goes and n == 1)]
        ends = some.await_ends(stay)
        assert [end["what"] for end in ends] == ["end"] * len(ends), ends
        assert {(end["rounds"], end["digest"]) for end in ends} == {(ENDS, ends[0]["digest"])}
        if goes:
            some.processes[1].join(limit(60))
            assert some.processes[1].exitcode == (0 if "leaves" in place else -signal.SIGKILL)
        some.check_equal()
        first = [event["step"] for event in some.events(stay[0], "step")]
        assert first == list(range(1, ENDS + 1))
        return some


def told(some: Starters) -> dict[int, list[str]]:
    """Hashes of each survivor's parameters, and of the outer state, round by round."""
    hashes = {
        n: [event["own"] + event["digest"] for event in some.events(n, "step")] for n in (0, 2)
    }
    return hashes | {-1: [event["digest"] for event in some.all_events("end")]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"bits": 8}, marks=pytest.mark.slow),
        {"bits": 2, "topk": 64},
        pytest.param({"fragments": 3, "bits": 4}, marks=pytest.mark.slow),
        {"fragments": 2, "delay": 2, "bits": 8},
    ],
    ids=str,
)
def test_a_death_costs_no_round_and_changes_no_bit(options: dict[str, Any]) -> None:
    """Wherever a member dies, the others have what they have where it leaves before.

    If it dies when all have its numbers, they may count, as if it left a round later.
    """
    planned = [told(play(place, **options)) for place in ("leaves", "leaves later")]
    assert planned[0] != planned[1]
    assert told(play("before", **options)) == planned[0]
    assert told(play("between", **options)) == planned[0]
    assert told(play("after", **options)) in planned


def test_a_joiner_begins_with_weight_zero() -> None:
    """It has the outer copy, takes part in a round without numbers, and then trains with them."""
    for options in ({}, {"fragments": 2, "delay": 1, "bits": 4}):
        some = play("grows", count=2, joiners=1, **options)
        joiner = some.events(2, "tracked")[0]
        assert joiner["equal"]
        assert 0 < joiner["rounds"] < ENDS  # a quick one comes before it is awaited
        weights = [event["weight"] for event in some.events(2, "brings")]
        assert weights[0] == 0
        assert all(weight > 0 for weight in weights[1:])
        assert some.events(2, "step")[0]["step"] == joiner["rounds"] + 1
        full = [event["weight"] for event in some.events(0, "brings")]
        assert set(full[options.get("fragments", 1) :]) == {EVERY}


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}], ids=str)
def test_inner_steps_go_on_while_a_joiner_gets_the_state(options: dict[str, Any]) -> None:
    some = play("sends", count=2, joiners=1, **options)
    for number in range(2):
        (sent,) = some.events(number, "sends")
        assert sent["steps"] >= 2


def average_by_weight(world: elastic.World, log: Log, bits: int) -> None:
    """Bring other numbers than the others; those of rank 1 weigh nothing."""
    outer = world.outer(*parts(0), every=1, bits=bits)
    moved = torch.full((965,), [1.0, 50.0, 5.0][world.rank])
    mine = Contribution(0, [3, 0, 1][world.rank], moved)
    data = outer._encode(mine)
    log("end", mean=world.attempt(lambda: outer._average(mine, data)).tolist())  # type: ignore


def test_the_mean_is_weighted_by_steps() -> None:
    for bits in (32, 8):
        with starters(3, partial(average_by_weight, bits=bits)) as some:
            for end in some.await_ends([0, 1, 2]):
                assert end["mean"] == pytest.approx([2.0] * 965, rel=0.01)


def train_by_time(world: elastic.World, log: Log) -> None:
    """Member 1 is slow, and is never waited for; validation goes on beside rounds."""
    number = int(os.environ["RANK"])
    net, inner, outer_opt = parts(number)
    outer = world.outer(net, inner, outer_opt, every=timedelta(seconds=0.3), bits=8)
    rig(outer, log, world, "")
    longest, total = 0.0, torch.ones(1)
    while outer.rounds < 6:
        before, began = outer.rounds, time.monotonic()
        time.sleep(0.4 if number == 1 else 0.005)
        inner_step(net, inner, number, outer.steps)
        longest = max(longest, time.monotonic() - began)
        if outer.rounds > before and outer.rounds == 3:
            world.attempt(lambda: dist.all_reduce(total))
            log("validated", sum=total.item())
    log("end", steps=outer.steps, longest=longest, digest=digest(outer.model.parameters()))


def test_a_slow_member_holds_nobody_up() -> None:
    with starters(3, train_by_time) as some:
        ends = some.await_ends([0, 1, 2])
        fast, slow = ends[0], ends[1]
        assert fast["steps"] > 3 * slow["steps"]
        for number in range(3):
            weights = [event["weight"] for event in some.events(number, "brings")]
            assert sum(weights) <= ends[number]["steps"]
            assert min(weights) > 0
            assert [event["sum"] for event in some.events(number, "validated")] == [3.0]
        assert fast["longest"] < claim(0.3), "it was held up for a step of the slow one"
        assert len({end["digest"] for end in ends}) == 1


def train_with_checkpoints(world: elastic.World, log: Log, folder: str, first: bool) -> None:
    number = int(os.environ["RANK"])
    net, inner, outer_opt = parts(number)
    outer = world.outer(net, inner, outer_opt, every=2, bits=8)
    world.checkpoint(folder, every=1)
    log("tracked", rounds=outer.rounds, digest=digest(net.parameters()))
    rounds = outer.rounds
    while outer.rounds < rounds + 4:
        inner_step(net, inner, number, outer.steps)
        log("step", step=outer.rounds, digest=digest(outer.model.parameters()))
    if first:
        assert world._saving is not None
        world._saving.checkpoints.finish()
    log("end")
    if first:
        signal.pause()


def test_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """It holds the outer copy, and each member's parameters begin there."""
    program = partial(train_with_checkpoints, folder=str(tmp_path))
    with starters(2, partial(program, first=True)) as some:
        some.await_events([0, 1], "end")
        known = {event["step"]: event["digest"] for event in some.events(0, "step")}
    with starters(2, partial(program, first=False)) as others:
        others.await_ends([0, 1])
        for number in range(2):
            (begins,) = others.events(number, "tracked")
            assert begins["rounds"] > 0
            assert begins["digest"] == known[begins["rounds"]]
        others.check_equal()


def train_alone(world: elastic.World, log: Log) -> None:
    net, inner, outer_opt = parts(0)
    outer = world.outer(net, inner, outer_opt, every=2)
    inner_step(net, inner, 0, 0)
    with torch.no_grad():
        net[0].bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="after inner step 2"):
        inner_step(net, inner, 0, 1)
    assert all(p.isfinite().all() for p in outer.model.parameters())
    log("end")


def test_parameters_that_are_not_finite_stay_here() -> None:
    with starters(1, train_alone) as some:
        some.await_ends([0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 5, "fragments": 2}, "a multiple of fragments=2"),
        ({"every": 6, "fragments": 2, "delay": 3}, "less than the 3 inner steps"),
        ({"every": timedelta(seconds=1), "delay": 3}, "with a time above 0"),
        ({"every": 0}, "at least 1"),
        ({"every": 1, "alpha": 2.0}, "from 0 to 1"),
    ],
)
def test_terms_that_cannot_be(options: dict[str, Any], text: str) -> None:
    usual = {"bits": 32, "topk": None, "fragments": 1, "delay": 0, "alpha": 0.5}
    with pytest.raises(ValueError, match=text):
        Terms(**{**usual, **options})


def test_what_goes_with_inner_steps_is_not_tracked() -> None:
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    _refuse({"count": nn.Linear(1, 1), "sched": StepLR(torch.optim.SGD([net.bias]), 3)}, inner)
    for thing in (StepLR(inner, 3), torch.amp.GradScaler("cpu")):
        with pytest.raises(ValueError, match="'thing' goes with the inner optimizer"):
            _refuse({"thing": thing}, inner)


def test_what_is_copied() -> None:
    """Frozen parameters are shared, trained ones and buffers are copied, tied ones stay tied."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net[3].requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    inner, outer_opt = torch.optim.AdamW(trained), torch.optim.SGD(trained, lr=1.0)
    outer, pairs = _outer_copy(net, inner, outer_opt)
    assert outer[3].weight is net[3].weight
    assert outer[2].weight is outer[0].weight is not net[0].weight
    assert outer[1].running_mean is not net[1].running_mean
    assert [p for group in outer_opt.param_groups for p in group["params"]] == [q for _, q in pairs]
    with pytest.raises(ValueError, match="all parameters of the model"):
        _outer_copy(net, inner, torch.optim.SGD(trained[1:], lr=1.0))
    sizes = [[q.numel() for _, q in fragment] for fragment in _cut(pairs, 3)]
    assert sizes == [[16], [4, 4], [4, 4]]
    with pytest.raises(ValueError, match="has only 5 parameters"):
        _cut(pairs, 6)
