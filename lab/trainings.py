"""Elastic trainings, a function each, for `Course`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lab.course import DIES, ENDS, GROWS, Course, Training, batch
from lab.trainee import CLASSES, FEATURES, Net


class Perceptron(nn.Module):
    """Two layers; the rank dies in the backward pass between them."""

    def __init__(self, course: Course | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
        self.course = course

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.course is not None:
            hidden = self.course.backward(hidden)
        return self.second(hidden)


def digest(net: nn.Module, opt: Any = None) -> str:
    """A hash of parameters and of what the optimizer holds: equal bits, equal hash."""
    states = opt.state.values() if opt is not None else ()
    tensors = [*net.parameters(), *(value for state in states for value in state.values())]
    result = hashlib.blake2b(digest_size=8)
    for tensor in filter(torch.is_tensor, tensors):
        result.update(tensor.detach().contiguous().numpy().tobytes())
    return result.hexdigest()


def _ddp(module: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(module, init_sync=False, **options)


def _loss(model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(data[0]), data[1])


def scaler(course: Course) -> Training:
    """GradScaler, which skips steps of infinite gradients; a scheduler; BatchNorm and dropout."""
    world, net = course.world, Net()
    model, opt = _ddp(net), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step() -> None:
        opt.zero_grad()
        loss = _loss(model, batch(world))
        if world.step_number in (2, DIES, 9) and world.rank == 0:
            loss = loss * float("inf")
        scale.scale(loss).backward()
        course.at("fails")
        scale.step(opt)
        scale.update()
        sched.step()

    def tell() -> dict[str, Any]:
        return {
            "digest": digest(net, opt),
            "scale": scale.get_scale(),
            "lr": sched.get_last_lr(),
            "scheduled": sched.last_epoch,
        }

    return Training({"model": model, "opt": opt, "sched": sched, "scale": scale}, step, tell)


def following(course: Course, late: bool = False) -> Training:
    """Averages and schedulers, in the block and after it, and a generator of the program's own.

    `late`: there are two optimizers, so the vote comes at the end of the block.
    """
    world, net = course.world, Net()
    model, draws = _ddp(net), torch.Generator().manual_seed(world.rank)
    halves = [net.layers[:2].parameters(), net.layers[2:].parameters()]
    opts = [torch.optim.SGD(half, lr=0.1) for half in (halves if late else [net.parameters()])]
    inside, outside = AveragedModel(net), AveragedModel(net)
    scheds = [torch.optim.lr_scheduler.StepLR(opts[0], 3, gamma=0.5) for _ in range(2)]

    def step() -> None:
        for opt in opts:
            opt.zero_grad()
        x, y = batch(world)
        loss = _loss(model, (x + torch.randn(x.shape, generator=draws), y))
        course.backward(loss).backward()
        course.at("fails")
        for opt in opts:
            opt.step()
        inside.update_parameters(net)
        scheds[0].step()

    def after() -> None:
        outside.update_parameters(net)
        scheds[1].step()

    def tell() -> dict[str, Any]:
        averages = [digest(average) for average in (inside, outside)]
        assert averages[0] == averages[1], averages
        return {
            "digest": [digest(net, opt) for opt in opts],
            "averages": [averages, [int(average.n_averaged) for average in (inside, outside)]],
            "scheduled": [sched.last_epoch for sched in scheds],
            "draws": torch.rand(1, generator=draws).item(),
        }

    tracked = {f"opt{number}": opt for number, opt in enumerate(opts)}
    tracked |= {f"sched{number}": sched for number, sched in enumerate(scheds)}
    tracked |= {"model": model, "inside": inside, "outside": outside, "draws": draws}
    return Training(tracked, step, tell, after)


def accumulating(course: Course) -> Training:
    """Two passes a step, the first without communication."""
    world, net = course.world, Perceptron(course)
    model, opt = _ddp(net), torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step() -> None:
        opt.zero_grad()
        with model.no_sync():
            _loss(model, batch(world)).backward()
        _loss(model, batch(world, part=1)).backward()
        opt.step()

    return Training({"model": model, "opt": opt}, step, _telling(net, opt))


def _telling(net: nn.Module, opt: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"digest": digest(net, opt)}


def _plain_step(course: Course, model: Any, opt: Any) -> Callable[[], None]:
    def step() -> None:
        opt.zero_grad()
        _loss(model, batch(course.world)).backward()
        opt.step()

    return step


def compressing(course: Course) -> Training:
    """A communication hook that sends halves."""
    net = Perceptron(course)
    model, opt = _ddp(net), torch.optim.SGD(net.parameters(), lr=0.1)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    step = _plain_step(course, model, opt)
    return Training({"model": model, "opt": opt}, step, _telling(net, opt))


def powering(course: Course) -> Training:
    """PowerSGD, whose hook remembers errors between steps."""
    net = Perceptron(course)
    model, opt = _ddp(net), torch.optim.SGD(net.parameters(), lr=0.1)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    step = _plain_step(course, model, opt)
    return Training({"model": model, "opt": opt}, step, _telling(net, opt))


def compiling_net(course: Course) -> Training:
    """torch.compile inside of DDP, with a backend that counts what it compiles."""
    return _compiling(course, lambda net, compiled: _ddp(compiled(net)))


def compiling_ddp(course: Course) -> Training:
    """torch.compile of DDP itself."""
    return _compiling(course, lambda net, compiled: compiled(_ddp(net)))


def _compiling(course: Course, make: Callable[[nn.Module, Any], Any]) -> Training:
    world, net, graphs = course.world, Perceptron(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(world.step_number)
        return graph.forward

    model = make(net, lambda module: torch.compile(module, backend=backend))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        opt.zero_grad()
        output = course.backward(model(batch(world)[0]))
        F.cross_entropy(output, batch(world)[1]).backward()
        opt.step()

    def after() -> None:
        if world.step_number == ENDS:
            course.log("compiled", at=graphs)

    return Training({"model": model, "opt": opt}, step, _telling(net, opt), after)


def adversaries(course: Course) -> Training:
    """Two models and two optimizers in one step, as in a GAN."""
    world = course.world
    judge, maker = Perceptron(), nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
    judging, making = _ddp(judge), _ddp(maker)
    judge_opt = torch.optim.AdamW(judge.parameters(), lr=1e-2)
    maker_opt = torch.optim.SGD(maker.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        x, y = batch(world)
        judge_opt.zero_grad()
        _loss(judging, (x, y)).backward()
        _loss(judging, (making(x).detach(), 0 * y)).backward()
        judge_opt.step()
        course.at("between")
        course.at("fails")
        maker_opt.zero_grad()
        _loss(judging, (making(x), y)).backward()
        maker_opt.step()

    def tell() -> dict[str, Any]:
        pairs = [(judge, judge_opt), (maker, maker_opt)]
        return {"digest": [digest(net, opt) for net, opt in pairs]}

    tracked = {"judge": judging, "maker": making, "judge_opt": judge_opt, "maker_opt": maker_opt}
    return Training(tracked, step, tell)


def averaging(course: Course) -> Training:
    """No DDP: gradients are averaged by hand."""
    world, net = course.world, Perceptron(course)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step() -> None:
        opt.zero_grad()
        _loss(net, batch(world)).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size
        opt.step()

    return Training({"net": net, "opt": opt}, step, _telling(net, opt))


def descending(course: Course) -> Training:
    """No optimizer: the program changes the parameters, before the vote."""
    world, net = course.world, Perceptron(course)
    model = _ddp(net)

    def step() -> None:
        for part in range(2):
            net.zero_grad()
            _loss(model, batch(world, part)).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
            course.at("between")
            course.at("fails")

    return Training({"model": model}, step, lambda: {"digest": digest(net)})


def searching(course: Course) -> Training:
    """LBFGS, which computes gradients in its step, several times."""
    world, net = course.world, Perceptron()
    model, opt = _ddp(net), torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    losses: list[float] = []  # from a step

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = _loss(model, batch(world))
        if len(losses) == 1:
            course.at("search")
            course.at("fails")
        loss.backward()
        losses.append(loss.item())
        return loss

    def step() -> None:
        losses.clear()
        opt.step(closure)

    return Training({"model": model, "opt": opt}, step, lambda: {"digest": digest(net)})


def validating(course: Course) -> Training:
    """`world.attempt` after each step, in which the rank dies."""
    world, net = course.world, Perceptron()
    model, opt = _ddp(net), torch.optim.SGD(net.parameters(), lr=0.1)
    results: list[list[float]] = []

    def validate() -> list[float]:
        count = torch.tensor([1.0, world.rank])
        dist.all_reduce(count)
        course.at("attempt")
        with torch.no_grad():
            loss = _loss(net, batch(world))
        dist.all_reduce(loss)
        return [*count.tolist(), loss.item()]

    def after() -> None:
        results.append(world.attempt(validate))

    def tell() -> dict[str, Any]:
        return {"digest": digest(net), "found": results[GROWS + 1 - ENDS :]}

    course_step = _plain_step(course, model, opt)
    return Training({"model": model, "opt": opt}, course_step, tell, after)


def grouping(course: Course) -> Training:
    """Subgroups that overlap, made anew at each change, and a learning rate that goes by size."""
    world, net = course.world, Perceptron(course)
    model, opt = _ddp(net), torch.optim.SGD(net.parameters(), lr=0.1)
    groups: list[Any] = []

    def make(change: Any = None) -> None:
        pairs = [[rank, rank + 1] for rank in range(world.size - 1)]
        groups[:] = [(pair, dist.new_group(pair)) for pair in pairs]
        for group in opt.param_groups:
            group["lr"] = 0.03 * world.size

    if world.size > 1:
        make()
    world.on_change(make)

    def step() -> None:
        opt.zero_grad()
        _loss(model, batch(world)).backward()
        course.at("between")
        for pair, group in groups:
            if world.rank in pair:
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        opt.step()

    def tell() -> dict[str, Any]:
        return {
            "digest": digest(net),
            "groups": len(groups),
            "lr": opt.param_groups[0]["lr"],
        }

    return Training({"model": model, "opt": opt}, step, tell)


def compiling_optimizer(course: Course, *, backend: str = "aot_eager") -> Training:
    """A compiled step of the optimizer, which the vote interrupts."""
    net = Perceptron(course)
    model, opt = _ddp(net), torch.optim.AdamW(net.parameters(), lr=0.01)
    apply = torch.compile(opt.step, backend=backend)

    def step() -> None:
        opt.zero_grad()
        _loss(model, batch(course.world)).backward()
        apply()

    return Training({"model": model, "opt": opt}, step, _telling(net, opt))
