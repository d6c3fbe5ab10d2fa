"""Several hosts on this machine: network namespaces on a switch of their own.

    with Hosts(2, rate="1gbit") as hosts:
        results = hosts.run_ranks([sys.executable, "script.py"], ranks_per_host=2)

Each host has an eth0, a name and an /etc/hosts of its own. Nothing of it is seen outside: the
switch has a namespace too. Needs root; `missing()` says what else. Names carry the process that
made them, so that the next one to make some removes what a crashed one left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab import sites, wan
from lab.limits import limit
from lab.namespaces import missing, own_name, remove, remove_leftovers, tool

SEEN_AS_LARGE = 1200  # bytes; what `corrupt` changes lies 1000 bytes into TCP's header and data

Environment = Mapping[str, "str | None"]
_serial = itertools.count()


class RankResult(NamedTuple):
    """How a rank ended; `output` holds stdout and stderr."""

    returncode: int
    output: str


class Hosts:
    """`count` hosts while the context lasts; `names`, `addresses` and `addresses6` are by host.

    `rate`, as "1gbit", limits each host's link in both directions. `ipv4=False` leaves IPv6 alone.
    With `far` the links are long. With `site_of`, the number of each host's site, only those to
    other sites are: a site has a switch of its own, and `rate` is that of its links.
    """

    def __init__(
        self,
        count: int,
        rate: str | None = None,
        *,
        far: wan.Wan | None = None,
        site_of: Sequence[int] = (),
        ipv4: bool = True,
        ipv6: bool = False,
        mtu: int = 1500,
        seed: int = 0,
    ) -> None:
        self.count, self.rate, self.mtu = count, rate, mtu
        self.far = far or wan.asked()
        self.site_of = site_of
        self.ipv4, self.ipv6 = ipv4, ipv6
        self.random = random.Random(seed)  # chooses the connections to be killed
        self._tag = own_name(next(_serial))
        self.switch = f"{self._tag}-switch"
        self.namespaces = [f"{self._tag}-host{index}" for index in range(count)]
        self.names = [f"host{index}" for index in range(count)]
        net = 64 + os.getpid() // 256 % 128, os.getpid() % 256
        self.addresses = [f"10.{net[0]}.{net[1]}.{i + 1}" for i in range(count)] if ipv4 else []
        self.addresses6 = [f"fd00:{net[0]}:{net[1]}::{i + 1}" for i in range(count)] if ipv6 else []
        self._ports = itertools.count(29500)  # a new one each time: the old may still be in use
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: subprocess.Popen[bytes] | None = None  # the long ones
        self._folder = Path(tempfile.gettempdir()) / f"{self._tag}-files"

    def __enter__(self) -> Hosts:
        if reason := missing():
            raise RuntimeError(reason)
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        self._folder.mkdir(0o700)
        tool("ip", "netns", "add", self.switch)
        self._without_ipv6(self.switch)  # it would have things to say, as snooping has
        words = ["link", "add", "switch", "type", "bridge", "mcast_snooping", 0]
        tool("ip", "-n", self.switch, *words)
        tool("ip", "-n", self.switch, "link", "set", "switch", "up")
        for namespace in self.namespaces:
            tool("ip", "netns", "add", namespace)
        if self.far:
            self._links = wan.start(self.far, self.mtu, self.switch, self.namespaces)
        for index, namespace in enumerate(self.namespaces):
            if not self.far:
                words = ["link", "add", f"port{index}", "mtu", self.mtu, "type", "veth"]
                words += ["peer", "name", "eth0", "mtu", self.mtu, "netns", namespace]
                tool("ip", "-n", self.switch, *words)
            tool("ip", "-n", self.switch, "link", "set", f"port{index}", "master", "switch", "up")
            if not self.ipv6:
                self._without_ipv6(namespace)
            for address in self.addresses[index : index + 1]:
                tool("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            for address in self.addresses6[index : index + 1]:
                words = [f"{address}/64", "dev", "eth0", "nodad"]
                tool("ip", "-n", namespace, "addr", "add", *words)
            tool("ip", "-n", namespace, "link", "set", "lo", "up")
            tool("ip", "-n", namespace, "link", "set", "eth0", "up")
            self._write_names(index)
            if self.rate and not self.site_of:
                self.limit(index, self.rate)
        sites.connect(self)
        for index in range(self.count):
            self._await_link(index)

    @staticmethod
    def _without_ipv6(namespace: str) -> None:
        off = "net.ipv6.conf.{}.disable_ipv6=1".format
        words = ["ip", "netns", "exec", namespace, "sysctl", "-qw", off("all"), off("default")]
        subprocess.run(words, capture_output=True)  # a kernel without IPv6 has no such setting

    def _write_names(self, host: int) -> None:
        """As Debian does it: a host's own name means a loopback address."""
        lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 {self.names[host]}"]
        for addresses in (self.addresses, self.addresses6):
            lines += [f"{addresses[i]} {self.names[i]}" for i in range(len(addresses)) if i != host]
        (self._folder / f"names{host}").write_text("\n".join([*lines, ""]))

    def _await_link(self, host: int) -> None:
        """The switch forwards a moment after a port is up: the kernel does that on the side."""
        show = ["bridge", "-n", self.switch, "-j", "link", "show", "dev", f"port{host}"]
        end = time.monotonic() + limit(5)
        while json.loads(tool(*show))[0]["state"] != "forwarding":
            assert time.monotonic() < end, f"the link of host {host} does not come up"
            time.sleep(0.01)

    def close(self) -> None:
        """End what runs on the hosts and remove them; once is enough, twice does no harm."""
        for process in self._processes:
            self._end(process)
        if self._links is not None:
            self._links.communicate(timeout=limit(10))
            self._links = None
        for namespace in [*self.namespaces, self.switch]:
            remove(namespace)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes = []

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:  # not reaped: the number is still its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def inside(self, host: int, *words: object, text: str | None = None) -> str:
        """Run a program on a host, at once; what it printed. It must succeed."""
        return tool("ip", "netns", "exec", self.namespaces[host], *words, text=text)

    def start(
        self,
        host: int,
        command: Sequence[str | Path],
        env: Environment | None = None,
        output: int | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, in a session of its own; None in `env` removes a variable.

        `output` is a descriptor for stdout and stderr, or subprocess.PIPE.
        """
        # The namespace of mounts is the command's own, thanks to `ip netns exec`.
        script = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        names = self._folder / f"names{host}"
        prefix = ["ip", "netns", "exec", self.namespaces[host], "unshare", "--uts"]
        prefix += ["sh", "-ec", script, "sh", str(names), self.names[host]]
        merged = {**os.environ, **(env or {})}
        process = subprocess.Popen(
            [*prefix, *(str(word) for word in command)],
            env={name: value for name, value in merged.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=output,
            cwd=cwd,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run_ranks(
        self,
        command: Sequence[str | Path],
        ranks_per_host: int = 1,
        env: Environment | None = None,
        timeout: float = limit(60),
        meanwhile: Callable[[], object] | None = None,
        patience: float | None = None,
    ) -> list[RankResult]:
        """Run a command as every rank, in torchrun's environment; how each ended, by rank.

        `meanwhile` is called once all have been started: the place for faults. A rank that has
        not ended after `timeout` seconds, or `patience` seconds after `meanwhile`, is killed: its
        returncode is -9.
        """
        end = time.monotonic() + timeout
        port, world = next(self._ports), self.count * ranks_per_host
        run = self._folder / f"run{port}"
        run.mkdir()
        processes = []
        for rank in range(world):
            host, local = divmod(rank, ranks_per_host)
            place = self._place(rank, world, local, ranks_per_host)
            with (run / str(rank)).open("wb") as file:
                merged = {**place, "MASTER_PORT": str(port), **(env or {})}
                processes.append(self.start(host, command, merged, file.fileno()))
        try:
            if meanwhile:
                meanwhile()
            if patience is not None:
                end = min(end, time.monotonic() + patience)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:
            for process in processes:
                self._end(process)
        outputs = [(run / str(rank)).read_text(errors="replace") for rank in range(world)]
        return [RankResult(process.returncode, outputs[i]) for i, process in enumerate(processes)]

    def _place(self, rank: int, world: int, local: int, locals_: int) -> dict[str, str]:
        host = rank // locals_
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(locals_),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": (self.addresses or self.addresses6)[0],
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",  # it would ask for the host's name, which is loopback
        }

    # ---- faults ------------------------------------------------------------------------------

    def connections(
        self,
        host: int,
        port: int | None = None,
        dst: str | None = None,
        spare: int | None = None,
    ) -> list[str]:
        """Established connections of a host, as expressions of ss; none with the port `spare`."""
        connections = []
        for line in self.inside(host, "ss", "-Htn", "state", "established").splitlines():
            here, there = line.split()[2:4]
            peer = there.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            ports = {int(end.rpartition(":")[2]) for end in (here, there)}
            if peer.startswith("127.") or peer == "::1" or dst not in (None, peer):
                continue
            if peer in [*self.addresses[host : host + 1], *self.addresses6[host : host + 1]]:
                continue
            if spare not in ports and (port is None or port in ports):
                connections.append(f"( src {here} and dst {there} )")
        return connections

    def kill_connections(
        self,
        host: int,
        *,
        probability: float = 1.0,
        count: int | None = None,
        port: int | None = None,
        dst: str | None = None,
        spare: int | None = None,
    ) -> int:
        """Reset some of a host's connections to other hosts, both ends; how many it were.

        Each with `probability`, or `count` of them; only those with this port at either end or this
        peer's address, and none with the port `spare`.
        """
        some = self.connections(host, port, dst, spare)
        if count is not None:
            some = self.random.sample(some, min(count, len(some)))
        else:
            some = [connection for connection in some if self.random.random() < probability]
        if not some:
            return 0
        told = self.inside(host, "ss", "-HKtn", "state", "established", " or ".join(some))
        return len(told.splitlines())

    def cut(self, host: int, *, carrier: bool = False) -> None:
        """Packets from and to a host vanish; with `carrier`, its eth0 sees the cable pulled."""
        if carrier:
            tool("ip", "-n", self.switch, "link", "set", f"port{host}", "down")
        else:
            words = ["link", "set", "dev", f"port{host}", "state", 0]
            tool("bridge", "-n", self.switch, *words)

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        set_port = ["link", "set", "dev", f"port{host}"]
        tool("ip", "-n", self.switch, *set_port, "up")
        with contextlib.suppress(RuntimeError):  # not while the link comes up: it forwards then
            tool("bridge", "-n", self.switch, *set_port, "state", 3)
        self._await_link(host)

    def second_network(self, rate: str) -> list[str]:
        """Give every host an eth1 on a switch of its own; the addresses."""
        switch = self.switch
        tool("ip", "-n", switch, "link", "add", "switch2", "type", "bridge", "mcast_snooping", 0)
        tool("ip", "-n", switch, "link", "set", "switch2", "up")
        addresses = []
        for host, namespace in enumerate(self.namespaces):
            words = ["link", "add", f"second{host}", "type", "veth", "peer", "name", "eth1"]
            tool("ip", "-n", switch, *words, "netns", namespace)
            tool("ip", "-n", switch, "link", "set", f"second{host}", "master", "switch2", "up")
            addresses.append(self.addresses[host].replace("10.", "11.", 1))
            tool("ip", "-n", namespace, "addr", "add", f"{addresses[-1]}/24", "dev", "eth1")
            tool("ip", "-n", namespace, "link", "set", "eth1", "up")
            words = ["qdisc", "replace", "dev", "eth1", "root", "tbf", "rate", rate]
            tool("tc", "-n", namespace, *words, "burst", "256kb", "latency", "20ms")
        return addresses

    def limit(self, host: int, rate: str) -> None:
        """Limit a host's link to `rate` in both directions: out of the host, out of the switch."""
        for namespace, device in ((self.namespaces[host], "eth0"), (self.switch, f"port{host}")):
            words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *sites.BURST]
            tool("tc", "-n", namespace, *words)

    @contextlib.contextmanager
    def rejecting(self, host: int, ports: Iterable[int] = ()) -> Iterator[None]:
        """Meanwhile, a firewall answers all packets of a host, in and out, with resets.

        With `ports`, only those that have one of them at either end.
        """
        chosen = ", ".join(str(port) for port in ports)
        ways = [f"tcp {way} {{ {chosen} }} " if chosen else "" for way in ("sport", "dport")]
        rules = [f"meta l4proto tcp {way}reject with tcp reset" for way in ways]
        chains = [
            f"type filter hook {hook} priority 0\n {name} eth0 tcp flags & rst != 0 accept\n"
            + "\n".join(f"{name} eth0 {rule}" for rule in rules)
            for hook, name in (("input", "iifname"), ("output", "oifname"))
        ]
        self._firewall(host, "reject", chains)
        try:
            yield
        finally:
            self._firewall(host, "reject", [])

    def reject(self, host: int, seconds: float) -> None:
        """Reject for some seconds."""
        with self.rejecting(host):
            time.sleep(seconds)

    def refuse(self, host: int, other: int) -> None:
        """Have `host` refuse all connections to `other`, as its own firewall might.

        The other host sees silence, unless it refuses as well. Packets from `host` to that
        address come to itself, where nobody listens; packets from there are dropped as forged.
        """
        address = f"{self.addresses[other]}/32"
        tool("ip", "-n", self.namespaces[host], "addr", "add", address, "dev", "lo")

    def accept(self, host: int, other: int) -> None:
        """Undo `refuse`."""
        address = f"{self.addresses[other]}/32"
        tool("ip", "-n", self.namespaces[host], "addr", "del", address, "dev", "lo")

    def corrupt(self, host: int, every: int) -> None:
        """Change 4 bytes in every so many-th large packet that leaves a host; 0 ends it.

        The link has no checksum of its own and TCP's is not checked, so the bytes arrive like that.
        """
        rule = f"oifname eth0 meta l4proto tcp meta length > {SEEN_AS_LARGE} "
        rule += f"numgen inc mod {every} 0 @th,8000,32 set 0xdeadbeef"
        chains = [f"type filter hook output priority 0\n{rule}"] if every else []
        self._firewall(host, "corrupt", chains)

    def _firewall(self, host: int, table: str, chains: Sequence[str]) -> None:
        """Replace a table of the host's firewall, at one stroke; no chains: remove it."""
        lines = [f"table inet rc_{table}", f"delete table inet rc_{table}"]  # "reject" is a keyword
        if chains:
            parts = [f"chain chain{i} {{\n{chain}\n}}" for i, chain in enumerate(chains)]
            lines += [f"table inet rc_{table} {{", *parts, "}"]
        self.inside(host, "nft", "-f", "-", text="\n".join([*lines, ""]))

    # ---- what passed ---------------------------------------------------------------------------

    def bytes_sent(self, host: int) -> int:
        """Bytes that have left a host's eth0, headers included."""
        return self._counter(host, "tx")

    def bytes_received(self, host: int) -> int:
        """Bytes that have come to a host's eth0, headers included."""
        return self._counter(host, "rx")

    def packets_sent(self, host: int) -> int:
        """Packets that have left a host's eth0; one may be as large as 64 KiB (offload)."""
        return self._counter(host, "tx", "packets")

    def segments_resent(self, host: int) -> int:
        """Segments that a host's TCP has sent again."""
        names, counts = self.inside(host, "grep", "^Tcp:", "/proc/net/snmp").splitlines()
        return int(dict(zip(names.split(), counts.split(), strict=True))["RetransSegs"])

    def _counter(self, host: int, way: str, what: str = "bytes") -> int:
        words = ["ip", "-n", self.namespaces[host], "-s", "-j", "link", "show", "dev", "eth0"]
        return int(json.loads(tool(*words))[0]["stats64"][way][what])
