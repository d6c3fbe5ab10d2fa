"""One rank's way through the examination, stage by stage, with a deadline for each.

meet      the store, and who is there
connect   every address of every peer, in both directions
measure   every pair
gather    all that was found, at the leader: the lowest rank that is there
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringcomm._runtime import addresses
from ringcomm.options import secret_in
from ringcomm.tools.doctor import endpoints, facts, measure, probe
from ringcomm.tools.doctor.facts import Facts
from ringcomm.tools.doctor.measure import Asker, Pair
from ringcomm.tools.doctor.meeting import Clock, Place, Reached, Table, open_store, resolve
from ringcomm.tools.doctor.probe import NO_ADDRESS, Acceptor, Attempt, Keys, Link, Window

# Seconds: the roll is called at ROLL of every clock, or earlier when all ranks are there.
STORE, ROLL, CONNECT, VERDICTS, MEASURE, GATHER, END = 9.0, 11.0, 15.5, 17.0, 20.5, 22.0, 24.0
PARTING = 3.0  # seconds after that, for words that wait in the store
SYN_SECONDS = 4.2  # a lost SYN comes again after 1 and 3 s
BURST_SECONDS = 0.02


@dataclass
class Findings:
    """What one run found: the rules of findings.py read it.

    `links` and `pairs` are by (from, to) and by the two ranks; `closed` says what a port answered
    on which nobody listens, by (from, address).
    """

    world: int
    leader: int
    ranks: dict[int, Facts]
    reached: Reached = field(default_factory=Reached)
    own_store: bool = False  # rank 0 serves it
    met: bool = False  # this rank has the store
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    closed: dict[tuple[int, str], str] = field(default_factory=dict)
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # came, and fell silent: in which stage
    alone: bool = False  # no launcher
    excluded: bool = False  # this rank came after the roll
    seconds: float = 0.0  # that the examination took
    broken: str = ""  # why the examination ended early
    silent: bool = False  # it ended because the store did not answer any more
    called: bool = False  # it is known who came


class Examination:
    """What this rank does; `found` holds what is known so far, whatever breaks later."""

    def __init__(
        self, place: Place | None, environment: Mapping[str, str], wait: float = ROLL
    ) -> None:
        self.place, self.environment = place, environment
        self.clock = Clock(time.monotonic() + wait - ROLL)
        rank = place.rank if place else 0
        self.facts = Facts(rank=rank)
        world = place.world if place else 1
        self.found = Findings(world, rank, {rank: self.facts}, alone=place is None)
        self.listeners: list[socket.socket] = []
        self.window: Window | None = None
        self.table: Table | None = None
        self.store: Any = None
        self.stuck = False  # its thread did not end
        self.opening = False  # the store

    def run(self) -> None:
        """Find out what can be found out. Raises RuntimeError when the store goes meanwhile."""
        self.facts = facts.collect(self.facts.rank, self.environment)
        self.found.ranks = {self.facts.rank: self.facts}
        self.listen()
        if self.place is None:
            return
        self.found.reached = Reached(self.place.address, self.place.port)  # if it gets no further
        self.opening = True
        self.store, self.found.reached = open_store(self.place, self.clock, STORE)
        self.opening = False
        self.found.own_store = not self.place.agent
        if self.store is None:
            return
        self.found.met = True
        self.table = Table(self.store, self.place, self.clock)
        keys = self.call_roll()
        if self.found.excluded:
            return
        acceptor = Acceptor(self.facts.rank, keys, self.listeners)
        acceptor.start()
        sockets = self.connect(keys)
        self.exchange_verdicts()
        self.measure(acceptor, sockets)
        self.gather()

    # ---- listening

    def listen(self) -> None:
        """Listen as ringcomm does: on the chosen addresses, and for peers of this host."""
        try:
            there = addresses.list_interfaces()
            self.facts.interfaces = [one.as_dict() for one in there]
            routed = None
            if self.place:
                routed = addresses.source_towards(resolve(self.place.address, 3.0)[0])
            wanted = self.environment.get("RINGCOMM_IFNAME", "")
            ports = addresses.parse_ports(self.environment.get("RINGCOMM_PORTS", ""))
            for address in addresses.choose(there, wanted, routed):
                try:
                    listener = endpoints.listen(address, ports)
                except OSError as error:  # one of several that cannot be had is no loss
                    self.facts.listen_error = error.strerror or str(error)
                    continue
                self.listeners.append(listener)
                name = listener.getsockname()
                self.facts.addresses.append(endpoints.endpoint(address, name[1]))
        except (OSError, ValueError) as error:
            self.facts.listen_error = str(getattr(error, "strerror", None) or error)
        try:
            unix = probe.listen_unix()
            self.listeners.append(unix)
            self.facts.socket = unix.getsockname()[1:].hex()
            self.window = Window()
        except OSError as error:
            self.facts.memfd_error = self.facts.memfd_error or (error.strerror or str(error))

    # ---- meeting

    def call_roll(self) -> Keys:
        """Learn who is there; the first rank that has waited long enough says so for all."""
        assert self.place
        assert self.table
        self.table.put("facts", self.facts.as_dict())
        told = self.table.gather("facts", range(self.place.world), ROLL, or_key="roll")
        roll = {"ranks": sorted(told), "token": secrets.token_hex(16)}
        agreed = self.table.agree("roll", roll)
        # The roll is the one moment that all ranks see: from here on their clocks are equal.
        self.clock.began = time.monotonic() - ROLL
        self.found.excluded = self.facts.rank not in agreed["ranks"]
        told.update(self.table.gather("facts", set(agreed["ranks"]) - set(told), ROLL))
        self.found.ranks = {rank: Facts.of(told[rank]) for rank in agreed["ranks"] if rank in told}
        self.found.ranks[self.facts.rank] = self.facts
        self.found.leader = min(agreed["ranks"])
        self.found.called = True
        return Keys(agreed["token"], own_secret(self.environment))

    # ---- connecting

    def connect(self, keys: Keys) -> dict[int, socket.socket]:
        """Connect to all peers. Returns the sockets of those that answered."""
        rank = self.facts.rank
        attempts: list[Attempt] = []
        asked: dict[str, Attempt] = {}
        links = {peer: Link() for peer in self.found.ranks if peer != rank}
        sockets: dict[int, socket.socket] = {}
        for peer, link in links.items():
            theirs = self.found.ranks[peer]
            if shares_memory(self.facts, theirs) == "" and rank < peer and self.window:
                found, why = probe.share_memory(keys, rank, peer, theirs.socket, self.window)
                link.memory = why or "shared"
                if found is not None:
                    sockets[peer] = found
                    continue
            if shares_memory(self.facts, theirs) == "" and rank > peer:
                continue
            for index, address in enumerate(theirs.addresses):
                attempts.append(Attempt(peer, index, address))
                host, _ = endpoints.split(address)
                asked.setdefault(host, Attempt(-1, 0, endpoints.endpoint(host, probe.CLOSED_PORT)))
        seconds = min(SYN_SECONDS, self.clock.left(CONNECT))
        probe.Connector(rank, keys).run([*asked.values(), *attempts], seconds)
        for one in attempts:
            links[one.peer].answers[one.address] = one.answer
            if one.socket is not None and one.peer not in sockets:
                sockets[one.peer], links[one.peer].chosen = one.socket, one.index
        self.found.links = {(rank, peer): link for peer, link in links.items()}
        self.found.closed = {(rank, host): one.answer for host, one in asked.items()}
        return sockets

    def exchange_verdicts(self) -> None:
        """Tell all ranks which connections this one has, and learn theirs."""
        assert self.table
        rank = self.facts.rank
        mine = {
            "links": {peer: asdict(link) for (_, peer), link in self.found.links.items()},
            "closed": {host: answer for (_, host), answer in self.found.closed.items()},
        }
        self.table.put("links", mine)
        others = [peer for peer in self.found.ranks if peer != rank]
        told = self.table.gather("links", others, VERDICTS)
        for peer, theirs in told.items():
            for to, link in theirs["links"].items():
                self.found.links[peer, int(to)] = Link(**facts.known(Link, link))
            for host, answer in theirs["closed"].items():
                self.found.closed[peer, host] = answer
        for peer in others:
            if peer not in told:
                self.found.lost[peer] = "connecting"

    # ---- measuring

    def measure(self, acceptor: Acceptor, sockets: dict[int, socket.socket]) -> None:
        rank = self.facts.rank
        table = measure.rounds(sorted(self.found.ranks))
        burst = min(BURST_SECONDS, self.clock.left(MEASURE) / max(1, len(table)) / 5)
        for each in table:
            for one, other in each:
                if rank in (one, other) and self.clock.left(MEASURE) > 0:
                    self.measure_pair(one, other, acceptor, sockets, burst)

    def measure_pair(
        self,
        one: int,
        other: int,
        acceptor: Acceptor,
        sockets: dict[int, socket.socket],
        burst: float,
    ) -> None:
        """Ask or answer, as who has the connection."""
        asks, answers = asker(self.found.links, min(one, other), max(one, other))
        if asks < 0:
            return
        link, end = self.found.links[asks, answers], time.monotonic() + self.clock.left(MEASURE)
        if self.facts.rank == asks:
            memory = self.window.map if self.window and link.memory == "shared" else None
            pair = Pair((asks, answers))
            Asker(sockets[answers], pair, memory).run(end, burst)
            sockets[answers].close()
            self.found.pairs[asks, answers] = pair
            return
        lane = acceptor.taken.get((asks, NO_ADDRESS if link.memory == "shared" else link.chosen))
        if lane is None:
            return
        try:
            memory = None
            if link.memory == "shared":
                memory = probe.map_window(acceptor.windows.pop(asks))
            measure.serve(lane, memory, min(end, time.monotonic() + 2 * measure.PARTNER))
        except (OSError, KeyError):
            pass  # the side that asks tells what it met
        lane.close()

    # ---- the end

    def gather(self) -> None:
        """Bring what every rank measured to the leader."""
        assert self.table
        rank = self.facts.rank
        self.table.put("pairs", [pair.as_dict() for pair in self.found.pairs.values()])
        if rank != self.found.leader:
            return
        others = [peer for peer in self.found.ranks if peer != rank]
        told = self.table.gather("pairs", others, GATHER)
        for pairs in told.values():
            for each in map(Pair.of, pairs):
                if set(each.ranks) <= set(self.found.ranks):
                    self.found.pairs[each.ranks] = each
        for peer in others:
            if peer not in told:
                self.found.lost.setdefault(peer, "measuring")

    def part(self, status: int) -> int:
        """Wait until the leader has reported; the rank that serves the store leaves last.

        Returns the leader's exit status. Calls of a store whose host is gone may never return, so
        they are in a thread, and this ends in time.
        """
        ends = [status]
        leaving = threading.Thread(target=lambda: ends.append(self._part(status)), daemon=True)
        leaving.start()
        leaving.join(max(END - self.clock.now(), 0) + PARTING)
        self.stuck = self.stuck or leaving.is_alive()
        return ends[-1]

    def _part(self, status: int) -> int:
        if self.table is None or self.found.excluded:
            return status
        others = [peer for peer in self.found.ranks if peer != self.facts.rank]
        with contextlib.suppress(RuntimeError):  # the store has gone: the report has said so
            if self.facts.rank == self.found.leader:
                self.table.put("status", status)
            else:
                told = self.table.await_word("status", self.found.leader, END)
                status = status if told is None else int(told)
            if self.facts.rank == 0 and self.found.own_store:
                self.table.gather("bye", others, END)
            else:
                self.table.put("bye", True)
        return status


def own_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret as the library has it, and random bytes where it would refuse it."""
    path = environment.get("RINGCOMM_SECRET_FILE")
    if not path:
        return environment.get("RINGCOMM_SECRET", "").encode()
    try:
        return secret_in(Path(path), path).encode()
    except ValueError:
        return os.urandom(16)  # such a rank joins no group: facts.secret_error


def shares_memory(one: Facts, other: Facts) -> str:
    """Return why two ranks do not share memory by what they tell; "" where they should."""
    if one.tcp or other.tcp:
        return "RINGCOMM_TRANSPORT=tcp"
    if one.machine != other.machine:
        for each in (one, other):
            if facts.UNKNOWN in (each.boot_id, each.network):
                return f"rank {each.rank} cannot read its boot id or network namespace"
        if one.boot_id == other.boot_id:
            return "two network namespaces of one machine"
        return "two hosts"
    if one.user != other.user:
        return f"users {one.user} and {other.user}"
    return ""


def asker(links: dict[tuple[int, int], Link], low: int, high: int) -> tuple[int, int]:
    """Return which rank of a pair has the connection to measure, and its peer; -1: neither."""
    forth, back = links.get((low, high)), links.get((high, low))
    if forth and (forth.memory == "shared" or forth.reaches):
        return low, high
    if back and back.reaches:
        return high, low
    return -1, -1


def examine(place: Place | None, environment: Mapping[str, str], wait: float) -> Examination:
    """Examine in a thread, and return in time even where it hangs.

    The other ranks are waited for `wait` seconds.
    """
    examination = Examination(place, environment, wait)

    def work() -> None:
        try:
            examination.run()
        except Exception as error:  # noqa: BLE001  the report says what broke, and the rest
            examination.found.broken = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=work, daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive() and examination.clock.now() < END + 1:
        thread.join(0.1)
    examination.found.seconds = time.monotonic() - began
    table = examination.table
    owes = examination.opening or (table is not None and table.unanswered)
    examination.found.silent = owes and (thread.is_alive() or bool(examination.found.broken))
    if thread.is_alive():
        examination.found.broken = "it did not end in time"
        examination.stuck = True
        examination.table = None  # the thread may be using it
    return examination
