"""Trouble for the ranks of a churned run on several hosts, by which no rank is lost."""

from __future__ import annotations

import random
import signal
import time

from lab.site import PORT, Site

OUTAGE = 5.0  # seconds at most, and less than the world's patience with a silent host
STOP = 2.0


class Weather:
    """Connections that are reset, hosts that are silent for a while, processes that are stopped.

    And groups that fail although nobody is lost.
    """

    def __init__(self, place: Site, draw: random.Random) -> None:
        self.place, self._draw = place, draw
        self.hosts: list[int] = []  # by trainee's number
        self.struck = {"resets": 0, "outages": 0, "stops": 0, "failures": 0}

    def start(self) -> list[int]:
        """Start a trainee on a host that is drawn."""
        return self.start_on(self._draw.randrange(self.place.hosts.count))

    def start_on(self, host: int) -> list[int]:
        self.hosts.append(host)
        return self.place.trainees.start(1, namespace=self.place.hosts.namespaces[host])

    def strike(self, alive: list[int]) -> None:
        """Do one of these, and wait until it is over."""
        kind = self._draw.choice(list(self.struck))
        host = self._draw.randrange(self.place.hosts.count)
        self.struck[kind] += 1
        if kind == "resets":
            self.place.hosts.kill_connections(host, probability=0.5, spare=PORT)
        elif kind == "outages":
            self.place.hosts.cut(host)
            time.sleep(self._draw.uniform(0.5, OUTAGE))  # for chance to decide
            self.place.hosts.heal(host)
        elif kind == "failures":
            self.place.trainees.kill(self._draw.choice(alive), signal.SIGUSR1)
        else:
            some = self.place.trainees
            number = self._draw.choice(alive)
            some.kill(number, signal.SIGSTOP)
            time.sleep(self._draw.uniform(0.1, STOP))
            some.kill(number, signal.SIGCONT)
