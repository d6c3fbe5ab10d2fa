"""A training whose ranks die and come at any time, and the same one with these changes planned.

What has changed is read from what the members have decided. In the planned run each rank goes in
good order, and each guest is called when it is its turn. Both have to compute the same bits.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.limits import limit
from lab.trainee import Log, Plan, Trainee
from lab.trainees import Trainees
from lab.weather import Weather
from ringcomm.elastic import rendezvous
from ringcomm.elastic.changes import Changes
from ringcomm.elastic.epochs import Decided, Epochs
from ringcomm.elastic.world import World

SCRIPT = "LAB_CHURN_SCRIPT"  # the variable with a script
SLIPS = {"~": "admit", "+": "guests"}  # how the slip begins of one that takes guests in


@dataclass
class Exit:
    """When a rank goes, after `step`.

    By `leave`, with the vote; when it has `seen` so many changes after that step; when guests are
    to be `admit`ted; or when they are to become members, the `guests`.
    """

    step: int
    how: str
    seen: int = 0


@dataclass
class Script:
    """A plan, by the numbers of the ranks in the planned run."""

    founders: int
    joins: dict[int, list[int]] = field(default_factory=dict)  # after that step
    exits: dict[int, Exit] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)  # after these steps; nobody is lost by them
    original: list[int] = field(default_factory=list)  # by number: that in the run that was churned
    folder: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Script:
        fields = json.loads(text)
        exits = {int(number): Exit(**given) for number, given in fields.pop("exits").items()}
        joins = {int(step): numbers for step, numbers in fields.pop("joins").items()}
        return cls(**fields, joins=joins, exits=exits)

    def step_of(self, number: int) -> int:
        """After which step a rank comes; 0 for a founder."""
        return next((step for step, numbers in self.joins.items() if number in numbers), 0)


# ---- from one run to the script of the other


def decisions(some: Trainees) -> list[dict[str, Any]]:
    """Return the decisions, by epoch. Raises AssertionError where ranks saw different decisions."""
    by_epoch: dict[int, dict[str, Any]] = {}
    for event in some.all_events("decided"):
        same = {name: event[name] for name in ("epoch", "commits", "members", "guests")}
        assert by_epoch.setdefault(event["epoch"], same) == same, (by_epoch[event["epoch"]], event)
    epochs = sorted(by_epoch)
    assert epochs == list(range(1, len(epochs) + 1)), "an epoch is missing"
    return [by_epoch[epoch] for epoch in epochs]


def script_of(some: Trainees, founders: int) -> Script:
    """Write the script of a run that has ended."""
    decided, more = decisions(some), some.events(0, "tracked")[0]["more"]
    script = Script(founders, original=list(range(founders)))
    members, seen = list(range(founders)), defaultdict[int, int](int)
    for at, decision in enumerate(decided):
        step = decision["commits"] - more
        script.failures.append(step)
        now = decision["members"]
        coming = decided[at + 1]["members"] if at + 1 < len(decided) else []
        admits = any(number in coming for number in decision["guests"])
        joined = [number for number in now if number not in members]
        for number in [number for number in members if number not in now]:
            how = "guests" if joined else "admit" if admits else "seen" if seen[step] else "leave"
            script.exits[script.original.index(number)] = Exit(step, how, seen[step])
        if joined:
            first = len(script.original)
            script.original += joined
            script.joins[step] = list(range(first, len(script.original)))
        if set(now) != set(members):
            seen[step] += 1
        members = now
    changed = {exit_.step for exit_ in script.exits.values()} | set(script.joins)
    script.failures = sorted(set(script.failures) - changed)
    for number in members:
        end = some.events(number, "end")[0]
        script.exits[script.original.index(number)] = Exit(end["step"], "leave")
    return script


# ---- the planned run


def act(plan: Plan, log: Log) -> None:
    """Be one rank of the planned run."""
    actor = Actor(Script.from_text(os.environ[SCRIPT]), plan)
    actor.wait_for_turn()
    trainee = actor.trainee = Trainee(plan, log)
    actor.world = world = trainee.world
    try:
        while True:
            for batch in world.batches(trainee.loader):
                actor.before_step()
                trainee.step(batch)
                trainee.write_step()
    finally:
        trainee.end()


class Actor:
    """One rank that keeps to a script."""

    def __init__(self, script: Script, plan: Plan) -> None:
        self.script, self.number = script, plan.number
        self.exit = script.exits[self.number]
        self.folder = Path(script.folder)
        self.trainee: Trainee | None = None
        self.failed = 0  # after which step
        self.world: Any = None
        self.seen: dict[int, int] = defaultdict(int)
        World._may_call = lambda world: 0  # type: ignore[assignment, method-assign]
        agree, tell = Epochs.agree, Changes._tell

        def fated(epochs: Epochs, decided: int, voted: bool, extra: str, failed: bool) -> Decided:
            self.before_agreement(epochs, decided, extra)
            before = epochs.members
            answer = agree(epochs, decided, voted, extra, failed)
            self.seen[answer.step] += before != epochs.members
            return answer

        def told(changes: Changes, *args: Any) -> None:
            tell(changes, *args)
            counters = changes.counters
            now = Exit(counters.steps, "seen", self.seen[counters.commits])
            if self.exit == now:
                go(changes)

        Epochs.agree = fated  # type: ignore[assignment, method-assign]
        Changes._tell = told  # type: ignore[assignment, method-assign]

    def wait_for_turn(self) -> None:
        """A guest comes when the others wait for it."""
        step = self.script.step_of(self.number)
        while step and not (self.folder / f"admits-{step}").exists():
            time.sleep(0.002)

    def before_agreement(self, epochs: Epochs, decided: int, extra: str) -> None:
        """Go where guests come in at the same time.

        Not before rank 0 has them in its slip, nor before all have that make guests members: the
        vote before that fails where this rank has gone, and then they come a step later.
        """
        if self.world is None:
            return
        changes = self.world._at
        step = decided - (changes.counters.commits - changes.counters.steps)
        if extra[:1] in SLIPS:
            (self.folder / f"offers-{step}-{SLIPS[extra[:1]]}-{self.number}").touch()
        if self.exit.how not in SLIPS.values() or step != self.exit.step:
            return
        if bool(epochs.guests) != (self.exit.how == "guests"):
            return
        offers = f"offers-{step}-{self.exit.how}-*"
        awaited = len(epochs.members) if self.exit.how == "guests" else 1
        deadline = time.monotonic() + limit(30)
        while len(list(self.folder.glob(offers))) < awaited:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 takes nobody in after step {step}")
            time.sleep(0.001)
        go(changes)

    def before_step(self) -> None:
        """Leave with this step, or have the guests ready that are to come after it.

        A failure has DDP lay out its buckets anew, and so sums are added up in another order: where
        there was one by which nobody was lost, there is to be one.
        """
        step = self.world.step_number + 1
        if self.world.rank == 0 and self.failed < step - 1 in self.script.failures:
            self.failed = step - 1
            assert self.trainee is not None
            self.trainee.fail()
        if self.exit.how == "leave" and self.exit.step == step:
            self.world.leave()
        if self.world.rank != 0 or step not in self.script.joins:
            return
        (self.folder / f"admits-{step}").touch()
        changes, guests = self.world._at, self.script.joins[step]
        deadline = time.monotonic() + limit(30)
        while time.monotonic() < deadline:
            keys = changes.epochs.home.keys
            came = rendezvous.answers(keys, rendezvous.call(keys, "join"), 8)
            if sorted(guest.rank for guest in came) == guests:
                changes.watch._guests = sorted(came, key=lambda guest: guest.rank)
                return
        raise TimeoutError(f"guests {guests} did not come")


def go(changes: Changes) -> None:
    """Go in good order, at once."""
    changes.watch.stop()
    changes.epochs.end()
    raise SystemExit(0)


def perform(script: Script, some: Trainees, namespaces: Sequence[str] = ()) -> None:
    """Have the ranks act; `some` runs `act`, and nobody has been started.

    `namespaces` are those of the hosts that the ranks are on, by their numbers.
    """
    script.folder = str(some.folder)
    settings = {**some.plan.settings, SCRIPT: script.to_text()}

    def start(number: int) -> None:
        namespace = namespaces[number] if namespaces else ""
        some.start(1, settings=settings, namespace=namespace)

    started = script.founders
    for number in range(started):
        start(number)
    steps, deadline = 0, time.monotonic() + limit(60)
    while started < len(script.original):
        assert time.monotonic() < deadline, some.all_events()[-20:]
        ahead = sum(step > steps for step in map(script.step_of, range(started)))
        if ahead < 3:
            start(started)
            started += 1
        else:
            time.sleep(0.02)
            notes = [int(path.name.split("-")[1]) for path in some.folder.glob("admits-*")]
            steps, before = max(notes, default=0), steps
            deadline += limit(60) * (steps > before)


# ---- the run that is churned


def churn(
    some: Trainees,
    seconds: float,
    pauses: tuple[float, float],
    draw: random.Random,
    weather: Weather | None = None,
) -> int:
    """Kill and start ranks for a time, then have all leave; returns how many were killed."""
    start = weather.start if weather is not None else some.start
    alive, kills = list(range(len(some.processes))), 0
    some.await_events(alive, "step")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(draw.uniform(*pauses))  # when, is for chance to decide
        members = [number for number in alive if some.events(number, "step")]
        if weather is not None and draw.random() < 0.4:
            weather.strike(members)
            continue
        if len(alive) < 6 and (len(members) < 3 or draw.random() < 0.5):
            alive += start()
            continue
        victim = draw.choice(alive)
        if victim in members and len(members) < 2:
            continue
        check_alive(some, alive)
        some.kill(victim)
        alive.remove(victim)
        kills += 1
    some.await_events(alive, "step", 2)
    check_alive(some, alive)
    for number in alive:
        some.kill(number, signal.SIGTERM)
        some.await_ends([number])
    return kills


def check_alive(some: Trainees, alive: list[int]) -> None:
    """Require that nobody was lost but those that were killed."""
    for number in alive:
        process = some.processes[number]
        assert process.exitcode is None, (number, process.exitcode, some.events(number)[-2:])


# ---- many changes


def restless(plan: Plan, log: Log) -> None:
    """Train, and have the group fail every other step; write down what the process holds."""
    trainee, failed = Trainee(plan, log), 0
    world = trainee.world
    try:
        while True:
            for batch in world.batches(trainee.loader):
                if world.rank == 0 and world.step_number > failed + 1:
                    failed = world.step_number
                    trainee.fail()
                trainee.step(batch)
                if plan.number == 0 and world.epoch % 10 == 0:
                    log("holds", epoch=world.epoch, **holdings())
    finally:
        trainee.end()


def holdings() -> dict[str, int]:
    """Count what this process holds of the kernel's things; memory in KiB."""
    status = Path("/proc/self/status").read_text().split()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": int(status[status.index("Threads:") + 1]),
        "memory": int(status[status.index("VmRSS:") + 1]),
    }
