"""A thread that looks at the store: who wants to join, and whether the store still answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ringcomm.elastic.lobby import Process, answers, call

LOOK_SECONDS = 0.025
MOST = 8  # guests at once: their names go into the slip of the one that leads


class Watch:
    """Looks for processes that ask to join, while `calls()` says that this rank is to call them.

    `guests` are those that answered the last call; `take` takes them, once.
    """

    def __init__(self, store: Any, calls: Callable[[], int], log: Callable[[str], None]) -> None:
        """`calls` returns how many guests may come, 0 while this rank calls nobody."""
        self._store = store
        self._calls = calls
        self._log = log
        self._lock = threading.Lock()
        self._guests: list[Process] = []
        self._asks = -1
        self._stop = threading.Event()
        self.answers = True  # the store does
        self._thread = threading.Thread(target=self._run, name="ringcomm elastic")
        self._thread.start()

    @property
    def guests(self) -> int:
        return len(self._guests)

    def take(self) -> list[Process]:
        """Return the guests that answered, and look for others from now on."""
        with self._lock:
            guests, self._guests = self._guests, []
            self._asks = -1
            return guests

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        # Not a daemon: Python may unwind one in the midst of C++. It ends with the main thread.
        while threading.main_thread().is_alive() and not self._stop.wait(LOOK_SECONDS):
            try:
                self._look()
                self.answers = True
            except RuntimeError as error:
                if self.answers and not self._stop.is_set():
                    self._log(f"the store does not answer, so no rank can join: {error}")
                self.answers = False
                time.sleep(1)

    def _look(self) -> None:
        most = self._calls()
        if most == 0 or self._guests:
            return
        asks = self._store.add("asks", 0)
        if asks == self._asks:
            return
        first = self._asks < 0
        self._asks = asks
        if first and asks == 0:
            return
        came = answers(self._store, call(self._store, "join"), min(most, MOST))
        with self._lock:
            self._guests = came[:MOST]
