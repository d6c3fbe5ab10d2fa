"""A step or a validation that comes again: nothing of the first try is left, and all else stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from ringcomm.elastic.state import Tracked


class Loop:
    """A model with an average and a schedule, whose program updates both after each step."""

    def __init__(self) -> None:
        self.net = nn.Linear(4, 2)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.sched = lr_scheduler.StepLR(self.opt, 100)
        self.ema = AveragedModel(self.net)
        self.tracked = Tracked(net=self.net, opt=self.opt, sched=self.sched, ema=self.ema)

    @property
    def rate(self) -> float:
        return float(self.opt.param_groups[0]["lr"])

    @property
    def counts(self) -> tuple[int, int]:
        return self.sched.last_epoch, int(self.ema.n_averaged)

    def begin(self) -> None:
        self.tracked.begin_again()
        self.tracked.mark()
        self.tracked.averages.begin()

    def fail(self) -> None:
        self.tracked.restore()
        self.tracked.leave_out()

    def after(self) -> None:
        self.opt.step()
        self.sched.step()
        self.ema.update_parameters(self.net)

    def succeed(self) -> None:
        self.tracked.averages.count()
        self.after()


def test_a_rate_of_a_callback_stays() -> None:
    loop = Loop()
    loop.begin()
    loop.fail()
    loop.opt.param_groups[0]["lr"] = 0.25  # as World.on_change may
    loop.tracked.keep_rates()
    loop.after()
    loop.opt.param_groups[0]["lr"] = 7.0  # and this is of the step that did not count
    loop.begin()
    assert loop.rate == 0.25
    assert loop.counts == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_an_attempt_after_a_step_that_did_not_count(fails: bool) -> None:
    loop = Loop()
    loop.begin()
    loop.fail()
    loop.tracked.mark(parameters=True)
    if fails:
        loop.tracked.restore()
        loop.tracked.keep_rates()
        loop.tracked.mark(parameters=True)
    loop.after()
    loop.begin()
    loop.succeed()
    assert loop.counts == (1, 1)


def test_an_attempt_that_fails_after_the_schedule() -> None:
    loop = Loop()
    loop.begin()
    loop.fail()
    loop.after()
    loop.tracked.mark(parameters=True)
    loop.tracked.restore()
    loop.opt.param_groups[0]["lr"] = 0.25
    loop.tracked.keep_rates()
    loop.begin()
    assert (loop.rate, loop.counts) == (0.25, (0, 0))
    loop.succeed()
    assert loop.counts == (1, 1)


def test_state_that_came_meanwhile_stays() -> None:
    loop, other = Loop(), Loop()
    for _ in range(3):
        other.begin()
        other.succeed()
    loop.begin()
    loop.fail()
    given = other.tracked.pack()
    taken = loop.tracked.unpack(given.header)
    for mine, theirs in zip(taken.parts, given.parts, strict=True):
        mine.copy_(theirs)
    loop.tracked.finish()
    loop.sched.step()  # after the block: of the step that did not count
    loop.begin()
    assert loop.counts == (3, 3)


def test_an_average_that_validation_lends() -> None:
    net = nn.Linear(4, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    tracked = Tracked(net=net, opt=opt)
    before = [p.detach().clone() for p in net.parameters()]
    tracked.mark(parameters=True)
    for parameter in net.parameters():
        parameter.data.copy_(torch.full_like(parameter, 9.0))  # no version tells of it
    tracked.restore()
    assert all(map(torch.equal, net.parameters(), before))
    tracked.mark()
    assert not tracked._by_hand._copies._kept  # a step needs no memory for that


class Momentum(nn.Module):
    """A module whose forward pass moves the parameters of one half after those of the other."""

    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.query, self.key, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.key.requires_grad_(False)
        self.frozen.requires_grad_(False)
        self.by_data = by_data

    def forward(self, x: Any) -> Any:
        pairs = zip(self.key.parameters(), self.query.parameters(), strict=True)
        for key, query in pairs:
            if self.by_data:
                key.data = key.data * 0.9 + query.data * 0.1
            else:
                with torch.no_grad():
                    key.mul_(0.9).add_(query, alpha=0.1)
        return self.query(x) - self.key(x).detach()


@pytest.mark.parametrize("by_data", [False, True])
def test_a_momentum_encoder(by_data: bool, capfd: pytest.CaptureFixture[str]) -> None:
    net = Momentum(by_data=by_data)
    opt = torch.optim.SGD(net.query.parameters(), lr=0.5)
    tracked = Tracked(net=net, opt=opt)
    for step in range(4):
        tracked.mark()
        before = [p.detach().clone() for p in net.key.parameters()]
        net(torch.ones(2, 4)).sum().backward()
        if step >= 1:
            tracked.restore()
            assert all(map(torch.equal, net.key.parameters(), before))
            net(torch.ones(2, 4)).sum().backward()
        opt.step()
    assert len(tracked._by_hand._copies._kept) == 2  # those of the frozen part are not copied
    assert "tracked optimizer" not in capfd.readouterr().err


def test_a_momentum_encoder_in_the_first_step(capfd: pytest.CaptureFixture[str]) -> None:
    net = Momentum(by_data=False)
    opt = torch.optim.SGD(net.query.parameters(), lr=0.5)
    tracked = Tracked(net=net, opt=opt)
    tracked.mark()
    net(torch.ones(2, 4))
    tracked.restore()
    assert "tracked optimizer has: this once they change twice" in capfd.readouterr().err
    tracked.mark()
    before = [p.detach().clone() for p in net.key.parameters()]
    net(torch.ones(2, 4))
    tracked.restore()
    assert all(map(torch.equal, net.key.parameters(), before))
    assert capfd.readouterr().err == ""
