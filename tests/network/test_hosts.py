"""Hosts as network namespaces: each facility of hosts.py does what it says, with plain sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT, namespaces
from lab.hosts import Hosts
from lab.limits import limit

pytestmark = pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))

# Takes one connection and says what came: bytes, how many were not 0, seconds, how it ended.
SINK = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000), family=int(sys.argv[2]))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    got = wrong = 0
    begin, end = time.monotonic(), "end"
    try:
        while data := connection.recv(1 << 20):
            got, wrong = got + len(data), wrong + len(data) - data.count(0)
    except OSError as error:
        end = type(error).__name__
    print(got, wrong, time.monotonic() - begin, end, flush=True)
"""
# Sends so many zeros, in pieces with pauses if told so, and says how it ended.
SOURCE = """
import socket, sys, time
address, size, pieces, pause = sys.argv[1], *map(float, sys.argv[2:])
try:
    with socket.create_connection((address, 5000), timeout=20) as connection:
        for _ in range(int(pieces)):
            connection.sendall(bytes(int(size / pieces)))
            time.sleep(pause)
    print("end", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


class Pair:
    """Host 0 takes what host 1 sends."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.address = (hosts.addresses or hosts.addresses6)[0]
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        sink = [sys.executable, "-c", SINK, self.address, str(int(family))]
        self._sink = hosts.start(0, sink, output=subprocess.PIPE)
        assert self._said() == ["ready"]

    def _said(self) -> list[str]:
        assert self._sink.stdout is not None
        return self._sink.stdout.readline().decode().split()

    def begin(self, size: int, pieces: int = 1, pause: float = 0) -> subprocess.Popen[bytes]:
        words = [self.address, str(size), str(pieces), str(pause)]
        return self.hosts.start(1, [sys.executable, "-c", SOURCE, *words], output=subprocess.PIPE)

    def ended(self, sender: subprocess.Popen[bytes]) -> tuple[str, int, int, float, str]:
        """How it ended for the sender, then bytes, wrong ones, seconds and end at the sink."""
        told = sender.communicate(timeout=30)[0].decode().strip()
        got, wrong, seconds, end = self._said()
        return told, int(got), int(wrong), float(seconds), end

    def connected(self) -> None:
        end = time.monotonic() + 5
        while not self.hosts.connections(0, port=5000):
            assert time.monotonic() < end, "nobody connects"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Hosts(2) as hosts:
        yield Pair(hosts)


def here() -> set[str]:
    """Return the traces of this process's hosts that can be seen from outside."""
    tag = namespaces.own_name(0)[:-1]
    names = namespaces.tool("ip", "netns", "list").split()
    names += [path.name for path in Path(tempfile.gettempdir()).iterdir()]
    return {name for name in names if name.startswith(tag)}


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits for init to notice."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def links() -> str:
    return namespaces.tool("ip", "-o", "link")


def test_all_arrives_and_counters_count(pair: Pair) -> None:
    before = pair.hosts.bytes_sent(1), pair.hosts.bytes_received(0)
    told, got, wrong, _, end = pair.ended(pair.begin(5_000_000))
    assert (told, got, wrong, end) == ("end", 5_000_000, 0, "end")
    sent = pair.hosts.bytes_sent(1) - before[0]
    received = pair.hosts.bytes_received(0) - before[1]
    assert 5_000_000 < sent < 5_500_000
    assert 5_000_000 < received < 5_500_000


def test_killed_connections_are_reset_at_both_ends(pair: Pair) -> None:
    sender = pair.begin(1000, pieces=1000, pause=0.02)
    pair.connected()
    hosts = pair.hosts
    assert hosts.kill_connections(0, port=5001) == 0
    assert hosts.kill_connections(0, dst="10.255.255.255") == 0
    assert hosts.kill_connections(0, probability=0) == 0
    assert hosts.kill_connections(0, count=0) == 0
    assert hosts.kill_connections(0, port=5000, dst=hosts.addresses[1], count=1) == 1
    told, got, _, _, end = pair.ended(sender)
    assert told in {"ConnectionResetError", "BrokenPipeError"}
    assert end == "ConnectionAbortedError"
    assert got < 1000
    assert pair.ended(pair.begin(1000))[:2] == ("end", 1000)  # the next one is let through


@pytest.mark.parametrize("carrier", [False, True])
def test_a_cut_stalls_and_heal_resumes(pair: Pair, carrier: bool) -> None:
    sender = pair.begin(100, pieces=100, pause=0.01)
    pair.connected()
    pair.hosts.cut(1, carrier=carrier)
    before = pair.hosts.bytes_received(0)
    time.sleep(1.5)
    assert sender.poll() is None or pair.hosts.connections(0, port=5000)
    assert pair.hosts.bytes_received(0) == before
    pair.hosts.heal(1)
    told, got, wrong, seconds, end = pair.ended(sender)
    assert (told, got, wrong, end) == ("end", 100, 0, "end")
    assert seconds > 1.4


@pytest.mark.parametrize("host", [0, 1])
def test_a_firewall_rejects_for_a_while(pair: Pair, host: int) -> None:
    sender = pair.begin(1000, pieces=1000, pause=0.02)
    pair.connected()
    with pair.hosts.rejecting(host, ports=[5001, 80]):
        time.sleep(0.1)
    assert sender.poll() is None
    with pair.hosts.rejecting(host, ports=[5000, 80]):
        source = [sys.executable, "-c", SOURCE, pair.address, "1", "1", "0"]
        assert "ConnectionRefusedError" in pair.hosts.inside(1, *source)
        sender.wait(5)
    assert pair.hosts.kill_connections(0) == 1  # who sends nothing has noticed nothing
    assert pair.ended(sender)[0] in {"ConnectionResetError", "BrokenPipeError"}
    assert pair.ended(pair.begin(1000))[:2] == ("end", 1000)


def test_large_packets_arrive_corrupted(pair: Pair) -> None:
    pair.hosts.corrupt(1, every=3)
    told, got, wrong, _, end = pair.ended(pair.begin(5_000_000))
    assert (told, got, end) == ("end", 5_000_000, "end")
    assert 4 <= wrong < 50_000
    assert wrong % 4 == 0
    assert pair.ended(pair.begin(1000))[2] == 0  # small ones are spared
    pair.hosts.corrupt(1, every=0)
    assert pair.ended(pair.begin(5_000_000))[2] == 0


def test_a_rate_limits_both_directions() -> None:
    with Hosts(2, rate="100mbit", ipv6=True) as hosts:
        pair = Pair(hosts)
        for slow in (None, 0, 1):  # then one side alone is slower
            size, rate = (5_000_000, 100e6) if slow is None else (1_000_000, 10e6)
            if slow is not None:
                hosts.limit(slow, "10mbit")
                hosts.limit(1 - slow, "1gbit")
            _, got, _, seconds, _ = pair.ended(pair.begin(size))
            assert got == size
            # The burst of 256 kB goes through at once, on each of the two ways.
            expected = (size - 2 * 256_000) * 8 / rate
            assert 0.8 * expected < seconds < 2 * expected + 5


def test_ipv6_alone() -> None:
    with Hosts(2, ipv4=False, ipv6=True) as hosts:
        assert not hosts.addresses
        pair = Pair(hosts)
        sender = pair.begin(1000, pieces=1000, pause=0.02)
        pair.connected()
        assert hosts.kill_connections(0) == 1
        assert pair.ended(sender)[4] == "ConnectionAbortedError"
        assert pair.ended(pair.begin(1000))[:2] == ("end", 1000)


SHOW = """
import os, socket
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK OMP_NUM_THREADS X HOME".split()
print(socket.gethostname(), *(os.environ.get(name, "-") for name in names))
print(*(socket.gethostbyname(f"host{i}") for i in range(2)), os.environ["MASTER_ADDR"])
"""


def test_ranks_have_their_place() -> None:
    with Hosts(2) as hosts:
        outside = socket.gethostname(), Path("/etc/hosts").read_text()
        command = [sys.executable, "-c", SHOW]
        results = hosts.run_ranks(command, ranks_per_host=2, env={"X": "x", "HOME": None})
        a, b = hosts.addresses
        assert [result.returncode for result in results] == [0] * 4, results
        assert [result.output.splitlines() for result in results] == [
            ["host0 0 4 0 2 0 1 x -", f"127.0.1.1 {b} {a}"],
            ["host0 1 4 1 2 0 1 x -", f"127.0.1.1 {b} {a}"],
            ["host1 2 4 0 2 1 1 x -", f"{a} 127.0.1.1 {a}"],
            ["host1 3 4 1 2 1 1 x -", f"{a} 127.0.1.1 {a}"],
        ]
        assert (socket.gethostname(), Path("/etc/hosts").read_text()) == outside


def test_ranks_that_hang_are_ended() -> None:
    with Hosts(2) as hosts:
        called = []
        script = 'echo began; [ "$RANK" = 0 ] || sleep 60; exit 3'
        begin = time.monotonic()
        command = ["sh", "-c", script]
        results = hosts.run_ranks(command, timeout=limit(0.7), meanwhile=lambda: called.append(1))
        assert time.monotonic() - begin < limit(5)  # less than the one that hangs would take
        assert results == [(3, "began\n"), (-9, "began\n")]
        assert called == [1]


def test_nothing_is_left_and_nothing_is_seen_outside() -> None:
    before, outside = here(), links()
    for _ in range(2):
        with Hosts(2) as hosts, Hosts(3) as others:
            assert links() == outside
            assert len(here() - before) == (2 + 2) + (3 + 2)
            child = hosts.start(0, ["sh", "-c", "sleep 60 & sleep 60"])
            orphan = others.start(0, ["setsid", "--fork", "sleep", "61"])
            assert orphan.wait(limit(5)) == 0  # its child lives on, in a session of its own
            pids = namespaces.tool("ip", "netns", "pids", others.namespaces[0]).split()
            assert len(pids) == 1
        assert child.returncode == -9
        assert ended(int(pids[0]))
        assert here() == before
        assert links() == outside


CRASH = """
import os
from lab.hosts import Hosts
hosts = Hosts(1).__enter__()
hosts.start(0, ["sleep", "62"], output=-3)  # DEVNULL: not our pipe
print(*hosts.namespaces, hosts.inside(0, "true"), flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_crash_left_is_removed() -> None:
    crash = subprocess.run(
        [sys.executable, "-c", CRASH], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    (name,) = crash.stdout.split()
    listed = namespaces.tool("ip", "netns", "list").split()
    pids = []
    if name in listed:  # another test run may have removed it at once
        pids = namespaces.tool("ip", "netns", "pids", name).split()
    alive = Hosts(1)
    with alive, Hosts(1):
        listed = namespaces.tool("ip", "netns", "list").split()
        assert name not in listed
        assert alive.namespaces[0] in listed
    assert all(ended(int(pid)) for pid in pids)
    left = name.removesuffix("-host0") + "-files"
    assert not (Path(tempfile.gettempdir()) / left).exists()


def test_several_processes_at_once() -> None:
    command = [sys.executable, "-c", CRASH.replace("os.kill(os.getpid(), 9)", "hosts.close()")]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    names = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(names) == 3


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    look = namespaces.missing.__wrapped__
    monkeypatch.setenv("PATH", "/nowhere")
    assert look() == "hosts as network namespaces need ip: `apt install iproute2`"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert look() == "hosts as network namespaces need root"
