"""How soon an elastic training goes on: after a kill, with a joiner; and what it costs without.

    python benchmarks/elastic_changes.py                       # 20 kills and 20 joins on this host
    python benchmarks/elastic_changes.py --rounds 5 --ranks 3
    python benchmarks/elastic_changes.py --unit 2              # a model sharded by FSDP2, in units

A round kills one of the ranks, chosen at random, and starts another one in its place. Times are of
the slowest survivor. The cost is that of a step with and without `world.step()`, in turn: of 10 ms,
and of as little as a step can take.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab import report
from lab.course import starters
from lab.report import Spread
from lab.trainee import Log, Plan, enter
from lab.trainees import Trainees, trainees

PAUSE = 0.010  # seconds of each step
BLOCK, BLOCKS = 50, 12  # steps in turn with and without world.step()


def after(some: Trainees, number: int, what: str, at: float) -> dict[str, Any] | None:
    """The first event of a kind that one of them has written since."""
    return next((e for e in some.events(number, what) if e["at"] > at), None)


def next_changes(some: Trainees, alive: list[int], cause: Callable[[], Any]) -> list[Any]:
    """Cause a change; return what each of them has written of it."""
    counts = [len(some.events(number, "change")) for number in alive]
    cause()
    for number, count in zip(alive, counts, strict=True):
        some.await_events([number], "change", count + 1)
    return [some.events(n, "change")[count] for n, count in zip(alive, counts, strict=True)]


def kill_one(some: Trainees, units: list[set[int]], chance: random.Random) -> dict[str, float]:
    """Kill one; returns the figures of the round, in ms. Its unit, the last now, is without it."""
    units.append(units.pop(chance.randrange(len(units))))
    victim = chance.choice(sorted(units[-1]))
    units[-1].remove(victim)
    alive = sorted(set().union(*units[:-1]))
    time.sleep(chance.uniform(0.0, 0.05))  # at any place of a step
    at = 0.0

    def kill() -> None:
        nonlocal at
        at = some.kill(victim)

    works = max(float(event["at"]) for event in next_changes(some, alive, kill))
    steps = []
    for number in alive:
        while (event := after(some, number, "step", works)) is None:
            time.sleep(0.001)
        steps.append(float(event["at"]))
    return {"works": (works - at) * 1e3, "commits": (max(steps) - at) * 1e3}


def join_one(some: Trainees, units: list[set[int]]) -> dict[str, float]:
    """Start one, for the last unit.

    Returns how long it waits in `world.track`, and the others for it, in ms.
    """
    started: list[int] = []
    alive = sorted(set().union(*units))
    changed = next_changes(some, alive, lambda: started.extend(some.start(1)))
    some.await_events(started, "tracked")
    events = {event["what"]: float(event["at"]) for event in some.events(started[0])}
    units[-1] |= set(started)
    stall = max(float(event["ms"]) for event in changed)
    return {"waits": (events["tracked"] - events["asks"]) * 1e3, "stalls": stall}


def training(ranks: int, unit: int) -> Any:
    """Start a training without end: with DDP, or with FSDP2 in units."""
    if unit == 1:
        return trainees(ranks, epochs=1 << 30, pause=PAUSE)
    from lab.sharded import Part, train  # it takes seconds to import

    part = Part("both", steps=1 << 30, pause=PAUSE)
    return starters(ranks, partial(train, part=part), unit=unit)


def changes(ranks: int, unit: int, rounds: int, seed: int) -> dict[str, list[float]]:
    chance, seconds = random.Random(seed), dict[str, list[float]]()
    with training(ranks, unit) as some:
        units = [set(range(first, first + unit)) for first in range(0, ranks, unit)]
        some.await_events(list(range(ranks)), "step", 20)
        for round_ in range(rounds):
            report.progress(f"kill and join {round_ + 1} of {rounds}")
            for name, value in (kill_one(some, units, chance) | join_one(some, units)).items():
                seconds.setdefault(name, []).append(value)
            some.await_events(list(set().union(*units)), "step", 20)
    report.progress("")
    return seconds


def cost(plan: Plan, log: Log) -> None:
    """Make steps in turn with and without `world.step()`; write down what each took."""
    world = enter(plan, log)
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)) for _ in "ab"]
    models = [DistributedDataParallel(net, init_sync=False) for net in nets]
    opts = [torch.optim.AdamW(net.parameters()) for net in nets]
    world.track(model=models[0], opt=opts[0])
    x = torch.randn(16, 64)

    def body(which: int) -> None:
        opts[which].zero_grad()
        loss = models[which](x).square().mean()
        end = time.perf_counter() + plan.pause  # a processor that computes, as in training
        while time.perf_counter() < end:
            pass
        loss.backward()  # its last all_reduce ends when all ranks are here
        opts[which].step()

    for block in range(2 * BLOCKS):
        times = []
        for _ in range(BLOCK):
            began = time.perf_counter()
            if block % 2 == 0:
                with world.step():
                    body(0)
            else:
                body(1)
            times.append(time.perf_counter() - began)
        log("block", elastic=block % 2 == 0, ms=statistics.median(times) * 1e3)
    log("end")


def costs(ranks: int, pause: float) -> list[float]:
    """Return the cost of a step by each pair of blocks, in us."""
    report.progress("cost without faults")
    with trainees(ranks, cost, pause=pause) as some:
        some.await_ends(list(range(ranks)))
        blocks = [float(event["ms"]) for event in some.events(0, "block")]
    report.progress("")
    pairs = zip(blocks[2::2], blocks[3::2], strict=True)  # the first ones warm up
    return [(with_step - without) * 1e3 for with_step, without in pairs]


def show(values: list[float], unit: str) -> str:
    spread = Spread.of(values)
    return f"{spread.median:8.1f} {unit}  ({spread.low:.1f} to {spread.high:.1f})"


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--unit", type=int, default=1, help="ranks that hold a copy of the model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures = changes(options.ranks, options.unit, options.rounds, options.seed)
    if options.unit == 1:
        figures |= {"cost": costs(2, PAUSE), "least": costs(2, 0.0)}
    rows = (
        ("kill -9 to the new group", "works", "ms"),
        ("kill -9 to the next step", "commits", "ms"),
        ("a joiner waits to be admitted", "waits", "ms"),
        ("the others wait for a joiner", "stalls", "ms"),
        ("cost of a step of 10 ms, 2 ranks", "cost", "us"),
        ("cost of the shortest step, 2 ranks", "least", "us"),
    )
    what = f"{options.ranks} ranks" + f" in units of {options.unit}" * (options.unit > 1)
    print(f"{what}, steps of {PAUSE * 1e3:.0f} ms, {options.rounds} rounds: ")
    for text, name, measure in rows:
        if name in figures:
            print(f"  {text:36}{show(figures[name], measure)}")
    report.write_json(options.json, "elastic", {"machine": report.machine(), "figures": figures})


if __name__ == "__main__":
    main()
