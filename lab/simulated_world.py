"""A simulated process of an elastic training: the shipped Python code, over stand-ins.

`ringcomm.elastic`'s World, Changes, Epochs, Entrance, Rendezvous, Watch, Waiting, Bars, Lapse,
Hang, Pulse and Guard run as they are. Stand-ins have the place of torch's groups, the agreement,
the store, the clock, and the model, which here is a number of steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from lab.simulated_group import Backend, Groups
from lab.simulated_store import Network, SimulatedStore
from lab.simulated_time import Event, Killed, Owner, Time
from ringcomm.elastic import (
    changes,
    entrance,
    epochs,
    errors,
    gathering,
    hang,
    kept_groups,
    pulse,
    rendezvous,
    watch,
    world,
)
from ringcomm.elastic.changes import COUNTERS
from ringcomm.elastic.epochs import Settings
from ringcomm.elastic.hang import Progress
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.process import Process
from ringcomm.elastic.waiting import Waiting
from ringcomm.elastic.watch import Bars

LEASE, HUNG_AFTER, PATIENCE, OPERATION = 15.0, 4.0, 2.0, 20.0  # seconds
JOIN_TIMEOUT = 10_000.0
LEAST_SLEEP = 0.02
# How a guest takes the state: its process is stopped meanwhile, or its program is and its threads
# are not; or all goes well, slowly, or with few signs of life besides.
TROUBLES = ("frozen", "stuck", "slow", "faint")
FROZEN, STUCK, FAINTNESS = 30.0, 40.0, 12.0  # seconds, and the slowness of its threads
PIECES = {"slow": 14, "faint": 6}  # of the state, one a second
MODEL_SECONDS = ((0.1, 1.5), (0.1, 1.5), (3.0, 8.0))  # to make it: some take long
DIES_AFTER = {0: "member", 3: "later"}  # steps
SAVE_EVERY = 5  # steps, between checkpoints
ENDS = (RuntimeError, ValueError, TimeoutError)  # a program ends by these with status 1
# Looks are rarer than in production, and what is measured by them is longer.
SECONDS: dict[Any, dict[str, float]] = {
    rendezvous: {"LOOK_SECONDS": 0.2, "ANSWER_SECONDS": 0.6, "JOIN_SECONDS": 0.6},
    watch: {"LOOK_SECONDS": 0.3, "JOIN_SECONDS": 0.6, "LONGEST_SECONDS": 2.0, "END_SECONDS": 0.0},
    hang: {"FEWEST": 2, "USUAL_STEPS": 10},
    pulse: {"BEAT_SECONDS": 0.3},
}


@dataclass
class Spec:
    """A process as its launcher knows it, and the fate in store for it."""

    host: str
    rank: int = -1
    supervised: bool = True  # it is started anew if it ends by an error
    differs: bool = False  # from the others, in its parameters
    # Where it dies, and where it does when it is started anew: as a "guest", as a new "member", or
    # "later", after some steps. Or one of TROUBLES.
    fates: tuple[str, ...] = ()
    hangs_at: float = float("inf")
    model: float = 0.0  # seconds that it needs to make its model, at least
    slow: float = 0.0  # seconds by which its next step takes longer
    slow_after: int = 0  # steps of the training: no earlier one takes longer
    # Below is the state of the process.
    hangs: bool = False
    pid: int = 0
    backend: Backend | None = None
    threads: int = 0
    world: Any = None
    said: list[str] = field(default_factory=list)
    status: int | None = None


class Model:
    """Stands in for Tracked: the state is a number of steps, of which each rank holds a shard."""

    sampler = None
    parameters = optimizers = schedulers = scalers = wrappers = generators = ()

    def __init__(self, course: Course) -> None:
        self.course, self.steps, self.epoch = course, 0, 0
        self.given_to = ""  # the name under which this process got the state
        self.objects: dict[str, Any] = {}
        self.shards = SimpleNamespace(regroup=lambda: course.check_members())
        self.averages = SimpleNamespace(begin=lambda: None, count=self._count)

    def _count(self) -> None:
        self.steps += 1
        self.course.applied(self.steps, self.epoch)

    def mark(self, *, parameters: bool = False) -> None:
        """A step begins, in this epoch. The decision that ends it may be what makes it count."""
        self.epoch = self.course.time.owner.more.world.epoch

    def fingerprint(self) -> int:
        more = self.course.time.owner.more
        differs = more.differs and not more.world._founder
        return hash((more.world._changes.epochs.me.place, self.steps, differs))

    def signature(self) -> str:
        return "model"

    def pack(self) -> Any:
        place = self.course.time.owner.more.world._changes.epochs.me.place
        counters = self.objects[COUNTERS].state_dict()
        return SimpleNamespace(total_bytes=0, place=place, steps=self.steps, counters=counters)

    def unpack(self, state: Any) -> None:
        me = self.course.time.owner.more.world._changes.epochs.me
        assert state.place == me.place
        self.steps, self.given_to = state.steps, me.uuid
        self.objects[COUNTERS].load_state_dict(state.counters)

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    finish = undo = forget_undo = restore = leave_out = keep_rates = begin_again = _nothing


class Units:
    """Stands in for UnitGroups."""

    def __init__(self, size: int) -> None:
        self.size, self.unit, self.replicas = size, None, None

    def _nothing(self, *_: Any) -> None:
        pass

    begin = connect = take_out = stay_apart = _nothing


class Course:
    """A run of simulated processes: starts them, and has what they share."""

    def __init__(self, seed: int, unit: int, start: int) -> None:
        self.time = Time(seed)
        self.network, self.groups = Network(self.time), Groups(self.time)
        self.unit, self.start = unit, start
        self.owners: list[Owner] = []
        self.saved = 0  # the step of the newest checkpoint
        self.goal = 10**9  # steps
        self.lines: dict[int, dict[int, int]] = {}  # by life: the epoch in which a step was applied
        self.newest = -1  # life that has applied steps
        self.succeeded = 0.0  # when it did so for the first time
        self.applied_at = self.pause = 0.0  # when it last did, and the longest time between two
        self.entrances: dict[tuple[str, int], int] = {}  # that failed in a row
        self.events: list[str] = []

    def note(self, text: str) -> None:
        self.events.append(f"{self.time.now:8.2f} {self.time.owner.name:8} {text}")

    # ---- processes

    def launch(self, spec: Spec) -> Owner:
        """Start a process; the launcher starts one anew that has ended with an error."""
        spec.pid = len(self.owners) + 1
        owner = Owner(f"{spec.host}/{spec.rank}#{spec.pid}", more=spec)
        self.owners.append(owner)
        self.time.spawn(owner, lambda: self._main(owner))
        return owner

    def _main(self, owner: Owner) -> None:
        spec = owner.more
        try:
            self._train(spec)
            spec.status = 0
        except ENDS as error:
            if isinstance(error, errors.TooFew):
                self.check_shards()
            alike = not any(process.more.differs for process in self.owners)
            if alike and isinstance(error, errors.Diverged | ValueError):
                require(False, f"ranks differ that are alike: {error}")
            self.note(f"ends: {type(error).__name__}: {error}")
            spec.status = 1
        except SystemExit as error:
            self.note(f"ends: {type(error).__name__}")
            spec.status = int(error.code or 0)
        owner.main_ends = True
        while spec.threads:
            self.time.sleep(0.1)
        owner.alive = False

    def _train(self, spec: Spec) -> None:
        time = self.time
        units: Any = Units(self.unit) if self.unit > 1 else None
        options: Any = SimpleNamespace()
        settings = Settings(OPERATION, PATIENCE, options)
        store, clock = SimulatedStore(self.network), time.monotonic
        time.owner.slowness = FAINTNESS if spec.fates[:1] == ("faint",) else 1.0
        way: Any = (store, settings, self.start, Lapse(LEASE, clock), None, units)
        into = entrance.Entrance("run", *way)
        into._rendezvous.heard = time.now
        progress: Any = Progress(HUNG_AFTER, clock)
        device: Any = None
        mine = world.World(store, into, (1, None), JOIN_TIMEOUT, device, progress, units)
        spec.world = mine
        if entered := into.enter(JOIN_TIMEOUT):
            mine._begin(entered)
        time.sleep(spec.model + time.random.uniform(*time.random.choice(MODEL_SECONDS)))
        mine.track()
        self._load(mine)
        made = 0
        while mine.step_number < self.goal:
            with mine.step():
                if spec.fates[:1] == (DIES_AFTER.get(made),):
                    self.kill(time.owner)
                made += 1
                time.sleep(time.random.uniform(0.5, 1.0) + self._delay(mine))
                if time.now > spec.hangs_at and made > hang.FEWEST:  # the first steps may be slow
                    spec.hangs = True
                    time.sleep(1e9)

    def _delay(self, mine: Any) -> float:
        """Return by how many seconds this step takes longer."""
        spec, slow = self.time.owner.more, 0.0
        if mine.step_number >= spec.slow_after:
            slow, spec.slow = spec.slow, 0.0
        return slow

    def _load(self, mine: Any) -> None:
        """Go on from the checkpoint, in a world that was founded just now."""
        if not mine._founder or mine.step_number:
            return
        mine._at.shared = False
        steps = mine.attempt(lambda: min(self.groups.exchange(self.saved)))
        mine._tracked.steps = mine._at.counters.steps = steps
        mine._at.shared = mine._at.fresh = True

    def kill(self, owner: Owner) -> None:
        """End a process; where it does so itself, at once."""
        owner.alive = False
        if self.time.current is not None and self.time.owner is owner:
            raise Killed

    # ---- what they do, checked

    def applied(self, step: int, epoch: int) -> None:
        """A member applies a step, computed in that epoch: as all do, and in one life at a time."""
        mine = self.time.owner.more.world._changes.epochs
        line = self.lines.setdefault(mine.life, {})
        known = line.setdefault(step, epoch)
        require(known == epoch, f"step {step} of life {mine.life} is applied in two epochs")
        if mine.life > self.newest:
            self.newest, self.succeeded = mine.life, self.time.now
        if mine.life == self.newest:
            self.pause = max(self.pause, self.time.now - self.applied_at)
            self.applied_at = self.time.now
        if mine.members[0] == mine.me and step % SAVE_EVERY == 0:
            self.saved = max(self.saved, step) if mine.life == self.newest else self.saved
        late = self.time.now - self.succeeded
        apart = mine.life == self.newest or self.may_lag()
        require(apart, f"two worlds apply steps, for {late:.0f} s")

    def may_lag(self) -> bool:
        """Tell whether a world may not know yet that another was founded in its place."""
        return True

    def check_members(self) -> None:
        """All members of an epoch have the state, and stand in whole units, at different places."""
        mine = self.time.owner.more.world
        epochs, given_to = mine._changes.epochs, mine._tracked.given_to
        require(mine._founder or given_to == epochs.me.uuid, "a member does not have the state")
        members = epochs.members
        places: dict[str, list[int]] = {}
        for process in members if self.unit > 1 else ():
            places.setdefault(process.unit, []).append(process.place)
        for name, held in places.items():
            whole = sorted(held) == list(range(self.unit))
            require(whole, f"unit {name} of an epoch has the places {held}")

    def check_shards(self) -> None:
        """A world goes back to its checkpoint only where no member holds some shard."""
        members = self.time.owner.more.world._changes.epochs.members
        held = {process.place for process in members}
        require(len(held) < self.unit, "a world ends, and its members hold all shards")

    # ---- stand-ins

    def _process(self, _: str) -> Process:
        self.time.check()
        spec = self.time.owner.more
        uuid, started = f"{self.time.random.getrandbits(64):x}", str(spec.pid)
        return Process(uuid, spec.host, spec.pid, "boot", started=started, rank=spec.rank)

    def _is_dead(self, process: Process) -> bool:
        near = self.time.owner.more.host == process.host
        return near and not self.owners[process.pid - 1].alive

    def _spawn(self, target: Callable[[], None], **_: Any) -> Any:
        owner = self.time.owner

        def run() -> None:
            owner.more.threads += 1
            target()
            owner.more.threads -= 1

        return SimpleNamespace(start=lambda: self.time.spawn(owner, run))

    def _threading(self) -> Any:
        main = SimpleNamespace(is_alive=lambda: not self.time.owner.main_ends)
        return SimpleNamespace(
            Thread=self._spawn,
            Event=lambda: Event(self.time),
            Lock=contextlib.nullcontext,
            main_thread=lambda: main,
        )

    def _end_of_a_hang(self, seconds: float, meanwhile: str) -> None:
        owner = self.time.owner
        self.note(f"hangs for {seconds:.0f} s, and others {meanwhile}")
        is_left = meanwhile == "gave it up"  # it could not go on in any case
        require(owner.more.hangs or is_left, "a rank that only waits ends as if it hung")
        self.kill(owner)

    def _send(self, state: Any, group: Any, givers: list[int], joiners: list[int]) -> int:
        self.groups.exchange(state)
        return 0

    def _receive(
        self,
        unpack: Callable[[Any], None],
        group: Any,
        givers: list[int],
        step: Callable[[], None] = lambda: None,
    ) -> None:
        owner = self.time.owner
        mine = owner.more.world._changes.epochs
        is_guest = mine.me in mine.guests
        if is_guest:
            self._suffer(owner, step)
        unpack(self.groups.exchange(None)[givers[0]])
        step()

    def _suffer(self, owner: Owner, step: Callable[[], None]) -> None:
        """Have a guest come to what is in store for it as it takes the state."""
        spec = owner.more
        fate = "".join(spec.fates[:1])
        if fate == "guest":
            self.kill(owner)
        if fate in ("frozen", "stuck"):
            spec.fates = spec.fates[1:]
            self.note(f"is {fate}")
        if fate == "frozen":
            owner.stopped_until = self.time.now + FROZEN
        owner.in_operation = True
        self.time.sleep(STUCK if fate == "stuck" else 0.0)
        for _ in range(PIECES.get(fate, 0)):
            self.time.sleep(1.0)
            step()

    def common(self) -> dict[str, Any]:
        """Return what stands in for names that some of the modules have."""
        time = self.time
        clock = SimpleNamespace(
            monotonic=time.monotonic,
            time=time.monotonic,
            sleep=lambda seconds: time.sleep(max(LEAST_SLEEP, seconds)),
        )
        return {"time": clock, "say": self.note, "within": self.network.within}

    def replaced(self) -> dict[Any, dict[str, Any]]:
        """Return what stands in for names of each module, beside the common ones."""
        time = self.time
        torch = {"dist": self.groups.torch()}
        library = SimpleNamespace(card=lambda: "")
        compiler = SimpleNamespace(disable=lambda function, reason: function)
        reporter = SimpleNamespace(start=lambda: None, look=lambda: None)
        return {
            rendezvous: {},
            errors: {},
            watch: {
                "threading": self._threading(),
                "Bars": lambda: Bars(time.monotonic),
                "Waiting": lambda unit: Waiting(unit, time.monotonic),
            },
            hang: {
                "operations": lambda: (time.owner.in_operation, time.owner.ended_at),
                "end_of_a_hang": self._end_of_a_hang,
            },
            entrance: {
                **torch,
                "load_library": lambda: library,
                "copies_are_wanted": lambda: False,  # those of the last unit are not simulated
            },
            pulse: {"threading": self._threading()},
            **self._replaced_in_groups(torch),
            world: {
                **torch,
                "Hang": functools.partial(hang.Hang, clock=time.monotonic),
                "Reporter": lambda *_: reporter,
                "Tracked": lambda _: Model(self),
                "outside": SimpleNamespace(Between=lambda *_: None, watch=lambda _: None),
                "torch": SimpleNamespace(compiler=compiler, initial_seed=lambda: 0),
                "register_optimizer_step_pre_hook": lambda _: None,
                "register_optimizer_step_post_hook": lambda _: None,
            },
        }

    def _replaced_in_groups(self, torch: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        exchange, backend_of = self.groups.exchange, self.groups.backend_of
        tables = SimpleNamespace(  # of a program that makes no groups of its own
            groups=list, first_free_number=lambda _: 1, count_names_from=lambda *_: None
        )
        return {
            epochs: {
                **torch,
                "Agreement": self.groups.agreement,
                "Pulses": functools.partial(pulse.Pulses, clock=self.time.monotonic),
                "backend_of": backend_of,
            },
            kept_groups: {
                "tell": exchange,
                "backend_of": backend_of,
                "groups": SimpleNamespace(connect=None),
                "group_tables": tables,
            },
            changes: {
                **torch,
                "vote": lambda mine, _: exchange(mine),
                "transfer": SimpleNamespace(send=self._send, receive=self._receive),
            },
            gathering: {**torch, "tell": exchange},
        }

    @contextlib.contextmanager
    def stands_in(self) -> Iterator[None]:
        """Have the shipped modules use the stand-ins meanwhile."""
        with contextlib.ExitStack() as stack:
            for module, names in self.replaced().items():
                common = {name: it for name, it in self.common().items() if hasattr(module, name)}
                for name, value in {**common, **names, **SECONDS.get(module, {})}.items():
                    stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch.object(Process, "this", self._process))
            stack.enter_context(mock.patch.object(Process, "is_dead", lambda p: self._is_dead(p)))
            yield


def is_member(owner: Owner) -> bool:
    changes = owner.more.world._changes if owner.more.world else None
    if changes is None or changes.stale or changes.given_up or changes.is_spare:
        return False
    return changes.epochs.me in changes.epochs.members


def process_of(owner: Owner) -> Process:
    me: Process = owner.more.world._changes.epochs.me
    return me


def place_of(owner: Owner) -> int:
    """Return the place in a unit that a process was given; -1 for none."""
    world = owner.more.world
    return -1 if world is None else int(world._entrance._rendezvous.me.place)


def leaders_unit(members: list[Owner]) -> list[Owner]:
    """Return those in the unit of the rank that leads; without units, it alone."""
    leads = [owner for owner in members if owner.more.world._changes.epochs.rank == 0]
    units = {process_of(owner).unit for owner in leads} - {""}
    return leads + [o for o in members if o not in leads and process_of(o).unit in units]


def epoch_of(owner: Owner) -> tuple[int, int]:
    epochs = owner.more.world._changes.epochs
    return epochs.life, epochs.epoch


def require(holds: bool, says: str) -> None:
    if not holds:
        raise AssertionError(says)
