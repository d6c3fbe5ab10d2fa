"""Averages of parameters, as an EMA: each step that counts goes into them once, and no other.

A step that is computed again would update them twice. So the updates of torch's `AveragedModel`
wait, inside a step, until it is known to count; those that a program makes after a step which did
not count are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim.swa_utils import AveragedModel


class Averages:
    """The averages among the tracked objects, and the updates of them that wait."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._waits = self._drops = False
        self._waiting: list[Callable[[], None]] = []
        for thing in things:
            if isinstance(thing, AveragedModel):
                self._wrap(thing)

    def _wrap(self, average: Any) -> None:
        update = average.update_parameters

        @functools.wraps(update)
        def later(model: Any) -> None:
            if self._waits:
                self._waiting.append(functools.partial(update, model))
            elif not self._drops:
                update(model)

        average.update_parameters = later

    def begin(self) -> None:
        """Have updates wait: a step begins."""
        self._waits, self._drops = True, False

    def count(self) -> None:
        """Make the updates that wait, and the next ones at once: the step counts."""
        self._waits = False
        waiting, self._waiting = self._waiting, []
        for update in waiting:
            update()

    def drop(self) -> None:
        """Leave out those that wait, and the next ones: the step does not count."""
        self._waits, self._drops = False, True
        self._waiting.clear()

    def begin_again(self) -> None:
        """Make updates again: the step that did not count is about to be computed again."""
        self._drops = False
