"""Long links between hosts: tests/cpp/net/wan.cc, for kernels without netem."""

from __future__ import annotations

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

    @property
    def queue(self) -> float:
        """The longest that a packet waits for the link, ms."""
        return 2 * self.delay + 20


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
