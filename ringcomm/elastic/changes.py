"""How a world commits its steps, and changes between them.

A commit is a vote (ballot.py) that all members see. Where it fails, the members agree on who goes
on and whether it counts. Then they make the next group, give the state to guests, and carry over
what holds the old group. Guests are admitted here: the members say who they are, call them in, and
give them the state.
"""

from __future__ import annotations

import json
import operator
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ringcomm._runtime.process import say
from ringcomm.elastic import ddp, transfer
from ringcomm.elastic.ballot import (
    ADMITS,
    COPIES,
    LEAVES,
    OVER,
    Ballot,
    compare,
    hash_of_options,
    hash_of_rates,
    vote,
)
from ringcomm.elastic.copies import Copies
from ringcomm.elastic.epochs import BROKEN, Decided, Epochs
from ringcomm.elastic.errors import Diverged, Evicted, Spare, TooFew
from ringcomm.elastic.journal import Journal
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import Rendezvous
from ringcomm.elastic.state import Tracked
from ringcomm.elastic.stats import DIFFERS, LEFT, UNKNOWN, History, place
from ringcomm.elastic.store import within
from ringcomm.elastic.units import holders, replicas_of
from ringcomm.elastic.watch import Watch, without

COUNTERS = "ringcomm.world"  # the name of what goes with the user's objects
COMPARE_EVERY = 1000  # steps, between comparisons of all parameters
SUCCEEDED = (
    "another world was founded in the place of this one, whose members were all taken for dead"
)
MOST_FRUITLESS = 3  # failures in a row, at the same place, that changed nothing


class Member(NamedTuple):
    """One rank of a world: a process, under a name that no other one has.

    `uuid` is that name; a process that is started anew has another. `host` is the name of its host,
    and `pid` its number there.
    """

    uuid: str
    host: str
    pid: int


class Change(NamedTuple):
    """How a world has changed, as callbacks of `World.on_change` get it.

    `epoch` counts the changes, and `step` the steps that were applied so far. `size` and `rank` are
    those of this process in the new group. `lost` and `joined` are the members that went and came.
    `seconds`: from the failure, or the vote, until the new group works. `reasons` say why each of
    `lost` is gone: "ended", "left", "hung" and so on.
    """

    epoch: int
    step: int
    size: int
    rank: int
    lost: tuple[Member, ...]
    joined: tuple[Member, ...]
    seconds: float
    reasons: tuple[str, ...] = ()


def member(process: Process) -> Member:
    return Member(process.uuid, process.host, process.pid)


class Counters:
    """The facts that guests need besides the state of the user's objects."""

    def __init__(self) -> None:
        self.commits = 0  # decided so far: steps, and attempts
        self.steps = 0
        self.seed = 0
        self.world = 0  # its name, in files: no other world has that number
        self.returns = 0  # to an earlier step, when the last unit had lost a rank
        self.act = 0  # of the last step
        self.talks = False  # a step had operations between its optimizers, or a closure

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)

    @property
    def history(self) -> int:
        """A number that is another one whenever steps may be made once more, with other bits."""
        return hash((self.world, self.returns)) & (1 << 62) - 1

    def seed_generators(self, place: int) -> None:
        """Give a rank that enters random numbers of its own, the same in every such run.

        `place` is that among those which enter now. Its rank will not do: that is another one in a
        run where a rank that dies soon has left before.
        """
        seed = hash((self.seed, self.commits, place))
        torch.manual_seed(seed & (1 << 63) - 1)
        random.seed(seed)
        if numpy := sys.modules.get("numpy.random"):
            numpy.seed(seed & (1 << 32) - 1)


@dataclass
class Changes:
    """The commits of one rank, and the changes between them."""

    epochs: Epochs
    watch: Watch
    counters: Counters = field(default_factory=Counters)
    tracked: Tracked | None = None
    on_change: list[Callable[[Change], None]] = field(default_factory=list)
    flags: int = 0  # for the next ballot
    dealt: bool = False  # the step under way takes batches of the sampler
    voted: bool = False
    redoes: bool = False  # the last step did not count
    planned: int = 0  # the changes that votes have asked for, as flags of ballots
    all_leave: bool = False  # by the last vote
    fruitless_failures: int = 0  # failures in a row that changed nothing
    meets: bool = False  # the main thread agrees with others on a change
    stale: bool = False  # the group of the present epoch is not made yet
    closed: bool = False  # no process can join
    is_over: bool = False  # another world was founded in the place of this one
    given_up: str = ""  # why this rank is in the world no more
    is_spare: bool = False  # it is not, either, but may be again: see Spare
    shared: bool = False  # the state is equal on all ranks
    fresh: bool = True  # the first vote of an epoch compares all parameters
    on_probation: frozenset[str] = frozenset()  # members that joined, until a vote with them counts
    lost: list[Process] = field(default_factory=list)
    before: tuple[Process, ...] = ()  # the members, when the change began
    since: float = 0.0
    history: History = field(default_factory=History)
    journal: Journal = field(default_factory=Journal)
    used: list[int] | None = None  # the batches of the last step, for the journal
    copies: Copies = field(default_factory=lambda: Copies(None))
    copy_due: bool = False  # all have voted for a copy after the step
    is_torn: bool = False  # the last unit has lost ranks, and the step of its shards: see recovery
    torn_from: tuple[Process, ...] = ()  # the members of that unit, by rank
    gone: dict[str, str] = field(default_factory=dict)  # why, by uuid, since then

    # ---- commits

    def votes_first(self) -> bool:
        """Tell whether a step of several optimizers is voted on before the first one begins.

        Not when it is computed again: if ranks differ in this, and operations come in between, they
        do not meet in the vote.
        """
        return bool(self.counters.act) and not self.counters.talks and not self.redoes

    def write_step(self) -> None:
        """Write down the step that was applied just now."""
        if self.journal.writes and self.tracked is not None:
            sampler = self.tracked.sampler
            held = sum(map(len, sampler._deck.queues.values())) if sampler is not None else 0
            self.journal(
                "step",
                step=self.counters.steps,
                digest=self.tracked.fingerprint(),
                place=self.epochs.me.place,
                used=self.used,
                held=held,
            )
            self.used = None

    def commit(self, act: int = 0) -> bool:
        """Vote for what this rank has done, an `act` that is to be equal on all ranks.

        Returns whether it counts. Raises Diverged. Once the vote has begun, others may count it.
        So this rank leaves the world if it is interrupted then, as by a KeyboardInterrupt.
        """
        try:
            self._await_device()
            self.epochs.check_groups()
            ballot = self._ballot(act)
        except RuntimeError as error:
            return self.failed(error)
        try:
            return self._vote(ballot)
        except (Diverged, Evicted):  # the others know
            raise
        except BaseException:
            self.give_up("this rank was interrupted in a vote, and does not know how it ended")
            raise

    def _vote(self, ballot: Ballot) -> bool:
        try:
            self.voted = True
            ballots = vote(ballot, len(self.epochs.all))
        except RuntimeError as error:
            return self.failed(error)
        self.voted = False
        try:
            compare(ballots, self.counters.steps, [p.place for p in self.epochs.members])
        except Diverged as error:
            if odd := self._to_drop(error):
                return self._drop(odd, error)
            raise
        self._decide()
        for process in self.epochs.members if self.on_probation else ():
            if process.uuid in self.on_probation:
                self.watch.bars.forget(process)
        self.on_probation = frozenset()
        for ballot in ballots:
            self.planned |= ballot.flags
        if self.planned & LEAVES:
            self._expect_to_leave(ballots)
        if self.planned & OVER:
            self.give_up(SUCCEEDED)
            raise Evicted(self.given_up)
        self.all_leave = all(ballot.flags & LEAVES for ballot in ballots)
        self.copy_due = all(ballot.flags & COPIES for ballot in ballots)
        return True

    def _expect_to_leave(self, ballots: list[Ballot]) -> None:
        pairs = zip(self.epochs.members, ballots, strict=False)  # guests vote last
        self.history.expect(LEFT, [who.uuid for who, ballot in pairs if ballot.flags & LEAVES])

    def _to_drop(self, error: Diverged) -> frozenset[str]:
        """Choose the members that the others go on without, instead of ending all; alike on all.

        One that came just now is dropped for any difference: it has another program or other
        settings. Of the others, one whose parameters differ where most agree: its memory may be
        broken, or a step is not deterministic there. Started anew, it gets the right ones.
        """
        members = self.epochs.members
        odd = frozenset(members[rank].uuid for rank in error.ranks)
        places = [members[rank].place for rank in error.ranks]
        among = [process.place for process in members]
        few = all(2 * places.count(place) < among.count(place) for place in places)
        few = few and error.what == "state"
        return odd if few or odd <= self.on_probation else frozenset()

    def _drop(self, odd: frozenset[str], error: Diverged) -> bool:
        """Leave if this rank is one of them, else go on without. The commit does not count."""
        if self.epochs.me.uuid in odd:
            self.give_up("this rank differs from the others")
            raise error
        self.history.expect(DIFFERS, odd)
        stay = [process.uuid for process in self.epochs.members if process.uuid not in odd]
        if self.epochs.me.uuid == stay[0]:
            say(f"elastic: going on without what differs: {error}")
        return self.meet()

    def give_up(self, why: str) -> None:
        """Leave the world for good: this rank may hold what the others do not."""
        self.given_up = f"{why}: it has left the world and must not go on; start it anew to join"
        self.watch.stop()
        self.epochs.end()

    def _await_device(self) -> None:
        """Wait until the device has its gradients. Raises DistBackendError if they are not good.

        A stream that waits for a rank which dies goes on, and what it does is garbage.
        """
        devices = {p.device for p in self.tracked.parameters if p.is_cuda} if self.tracked else ()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        if devices and not self.epochs.backend()._is_device_good():
            raise dist.DistBackendError("a rank was lost while the device waited for it")

    def _ballot(self, act: int) -> Ballot:
        counters, tracked = self.counters, self.tracked
        flags = self.flags | (ADMITS if self.watch.wants_change else 0)
        flags |= OVER if self.is_over else 0
        copies = act and self.keeps_copies and self.copies.wants(counters.steps + 1)
        flags |= COPIES if copies else 0
        mine = Ballot(self.epochs.epoch, counters.commits, flags, act)
        if tracked is None or not self.shared or self.is_torn:
            return mine
        whole = self.fresh or counters.commits % COMPARE_EVERY == 0
        deck = tracked.sampler._deck.digest(whole=whole) if tracked.sampler is not None else 0
        if not whole:
            return mine._replace(deck=deck, options=hash_of_rates(tracked))
        state, options = tracked.fingerprint(), hash_of_options(tracked)
        self.fresh = False
        return mine._replace(deck=deck, state=state, options=options)

    def _decide(self) -> None:
        self.counters.commits += 1
        if self.tracked is not None and self.tracked.sampler is not None and self.dealt:
            if self.journal.writes:
                self.used = self.tracked.sampler._deck.present()
            self.tracked.sampler._decide()
        self.dealt = False
        self.fruitless_failures = 0

    def is_failure(self, error: BaseException) -> bool:
        """Tell whether `error` says that the group has failed, or was raised because of that."""
        if not isinstance(error, Exception) or isinstance(error, Diverged | Evicted | TooFew):
            return False
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, dist.DistBackendError | dist.DistNetworkError):
                return True
            cause = cause.__cause__ or cause.__context__
        if not isinstance(error, RuntimeError):
            return False
        if not dist.is_initialized():
            return False
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares calls over Gloo first, which fails.
        return not _is_well(self.epochs.backend()) or self.epochs.has_lost()

    def check_failure(self, error: BaseException) -> None:
        """Raise `error` unless it is the group that has failed."""
        if not self.is_failure(error):
            raise error

    def failed(self, error: BaseException) -> bool:
        """Meet because of `error`; whether the commit that was voted for counts.

        Raises `error` if it is the program's. Ranks whose operations differ fail again and again,
        though none is lost: after some times that is an error, on all of them.
        """
        if self.given_up:
            raise error
        self.check_failure(error)
        return self._meet_after(error)

    def _meet_after(self, error: BaseException) -> bool:
        counts = self.meet(failed=True)
        if self.fruitless_failures < MOST_FRUITLESS:
            return counts
        diverged = Diverged(
            f"operations failed {self.fruitless_failures} times in a row, and no rank was lost "
            f"by it: {error}"
        )
        if not self.on_probation:
            raise diverged from error
        return self._drop(self.on_probation, diverged)

    # ---- changes

    def _begin_change(self) -> None:
        if self.since == 0.0:
            self.since = time.monotonic()
            self.before = self.epochs.all

    def meet(self, extra: str = "", *, failed: bool = False) -> bool:
        """Agree on the next epoch. Returns whether the commit that was voted for counts."""
        self._begin_change()
        self.epochs.watch_no_guests()
        entering = {guest.uuid for guest in self.epochs.guests} | self.on_probation
        late = failed and not self.stale and self.epochs.has_timed_out()
        before = self.epochs.members
        self.stale, self.planned, self.copy_due = True, 0, False
        self.meets = True
        try:
            decided = self.epochs.agree(self.counters.commits, self.voted, extra, late)
        except Evicted as error:
            self.given_up = str(error)
            raise
        except (Spare, TooFew) as error:
            self._end_here(error)
            return False
        finally:
            self.meets = False
        self._note(decided, entering, late)
        self.copies.try_finish()
        self._note_torn(before, decided)
        broken = [p for p in decided.lost if decided.fates.get(p.uuid) == BROKEN]
        self.watch.waiting.meet(before, broken)
        blamed = [p for p in decided.lost if p.uuid in entering and p not in broken]
        self._bar(blamed)  # those whose mate died live, and are not to blame
        counts = decided.step > self.counters.commits
        if decided.step - self.counters.commits > 1 or (counts and not self.voted):
            raise Evicted(
                f"the others have decided step {decided.step}, and this rank is at "
                f"{self.counters.commits}: it must not go on; start it anew to join"
            )
        self.voted = False
        self.fruitless_failures += 1
        if decided.lost or decided.extra:
            self.fruitless_failures = 0
        if counts:
            self._decide()
        self.deal()
        return counts

    def _note_torn(self, before: tuple[Process, ...], decided: Decided) -> None:
        """Note whether the last unit has lost ranks."""
        if not self.epochs.is_broken and not self.is_torn:
            return
        if not self.is_torn:
            self.torn_from, self.gone, self.is_torn = before, {}, True
        self.torn_from = self.torn_from or before  # of one that came since
        reasons = self.history.reasons
        self.gone |= {p.uuid: reasons.get(p.uuid, UNKNOWN) for p in decided.lost}

    def end_torn(self, error: TooFew) -> NoReturn:
        """Leave a world whose last unit is broken and can't go back to any step."""
        self._end_here(error)
        raise error

    # ---- copies

    @property
    def keeps_copies(self) -> bool:
        """Whether shards are copied now: there is one unit, it is whole, and of one step."""
        return self.epochs.keeps_copies and self.epochs.is_last_unit and not self.is_torn

    def copy(self) -> None:
        """Between two steps: copy this rank's shard if all have voted for it, or none is there."""
        due, self.copy_due = self.copy_due, False
        epochs, copies = self.epochs, self.copies
        if self.stale or not self.keeps_copies or not (due or copies.is_cut):
            return
        assert self.tracked is not None
        try:
            counters, to = self.counters, holders(epochs.members_by_place)
            copies.make(counters.steps, self.tracked, to, counters.history)
        except (TypeError, ValueError) as error:
            epochs.wants_copies = False
            say(
                "elastic: no more copies are made of the last unit's shards, because the state "
                f"can't be sent: {error}"
            )
        except RuntimeError as error:
            self.failed(error)

    # ---- the next group

    def _end_here(self, error: Spare | TooFew) -> None:
        """Be in this world no more: as a spare, or because no unit is whole, which is raised."""
        self.watch.stop()
        self.epochs.end()
        if isinstance(error, TooFew):
            self.given_up = str(error)
            raise error
        self.is_spare, self.voted = True, False

    def _bar(self, failed: list[Process]) -> None:
        """Let those wait that were lost before they had taken part in a step."""
        for process in failed:
            seconds = self.watch.bars.bar(process, failed)
            if self.epochs.rank == 0:
                say(
                    f"elastic: {process.host} process {process.pid} did not enter, and is not "
                    f"called for {seconds:.0f} s"
                )

    def _note(self, decided: Decided, entering: set[str], late: bool) -> None:
        self.lost += decided.lost
        history = self.history
        history.explain(decided.lost, decided.fates, entering, late)
        history.agree_seconds = decided.seconds
        history.steps_lost += max(0, self.counters.commits - decided.step)

    def let_go(self) -> None:
        """After a vote that counts: go on without those that leave, if any do."""
        if self.planned & LEAVES and not self.is_spare:
            self.meet()

    def admit(self) -> None:
        """Take guests in, or go to another store, if a vote has asked for it.

        Members come by here before each step.

        The vote tells those that have seen the end of that one, and are here, from those that saw
        it fail, and are not.
        """
        if not self.planned & ADMITS or self.is_spare:
            return
        try:
            vote(Ballot(self.epochs.epoch, self.counters.commits), len(self.epochs.all))
        except RuntimeError as error:
            self.failed(error)
            return
        if self.epochs.rank != 0:
            self.meet()
        elif offer := self.epochs.home.offer:
            self.meet(f"@{offer.address}")
        else:
            guests = self._describe(without(self.watch.take(), self.epochs.all))
            self.meet(" ".join("~" + guest.uuid for guest in guests))

    def regroup(self) -> None:
        """Make the group of the present epoch, whatever fails meanwhile, and carry over to it."""
        while self.stale and not self.is_spare:
            try:
                began = time.monotonic()
                self.epochs.meet_guests()
                if self.epochs.guests and self.epochs.rank == 0:
                    within(self._call_in)
                if self.epochs.guests:
                    self.epochs.watch_guests(self.watch.bars.failures)
                self.epochs.make()
                self.history.regroup_seconds = time.monotonic() - began
                if self.epochs.guests:
                    self._give_state()
                else:
                    self._carry_over()
                    self.stale = False
            except RuntimeError as error:
                self._survive(error)

    def _survive(self, error: RuntimeError) -> None:
        kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
        if not isinstance(error, kinds):
            raise error
        self._meet_after(error)

    def deal(self) -> None:
        """Deal the batches to the members that were decided on.

        Not when the group works: one that fails at once works on some ranks, and on others never.
        The deck would then be moved by other changes there.
        """
        if self.tracked is None or self.tracked.sampler is None:
            return
        deck = self.tracked.sampler._deck
        self.bind(deck.ahead, deck.accumulate)

    def bind(self, ahead: int, accumulate: int) -> None:
        """Bind the sampler to the present members, or to units where their ranks share batches."""
        assert self.tracked is not None
        sampler, epochs = self.tracked.sampler, self.epochs
        members = list(epochs.members)
        if epochs.is_last_unit:  # one that came takes the batches of the one that died
            members.sort(key=lambda process: process.shard)
        names = [sampler.name_of(process) for process in members]
        sampler._bind(sampler.name_of(epochs.me), list(dict.fromkeys(names)), ahead, accumulate)

    def _carry_over(self) -> None:
        """Have all that holds the old group, or the old members, go on with the new."""
        epochs = self.epochs
        old = {process.uuid for process in self.before}
        joined = [process for process in epochs.members if process.uuid not in old]
        epochs.connect_groups()
        if self.tracked is not None:
            self.tracked.shards.regroup()
            for wrapper in self.tracked.wrappers:
                ddp.regroup(wrapper, dist.group.WORLD, rebuild=bool(joined))
        if not (epochs.is_broken or epochs.is_last_unit):
            self.copies.drop()
        self.fresh = True
        self.on_probation |= {process.uuid for process in joined}
        self.on_probation &= {process.uuid for process in epochs.members}
        self._tell(joined)

    def _tell(self, joined: list[Process]) -> None:
        epochs, seconds = self.epochs, time.monotonic() - self.since
        lost = tuple(member(process) for process in self.lost)
        change = Change(
            epochs.epoch,
            self.counters.steps,
            len(epochs.members),
            epochs.rank,
            lost,
            tuple(member(process) for process in joined),
            seconds,
            tuple(self.history.reasons.get(process.uuid, UNKNOWN) for process in self.lost),
        )
        self._remember(change)
        self.journal(
            "change",
            epoch=epochs.epoch,
            step=change.step,
            lost=[other.pid for other in lost],
            why=change.reasons,
            joined=[process.pid for process in joined],
            ms=seconds * 1e3,
        )
        self.since, self.lost, self.before = 0.0, [], ()
        if epochs.rank == 0:
            say(f"elastic: {_sentence(change, self.counters.steps)}")
        for callback in self.on_change:
            callback(change)
        if self.tracked is not None:
            self.tracked.keep_rates()  # a step that comes again takes those of the callbacks

    def _remember(self, change: Change) -> None:
        self.history.add(
            {
                "epoch": change.epoch,
                "step": change.step,
                "at": time.time(),
                "size": change.size,
                "lost": [
                    {**place(process), "why": why}
                    for process, why in zip(change.lost, change.reasons, strict=True)
                ],
                "joined": [place(process) for process in change.joined],
                "seconds": change.seconds,
            }
        )

    # ---- guests

    def _describe(self, guests: list[Process]) -> list[Process]:
        """Write down who the guests are, for the other members; none where the store is gone."""

        def write() -> None:
            for guest in guests:
                self.epochs.store.set(f"guest/{guest.uuid}", json.dumps(asdict(guest)))

        try:
            within(write)
        except dist.DistStoreError:
            return []
        return guests

    def _call_in(self) -> None:
        """Tell the guests how to enter, where this world is still the one that the store knows."""
        epochs, keys = self.epochs, self.epochs.home.keys
        if not Rendezvous(keys, epochs.me).bring_up_to_date(epochs.record()):
            raise Evicted(f"{SUCCEEDED}: this rank must not go on")
        text = epochs.admission().to_text()
        for guest in epochs.guests:
            keys.set(f"welcome/{guest.uuid}", text)

    def _give_state(self) -> None:
        """Give the state to the guests. When all have it, they become members."""
        assert self.tracked is not None
        epochs, began = self.epochs, time.monotonic()
        mine = replicas_of(epochs.me, epochs.all)
        givers = [rank for rank in mine if rank < len(epochs.members)]
        joiners = mine[len(givers) :]
        try:
            state = self.tracked.pack()
        except (TypeError, ValueError) as error:
            self.closed = True
            say(f"elastic: no rank can join any more, because the state cannot be sent: {error}")
            self.meet()
            return
        if epochs.pulses is not None:
            epochs.pulses.state_bytes = state.total_bytes
        sent = 0
        if not epochs.is_broken:  # there, those that come get it once the unit is whole: recovery
            sent = transfer.send(state, dist.group.WORLD, givers, joiners)
        vote(Ballot(epochs.epoch, self.counters.commits), len(epochs.all))
        self.history.sent_bytes += sent
        self.history.give_seconds = time.monotonic() - began
        self.meet(" ".join("+" + guest.uuid for guest in epochs.guests))

    def take_state(self) -> None:
        """Take the state as a guest, and become a member. Raises RuntimeError if that fails."""
        assert self.tracked is not None
        epochs = self.epochs
        givers = replicas_of(epochs.me, epochs.members)
        self.before, self.since = epochs.members, time.monotonic()
        step = epochs.pulse.step if epochs.pulse else lambda: None
        self.is_torn = epochs.is_broken
        try:
            if not self.is_torn:
                transfer.receive(self.tracked.unpack, dist.group.WORLD, givers, step)
                self.tracked.finish()
            vote(Ballot(epochs.epoch, self.counters.commits), len(epochs.all))
        except RuntimeError as error:
            self.check_failure(error)
        self.stale = True
        decided = epochs.agree(self.counters.commits, False, "", failed=False)
        if epochs.pulse is not None:  # not before: the vote may end later on others
            epochs.pulse.end()
        if self.is_torn:
            self.counters.commits = decided.step
        self._seed_generators()
        self.deal()
        self.regroup()

    def _seed_generators(self) -> None:
        """Give this rank random numbers that no other one has, but for those that share batches.

        They compute as one, so they drop out the same numbers. Generators that are tracked have
        come with the state.
        """
        epochs, tracked = self.epochs, self.tracked
        assert tracked is not None
        old = {process.uuid for process in self.before}
        joined = [process for process in epochs.members if process.uuid not in old]
        name = tracked.sampler.name_of if tracked.sampler else operator.attrgetter("uuid")
        names = list(dict.fromkeys(map(name, joined)))
        came = [(generator, generator.state_dict()) for generator in tracked.generators]
        self.counters.seed_generators(names.index(name(epochs.me)))
        for generator, state in came:
            generator.load_state_dict(state)

    def share_state(self, giver: int = 0) -> None:
        """Give that rank's state to all others, before anything was trained.

        In units each rank gets it from one of its replicas, and `giver` is this rank's.
        """
        assert self.tracked is not None
        others = [r for r in replicas_of(self.epochs.me, self.epochs.members) if r != giver]
        if self.epochs.rank == giver and others:
            transfer.send(self.tracked.pack(), dist.group.WORLD, [giver], others)
        elif others:
            transfer.receive(self.tracked.unpack, dist.group.WORLD, [giver])
            commits = self.counters.commits
            self.tracked.finish()
            self.counters.commits = commits


def _is_well(backend: Any) -> bool:
    return str(backend.get_error()).endswith(".SUCCESS")


def _sentence(change: Change, step: int) -> str:
    gone = ", ".join(
        f"{member.host} process {member.pid} ({why})"
        for member, why in zip(change.lost, change.reasons, strict=True)
    )
    came = ", ".join(f"{member.host} process {member.pid}" for member in change.joined)
    what = f"without {gone}" if gone else ""
    what += (" and " if gone and came else "") + (f"with {came}" if came else "")
    return (
        f"going on {what or 'as before'}: {change.size} ranks, epoch {change.epoch}, after step "
        f"{step}, {change.seconds * 1e3:.0f} ms"
    )
