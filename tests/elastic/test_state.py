"""The state of a loop: put back bit for bit, taken back, and given to joiners in stripes."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from lab.oracle import bits
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, error_of, join, ranks
from ringcomm.elastic import transfer
from ringcomm.elastic.state import Tracked


class Net(nn.Module):
    """A forward pass that changes buffers, in place and by assignment, and random numbers."""

    mean: Any

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(), nn.Linear(width, 4)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("ones", torch.ones(1).expand(8), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x + np.random.rand() + random.random())
        self.seen += len(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


class Count:
    """An object with state of its own."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


KINDS: dict[str, Any] = {"AdamW": {}, "SGD": {"momentum": 0.9}, "Adagrad": {}, "LBFGS": {}}


def optimizer(kind: str, parameters: Any) -> Any:
    return getattr(torch.optim, kind)(parameters, lr=0.1, **KINDS[kind])


def seed_all(seed: int) -> None:
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(seed)


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))


def stepped(net: nn.Module, opt: torch.optim.Optimizer, step: int) -> None:
    def closure() -> Any:
        return net(batch(step)).square().mean()

    opt.zero_grad()
    closure().backward()
    opt.step(closure)


def digests(*values: Any) -> list[str]:
    """The bits of all tensors in `values`, and the rest as text."""
    tensors: list[tuple[Any, bool]] = []
    rest = transfer.flatten(list(values), tensors, False)
    return [repr(rest), *(bits(tensor.detach()) for tensor, _ in tensors)]


def of(tracked: Tracked) -> list[str]:
    return digests(*(thing.state_dict() for thing in tracked.objects.values()))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("zeroed", ["first", "last", "last, in place"])
def test_a_step_computed_again_is_the_same(zeroed: str) -> None:
    seed_all(1)
    net = Net()
    opt = optimizer("SGD", net.parameters())
    parts = [lr_scheduler.ConstantLR(opt), lr_scheduler.StepLR(opt, 2)]
    sched = lr_scheduler.SequentialLR(opt, parts, milestones=[2])
    tracked = Tracked(model=net, opt=opt, sched=sched)

    def compute(step: int) -> list[str]:
        if zeroed == "first":
            opt.zero_grad()
        net(batch(step)).square().sum().backward()
        sched.step()  # early, as some loops do
        gradients = [parameter.grad for parameter in net.parameters()]
        noise = [random.getstate(), repr(np.random.get_state()), torch.get_rng_state()]
        return digests(net.state_dict(), gradients, noise, sched.state_dict(), opt.state_dict())

    for step in range(5):
        tracked.mark()
        first, mean = compute(step), net.mean
        for _ in range(2):  # a redo may be cut short, too
            tracked.restore()
            assert net.mean is not mean
            assert zeroed != "last" or all(parameter.grad is None for parameter in net.parameters())
            assert compute(step) == first
            net.mean.fill_(float("nan"))
            net._buffers["late"] = torch.ones(1)
        tracked.restore()
        compute(step)
        opt.step()
        if zeroed != "first":
            opt.zero_grad(set_to_none=zeroed == "last")


def test_numpy_normal_numbers_come_in_pairs() -> None:
    """The second of a pair leaves the bits as they are, but not the state."""
    tracked = Tracked(count=Count())
    for _ in range(5):
        tracked.mark()
        first = np.random.standard_normal()
        tracked.restore()
        assert np.random.standard_normal() == first


def test_scaler_that_has_unscaled() -> None:
    net = Net()
    opt = torch.optim.SGD([{"params": net.parameters(), "lr": torch.tensor(0.5)}])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    tracked = Tracked(net=net, opt=opt, scaler=scaler)
    for _ in range(2):  # the first time the scale is not made yet
        tracked.mark()
        for _ in range(2):
            opt.zero_grad()
            scaler.scale(net(batch(0)).sum()).backward()
            scaler.unscale_(opt)  # raises the second time in a step
            opt.param_groups[0]["lr"].fill_(7)
            opt.param_groups[0]["new"] = 1
            tracked.restore()
            assert opt.param_groups[0]["lr"] == 0.5
            assert "new" not in opt.param_groups[0]
        scaler.scale(net(batch(0)).sum()).backward()
        scaler.step(opt)
        scaler.update()


def test_cost_of_mark() -> None:
    np.random.seed(1)  # it holds no number back
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(5)])
    opt = optimizer("AdamW", net.parameters())
    tracked = Tracked(model=net, opt=opt, sched=lr_scheduler.CosineAnnealingLR(opt, 100))
    taken = []
    for _ in range(1000):
        begin = time.perf_counter()
        tracked.mark()
        taken.append(1e6 * (time.perf_counter() - begin))
    print(f"mark(), 20 parameters, 15 buffers: {sorted(taken)[500]:.1f} us, least {min(taken):.1f}")


@pytest.mark.parametrize("kind", KINDS)
def test_undo(kind: str) -> None:
    net = nn.Linear(8, 4)
    opt = optimizer(kind, net.parameters())
    tracked = Tracked(net=net, opt=opt)
    for step in range(3):
        before = of(tracked)
        tracked.keep_for_undo(opt)
        stepped(net, opt, step)
        once = of(tracked)
        assert once != before
        tracked.undo()
        assert of(tracked) == before
        tracked.undo()  # nothing is kept any more
        stepped(net, opt, step)
        assert of(tracked) == once
        tracked.keep_for_undo(opt)
        tracked.forget_undo()
        tracked.undo()
        assert of(tracked) == once


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'x' is a list without state_dict\(\)"):
        Tracked(x=[])  # type: ignore[arg-type]
    for value in (np.float64(1), torch.eye(2).to_sparse()):
        with pytest.raises(ValueError, match=r"state of 'x' cannot be sent to joiners: it has a"):
            Tracked(x=Count(value))
    counter, two = Count(), Count()
    counter._decide = two._decide = None  # type: ignore[attr-defined]
    assert Tracked(sampler=counter).sampler is counter
    with pytest.raises(ValueError, match="a and b are elastic samplers"):
        Tracked(b=two, a=counter)


def test_a_header_runs_no_code() -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    with pytest.raises(pickle.UnpicklingError, match="system, which is not plain data"):
        transfer.decode(pickle.dumps({"leaves": [], "states": Harm()}))


def test_other_types_that_torch_reads_are_sent() -> None:
    counts = Counter({"a": 3, "b": 1})
    tensors: list[Any] = []
    state = transfer.flatten({"counts": counts, "type": torch.bfloat16}, tensors, True)
    header = transfer.decode(transfer.encode({"state": state, "leaves": []}))
    assert transfer.fill(header["state"], tensors) == {"counts": counts, "type": torch.bfloat16}


def test_signature_and_fingerprint() -> None:
    net = Net()
    tracked = Tracked(opt=optimizer("AdamW", net.parameters()), model=net)
    assert tracked.signature() == "model: Net, opt: AdamW"
    parameters, both = tracked.fingerprint(), tracked.fingerprint(buffers=True)
    net(batch(0))
    assert (tracked.fingerprint(), tracked.fingerprint(buffers=True) == both) == (parameters, False)
    list(net.parameters())[-1].detach().view(torch.int32)[-1] ^= 1
    assert tracked.fingerprint() != parameters


def loop(kind: str, steps: int, seed: int, width: int = 8) -> Tracked:
    """A loop that has made some steps."""
    seed_all(seed)
    net, scaler = Net(width), torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = optimizer(kind, net.parameters())
    sched, count = lr_scheduler.MultiStepLR(opt, [2, 3]), Count()
    for step in range(steps):
        opt.zero_grad()
        scaler.scale(net(batch(step)).square().mean()).backward()
        scaler.step(opt)
        scaler.update(4.0 + step)
        sched.step()
    count.value = {"deep": [torch.arange(steps), (steps, None, "x")]}
    return Tracked(model=net, adam=opt, sched=sched, scaler=scaler, count=count)


def moved(here: Tracked, there: Tracked) -> None:
    """The effect of a transfer."""
    packed = here.pack()
    for into, part in zip(there.unpack(packed.header).parts, packed.parts, strict=True):
        into.copy_(part)
    there.finish()


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_joiner_loads_what_was_packed(kind: str, steps: int) -> None:
    here = loop(kind, steps, seed=1)
    for before in (0, 2):  # a joiner that has state of its own, too
        there = loop(kind, before, seed=2)
        assert of(there) != of(here)
        moved(here, there)
        assert of(there) == of(here)
        for tracked in (here, there):
            seed_all(before)
            stepped(tracked.objects["model"], tracked.objects["adam"], 0)
        assert of(there) == of(here)


class Odd(nn.Conv2d):
    """State that is no tensor, and a type to which torch rounds the optimizer's."""

    def __init__(self, level: int) -> None:
        super().__init__(3, 4, 3, dtype=torch.bfloat16)
        self.level = level

    def get_extra_state(self) -> Any:
        return {"level": self.level, "more": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.level = state["level"] * int(state["more"].sum())


def test_odd_modules() -> None:
    here, there = Odd(5), Odd(0).to(memory_format=torch.channels_last)
    opts = [optimizer("SGD", net.parameters()) for net in (here, there)]
    opts[0].state[here.weight]["momentum_buffer"] = noise = torch.rand_like(here.weight.float())
    stride = there.weight.stride()
    assert here.weight.stride() != stride
    moved(Tracked(net=here, opt=opts[0]), Tracked(net=there, opt=opts[1]))
    assert (there.level, torch.equal(here.weight, there.weight)) == (10, True)
    assert there.weight.stride() == stride
    assert torch.equal(opts[1].state[there.weight]["momentum_buffer"], noise)


def test_differences_are_named() -> None:
    def check(there: dict[str, Any], here: dict[str, Any], text: str) -> None:
        joiner = Tracked(**here)
        before = joiner.fingerprint(buffers=True)
        header = Tracked(**there).pack().header
        assert error_of(lambda: joiner.unpack(header)) == ("ValueError", text)
        assert joiner.fingerprint(buffers=True) == before

    net, wide, bare = nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(3, 4, bias=False)
    wrong = "state of 'net' cannot be loaded: "
    text = wrong + "'weight' is float32[4, 3] at the members and float32[5, 3] here"
    check({"net": net}, {"net": wide}, text)
    text = wrong + "'weight' is float32[4, 3] at the members and bfloat16[4, 3] here"
    check({"net": net}, {"net": nn.Linear(3, 4).bfloat16()}, text)
    check({"net": net}, {"net": bare}, wrong + "'bias' is only at the members")
    check({"net": bare}, {"net": net}, wrong + "'bias' is only here")
    less, more = (optimizer("SGD", some.parameters()) for some in (bare, net))
    text = "parameter 1 of group 0 is missing at the members and [4] here"
    check({"opt": less}, {"opt": more}, f"state of 'opt' cannot be loaded: {text}")
    text = "the members have net: Linear, opt: SGD, and this rank has net: Linear: every rank "
    check({"opt": less, "net": net}, {"net": net}, text + "needs the same things")


def test_stripes_and_pieces_are_the_whole_stream() -> None:
    chance = random.Random(0)
    for _ in range(100):
        sizes = [chance.choice([0, 1, 4, 70_000, 99_999]) for _ in range(chance.randrange(9))]
        parts = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        packed = transfer.Packed(b"", parts, sum(sizes[: chance.randrange(len(sizes) + 1)]))
        count = chance.randrange(1, 5)
        cuts = transfer.stripes(packed, count)
        assert [cuts[0][0], cuts[-1][1], len(cuts)] == [0, sum(sizes), count]
        assert cuts[0][1] >= packed.own_bytes
        for begin, end in cuts:
            for piece in transfer.pieces(packed, begin, end):
                for part, low, high in piece.segments:
                    parts[part][low:high] += 1
        assert all(bool((part == 1).all()) for part in parts)


@pytest.fixture(scope="module")
def five() -> Iterator[Ranks]:
    with ranks(5, backend=None) as some:
        yield some


GIVERS, JOINERS = [0, 2, 3], [1, 4]


def break_something(rank: int, fault: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if (fault, rank) == ("joiner dies", 4):
        transfer._Input._take = die  # type: ignore[method-assign]
    if (fault, rank) == ("giver dies", 2):
        dist.isend = die
    if (fault, rank) == ("bytes change", 3):
        transfer._hash = lambda tensor: 5


def given(rank: Rank, fault: str) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, fault), seconds=30)
        transfer.PIECE_BYTES = 300_001
        is_giver = rank.index in GIVERS
        tracked = loop("AdamW", steps=2 * is_giver, seed=1 + is_giver, width=40_000)
        if is_giver:  # what differs between ranks comes from the first
            tracked.modules[0].mean.fill_(rank.index)
            tracked.objects["count"].value = 7 + rank.index
        before, begin = of(tracked), time.monotonic()
        break_something(rank.index, fault)
        error, sent = "", 0
        try:
            if is_giver:
                sent = transfer.send(tracked.pack(), dist.group.WORLD, GIVERS, JOINERS)
            else:
                transfer.receive(tracked.unpack, dist.group.WORLD, GIVERS)
                tracked.finish()
            dist.barrier()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
        dist.destroy_process_group()
        seconds, state = time.monotonic() - begin, of(tracked)
        return {"error": error, "state": state, "before": before, "sent": sent, "seconds": seconds}

    return in_child(body)


def test_state_comes_in_stripes(five: Ranks) -> None:
    outcomes = five(given, "none")
    assert [outcome.get("error") for outcome in outcomes] == [""] * 5, outcomes
    states = [outcome["state"] for outcome in outcomes]
    assert [state == states[0] for state in states] == [True, True, False, False, True]
    sent = [outcomes[giver]["sent"] for giver in GIVERS]
    assert max(sent) < 1.1 * min(sent), "the stripes are not equal"
    print(f"{sum(sent) / 2e6:.1f} MB to each of 2, in {outcomes[1]['seconds']:.2f} s")


@pytest.mark.parametrize(("fault", "dead"), [("joiner dies", 4), ("giver dies", 2)])
def test_a_death_in_transfer_harms_no_giver(five: Ranks, fault: str, dead: int) -> None:
    outcomes = five(given, fault)
    assert outcomes[dead] == {"killed": signal.SIGKILL}
    for rank, outcome in enumerate(outcomes):
        if rank != dead:
            assert outcome["error"].startswith("DistBackendError"), outcome["error"]
            assert f"rank {dead}" in outcome["error"]
            assert rank in JOINERS or outcome["state"] == outcome["before"]


def test_bytes_that_changed_are_noticed(five: Ranks) -> None:
    outcomes = five(given, "bytes change")
    for joiner in JOINERS:
        assert "RuntimeError: stripe 3 of 3 of the state, from rank 3" in outcomes[joiner]["error"]
