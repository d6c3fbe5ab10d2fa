"""A world of ranks that trains on while ranks die, leave and come, as one rank sees it.

A step that runs in `world.step()` is applied by every member or by none, and computed again if a
member was lost meanwhile. Others come in between steps, where all members come by: `_assemble`.
Rank 0 writes checkpoints, which hold the plain modules' state, without DDP's.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ringcomm._runtime.process import say
from ringcomm.elastic import (
    ballot,
    ddp,
    gathering,
    lease,
    notices,
    outer,
    outside,
    recovery,
    units,
)
from ringcomm.elastic.ballot import LEAVES
from ringcomm.elastic.changes import COUNTERS, Change, Changes, Member, member
from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.copies import Copies
from ringcomm.elastic.entrance import Entered, Entrance
from ringcomm.elastic.epochs import Epochs
from ringcomm.elastic.errors import Evicted, Left, Redo, Spare, TooFew
from ringcomm.elastic.hang import Hang, Progress, hung
from ringcomm.elastic.newest import NONE
from ringcomm.elastic.outer import Outer, Terms
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import Record
from ringcomm.elastic.sampler import Feed
from ringcomm.elastic.saving import Saving
from ringcomm.elastic.state import Stateful, Tracked
from ringcomm.elastic.stats import History, Stats, stats_of
from ringcomm.elastic.status import Reporter
from ringcomm.elastic.store import RunStore, within
from ringcomm.elastic.unit_groups import UnitGroups
from ringcomm.elastic.watch import MOST, Watch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
MOST_RANKS = 200  # in a group
# Why a compiled optimizer's step is left for a moment: torch says so where it must not be.
HOOK = "ranks vote here in an elastic world: compile the optimizer's step without fullgraph=True"
LAST_ACT = (1 << 32) - 1  # what a ballot holds of the step before: 31 optimizers


class World:
    """One rank's view of its world, which `join` makes. `device` is the rank's own device."""

    def __init__(
        self,
        store: RunStore,
        entrance: Entrance,
        sizes: tuple[int, int | None],
        timeout: float,
        device: torch.device,
        progress: Progress,
        groups: UnitGroups | None = None,
    ) -> None:
        self._groups = groups  # of units, if there are any
        self._store, self._entrance, self._timeout = store, entrance, timeout
        self._progress = progress
        self._sizes = sizes  # the least, the most
        self._changes: Changes | None = None  # once this rank is in the world
        self._tracked: Tracked | None = None
        self._feed: Feed | None = None
        self._saving: Saving | None = None
        self._reporter: Reporter | None = None
        self._outer: Outer | None = None
        self._callbacks: list[Callable[[Change], None]] = []
        self._step: Step | None = None  # that is under way
        self._attempts = False  # a call of `attempt` is under way
        self._loops = False  # the program is in the body of a loop over `batches`
        self._given = False  # it has batches there that no step has taken yet
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._leaving = self._founder = self._training = False
        self._failed = False  # an error has ended a step
        self._within_data = False  # a loop over `batches` did not come to its end
        self._asks = False  # to be admitted
        self._goes = False  # as the last one, when the program has done all of this step
        self._missed = 0  # epochs of data that went by while this rank waited
        self._keeps_copies = groups is not None  # of shards, while there is one unit
        self.device = device

    # ---- what it is now

    @property
    def epoch(self) -> int:
        """How often the world has changed."""
        return self._changes.epochs.epoch if self._changes else 0

    @property
    def step_number(self) -> int:
        """How many steps were applied, since the beginning of the training."""
        return self._changes.counters.steps if self._changes else 0

    @property
    def rank(self) -> int:
        """The rank of this process in the present group, from 0: a change may give it another."""
        if self._outer is not None:  # its thread may be making a group just now
            return self._at.epochs.rank
        return dist.get_rank()

    @property
    def size(self) -> int:
        """How many ranks the present group has."""
        if self._outer is not None:
            return len(self._at.epochs.members)
        return dist.get_world_size()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, by rank."""
        return (
            tuple(member(process) for process in self._changes.epochs.members)
            if self._changes
            else ()
        )

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of a world with units: units by the ranks of each.

        Its dimensions are "replicate" and "shard". It is the same object for good: shard over
        `mesh["shard"]`, then gradients are averaged over units after each backward pass, or
        over both, as HSDP does, where FSDP averages them meanwhile. Its sizes are those of the
        time when it was made. Raises RuntimeError without units.
        """
        if self._groups is None:
            raise RuntimeError("this world has no units: tell elastic.join(unit=...) their size")
        mesh: DeviceMesh = self._groups.mesh
        return mesh

    @property
    def weight(self) -> float:
        """The factor for each batch's mean loss where a step takes several batches.

        DDP averages gradients over ranks. With this weight the result is the mean over all batches
        of the step, however many each rank has.
        """
        sampler = self._tracked.sampler if self._tracked else None
        shares = sampler._deck.shares() if sampler is not None else [1]
        return len(shares) / sum(shares)

    def stats(self) -> Stats:
        """Return figures of the world as this rank knows them. Any thread may call it."""
        changes, written = self._changes, self._saving.checkpoints if self._saving else None
        return stats_of(
            changes.history if changes else History(),
            changes.epochs if changes else None,
            self.step_number,
            written.known if written else None,
            written.failures if written else 0,
        )

    # ---- entering

    def _begin(self, entered: Entered) -> None:
        me = entered.epochs.me
        hang = Hang(self._progress, lambda: bool(self._changes and self._changes.meets), me.uuid)
        watch = Watch(
            self._store,
            self._may_call,
            self._record,
            lambda: self._look(hang),
            lambda: self._tell_end(entered.epochs),
            self._groups.size if self._groups else 1,
        )
        history = History(entered=entered.epochs.epoch)
        entered.epochs.wants_copies &= self._keeps_copies
        copies = Copies(self._groups)
        self._changes = Changes(entered.epochs, watch, history=history, copies=copies)
        self._reporter = Reporter(self._changes, lambda: self.stats() if self._training else None)
        self._reporter.start()
        self._changes.on_change = self._callbacks
        self._changes.shared = entered.is_guest
        self._founder = not entered.is_guest
        if self._tracked is not None:
            self._changes.tracked = self._tracked
            self._tracked.objects[COUNTERS] = self._changes.counters
        if self._saving is not None:
            self._saving.changes = self._changes

    def _record(self) -> Record | None:
        """Return the record for the store; None unless this rank leads a world that trains."""
        changes = self._changes
        if changes is None or not self._training or changes.stale or changes.epochs.rank != 0:
            return None
        return changes.epochs.record()

    def _look(self, hang: Hang) -> None:
        """Look whether this rank hangs, and keep the lease if it leads; a thread does it."""
        changes, keys = self._changes, self._store.ready
        if changes is None or changes.given_up:
            return
        changes.is_over = changes.is_over or changes.watch.succeeded
        if keys is None:
            return
        epochs = changes.epochs
        place = f"{epochs.life}/{epochs.epoch}/{changes.counters.commits}"
        hang.look(keys, place, lambda: within(lambda: epochs.is_left(keys)))
        if epochs.members[:1] == (epochs.me,):
            life, members = epochs.life, epochs.members
            changes.is_over = changes.is_over or within(lambda: lease.beat(keys, life, members))
        changes.history.ask_why(lambda uuid: within(lambda: keys.check([hung(uuid)])))

    def _tell_end(self, epochs: Epochs) -> None:
        """Say that this process is in its world no more. It may be ending: without a thread."""
        changes, keys = self._changes, self._store.ready
        if self._reporter is not None:
            self._reporter.look()
        if keys is not None:
            gave_up = changes is None or bool(changes.given_up) or changes.is_spare
            raised = self._failed or getattr(sys, "last_value", None) is not None
            early = gave_up or raised or self._leaving or self._within_data
            lease.tell_end(keys, epochs.me, not early)

    def _may_call(self) -> int:
        """How many guests may come, where this rank leads the world."""
        if self._at.closed:
            return 0
        most = self._sizes[1] or MOST_RANKS
        sampler = self._tracked.sampler if self._tracked else None
        if sampler is not None and sampler._deck.most_members is not None:
            most = min(most, sampler._deck.most_members)
        return max(0, min(MOST, most - len(self._at.epochs.members)))

    @property
    def _at(self) -> Changes:
        if self._changes is None:
            raise RuntimeError("this rank is not in the world yet: call world.track(...) first")
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this process was forked from rank {self._changes.epochs.rank}, and is none: use "
                "the world only where it was joined"
            )
        if self._changes.given_up:
            raise Evicted(self._changes.given_up)
        return self._changes

    # ---- the state

    def track(self, **state: Stateful | torch.Generator) -> None:
        """Say what the training changes: modules, optimizers, schedulers, scalers, the sampler.

        Call it once, with the same names on all ranks. All get the state of rank 0. One that
        comes later is admitted here: it gets the state from all members, after the step under way.
        torch's `AveragedModel` counts each step once. A generator draws alike on all ranks.
        Parameters that no tracked module has are not kept equal. Raises TypeError or ValueError for
        what cannot be taken over a change, or where ranks track different things.
        """
        if self._tracked is not None:
            raise RuntimeError("world.track was called before: call it once, with everything")
        self._track(Tracked(self._groups, **state))

    def _track(self, tracked: Tracked) -> None:
        register_optimizer_step_pre_hook(
            torch.compiler.disable(self._before_optimizer, reason=HOOK)
        )
        register_optimizer_step_post_hook(
            torch.compiler.disable(self._after_optimizer, reason=HOOK)
        )
        self._tracked = tracked
        while self._changes is None:
            self._ask()
        self._changes.tracked = tracked
        tracked.objects[COUNTERS] = self._changes.counters
        if self._founder:
            self._agree_on_state()
        outside.watch(
            outside.Between(
                self._is_outside,
                lambda operation: self._repeat(operation, None),
                lambda error: self._at.is_failure(error),
            )
        )

    def _ask(self, *, founds: bool = True) -> None:
        """Come into a world that runs, with the state of its members, or found one."""
        self._asks = True
        try:
            if self._leaving and not founds:  # it was told to while its unit broke
                raise Left
            entered = self._entrance.ask(self._timeout, founds=founds)
        finally:
            self._asks = False
        if entered is None:
            return
        self._begin(entered)
        changes = self._at
        if not entered.is_guest:
            assert changes.tracked is not None
            changes.tracked.shards.regroup()
            for wrapper in changes.tracked.wrappers:
                ddp.regroup(wrapper, dist.group.WORLD, rebuild=True)
            return
        try:
            changes.take_state()
        except BaseException as error:
            changes.watch.stop()
            changes.epochs.end()
            if not isinstance(error, Evicted | Spare):
                raise
            say(f"elastic: process {os.getpid()} was not admitted, and asks again: {error}")
            self._ask_again()
            return
        if changes.is_spare:
            self._ask_again()
        else:
            self._await_unit()

    def _ask_again(self) -> None:
        self._changes = None
        self._entrance.refused()

    def _agree_on_state(self) -> None:
        self._at.counters.seed = torch.initial_seed() & (1 << 62) - 1
        name = uuid.uuid4().int & (1 << 62) - 1  # the first rank's will be that of all
        assert self._tracked is not None
        self.attempt(self._at.epochs.connect_units)
        self._tracked.shards.regroup()
        mine = self._tracked.signature()
        told = self.attempt(lambda: gathering.tell(f"{name:x} {mine}"))
        ballot.require_same(mine, [text.partition(" ")[2] for text in told])
        self._at.counters.world = int(told[0].partition(" ")[0], 16)
        if self._tracked.sampler is not None:
            self._bind(1, 1)
        self.attempt(lambda: self._at.share_state(self._first_replica()))
        self._at.shared = True

    def _first_replica(self) -> int:
        epochs = self._at.epochs
        return units.replicas_of(epochs.me, epochs.members)[0]

    def _wait_if_spare(self) -> None:
        """Come in again where this rank's unit was broken, with the state of the others."""
        if self._changes is None or not self._changes.is_spare:
            return
        say(f"elastic: process {os.getpid()} waits until its unit is whole again")
        self._progress.end()  # it waits within its step, then gets the state, and does not hang
        before = self._tracked.sampler.epoch if self._tracked and self._tracked.sampler else 0
        if self._saving is not None:
            self._saving.checkpoints.secure()  # it may still read what is about to be received
        self._ask_again()
        while self._changes is None:
            self._ask(founds=False)
        if self._feed is not None and self._tracked is not None:
            self._feed.begin_anew()
            # The loop over the epoch in which it went ends now, and counts for that one.
            self._missed = max(0, self._tracked.sampler.epoch - before - 1)

    # ---- the data

    def _bind(self, ahead: int, accumulate: int) -> None:
        self._at.bind(ahead, accumulate)

    def batches(self, loader: Iterable[T], *, accumulate: int = 1) -> Iterator[Any]:
        """Yield this rank's batches of the present epoch of data; one that was aborted, again.

        `loader` is a stock DataLoader whose batch sampler is the tracked elastic.Sampler. With
        `accumulate` k, or where the sampler has a `total_batch`, each step takes several batches
        on a rank, and they come as a list: see `weight`. The body of the loop must have exactly one
        `world.step()`. Raises TypeError for another loader, ValueError where ranks differ in it.
        """
        sampler = self._tracked.sampler if self._tracked else None
        if sampler is None:
            raise RuntimeError("world.batches needs a sampler: give one to world.track(...)")
        feed = self._feed
        if feed is None or not feed.is_of(loader, accumulate):
            new = Feed(loader, sampler, accumulate)
            if feed is None and not self._founder:
                self._check_loader(new, accumulate)
            feed = self._feed = new
        if (sampler._deck.ahead, sampler._deck.accumulate) != (feed.ahead, accumulate):
            self._bind(feed.ahead, accumulate)
        if self._missed > 0:  # the loop of the program over epochs is behind
            self._missed -= 1
            return
        epoch = sampler.epoch
        self._within_data = True  # also if the program ends in the body, as by sys.exit()
        try:
            while not sampler._deck.epoch_over(epoch):
                self._assemble()
                self._progress.begin()
                batches = feed.batches()
                self._progress.end()
                self._loops = self._given = True
                yield batches
                if self._given:
                    raise RuntimeError(
                        "a batch of world.batches was not used: put the body of the loop into "
                        "`with world.step():`"
                    )
                feed.check()
                if self._goes:
                    self._go()
                self._end_body()
            self._within_data = False
        finally:
            self._end_body()
            self._progress.end()
            self._loops = self._given = False

    def _end_body(self) -> None:
        """Write a checkpoint that waits until the program has done all of a step.

        Schedulers and averages may come after the block, and are of that step as well.
        """
        if self._saving is None:
            return
        if self._goes:  # and the program has ended its loop
            self._goes = False
            self._saving.save(certainly=True)
        else:
            self._saving.save_due()

    def _check_loader(self, feed: Feed, accumulate: int) -> None:
        """Have this rank leave, by ValueError, if the members' loaders hold other batches."""
        assert self._tracked is not None
        deck = self._tracked.sampler._deck
        if deck.decided == 0 or (deck.ahead, deck.accumulate) == (feed.ahead, accumulate):
            return
        self._at.give_up("this rank's loader differs from the others'")
        raise ValueError(
            f"the members' loaders prefetch {deck.ahead - deck.accumulate} batches and steps take "
            f"{deck.accumulate}, and here it is {feed.ahead - accumulate} and {accumulate}: give "
            "every rank the same num_workers, prefetch_factor and accumulate"
        )

    def _takes_batches(self) -> bool:
        """Have a step begin; whether it takes what `batches` gave."""
        if not self._loops:
            self._assemble()
            return False
        if not self._given:
            raise RuntimeError(
                "a second world.step() in the body of a loop over world.batches: make one step of "
                "the two, because each takes batches of its own"
            )
        self._given = False
        return True

    # ---- steps

    def step(self) -> Step:
        """Enclose a step of the training: every member applies it, or none does and it is repeated.

            with world.step() as step:
                …
            if step.counted:
                …  # it was applied, by all members

        The first `step()` of a tracked optimizer inside waits until all ranks have their gradients.
        With operations between several optimizers, and with a closure, they make their steps at
        once, and take them back if the step does not count. If a rank is lost before that, the
        block ends, and the loop gets the same batch once more. Errors other than the group's are
        raised as they are. After the vote all others apply the step, so a rank that raises one then
        has left the world: later calls raise Evicted.

        Operations between ranks belong before `opt.step()`, or into `attempt`. A learning rate may
        change after it. Parameters change by optimizers only, unless none is tracked.
        """
        return Step(self)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called by torch before each optimizer's step in this process."""
        tracked = self._tracked
        assert tracked is not None
        places = [n for n, known in enumerate(tracked.optimizers) if known is optimizer]
        if not places:
            ours = {id(parameter) for parameter in tracked.parameters}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                raise RuntimeError(
                    f"this {type(optimizer).__name__} is not tracked, but its parameters are: give "
                    "it to world.track(...), too; nothing was applied"
                )
        elif self._step is None:
            raise RuntimeError(
                "a tracked optimizer made a step outside of `with world.step():`, which no other "
                "rank would know of: nothing was applied"
            )
        else:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._step.before(optimizer, places[0], closure=closure is not None)
            if self._saving is not None:
                self._saving.checkpoints.secure()

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called by torch after each optimizer's step, unless it raised something."""
        if self._step is not None and self._tracked is not None:
            for index, tracked in enumerate(self._tracked.optimizers):
                if tracked is optimizer:
                    self._step.after(index)

    def _check_outside(self, what: str) -> None:
        if self._step is not None or self._attempts:
            outer = "world.step()" if self._step is not None else "world.attempt()"
            raise RuntimeError(f"{what} inside of {outer}: end the outer one first")

    def attempt(self, function: Callable[[], T]) -> T:
        """Call `function` until no rank was lost meanwhile, and return its result.

        For validation and metrics: code with operations that all ranks call, and no optimizer. It
        may run several times, each time on all ranks and from the same state: whatever a try has
        changed of parameters, buffers and random numbers is put back before the next one.
        """
        if self._outer is not None:
            self._outer.wait()
        self._check_outside("world.attempt()")
        self._check_torn()
        self._end_body()
        if self._saving is not None:
            self._saving.checkpoints.secure()
        self._at.copies.cut()
        return self._repeat(function, self._tracked)

    def _repeat(self, function: Callable[[], T], tracked: Tracked | None) -> T:
        """Call `function` as `attempt` does; `tracked` is put back before it is called again."""
        while True:
            changes = self._at
            if tracked is not None:
                tracked.mark(parameters=True)  # validation may lend them those of an average
            self._attempts, counts = True, False
            try:
                result = function()
                counts = changes.commit()
            except Exception as error:  # noqa: BLE001 - raised there, unless it is the group's
                changes.failed(error)
            finally:
                self._attempts = False
            if not counts and tracked is not None and not changes.is_spare:
                tracked.restore()
            changes.let_go()
            changes.regroup()
            if changes.is_spare:  # the others go on, and don't come back to this place
                changes.given_up = (
                    "this rank's unit was broken outside of a step, so it must not go on: start it "
                    "anew to join"
                )
                raise Evicted(changes.given_up)
            if counts:
                return result
            if tracked is not None:
                self._check_torn()

    def _is_outside(self) -> bool:
        """Tell whether this thread's program is in its world, and between two steps."""
        changes, busy = self._changes, self._step is not None or self._attempts
        if changes is None or busy or self._outer is not None:
            return False
        here = changes.shared and not (changes.stale or changes.given_up or changes.is_spare)
        return here and self._thread == threading.get_ident() and self._pid == os.getpid()

    def _after(self) -> None:
        """Carry out the change that a vote or a failure led to."""
        self._at.let_go()
        self._at.regroup()
        self._wait_if_spare()

    def _assemble(self) -> None:
        """Between two steps: take guests in, and wait for others while there are too few."""
        if self._tracked is not None:
            self._tracked.begin_again()  # before guests get it
        self._at.copy()
        self._at.admit()
        self._at.regroup()
        self._wait_if_spare()
        self._await_unit()
        least = self._sizes[0]
        if len(self._at.epochs.members) >= least:
            return
        self._await(f"only {self.size} of at least {least} ranks are left", self._lacks_ranks)

    def _lacks_ranks(self) -> bool:
        self._await_unit()  # before guests get its state
        return len(self._at.epochs.members) < self._sizes[0]

    def _await(self, few: str, lacks: Callable[[], bool]) -> None:
        """Take guests in for as long as others are lacked; raises TooFew where none come."""
        say(f"elastic: {few}: waiting {self._timeout:.0f} s for more")
        deadline = time.monotonic() + self._timeout
        self._training = True
        while lacks():
            if time.monotonic() > deadline:
                raise TooFew(f"{few}: none came in {self._timeout:.0f} s")
            time.sleep(0.02)
            changes = self._at
            changes.flags = LEAVES if (leaves := self._leaving) else 0
            changes.commit()
            changes.flags = 0
            if leaves and changes.planned & LEAVES:
                self._go()
            changes.let_go()
            changes.admit()
            changes.regroup()
            self._wait_if_spare()

    # ---- the last unit

    def _await_unit(self) -> None:
        """If the last unit has lost ranks, wait for others, and go back to a step with them."""
        if not self._at.is_torn:
            return
        while self._at.is_torn:
            self._await_mates()
            step = self._repeat(lambda: recovery.restore(self._at, self._saving), None)
            if step == NONE:
                self._at.end_torn(self._at.epochs.too_few(self._at.epochs.members))
            self._at.is_torn = self._at.epochs.is_broken
        if self._at.epochs.rank == 0:
            say(f"elastic: {self._at.history.restored}")
        self._at.shared = self._at.fresh = True
        if self._feed is not None:
            self._feed.begin_anew()

    def _await_mates(self) -> None:
        """Wait until the unit is whole. Raises TooFew if it couldn't go back to any step then."""
        while (epochs := self._at.epochs).is_broken:
            step = self._repeat(lambda: recovery.step_in_memory(self._at), None)
            if step == NONE:
                self._at.end_torn(epochs.too_few(epochs.members))
            few = f"only {self.size} of the last unit's {epochs.unit_size} ranks are left, and "
            few += f"all shards of step {step} are in their memory"
            self._await(few, functools.partial(self._is_still_of, epochs.members))

    def _is_still_of(self, members: tuple[Process, ...]) -> bool:
        return self._at.epochs.members == members

    def _check_torn(self) -> None:
        """Raise TooFew where the last unit is broken at a place to which no other rank can come."""
        changes = self._changes
        if changes is not None and changes.is_torn:
            changes.end_torn(
                TooFew(
                    "the last unit was broken outside of a step, where those that come in cannot "
                    "join it: start all ranks again, they go on from the checkpoint"
                )
            )

    # ---- sites far apart

    def outer(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer_opt: torch.optim.Optimizer,
        *,
        every: int | timedelta,
        bits: int = 32,
        topk: int | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.5,
        **state: Stateful | torch.Generator,
    ) -> Outer:
        """Train by DiLoCo: steps of `inner` are this member's own, and rounds average them.

            outer_opt = SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            outer = world.outer(net, inner, outer_opt, every=50)
            while outer.rounds < 100:
                …
                inner.step()  # after every 50th, a round

        Call it once, instead of `track`; give `state` what else is to be tracked. Both optimizers
        are made for the model's parameters. `outer_opt` then updates a copy of these, the outer
        copy, which is equal on all members. A round takes the outer copy minus the parameters,
        averages that over the members, weighted by their inner steps since the last round, and
        makes an outer step of it (Douillard et al. 2023, arXiv 2311.08105). It is a step of the
        world: if a member is lost, the others make the same round again, without it.
        `step_number` and `checkpoint` count rounds. A process that joins gets the outer copy, and
        takes part in a round with weight 0 before this returns.

        `every`: inner steps, or a time; then nobody waits for a slow member. `bits`: 32, 16, 8, 4
        or 2 for each number. `topk`: send only so many of each 4,096 numbers, in 32, 4 or 2 bits.
        What is left out goes into the next round (error feedback). `fragments` of the model take
        turns, each once in `every`. With `delay`, and with a time, inner steps go on during a
        round. After `delay` of them, or when the round has ended, the parameters become `alpha`
        times themselves plus 1 - `alpha` times the outer copy (Douillard et al. 2025, arXiv
        2501.18512).

        With `elastic.join(unit=S)` a site is S ranks, whose inner steps DDP makes one: `model` is
        then a wrapper over the group of `mesh["shard"]`, each inner step stands in a block of
        `Outer.step`, and rounds are awaited. Each rank of a site sends its share of a round.

        Raises ValueError and TypeError for what cannot be, and what `track` raises. Later,
        `inner.step()` raises FloatingPointError if parameters are not finite, and what
        `World.step` raises.
        """
        terms = Terms(every, bits, topk, fragments, delay, alpha)
        self._keeps_copies = False  # the outer copy is on all ranks
        if self._changes is not None:
            self._changes.epochs.wants_copies = False
        self._outer = outer.start(self, model, (inner, outer_opt), terms, state)
        return self._outer

    # ---- changes, checkpoints and the end

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Have `callback` called after each change, on each rank, when the new group works.

        For learning rates, and for groups of another layout: those that there are live on, with
        the ranks that are left.
        """
        self._callbacks.append(callback)

    def checkpoint(
        self, directory: str | os.PathLike[str], *, every: int | timedelta, keep: int = 2
    ) -> None:
        """Write the state into `directory`: each `every` steps, or after that time.

        Rank 0 writes, in a thread; the `keep` newest stay. A world that was founded just now first
        loads the newest whole one that any of its ranks finds in its `directory`, which may be on
        its own disk. With units, each rank of one writes its shard, into a folder of its own, and
        `every` is a number of steps. Raises what `Checkpoints` raises.
        """
        if self._tracked is None:
            raise RuntimeError("call world.track(...) before world.checkpoint")
        if self._groups is not None:
            if isinstance(every, timedelta):
                raise ValueError(f"every={every}: give steps, so that all shards are of one step")
            place, size = self._groups.place, self._groups.size
            directory = Path(directory) / recovery.folder_of(place, size)
        checkpoints = Checkpoints(
            directory, every=every, keep=keep, log=lambda text: say(f"elastic: {text}")
        )
        self._saving = Saving(self._store.run, checkpoints, self._at)
        if not self._founder or self.step_number > 0:
            return
        self._at.shared = False
        self.attempt(self._saving.load)
        self._at.shared = self._at.fresh = True
        if self._tracked.sampler is not None:
            self._bind(1, 1)

    def leave(
        self,
        *,
        on_signal: int | None = None,
        on_notice: Literal["aws", "gcp", "azure"] | None = None,
    ) -> None:
        """Leave the world after this step, or the next; nothing is lost.

        With `on_signal` this is done when that signal comes, as a scheduler sends SIGTERM before it
        stops a process; with `on_notice` when that cloud tells its machine that it will be taken
        away. The program ends then, by SystemExit(0) out of the step. The last member of a world
        writes a checkpoint before it goes. If you call this after your last loop, it writes one at
        once. Raises ValueError for a cloud that is not known.
        """
        if on_notice is not None and on_notice not in notices.CLOUDS:
            raise ValueError(f"on_notice={on_notice!r}: one of {', '.join(notices.CLOUDS)}")
        if on_signal is None and on_notice is None:
            self._leaving = True
            if self._saving is not None and self._is_outside() and not self._loops:
                self._saving.save(certainly=True)
        if on_signal is not None:
            signal.signal(on_signal, lambda number, frame: self._leave_by_signal())
        if on_notice is not None:
            notices.watch(notices.CLOUDS[on_notice](), self._leave_soon)

    def _leave_soon(self) -> None:
        self._leaving = True

    def _leave_by_signal(self) -> None:
        self._leave_soon()
        if self._asks:  # nobody counts on it yet
            raise Left

    def _go_after_body(self) -> None:
        """Leave now, or as the last one when the program has done all of the step."""
        last = self._at.all_leave or len(self._at.epochs.members) == 1
        self._goes = self._loops and last and self._saving is not None
        if not self._goes:
            self._go()

    def _go(self) -> None:
        changes, self._goes = self._at, False
        changes.watch.stop()
        last = changes.all_leave or len(changes.epochs.members) == 1
        if self._saving is not None and last and not changes.is_torn:
            self._saving.save(certainly=True)
        if self._reporter is not None:
            self._reporter.look()
        changes.copies.try_finish()  # so that all of the last one has gone to its holder
        changes.epochs.end()
        raise Left


class Step(AbstractContextManager["Step"]):
    """A step under way: voted on when its first optimizer is about to apply it, or at its end.

    At its end if a step before had operations between its optimizers, as those of a GAN, or called
    a closure, and in the first step of several optimizers. Then each keeps a copy of what it
    changes, and it is taken back if the step does not count. Where such operations come for the
    first time after the vote, there is another vote before the next optimizer. If a rank is lost
    until then, the step counts without that optimizer, on all ranks alike.

    Once a step counts, every other rank applies it. So a rank that cannot finish it leaves the
    world, no matter what it raises: its state may differ from that of the others.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._act = 1  # the lowest bit, and one for each optimizer that began its step
        self._done = 1  # the same, for those that have ended it
        self._first = 0  # the bit of the first
        self._kept = False  # what optimizers change can be taken back
        self._talks = False  # operations came after the first one, or in it
        self._issued: list[int] = []  # operations until the first, or until the last vote
        self._counts = False  # it was decided
        self._redo = False  # it was decided that it does not count
        self._leaves = False

    @property
    def counted(self) -> bool:
        """Whether every member has applied it. Without, it comes again: do nothing for it."""
        return self._counts

    def __enter__(self) -> Step:
        world, tracked = self._world, self._world._at.tracked
        if tracked is None:
            raise RuntimeError("call world.track(...) before the first world.step()")
        world._check_outside("world.step()")
        changes = world._at
        changes.dealt = world._takes_batches()
        world._check_torn()
        self._leaves = world._leaving
        changes.flags = LEAVES if self._leaves else 0
        world._progress.begin()
        tracked.mark()
        tracked.averages.begin()
        world._step, world._training = self, True
        return self

    def before(self, optimizer: Any, index: int, *, closure: bool) -> None:
        """Prepare: the tracked optimizer of that index is about to apply its gradients.

        Raises Redo if the step is not to be applied, and what `Changes.commit` raises.
        """
        bit = 2 << index
        if self._act & bit:
            raise RuntimeError(
                "an optimizer made two steps in one world.step(): give each a world.step() of its "
                "own"
            )
        self._act |= bit
        changes = self._world._at
        assert changes.tracked is not None
        several = len(changes.tracked.optimizers) > 1
        if not self._first:
            self._first, self._issued = bit, changes.epochs.issued() if several else []
        self._talks |= closure
        if self._counts:
            self._go_on(changes, bit)
        elif closure or self._kept or (several and not changes.votes_first()):
            self._kept = True
            changes.tracked.keep_for_undo(optimizer)
        else:
            self._counts = self._vote(changes)
            if not self._counts:
                self._redo = True
                raise Redo
            self._issued = changes.epochs.issued() if several else []

    def _vote(self, changes: Changes) -> bool:
        """Vote: on the optimizer that is about to begin, and on all of the step before."""
        self._world._progress.move()
        act = 1 | self._first | (changes.counters.act & LAST_ACT) << 32
        counts = changes.commit(act)
        self._world._progress.move()
        return counts

    def _go_on(self, changes: Changes, bit: int) -> None:
        """Prepare an optimizer after the vote. Unless operations came in between, all get here."""
        if not self._has_talked(changes):
            return
        if self._vote(changes):
            self._issued = changes.epochs.issued()
            return
        self._act &= ~bit
        self._redo = True
        say(
            f"WARNING elastic: a rank was lost between the optimizers of step "
            f"{changes.counters.steps + 1}: it counts with those before, on all ranks"
        )
        raise Redo

    def _has_talked(self, changes: Changes) -> bool:
        """Note, and tell, whether operations came since the first optimizer, or the last vote."""
        talks = bool(self._issued) and changes.epochs.issued() != self._issued
        self._talks |= talks
        return talks

    def after(self, index: int) -> None:
        """Note that the tracked optimizer of that index has applied its gradients."""
        self._done |= 2 << index
        tracked = self._world._at.tracked
        if self._counts and tracked is not None:
            tracked.averages.count()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        ended = False
        self._world._progress.move()  # one that has waited for a rank that hung does not hang
        try:
            ended = self._end(error)
        finally:
            self._world._progress.end(self._counts)
            self._world._failed = not ended and error is not None
        return ended

    def _end(self, error: BaseException | None) -> bool:
        world, changes = self._world, self._world._changes
        assert changes is not None
        # A handler of the program's may have caught that it does not count.
        ends = isinstance(error, Redo) or (error is None and self._redo)
        if self._counts and not self._is_applied(changes, error):
            world._step, changes.flags, changes.dealt = None, 0, False
            changes.give_up(
                f"step {changes.counters.steps + 1} counts, and this rank raised an error before "
                "it had ended it"
            )
            if error is None or changes.is_failure(error):
                raise Evicted(changes.given_up) from error
            return False
        try:
            if error is None and not ends:
                self._check_done()
                self._has_talked(changes)
                self._counts = self._counts or self._vote(changes)
            elif error is not None and not ends and changes.is_failure(error):
                ends = self._talks = True
                if not changes.stale:  # else they have met in this step
                    changes.failed(error)
        finally:
            self._finish()
        if error is not None and not ends:
            return False
        if self._counts and not changes.is_spare:
            if world._saving is not None:
                world._saving.note()
            if self._leaves and changes.planned & LEAVES:  # all know, else with the next step
                world._go_after_body()
                return True
            if not world._loops:
                world._end_body()
        world._after()
        return True

    def _is_applied(self, changes: Changes, error: BaseException | None) -> bool:
        """Tell whether this rank has done all that a step which counts changes.

        What fails because the group has, after the optimizer, fails on the others, too.
        """
        whole = self._done == self._act
        return whole and (error is None or isinstance(error, Redo) or changes.is_failure(error))

    def _check_done(self) -> None:
        if self._done != self._act:
            raise RuntimeError(
                "an optimizer raised an error in world.step(), and the program went on: its step "
                "is undone on this rank; let the error end the block"
            )

    def _finish(self) -> None:
        """Stay with what the step has done, or put everything back."""
        world, changes = self._world, self._world._changes
        assert changes is not None
        tracked = changes.tracked
        assert tracked is not None
        world._step, changes.flags, changes.dealt = None, 0, False
        if changes.given_up:
            return
        if self._counts:
            changes.counters.steps += 1
            changes.counters.act, changes.redoes = self._act, False
            changes.counters.talks |= self._talks
            tracked.forget_undo(free=changes.votes_first())
            tracked.averages.count()
            changes.write_step()
            return
        try:
            tracked.undo()
            tracked.forget_undo()
            tracked.restore()
            tracked.leave_out()
        except BaseException:
            changes.give_up("this rank could not undo a step that does not count")
            raise
        changes.redoes = True
        changes.history.aborted += 1
        changes.journal("aborted")
