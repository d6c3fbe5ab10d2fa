"""The cost of the copies that the last unit of a sharded training makes of its shards.

    python benchmarks/elastic_copies.py                        # 10 million parameters, 2 ranks
    python benchmarks/elastic_copies.py --millions 40 --rounds 3

Each round trains without copies, with one after each step, and as often as the default makes them.
A copy has the parameters and what Adam keeps. Training stands still while it is made, not while it
travels.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lab import report
from lab.course import starters
from lab.report import Spread
from lab.trainee import Log
from ringcomm import elastic

WIDTH, ROWS = 1024, 32
SETTINGS = {"none": "0", "each step": "1", "auto": "auto"}


def train(world: elastic.World, log: Log, layers: int, seconds: float) -> None:
    """Train for so long; write down how long steps and copies took, in ms."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    for layer in net:
        fully_shard(layer, mesh=world.mesh["shard"])
    fully_shard(net, mesh=world.mesh["shard"])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    world.track(net=net, opt=opt)
    copies, x = world._at.copies, torch.randn(ROWS, WIDTH)
    times: list[float] = []
    still: list[float] = []
    made = 0
    until = time.perf_counter() + seconds
    go_on = torch.ones(1)
    while go_on.item():
        began, before = time.perf_counter(), copies._since
        with world.step():
            opt.zero_grad()
            net(x).square().mean().backward()
            go_on.fill_(time.perf_counter() < until)
            torch.distributed.all_reduce(go_on, torch.distributed.ReduceOp.MIN)
            opt.step()
        times.append((time.perf_counter() - began) * 1e3)
        if copies._since != before:
            made += 1
            still.append(copies._cost * 1e3)
    figures = {"times": times[5:], "still": still[2:], "made": made, "steps": len(times)}
    log("end", bytes=copies.nbytes // 4, **figures)


def measure(layers: int, rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Return, by setting: ms of a step, ms that it stood still, steps for a copy, and its bytes."""
    kinds = ("step", "still", "every", "bytes")
    figures: dict[str, dict[str, list[float]]] = {n: {k: [] for k in kinds} for n in SETTINGS}
    for _ in range(rounds):
        for name, every in SETTINGS.items():
            report.progress(f"copies: {name}")
            settings = {"RINGCOMM_ELASTIC_COPY_STEPS": every}
            program = partial(train, layers=layers, seconds=seconds)
            with starters(2, program, unit=2, settings=settings) as some:
                end = some.await_ends([0, 1], 120)[0]
            told = figures[name]
            told["step"].append(statistics.mean(end["times"]))
            told["still"] += end["still"]
            told["every"].append(end["steps"] / max(1, end["made"]))
            told["bytes"].append(end["bytes"])
    report.progress("")
    return figures


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--millions", type=int, default=10, help="of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, each time")
    options = parser.parse_args()
    layers = max(1, round(options.millions * 1e6 / WIDTH**2))
    figures = measure(layers, options.rounds, options.seconds)
    size = max(figures["each step"]["bytes"])
    print(f"{layers * WIDTH**2 / 1e6:.1f} million parameters, a shard of {size / 1e6:.0f} MB")
    for name, told in figures.items():
        step = Spread.of(told["step"])
        print(
            f"  {name:10} a step: {step.median:.0f} ms ({step.low:.0f} to {step.high:.0f})", end=""
        )
        if told["still"]:
            still = Spread.of(told["still"])
            print(f", a copy: {still.median:.0f} ms ({still.low:.0f} to {still.high:.0f})", end="")
            print(f", after each {statistics.median(told['every']):.1f} steps", end="")
        print()
    report.write_json(options.json, "copies", {"machine": report.machine(), "figures": figures})


if __name__ == "__main__":
    main()
