"""Which addresses and ports a rank listens on, of hosts that are made up."""

from __future__ import annotations

import socket

import pytest

from ringcomm._runtime import addresses
from ringcomm._runtime.addresses import Interface, number


def host(*lines: str) -> list[Interface]:
    """Make interfaces of "eth0 10.0.0.5"; one with a "-" at its end is down."""
    interfaces = []
    for words in lines:
        name, address = words.rstrip("-").split()
        up, loopback = not words.endswith("-"), name == "lo"
        interfaces.append(Interface(name, address, up=up, loopback=loopback))
    return interfaces


# Two networks, containers, and a cable that is not plugged in.
BIG = host(
    *("lo 127.0.0.1", "docker0 172.17.0.1", "eth0 10.0.0.5", "eth10 10.0.1.5"),
    *("ib0 192.168.7.5", "eth2 10.0.2.5-", "usb0 169.254.3.4", "lo ::1"),
    *("eth0 fd00::5", "eth0 fe80::5", "br-7c1f 172.18.0.1"),
)
LONELY = host("lo 127.0.0.1", "lo ::1", "eth0 10.0.0.5-")


@pytest.mark.parametrize(
    ("there", "wanted", "routed", "chosen"),
    [
        (BIG, "", None, "10.0.0.5 10.0.1.5 192.168.7.5 fd00::5"),
        (BIG, "", "192.168.7.5", "192.168.7.5 10.0.0.5 10.0.1.5 fd00::5"),
        (BIG, "", "fd00::5", "fd00::5 10.0.0.5 10.0.1.5 192.168.7.5"),
        # Debian gives a host's own name 127.0.1.1: no reason to tell others a loopback address.
        (BIG, "", "127.0.1.1", "10.0.0.5 10.0.1.5 192.168.7.5 fd00::5"),
        # The route may begin at an address that no interface lists, or at a link-local one.
        (BIG, "", "10.9.9.9", "10.9.9.9 10.0.0.5 10.0.1.5 192.168.7.5"),
        (host("lo 127.0.0.1", "usb0 169.254.3.4"), "", "169.254.3.4", "169.254.3.4"),
        # A bridge of containers comes last, unless all packets leave through it.
        (host("docker0 172.17.0.1", "eth0 10.0.0.5"), "", None, "10.0.0.5 172.17.0.1"),
        (host("eth0 10.0.0.5", "docker0 172.17.0.1"), "", "172.17.0.1", "172.17.0.1 10.0.0.5"),
        # A routed network may give the host's address to lo.
        (host("lo 127.0.0.1", "lo 10.3.3.3"), "", None, "10.3.3.3"),
        (host("eth0 10.0.0.5", "eth0 10.0.0.5"), "", None, "10.0.0.5"),
        # Loopback alone.
        (LONELY, "", None, "127.0.0.1 ::1"),
        (LONELY, "", "127.0.0.1", "127.0.0.1 ::1"),
        (LONELY, "lo", None, "127.0.0.1 ::1"),
        (BIG, "lo", None, "127.0.0.1 ::1"),
        (LONELY, "::/0", None, "::1"),
        ([], "", None, ""),
        # Names.
        (BIG, "eth", None, "10.0.0.5 10.0.1.5 fd00::5"),
        (BIG, "eth1", None, "10.0.1.5"),  # a beginning, as in NCCL
        (BIG, "=eth0,ib", None, "10.0.0.5 fd00::5"),  # ib is exact too
        (BIG, "ib,=eth0", None, "192.168.7.5 10.0.0.5 fd00::5"),
        (BIG, "ib0,eth0", "10.0.0.5", "192.168.7.5 10.0.0.5 fd00::5"),
        (BIG, "eth", "10.0.1.5", "10.0.1.5 10.0.0.5 fd00::5"),
        (BIG, "eth", "192.168.7.5", "10.0.0.5 10.0.1.5 fd00::5"),
        (BIG, "^docker0,br-,eth", None, "192.168.7.5"),
        (BIG, "^=eth0,eth1", None, "10.0.1.5 192.168.7.5 172.17.0.1 172.18.0.1"),
        (BIG, "eth,^eth1", None, "10.0.0.5 fd00::5"),
        (BIG, "docker,usb", None, "172.17.0.1 169.254.3.4"),  # asked for by name
        # Networks.
        (BIG, "10.0.0.0/8", None, "10.0.0.5 10.0.1.5"),
        (BIG, "fd00::/16,10.0.1.0/24", None, "fd00::5 10.0.1.5"),
        (BIG, "10.0.1.5", None, "10.0.1.5"),
        (BIG, "10.1.2.3/8,^10.0.1.0/24", None, "10.0.0.5"),
        (BIG, "10.9.0.0/16", "10.9.9.9", "10.9.9.9"),
    ],
)
def test_choice(there: list[Interface], wanted: str, routed: str | None, chosen: str) -> None:
    assert addresses.choose(there, wanted, routed) == chosen.split()


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("=eth1", "RINGCOMM_IFNAME==eth1 leaves no address that other hosts can reach"),
        ("wlan0", "this host has lo 127.0.0.1, docker0 172.17.0.1, eth0 10.0.0.5, eth10"),
        ("eth2", "eth2 10.0.2.5 (down)"),
    ],
)
def test_nothing_left(wanted: str, text: str) -> None:
    with pytest.raises(ValueError, match="leaves no address") as caught:
        addresses.choose(BIG, wanted, None)
    assert text in str(caught.value)
    with pytest.raises(ValueError, match="this host has none"):
        addresses.choose([], wanted, None)


@pytest.mark.parametrize(
    "text",
    [
        *(",", "eth0,", ",eth0", "^", "=", "^=", "eth0,^", "eth 0", "10.0.0.0/33", "fd00::/129"),
        *("10.0.0.0/", "10.0.0.0/x", "/8", "eth0/8", "10.0.0/8", "10.0.0.0/-1", "10.0.0.0/8/8"),
    ],
)
def test_filters_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none of eth") as caught:
        addresses.parse_filter(text)
    assert str(caught.value).startswith(f"RINGCOMM_IFNAME={text}: '")


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("", 0, 0),
        ("0", 0, 0),
        ("40000", 40000, 40000),
        ("40000-40100", 40000, 40100),
        ("65535", 65535, 65535),
    ],
)
def test_ports(text: str, first: int, last: int) -> None:
    ports = addresses.parse_ports(text)
    assert (ports[0], ports[-1]) == (first, last)


@pytest.mark.parametrize(
    "text",
    [
        *("-", "1-", "-1", "2-1", "0-5", "65536", "1-65536", "a", "1-2-3", " 1", "1 -2", "1,2"),
        "0x10",
    ],
)
def test_ports_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"RINGCOMM_PORTS={text} is neither"):
        addresses.parse_ports(text)


def test_numbers() -> None:
    assert str(number("::ffff:10.0.0.1")) == "10.0.0.1"  # IPv4 in IPv6's clothes
    for text in ("10", "10.1", "", "eth0", "10.0.0.1:4"):
        assert number(text) is None


def test_this_host() -> None:
    (lo,) = (face for face in addresses.list_interfaces() if face.address == "127.0.0.1")
    assert (lo.name, lo.up, lo.loopback) == ("lo", True, True)
    assert addresses.source_towards(["127.0.0.1"]) == "127.0.0.1"
    assert addresses.addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert addresses.addresses_of(300 * "x") == []
    assert addresses.source_towards([]) is None
    address, first, last = addresses.places("lo", "40000-40001", "127.0.0.1")
    assert (address[0], first, last) == ("127.0.0.1", 40000, 40001)


# ---- how far another host is


@pytest.mark.parametrize(
    ("times", "far"),
    [([0.0002], 0), ([0.05, 0.0005], 0), ([0.05, 0.004, 0.006], 1), ([0.05] * 3, 2), ([None], 0)],
)
def test_distance(monkeypatch: pytest.MonkeyPatch, times: list[float | None], far: int) -> None:
    monkeypatch.setattr(addresses, "round_trip", lambda _: times.pop(0))
    assert addresses.distance(["10.0.0.1:4000"]) == far
    assert not times


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_round_trip_to_one_that_answers(host: str) -> None:
    with socket.socket(addresses.family(host)) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(str(error))
        listener.listen()
        port = listener.getsockname()[1]
        there = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        took = addresses.round_trip(["127.0.0.2:1", there])
        assert took is not None
        assert 0 < took < 0.5


def test_nobody_answers() -> None:
    assert addresses.round_trip(["127.0.0.2:1"]) is None
    assert addresses.distance(["127.0.0.2:1"]) == 0
