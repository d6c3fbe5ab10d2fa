"""Which addresses ranks tell each other, and what becomes of those that lead nowhere."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.hosts import Hosts
from lab.limits import claim, limit
from lab.namespaces import missing, tool

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

MOVED = 4 << 20  # bytes that each rank sends in its all_reduce
PORTS = range(40000, 40004)
RANGE = f"{PORTS[0]}-{PORTS[-1]}"


class Lab:
    """Two hosts, a rank on each as often as asked for. Beside eth0 they share fast0, a cable."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.fast = ["10.200.0.1", "10.200.0.2"]
        self._sockets = [folder / f"host{host}" for host in range(2)]
        self._ports = itertools.count(29600)
        words = ["link", "add", "fast0", "type", "veth", "peer", "name", "fast0", "netns"]
        tool("ip", "-n", hosts.namespaces[0], *words, hosts.namespaces[1])
        for host, path in enumerate(self._sockets):
            self.ip(host, "addr", "add", f"{self.fast[host]}/24", "dev", "fast0")
            self.ip(host, "link", "set", "fast0", "up")
            script = Path(__file__).with_name("address_rank.py")
            hosts.start(host, [sys.executable, script, path], {"OMP_NUM_THREADS": "1"})

    def ip(self, host: int, *words: object) -> None:
        tool("ip", "-n", self.hosts.namespaces[host], *words)

    def run(
        self,
        address: str | None = None,
        others: tuple[dict[str, str], dict[str, str]] = ({}, {}),
        **env: str,
    ) -> list[dict[str, Any]]:
        """Be two ranks that meet at an address of host 0; what each says. `others`: by rank."""
        place = {"host": address or self.hosts.addresses[0], "port": next(self._ports)}
        with contextlib.ExitStack() as stack:
            streams = []
            for rank, path in enumerate(self._sockets):
                stream = self._connect(path, stack)
                variables = {"RINGCOMM_RESUME_SECONDS": "3", **env, **others[rank]}
                words = json.dumps({**place, "rank": rank, "environment": variables})
                print(words, file=stream, flush=True)
                streams.append(stream)
            return [json.loads(stream.readline()) for stream in streams]

    def _connect(self, path: Path, stack: contextlib.ExitStack) -> Any:
        end = time.monotonic() + limit(60)  # it imports torch first
        while True:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(limit(60))
            try:
                connection.connect(str(path))
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < end, "a host does not answer"
                time.sleep(0.02)
            else:
                return stack.enter_context(connection.makefile("rw"))

    def look(self, host: int, interface: str) -> dict[str, Any]:
        words = ["ip", "-n", self.hosts.namespaces[host], "-s", "-j", "link", "show", "dev"]
        entry: dict[str, Any] = json.loads(tool(*words, interface))[0]
        return entry

    def carried(self, host: int, interface: str) -> int:
        """Bytes that have come to a host by an interface."""
        return int(self.look(host, interface)["stats64"]["rx"]["bytes"])

    @contextlib.contextmanager
    def firewall(self, *rules: str) -> Iterator[None]:
        """Both hosts treat what comes to them by these rules of nft."""
        chain = "\n".join(["chain lab {", "type filter hook input priority 0", *rules, "}"])
        try:
            for host in range(2):
                text = f"table inet lab {{\n{chain}\n}}\n"
                self.hosts.inside(host, "nft", "-f", "-", text=text)
            yield
        finally:
            for host in range(2):
                self.hosts.inside(host, "nft", "flush", "ruleset")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Hosts(2, ipv6=True) as hosts:
        yield Lab(hosts, tmp_path_factory.mktemp("lab"))


def listened(answer: dict[str, Any]) -> dict[str, int]:
    """Where a rank listened, and at which port. The store listens everywhere: it is left out."""
    ports = {}
    for text in answer["listened"]:
        digits, port = text.split(":")
        words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
        address = ipaddress.ip_address(b"".join(words))
        if not address.is_unspecified:
            ports[str(address)] = int(port, 16)
    return ports


def good(answers: list[dict[str, Any]]) -> None:
    assert [answer["error"] for answer in answers] == ["", ""]
    for answer in answers:
        assert listened(answer)
        assert not any(ipaddress.ip_address(address).is_loopback for address in listened(answer))


@pytest.fixture
def docker0(lab: Lab) -> Iterator[None]:
    """Make what a daemon of containers makes on every host, with one container."""
    for host in range(2):
        lab.ip(host, "link", "add", "docker0", "type", "bridge")
        lab.ip(host, "link", "add", "container0", "type", "veth", "peer", "name", "inside0")
        lab.ip(host, "link", "set", "container0", "master", "docker0", "up")
        lab.ip(host, "link", "set", "inside0", "up")
        lab.ip(host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        lab.ip(host, "link", "set", "docker0", "up")
    end = time.monotonic() + limit(5)
    while any(lab.look(host, "docker0")["operstate"] != "UP" for host in range(2)):
        assert time.monotonic() < end, "docker0 does not come up"
        time.sleep(0.01)
    yield
    for host in range(2):
        lab.ip(host, "link", "del", "container0")
        lab.ip(host, "link", "del", "docker0")


@pytest.mark.parametrize("ports", ["", "40000"])
@pytest.mark.usefixtures("docker0")
def test_a_docker0_on_both_hosts_is_in_nobodys_way(lab: Lab, ports: str) -> None:
    """With one port for all, both hosts even listen at the very same address."""
    answers = lab.run(RINGCOMM_PORTS=ports, RINGCOMM_IFNAME="^fast0")
    good(answers)
    assert all("172.17.0.1" in listened(answer) for answer in answers)
    assert max(answer["seconds"] for answer in answers) < claim(5)
    without = lab.run(RINGCOMM_PORTS=ports, RINGCOMM_IFNAME="^fast0,docker,br-")
    good(without)
    assert not any("172.17.0.1" in listened(answer) for answer in without)


@pytest.mark.usefixtures("docker0")
def test_an_address_that_both_hosts_have_is_nobodys(lab: Lab) -> None:
    for answer in lab.run(RINGCOMM_IFNAME="docker0"):
        assert "listens at 172.17.0.1:" in answer["error"]
        assert "an address that this host, which is another one, has as well" in answer["error"]
        assert "choose an interface between them with RINGCOMM_IFNAME" in answer["error"]
        assert answer["seconds"] < claim(5)


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ("fast0", "fast0"),
        ("=fast0", "fast0"),
        ("fast", "fast0"),
        ("10.200.0.0/24", "fast0"),
        ("^eth", "fast0"),
        ("=eth0", "eth0"),
        ("^fast", "eth0"),
        ("fd00::/16", "eth0"),
    ],
)
def test_bytes_pass_over_the_interface_asked_for(lab: Lab, asked: str, used: str) -> None:
    other = {"fast0": "eth0", "eth0": "fast0"}[used]
    before = [[lab.carried(host, name) for name in (used, other)] for host in range(2)]
    answers = lab.run(RINGCOMM_IFNAME=asked)
    good(answers)
    for host in range(2):
        assert lab.carried(host, used) - before[host][0] > MOVED
        assert lab.carried(host, other) - before[host][1] < MOVED / 10  # the store's, at most
        places = listened(answers[host])
        if used == "fast0":
            assert list(places) == [lab.fast[host]]
        else:
            assert set(places) <= {lab.hosts.addresses[host], lab.hosts.addresses6[host]}


def test_a_range_of_ports_is_enough_for_a_firewall(lab: Lab) -> None:
    """The store's ports are open as well, and answers; all else is dropped."""
    syn = "tcp flags & (syn | ack) == syn"
    with lab.firewall(
        f"{syn} tcp dport != {{ {RANGE}, 29500-29999 }} drop", "meta l4proto udp drop"
    ):
        answers = lab.run(RINGCOMM_PORTS=RANGE)
        good(answers)
        for answer in answers:
            assert set(listened(answer).values()) <= {*PORTS}
        for rank, answer in enumerate(lab.run(RINGCOMM_PORTS="41000-41003")):
            names_what_is_out_of_reach(lab, answer, rank, range(41000, 41004))


def names_what_is_out_of_reach(lab: Lab, answer: dict[str, Any], rank: int, ports: range) -> None:
    """Check that the error says who, where, from where, and what to look at."""
    error, there, here = answer["error"], lab.hosts.addresses[1 - rank], lab.hosts.addresses[rank]
    assert f"rank {1 - rank}: no answer from " in error
    assert any(f"{there}:{port}" in error for port in ports), error
    assert f" to {here} for " in error
    assert "see whether that host runs, has a route to this one, and lets these ports" in error
    assert "RINGCOMM_IFNAME and RINGCOMM_PORTS" in error
    assert 3 < answer["seconds"] < claim(20)


def test_a_host_that_is_loopback_to_itself(lab: Lab) -> None:
    """As on Debian: its own name is 127.0.1.1 in its /etc/hosts, and the others' are not."""
    answers = lab.run("host0", RINGCOMM_IFNAME="eth0")
    assert [answer["named"] for answer in answers] == ["127.0.1.1", "127.0.1.1"]
    good(answers)


@pytest.mark.parametrize("blocked", ["ipv4", "ipv6"])
def test_of_two_families_one_is_enough(lab: Lab, blocked: str) -> None:
    with lab.firewall(f"meta nfproto {blocked} tcp dport {RANGE} drop"):
        answers = lab.run(RINGCOMM_PORTS=RANGE, RINGCOMM_IFNAME="eth0")
        good(answers)
        for host, answer in enumerate(answers):
            both = {lab.hosts.addresses[host], lab.hosts.addresses6[host]}
            assert {*listened(answer)} == both


def test_ipv6_alone(lab: Lab) -> None:
    for host in range(2):
        lab.ip(host, "-4", "addr", "flush", "dev", "eth0")
        lab.ip(host, "link", "set", "fast0", "down")
    try:
        answers = lab.run(lab.hosts.addresses6[0])
        good(answers)
        assert [[*listened(answer)] for answer in answers] == [[a] for a in lab.hosts.addresses6]
    finally:
        for host in range(2):
            lab.ip(host, "addr", "add", f"{lab.hosts.addresses[host]}/24", "dev", "eth0")
            lab.ip(host, "link", "set", "fast0", "up")


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_loopback_is_told_to_no_other_host(lab: Lab, who: tuple[int, ...]) -> None:
    requests = ({"RINGCOMM_IFNAME": "lo" if 0 in who else "eth0"},
              {"RINGCOMM_IFNAME": "lo" if 1 in who else "eth0"})  # fmt: skip
    answers = lab.run(others=requests, RINGCOMM_PORTS=RANGE)
    for rank, answer in enumerate(answers):
        culprit = r"\d" if len(who) > 1 else str(who[0])
        assert re.search(f"rank {culprit} listens at 127.0.0.1:4000", answer["error"])
        assert "an address that this host, which is another one, has as well" in answer["error"]
        assert "choose an interface between them with RINGCOMM_IFNAME" in answer["error"]
        if who == (rank,):
            assert f"rank {1 - rank} failed: " in answer["error"]
        assert answer["seconds"] < claim(5)
