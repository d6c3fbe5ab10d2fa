"""How far a command is: a line on stderr if that is a terminal. Nothing of it reaches stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

ERASE = "\r\x1b[2K"
WIDTH = 20  # of the bar


class Lines:
    """Says results, and nothing of the progress."""

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def step(self, what: str, advance: int = 0) -> None:
        """Tell what comes next, and that `advance` parts of the whole are done."""

    def end(self) -> None:
        """Leave nothing of the progress behind."""


class Bar(Lines):
    """Keeps a line with a bar, what is being done and the time that is left."""

    def __init__(self, total: int, terminal: TextIO) -> None:
        self._total, self._terminal = max(1, total), terminal
        self._done, self._what, self._began = 0, "", time.monotonic()

    def say(self, text: str = "") -> None:
        self.end()
        super().say(text)
        self._draw()

    def step(self, what: str, advance: int = 0) -> None:
        """`what` begins; the parts before it are done."""
        self._what = what
        self._draw()
        self._done += advance

    def end(self) -> None:
        self._terminal.write(ERASE)
        self._terminal.flush()

    def _draw(self) -> None:
        share = min(1.0, self._done / self._total)
        full = round(WIDTH * share)
        line = f"[{'#' * full}{'.' * (WIDTH - full)}] {share:4.0%}  {self._what}"
        if share:
            left = (time.monotonic() - self._began) * (1 - share) / share
            line += f", {left // 60:.0f}:{left % 60:02.0f} left"
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(self._terminal.fileno()).columns
            line = line[: columns - 1] if columns else line  # 0: it does not know
        self._terminal.write(ERASE + line)
        self._terminal.flush()


@contextlib.contextmanager
def shown(total: int, *, quiet: bool = False) -> Iterator[Lines]:
    """Show the progress of so many parts where stderr is a terminal that can erase a line."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield Lines()
        return
    bar = Bar(total, sys.stderr)
    bar.step("starting")
    try:
        yield bar
    finally:
        bar.end()
