"""Long links between hosts: tests/cpp/net/wan.cc, for kernels without netem."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from lab import ROOT
from lab.namespaces import tool


class Wan(NamedTuple):
    """A long link from each host to the switch, by tests/cpp/net/wan.cc: kernels may lack netem.

    Of each host what leaves it is limited, delayed (so a round trip takes twice that) and lost.
    """

    rate: float  # Mbit/s
    delay: float  # ms
    loss: float = 0  # percent of the packets

    @classmethod
    def of(cls, text: str) -> Wan:
        """Parse "300,25" or "300,25,0.1". Raises ValueError."""
        words = text.split(",")
        if not 2 <= len(words) <= 3:
            raise ValueError(f"{text!r} is not RATE,DELAY or RATE,DELAY,LOSS")
        return cls(*map(float, words))

    @property
    def queue(self) -> float:
        """The longest that a packet waits for the link, ms."""
        return 2 * self.delay + 20

    @property
    def round_trip(self) -> float:
        """Seconds between two hosts, there and back."""
        return 2 * self.delay / 1e3


def asked() -> Wan | None:
    """Return the links that LAB_WAN=RATE,DELAY[,LOSS] asks for: benchmarks/faults.py --wan."""
    text = os.environ.get("LAB_WAN")
    return Wan.of(text) if text else None


def round_trip() -> float:
    """Return seconds there and back between hosts, as LAB_WAN asks for it; else 0."""
    profile = asked()
    return profile.round_trip if profile else 0.0


def start(wan: Wan, mtu: int, switch: str, namespaces: Sequence[str]) -> subprocess.Popen[bytes]:
    """Make the links of these hosts, in namespaces that are there. They end with its stdin."""
    words = [ROOT / "build" / "tests" / "wan", *wan, wan.queue, mtu, switch, *namespaces]
    process = subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError("there are no long links: see above")
    for namespace in namespaces:  # as hosts on long links have them
        for name in ("rmem", "wmem"):
            words = ["sysctl", "-qw", f"net.ipv4.tcp_{name}=4096 131072 67108864"]
            tool("ip", "netns", "exec", namespace, *words)
    return process
