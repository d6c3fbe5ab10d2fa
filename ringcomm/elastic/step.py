"""One `with world.step():`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringcomm.elastic.changes import LEAVES, Changes
from ringcomm.elastic.errors import Evicted, Redo

if TYPE_CHECKING:
    from ringcomm.elastic.world import World


class Step(AbstractContextManager[None]):
    """A step under way: voted on when its only optimizer is about to apply it, else at its end.

    Several optimizers, and those that call a closure, apply theirs before the vote. Then it is
    taken back if the step does not count.

    Once a step counts, every other rank applies it. So a rank that cannot finish it, whatever it
    raises, leaves the world: what it holds may differ from what the others hold.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._act = 1  # the lowest bit, and one for each optimizer that began its step
        self._done = 1  # the same, for those that have ended it
        self._counts = False  # it was decided
        self._redo = False  # it was decided that it does not count
        self._leaves = False

    def __enter__(self) -> None:
        world, tracked = self._world, self._world._at.tracked
        if tracked is None:
            raise RuntimeError("call world.track(...) before the first world.step()")
        world._check_outside("world.step()")
        changes = world._at
        changes.dealt = world._takes_batches()
        self._leaves = world._leaving
        changes.flags = LEAVES if self._leaves else 0
        tracked.mark()
        world._step, world._training = self, True

    def before(self, optimizer: Any, index: int, *, closure: bool) -> None:
        """The tracked optimizer of that index is about to apply its gradients.

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
        if closure or len(changes.tracked.optimizers) > 1:
            changes.tracked.keep_for_undo(optimizer)
            return
        self._counts = changes.commit(self._act)
        if not self._counts:
            self._redo = True
            raise Redo

    def after(self, index: int) -> None:
        """The tracked optimizer of that index has applied its gradients."""
        self._done |= 2 << index

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
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
                self._counts = self._counts or changes.commit(self._act)
            elif error is not None and not ends and changes.is_failure(error):
                ends = True
                if not changes.stale:  # else they have met in this step
                    changes.failed(error)
        finally:
            self._finish()
        if error is not None and not ends:
            return False
        if self._counts:
            if world._saving is not None:
                world._saving.save()
            if self._leaves and changes.planned & LEAVES:  # all know, else with the next step
                world._go()
        world._after()
        return True

    def _is_applied(self, changes: Changes, error: BaseException | None) -> bool:
        """Whether this rank has done all that a step which counts changes.

        What fails because the group has, after the optimizer, fails on the others, too.
        """
        whole = self._done == self._act
        return whole and (error is None or changes.is_failure(error))

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
            tracked.forget_undo()
            return
        try:
            tracked.undo()
            tracked.forget_undo()
            tracked.restore()
        except BaseException:
            changes.give_up("this rank could not undo a step that does not count")
            raise
        changes.numbers["aborted"] = changes.numbers.get("aborted", 0) + 1
