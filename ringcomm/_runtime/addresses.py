"""The addresses on which a rank listens, and which it tells other hosts.

RINGCOMM_IFNAME, RINGCOMM_PORTS and the way to the store decide. The library calls `places` when a
group has ranks of several hosts, and `ringcomm doctor` uses the same rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import re
import selectors
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST_ADDRESSES = 4
UP_AND_RUNNING, LOOPBACK = 0x41, 0x8  # IFF_UP | IFF_RUNNING, IFF_LOOPBACK
VIRTUAL = (
    *("docker", "br-", "virbr", "vnet", "veth", "lxc", "lxdbr", "podman"),
    *("cni", "flannel", "cali", "kube", "weave", "cilium", "nerdctl", "tunl"),
)

IP = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Interface:
    """One address of an interface; `mtu` in bytes, 0 where it is not known."""

    name: str
    address: str
    up: bool = True
    loopback: bool = False
    mtu: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def number(text: str) -> IP | None:
    """Return the IP address that the text is; None for a name."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# ---- this host's interfaces


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def list_interfaces(sys: Path = Path("/sys")) -> list[Interface]:
    """List every IPv4 and IPv6 address of this host. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    interfaces = []
    try:
        entry = first
        while entry:
            address = entry.contents
            if text := address_text(address.address):
                name = address.name.decode()
                up = address.flags & UP_AND_RUNNING == UP_AND_RUNNING
                interfaces.append(
                    Interface(name, text, up, bool(address.flags & LOOPBACK), mtu_of(sys, name))
                )
            entry = address.next
    finally:
        library.freeifaddrs(first)
    return interfaces


def address_text(pointer: int | None) -> str:
    """Return the address of a sockaddr in memory; "" for other families than IP."""
    if not pointer:
        return ""
    kind = ctypes.c_ushort.from_address(pointer).value
    if kind == socket.AF_INET:
        return str(ipaddress.IPv4Address(ctypes.string_at(pointer + 4, 4)))
    if kind == socket.AF_INET6:
        return str(number(str(ipaddress.IPv6Address(ctypes.string_at(pointer + 8, 16)))))
    return ""


def mtu_of(sys: Path, name: str) -> int:
    try:
        return int((sys / "class" / "net" / name / "mtu").read_text())
    except (OSError, ValueError):
        return 0


# ---- RINGCOMM_IFNAME


@dataclass(frozen=True)
class Item:
    """An item of RINGCOMM_IFNAME: the interfaces or addresses that it asks for or excludes."""

    name: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    exact: bool
    exclude: bool

    def matches(self, interface: Interface) -> bool:
        if self.network is not None:
            return number(interface.address) in self.network
        return interface.name == self.name if self.exact else interface.name.startswith(self.name)


def network_of(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the network that an item names; None for one that names an interface, or nothing."""
    address, slash, prefix = name.partition("/")
    if number(address) is None or (slash and not re.fullmatch("[0-9]{1,3}", prefix, re.ASCII)):
        return None
    try:
        return ipaddress.ip_network(f"{number(address)}{slash}{prefix}", strict=False)
    except ValueError:
        return None


def parse_filter(text: str) -> list[Item]:
    """Parse RINGCOMM_IFNAME. Raises ValueError."""
    items, exact, exclude = [], False, False
    for word in text.split(",") if text else []:
        name = word.lstrip("^=")
        marks = word[: len(word) - len(name)]
        exact, exclude = exact or "=" in marks, exclude or "^" in marks
        network = network_of(name)
        if network is None and (not name or re.search(r"[/\s]", name)):
            raise ValueError(
                f"RINGCOMM_IFNAME={text}: '{name}' is none of eth (a name or its beginning), =eth0 "
                "(exactly) and 10.0.0.0/8 (a network); commas separate them, ^ excludes what "
                "follows"
            )
        items.append(Item(name, network, exact, exclude))
    return items


def place(items: list[Item], interface: Interface) -> int | None:
    """Return which item asks for this interface; None where it is not wanted."""
    match = None if any(not item.exclude for item in items) else 0
    for index in reversed(range(len(items))):
        if items[index].matches(interface):
            if items[index].exclude:
                return None
            match = index
    return match


def choose(interfaces: list[Interface], wanted: str, routed: str | None) -> list[str]:
    """Return the addresses that a rank tells others, best first, at most four.

    The order of `wanted`, which is RINGCOMM_IFNAME, comes first. Then comes `routed`, the address
    from which packets to the store leave, and real interfaces before virtual bridges. Interfaces
    that are down are left out. So are IPv6 link-local addresses, which mean nothing elsewhere, and
    IPv4 link-local ones that were not asked for. An address on lo may be the host's own in a routed
    network, or one that a balancer shares. Loopback is the answer where nothing else is, or where
    it was asked for. Raises ValueError where the filter leaves nothing.
    """
    items = parse_filter(wanted)
    selects = any(not item.exclude for item in items)
    known = [interface.address for interface in interfaces]
    candidates = list(interfaces)
    if routed is not None and routed not in known:
        candidates.append(Interface("", routed))
    ordered, loopback = [], []
    for interface in candidates:
        rank, at = place(items, interface), ipaddress.ip_address(interface.address)
        if rank is None or not interface.up:
            continue
        if at.is_loopback:
            loopback.append(interface.address)
            continue
        is_routed = interface.address == routed
        if at.is_link_local and not (at.version == 4 and (is_routed or selects)):
            continue
        order = (rank, not is_routed, interface.name.startswith(VIRTUAL) or interface.loopback)
        ordered.append((order, interface.address))
    ordered.sort(key=lambda pair: pair[0])
    chosen = list(dict.fromkeys(address for _, address in ordered))[:MOST_ADDRESSES] or loopback
    if not chosen and wanted:
        there = ", ".join(
            f"{interface.name} {interface.address}{'' if interface.up else ' (down)'}"
            for interface in interfaces
        )
        raise ValueError(
            f"RINGCOMM_IFNAME={wanted} leaves no address that other hosts can reach: "
            f"this host has {there or 'none'}"
        )
    return chosen


# ---- the way to the store


def addresses_of(host: str) -> list[str]:
    """Ask the name server, if `host` is a name; none where it knows of none."""
    flags = socket.AI_ADDRCONFIG
    try:  # bytes: for text Python loads a codec, which a process that changed its user cannot read
        answers = socket.getaddrinfo(host.encode(), 9, type=socket.SOCK_DGRAM, flags=flags)
    except (OSError, ValueError):
        return []
    return [str(answer[4][0]) for answer in answers]


def source_towards(addresses: Iterable[str]) -> str | None:
    """Return this host's address from which packets to the first routable one leave.

    A loopback address says nothing to other hosts: many a host's own name is 127.0.1.1 in its
    /etc/hosts.
    """
    for address in addresses:
        try:
            with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: the kernel looks the route up
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


# ---- the distance to another host

NEAR, MIDDLE = 1e-3, 8e-3  # seconds of a round trip
LOOKS = 3
PATIENCE = 1.0  # seconds, with addresses that do not answer
RTT_AT = 68  # in Linux's struct tcp_info: tcpi_rtt, microseconds


def distance(addresses: list[str]) -> int:
    """Return 0 for a host that is near, 1 or 2 for one that is farther away.

    The shortest of some round trips counts: one may be long because this host was busy. A host
    that does not answer counts as near; who needs it finds out later, and says so.
    """
    times: list[float] = []
    while len(times) < LOOKS and (took := round_trip(addresses)) is not None:
        times.append(took)
        if took <= NEAR:
            break
    shortest = min(times, default=0.0)
    return 0 if shortest <= NEAR else 1 if shortest <= MIDDLE else 2


def round_trip(addresses: list[str]) -> float | None:
    """Return the seconds to the first of these that answers, as the kernel measures them.

    An address is "10.0.0.1:4000" or "[fd00::1]:4000". None: none answers.
    """
    end = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as selector:
        for address in addresses:
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            probe = sockets.enter_context(socket.socket(family(host)))
            probe.setblocking(False)
            if probe.connect_ex((host, int(port))) in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, probe)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(probe := key.data)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    info = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RTT_AT + 4)
                    return int.from_bytes(info[RTT_AT:], sys.byteorder) / 1e6
    return None


# ---- RINGCOMM_PORTS


def parse_ports(text: str) -> range:
    """Parse RINGCOMM_PORTS, "40000-40100" or one port. Raises ValueError."""
    span = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text or "0", re.ASCII)
    first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
    if first > last or last > 65535 or (first == 0 < last):
        raise ValueError(
            f"RINGCOMM_PORTS={text} is neither a port nor a range of ports, as 40000 or 40000-40100"
        )
    return range(first, last + 1)


# ---- all of it

GRAMMAR = {"ifname": parse_filter, "ports": parse_ports}  # attributes of Options


def places(ifname: str, ports: str, store_host: str) -> tuple[list[str], int, int]:
    """Return where this process listens: addresses, best first, and the first and last port.

    Raises ValueError for a filter that leaves nothing, and OSError.
    """
    span = parse_ports(ports)
    routed = source_towards(addresses_of(store_host)) if store_host else None
    return choose(list_interfaces(), ifname, routed), span[0], span[-1]
