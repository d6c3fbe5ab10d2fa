"""The state of a running world in files, once a second, for those who look at it from outside.

On each host the first of its ranks writes the world's file for `ringcomm elastic top` and `page`,
and rank 0 the one for Prometheus. A thread of its own does it, because a disk may be slow: neither
a step nor the lease waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ringcomm._flight.processes import this_process, written
from ringcomm._flight.recorder import own_folder, write
from ringcomm._runtime.process import say, setting
from ringcomm.elastic import prometheus
from ringcomm.elastic.changes import Changes
from ringcomm.elastic.stats import Stats

FORMAT = 1
EVERY_SECONDS = 1.0
KEPT = 20  # files of worlds that have ended, in a folder
OLD_SECONDS = 3600.0  # a file that was not written for so long is a world's that has ended


def folder() -> Path | None:
    """Return where the files of worlds are; None where RINGCOMM_TRACE is off.

    Raises OSError, and ValueError.
    """
    named = setting("trace")
    if named == "off":
        return None
    return Path(named) if named else own_folder()


class Reporter(threading.Thread):
    """Writes the state of one rank's world, until the rank leaves it or ends."""

    def __init__(self, changes: Changes, stats: Callable[[], Stats | None]) -> None:
        """`stats` returns None until the training has begun."""
        super().__init__(name="ringcomm elastic status", daemon=True)
        self._changes, self._stats = changes, stats
        self._file: Path | None = None  # once this rank was the first of its host
        self._prometheus = os.environ.get("RINGCOMM_ELASTIC_PROMETHEUS")
        self._said: set[str] = set()
        self._lock = threading.Lock()  # the last look is another thread's

    def run(self) -> None:
        while threading.main_thread().is_alive() and not self._changes.watch.stopped:
            time.sleep(EVERY_SECONDS)
            self.look()

    def look(self) -> None:
        """Write the files that are this rank's to write. Any thread may call it."""
        stats = self._stats()
        if stats is not None:
            with self._lock:
                self._look(stats)

    def _look(self, stats: Stats) -> None:
        changes = self._changes
        changes.history.sample(time.time(), stats["step"])
        me, members = changes.epochs.me, changes.epochs.members
        if [process for process in members if process.host == me.host][:1] == [me]:
            with self._saying("the state of the world is not written"):
                self._write(stats)
        if self._prometheus and members[:1] == (me,):
            with self._saying(f"RINGCOMM_ELASTIC_PROMETHEUS={self._prometheus}"):
                write(Path(self._prometheus), prometheus.text_of(stats).encode())

    @contextlib.contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            text = f"WARNING elastic: {what}: {error}"
            if text not in self._said:
                self._said.add(text)
                say(text)

    def _write(self, stats: Stats) -> None:
        place, changes = folder(), self._changes
        if place is None:
            return
        if self._file is None:
            place.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another rank removes the same
                tidy(place)
            host = re.sub(r"\W", "_", changes.epochs.me.host)
            self._file = place / f"world-{changes.counters.world:016x}-{host}.json"
            self._adopt(self._file)
            stats = self._stats() or stats
        history = changes.history
        state = {
            "format": FORMAT,
            "run": changes.epochs.run,
            "world": self._file.name.split("-")[1],
            "at": time.time(),
            "began": history.began,
            "pid": os.getpid(),
            "process": json.loads(written(this_process())),
            "points": history.points,
            "stats": stats,
        }
        write(self._file, json.dumps(state).encode())

    def _adopt(self, path: Path) -> None:
        """Go on where the rank that wrote the file before has ended."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            earlier = json.loads(path.read_bytes())
            points = [(at, step) for at, step in earlier["points"]]
            self._changes.history.adopt(earlier["stats"], points, earlier["began"])


def tidy(place: Path) -> None:
    """Remove all but the newest files of worlds that have ended."""
    old = time.time() - OLD_SECONDS
    for path in sorted(place.glob("world-*.json"), key=lambda path: -path.stat().st_mtime)[KEPT:]:
        if path.stat().st_mtime < old:
            path.unlink(missing_ok=True)
