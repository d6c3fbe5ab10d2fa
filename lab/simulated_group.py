"""Stand-ins for what the members of a simulated world do over links: groups, and the agreement.

Operations keep the rule of plans: one that has ended on a rank was begun on every rank. The
agreement is an oracle that makes one decision for each epoch, as decree_sim proves of the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lab.simulated_store import prefixed
from lab.simulated_time import Owner, Time
from ringcomm.elastic.agreement import (
    ENDED,
    GAVE_UP,
    NOTHING,
    SILENT,
    Answer,
    Decision,
)

RARE = 0.03  # how often a rank sees that another is gone, and not that the operation has ended
SOON, LATEST = 0.02, 0.3  # seconds between looks of one that waits


@dataclass
class Group:
    """The ranks of one epoch, and what each has given to their operations so far."""

    size: int
    owners: dict[int, Owner] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # they have ended their operations
    given: dict[int, dict[int, Any]] = field(default_factory=dict)  # by operation and rank

    def is_broken(self) -> bool:
        dead = any(not owner.alive for owner in self.owners.values())
        return dead or bool(self.gone)


class Backend:
    """One rank's part in a group."""

    def __init__(self, time: Time, group: Group, rank: int, timeout: float) -> None:
        self.time, self.group, self._rank, self.timeout = time, group, rank, timeout
        self.operations = 0
        self.error = ".SUCCESS"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.group.size

    def get_error(self) -> str:
        return self.error

    def abort(self) -> None:
        self.time.check()
        self.group.gone.add(self._rank)

    def _close(self) -> None:
        pass

    def _reconfigure_handle(self) -> str:
        return ""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()

    def exchange(self, value: Any) -> list[Any]:
        """Give a value, and return those of all ranks. Raises DistBackendError where one is lost.

        If all have given theirs and one is lost then, some ranks see the end and others a failure.
        """
        time, given = self.time, self.group.given.setdefault(self.operations, {})
        self.operations += 1
        given[self._rank] = value
        owner, owner.in_operation = time.owner, True
        try:
            try:
                return self._await_all(given)
            finally:
                owner.in_operation, owner.ended_at = False, time.now
        except dist.DistBackendError:
            time.sleep(owner.dawdles)
            raise

    def _await_all(self, given: dict[int, Any]) -> list[Any]:
        time = self.time
        began = ended = time.now
        pause = SOON
        while True:
            time.sleep(time.random.uniform(0, pause))
            pause = min(LATEST, 1.5 * pause)
            broken = self.group.is_broken()
            full = len(given) == self.size()
            ended = ended if full else time.now
            if full and time.now - ended < time.owner.lag and self._rank not in self.group.gone:
                continue
            if full and not (broken and time.random.random() < RARE):
                return [given[rank] for rank in range(self.size())]
            if broken or time.now - began > self.timeout:
                self.error = ".FAILED" if broken else ".TIMEOUT"
                raise dist.DistBackendError("a rank is lost, or late")


@dataclass
class Meeting:
    """The meeting of the members of one epoch; numbers are their ranks."""

    entered: dict[int, tuple[int, bool, str]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    suspected: set[int] = field(default_factory=set)
    decision: Decision | None = None


class Groups:
    """The groups and meetings of all worlds of a run."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.groups: dict[tuple[int, int], Group] = {}
        self.meetings: dict[tuple[int, int], Meeting] = {}

    def make(
        self,
        _: str,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta | None = None,
        pg_options: Any = None,
    ) -> None:
        """Stand in for dist.init_process_group: wait for the others of the epoch."""
        if timeout is None:  # for the group of one that is apart
            return
        time, oracle = self.time, getattr(pg_options, "oracle", None)
        words = store.prefix.split("/")
        epoch = int(words[words.index("epoch") + 1])
        life = int(words[words.index("life") + 1]) if "life" in words else 0
        group = self.groups.setdefault((oracle.life if oracle else life, epoch), Group(world_size))
        assert group.size == world_size, (store.prefix, group, world_size, time.owner.name)
        group.owners[rank] = time.owner
        try:
            self._await(group, timeout.total_seconds(), oracle)
        except dist.DistBackendError:
            group.gone.add(rank)
            raise
        time.owner.more.backend = Backend(time, group, rank, timeout.total_seconds())

    def _await(self, group: Group, seconds: float, oracle: Any) -> None:
        time, began = self.time, self.time.now
        while len(group.owners) < group.size:
            time.sleep(time.random.uniform(0, LATEST))
            if oracle is not None:
                oracle.check_members()
            if group.is_broken() or time.now - began > seconds:
                raise dist.DistBackendError("a group is not made")

    def backend_of(self, *_: Any) -> Backend:
        """Stand in for the function of that name."""
        if (backend := self.time.owner.more.backend) is None:
            raise ValueError("there is no group")
        present: Backend = backend
        return present

    def destroy(self) -> None:
        """Stand in for dist.destroy_process_group."""
        self.time.check()
        if (backend := self.time.owner.more.backend) is not None:
            backend.abort()
        self.time.owner.more.backend = None

    def exchange(self, value: Any) -> list[Any]:
        return self.backend_of().exchange(value)

    def agreement(
        self, run: str, backend: Backend, epoch: int, guests: int = 0, made: Decision = NOTHING
    ) -> Oracle:
        """Stand in for the class Agreement."""
        return Oracle(self, int(run.split("/")[-1]), backend, epoch, guests)

    def torch(self) -> Any:
        """Return what stands in for torch.distributed."""
        real = {name: getattr(dist, name) for name in dir(dist) if name.startswith("Dist")}
        return SimpleNamespace(
            **real,
            HashStore=object,
            PrefixStore=prefixed,
            init_process_group=self.make,
            destroy_process_group=self.destroy,
            is_initialized=lambda: self.time.owner.more.backend is not None,
            barrier=lambda: self.exchange(None),
            get_rank=lambda: self.time.owner.more.backend.rank(),
            get_world_size=lambda: self.time.owner.more.backend.size(),
            group=SimpleNamespace(WORLD=None),
            distributed_c10d=SimpleNamespace(_world=Tables(self.time)),
        )


class Tables:
    """Stands in for torch's tables of groups."""

    group_count = 0

    def __init__(self, time: Time) -> None:
        self._time = time

    @property
    def pg_map(self) -> list[Backend]:
        backend = self._time.owner.more.backend
        return [] if backend is None else [backend]


class Oracle:
    """One member's part in the agreements."""

    def __init__(self, all_: Groups, life: int, backend: Backend, epoch: int, guests: int) -> None:
        self._all, self._time, self.life, self.epoch = all_, all_.time, life, epoch
        self._owners = [backend.group.owners[rank] for rank in range(backend.size())]
        self._size = backend.size() - guests  # of the members
        self._rank = backend.rank()
        self._check_guests: Callable[[], None] = lambda: None
        self.fates: dict[int, str] = {}

    @property
    def _meeting(self) -> Meeting:
        return self._all.meetings.setdefault((self.life, self.epoch), Meeting())

    def _standing(self) -> list[int]:
        """Return the members that have not left, and are not known to be dead."""
        left = self._meeting.left
        return [r for r in range(self._size) if r not in left and self._owners[r].alive]

    def adopt(self, backend: Backend) -> None:
        self._owners = [backend.group.owners[rank] for rank in range(backend.size())]

    def prepare(
        self, options: Any, guests: Sequence[Any], check_guests: Callable[[], None]
    ) -> None:
        options.oracle, self._check_guests = self, check_guests

    def leave(self) -> None:
        self._time.check()
        self._meeting.left.add(self._rank)

    def lost(self) -> bool:
        return len(self._standing()) < self._size or bool(self._meeting.suspected)

    def check_members(self) -> None:
        """Raise DistBackendError where the group of the present epoch never will be made."""
        if self.lost() or self._meeting.entered or self._meeting.decision:
            raise dist.DistBackendError("the group of this epoch never will be made")
        self._check_guests()

    def agree(
        self,
        decided: int,
        voted: bool,
        extra: str,
        witness: Any,
        patience: float,
        timeout: float,
    ) -> Answer:
        meeting, time, is_guest = self._meeting, self._time, self._rank >= self._size
        if not is_guest and meeting.decision is None:
            meeting.entered.setdefault(self._rank, (decided, voted, extra))
        began = alone = time.now
        while meeting.decision is None:
            time.sleep(time.random.uniform(0, LATEST))
            standing = self._standing()
            if meeting.decision is not None:  # meanwhile
                break
            if is_guest:
                if not standing:
                    raise dist.DistBackendError("every member died before this rank was one")
                continue
            if self._rank not in standing:
                raise dist.DistBackendError("this rank has left")
            missing = set(standing) - meeting.entered.keys()
            if time.now - began > patience:
                meeting.suspected |= missing
            if missing - meeting.suspected:
                alone = time.now
            elif self._is_enough(standing, missing, witness):
                meeting.decision = self._decide(standing)
            elif time.now - alone > timeout:
                raise dist.DistBackendError("the others are no majority")
        return self._begin_next(meeting.decision)

    def _is_enough(self, standing: list[int], missing: set[int], witness: Any) -> bool:
        there = 2 * (len(standing) - len(missing)) + (witness is not None)
        return 2 * there > 2 * len(standing) + 1

    def _decide(self, standing: list[int]) -> Decision:
        meeting = self._meeting
        ranks = sorted(set(standing) & meeting.entered.keys())
        most = max(meeting.entered[rank][0] for rank in ranks)
        all_voted = all(meeting.entered[rank][:2] == (most, True) for rank in ranks)
        return Decision(ranks, most + all_voted, meeting.entered[ranks[0]][2])

    def _fate(self, rank: int) -> str:
        quiet = GAVE_UP if rank in self._meeting.left else SILENT
        return quiet if self._owners[rank].alive else ENDED

    def _begin_next(self, decision: Decision) -> Answer:
        self.fates = {rank: self._fate(rank) for rank in range(self._size)}
        for rank in decision.ranks:
            del self.fates[rank]
        confirmed = [word for word in decision.extra.split() if word.startswith("+")]
        is_guest = self._rank >= self._size
        stays = bool(confirmed) if is_guest else self._rank in decision.ranks
        ranks = [*decision.ranks, *range(self._size, self._size + len(confirmed))]
        self._rank = ranks.index(self._rank) if stays else len(ranks)
        self._owners = [self._owners[rank] for rank in ranks]
        self._size = len(ranks)
        self.epoch += 1
        return Answer(self.epoch, stays, decision)
