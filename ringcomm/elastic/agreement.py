"""One member's part in the agreements of its world: who goes on, and which step is the last.

The engine has the protocol (csrc/elastic/decree.h) and the links to the other members
(csrc/elastic/link.h). Here is what drives them.

An epoch is the time between two agreements. Its members make a group, and work. When one is gone
or a change is planned, each leaves the group and comes to agree(). The members that the decision
names make the group of the next epoch. If one of them dies meanwhile, they agree once more.

A process that joins is a guest of one epoch: in its group, behind the members, to be given the
state of the training, and without a vote. The next agreement makes it a member, or drops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from ringcomm._runtime.library import load_library
from ringcomm._runtime.process import say

if TYPE_CHECKING:
    from ringcomm.elastic.process import Process

LOOK = timedelta(milliseconds=1)  # at the end of a process, which wakes no thread
LOOK_AT_GUESTS_SECONDS = 0.02
TELL_SECONDS = 10.0
ASK_AGAIN_SECONDS = 0.2  # after a store has failed
# Why a member is gone, as another one sees it.
ENDED = "ended"  # its process has: it was killed, or an error ended it
SILENT = "silent"  # nothing is heard of it
GAVE_UP = "gave up"  # it left because of an error


class Decision(NamedTuple):
    """The decision that is made once for each epoch."""

    ranks: Sequence[int] = ()  # the members that go on, by their ranks so far
    step: int = 0  # the last one that counts
    extra: str = ""  # the leader's words to all


NOTHING = Decision()


class Answer(NamedTuple):
    """A decision, as this process sees it."""

    epoch: int  # the new one
    stays: bool = False  # this process is in it
    decision: Decision = NOTHING


class Witness:
    """The witness: a key of the store, which has a vote.

    The store may not answer. So each request has a thread of its own, which is not waited for.
    """

    def __init__(self, keys: Any, key: str) -> None:
        self._keys, self._key = keys, key
        self._asked: bytes | None = None
        self._answers: list[bytes | None] = []  # to the last request; None: the store failed
        self._again = 0.0

    def ask(self, request: Any) -> bytes | None:
        """Return the answer as soon as there is one. Called often with the same request."""
        wanted = request.answer(b"")  # tells one request from another
        failed = self._answers == [None]
        if failed and time.monotonic() < self._again:
            return None
        if failed or wanted != self._asked:
            self._asked, self._answers = wanted, []
            self._again = time.monotonic() + ASK_AGAIN_SECONDS
            asked = (request, self._answers)
            threading.Thread(target=self._exchange, args=asked, daemon=True).start()
        return self._answers[0] if self._answers else None

    def _exchange(self, request: Any, answers: list[bytes | None]) -> None:
        before = b""
        try:
            while True:
                wanted = request.answer(before)
                now = self._keys.compare_set(self._key, before, wanted)
                if now == wanted:
                    break
                before = now
        except Exception:  # noqa: BLE001 - the store is asked again
            now = None
        answers.append(now)


class Agreement:
    """A process has one. `run` is the same for all members, and for no other world."""

    def __init__(
        self, run: str, backend: Any, epoch: int, guests: int = 0, made: Decision = NOTHING
    ) -> None:
        """Begin with a group that works. `made` is the decision that made its epoch."""
        self._library = load_library()
        self._links = self._library.Links(run)
        size = backend.size() - guests
        self._decree = self._library.Decree(backend.rank(), size, epoch, *made)
        self._guests: tuple[Process, ...] = ()  # while their group is being made
        self._check_guests: Callable[[], None] = lambda: None
        self._looked = 0.0  # at them
        self.fates: dict[int, str] = {}  # of the last epoch's members that are gone, by rank
        self.adopt(backend)

    def adopt(self, backend: Any) -> None:
        """Take over the links of the present epoch's group, which works."""
        self._guests = ()
        self._links.adopt(backend, self._decree)

    @property
    def _is_guest(self) -> bool:
        return bool(self._decree.rank >= self._decree.size)

    def leave(self) -> None:
        """Leave, so that the others need not wait for the end of this process."""
        self._decree.leave()
        self._links.show(self._decree)

    def lost(self) -> bool:
        """Tell whether a member of the present epoch has died, or is suspected."""
        self._links.hear(self._decree)
        return bool(self._decree.gone())

    # ---- agreement

    def agree(
        self,
        decided: int,
        voted: bool,
        extra: str,
        witness: Witness | None,
        patience: float,
        timeout: float,
    ) -> Answer:
        """Agree with the other members on who goes on. The next epoch is the present one then.

        `decided`: the last step that this member has applied; `voted`: it has voted for the next.
        `extra` goes with the decision, should this member lead.

        Members that live and do not come within `patience` are suspected: those of this host at
        once, others when they have not answered for as long as silence may last. Raises
        DistBackendError where no other member is awaited, and those that came are too few for as
        long as `timeout`; and at a guest that no member is left to decide for.
        """
        decree, links = self._decree, self._links
        if not decree.entered() and not self._is_guest:
            decree.enter(decided, voted, extra)
        began = alone = time.monotonic()
        tell = TELL_SECONDS
        while True:
            links.hear(decree)
            self._take_part(witness)
            links.show(decree)
            if decree.decision() or decree.left_behind():
                break
            passed = time.monotonic() - began
            links.give_up(decree, passed >= patience, passed)
            if decree.awaited():
                alone = time.monotonic()
            if time.monotonic() - alone >= timeout:
                raise dist.DistBackendError(
                    f"cut off from {len(decree.suspected())} of {decree.size} ranks, and the "
                    f"others were no majority within {round(passed, 2):g} s: others may go on "
                    "without this rank, so it stops"
                )
            if passed >= tell:
                tell += TELL_SECONDS
                self._tell_who_is_awaited(passed)
            links.sleep(LOOK)
        return self._begin_next() if decree.decision() else Answer(decree.epoch + 1)

    def _take_part(self, witness: Witness | None) -> None:
        decree = self._decree
        if self._is_guest:
            if len({*decree.dead(), *decree.suspected()}) >= decree.size:
                raise dist.DistBackendError(
                    "every member of the world died before this rank was one of them"
                )
            return
        decree.tick()
        request = decree.asks()
        answer = witness.ask(request) if witness and request else None
        if answer is not None:
            decree.hear_witness(answer)

    def _tell_who_is_awaited(self, passed: float) -> None:
        for rank in self._decree.awaited():
            say(
                f"WARNING elastic: waiting {round(passed, 2):g} s for rank {rank} to end its step: "
                f"it is {self._links.condition(rank)}"
            )

    def _begin_next(self) -> Answer:
        """Begin the next epoch. Members keep their order, and confirmed guests come behind them."""
        before = self._decree
        self.fates = dict.fromkeys(before.gone(), GAVE_UP)
        self.fates |= dict.fromkeys(before.suspected(), SILENT)
        self.fates |= dict.fromkeys(before.dead(), ENDED)
        ranks, step, extra = before.decision()
        # A peer may name ranks that do not exist.
        decision = Decision([rank for rank in ranks if rank < before.size], step, extra)
        words = extra.split()
        confirmed = sum(word.startswith("+") for word in words)
        stays = confirmed > 0 if self._is_guest else before.rank in decision.ranks
        guests = range(before.size, min(before.size + confirmed, len(self._links)))
        ranks = [*decision.ranks, *guests]
        place = len(decision.ranks) + before.rank - before.size
        if not self._is_guest:
            place = ranks.index(before.rank) if stays else len(ranks)
        self._decree = self._library.Decree(place, len(ranks), before.epoch + 1, *decision)
        if not stays:
            self._decree.leave()
        self._links.keep(ranks, sum(word.startswith("~") for word in words), self._decree)
        return Answer(self._decree.epoch, stays, decision)

    # ---- the next group

    def prepare(
        self, options: Any, guests: Sequence[Process], check_guests: Callable[[], None]
    ) -> None:
        """Say in the options of the next group how its ranks meet.

        The members that go on need no store. With guests, whom not all of them reach, they do.
        `check_guests` raises DistBackendError where these are given up.
        """
        self._guests, self._check_guests = tuple(guests), check_guests
        options._check_members = self.check_members
        options._links = None if len(self._links) > self._decree.size else self._links

    def check_members(self) -> None:
        """Raise DistBackendError where the group of the present epoch never will be made."""
        decree = self._decree
        self._links.hear(decree)
        for rank in range(decree.size):
            gone = rank in decree.gone()
            if gone or not decree.is_working(rank):
                raise dist.DistBackendError(
                    f"rank {rank} {'died' if gone else 'gave up'} while the group of epoch "
                    f"{decree.epoch} was being made"
                )
        if decree.decision() or decree.left_behind():
            raise dist.DistBackendError(f"the others have left epoch {decree.epoch} already")
        self._check_guests()
        if time.monotonic() - self._looked < LOOK_AT_GUESTS_SECONDS:
            return
        self._looked = time.monotonic()
        for guest in self._guests:
            if self._library.has_ended(guest.card):
                raise dist.DistBackendError(f"process {guest.pid} died before it had joined")
