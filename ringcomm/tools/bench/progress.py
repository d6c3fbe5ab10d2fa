"""How far a measurement is: bars on a terminal; elsewhere plain lines, as results come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ringcomm.tools import extra


class Lines:
    """Shows results, and nothing of the progress: no control characters."""

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def step(self, what: str, advance: int = 0) -> None:
        """Tell what comes next, and that `advance` parts of the whole are done."""


class Bars(Lines):
    """Shows results, and below them a bar with the time that is left."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def say(self, text: str = "") -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, what: str, advance: int = 0) -> None:
        self._progress.update(self._task, description=what, advance=advance)


@contextlib.contextmanager
def shown(total: int) -> Iterator[Lines]:
    """Show the progress of so many parts: by a bar on a terminal where rich is installed."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    try:
        rich, console = extra("rich.progress"), extra("rich.console").Console()
    except ValueError:  # the figures do not need it
        yield Lines()
        return
    with rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        yield Bars(progress, progress.add_task("the ranks start", total=total))
