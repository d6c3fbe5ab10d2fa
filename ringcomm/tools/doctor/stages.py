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
from dataclasses import asdict
from typing import Any

from ringcomm._runtime import addresses
from ringcomm.options import secret_of
from ringcomm.tools import load
from ringcomm.tools.doctor import endpoints, facts, measure, probe
from ringcomm.tools.doctor.evidence import Evidence, asker, machines, shares_memory
from ringcomm.tools.doctor.facts import Facts
from ringcomm.tools.doctor.measure import Asker, Pair
from ringcomm.tools.doctor.meeting import Clock, Place, Reached, Table, open_store, resolve
from ringcomm.tools.doctor.probe import NO_ADDRESS, Acceptor, Attempt, Keys, Reachability, Window
from ringcomm.tools.doctor.timetable import (
    CONNECT,
    END,
    GATHER,
    MEASURE,
    PARTING,
    ROLL,
    STORE,
    VERDICTS,
)
from ringcomm.tools.doctor.turns import turns
from ringcomm.tools.load import Span
from ringcomm.tools.progress import Lines

SYN_SECONDS = 4.2  # a lost SYN comes again after 1 and 3 s
BURST_SECONDS = 0.02
BURSTS_A_PAIR = 12  # that would last as long, all in all
WATCHED = 0.5  # seconds, at least, in which other processes are watched


class Examination:
    """The work of this rank; `evidence` holds what is known so far, whatever breaks later."""

    def __init__(
        self,
        place: Place | None,
        environment: Mapping[str, str],
        wait: float = ROLL,
        lines: Lines | None = None,
    ) -> None:
        self.place, self.environment = place, environment
        self.lines = lines or Lines()
        self.clock = Clock(time.monotonic() + wait - ROLL)
        rank = place.rank if place else 0
        self.facts = Facts(rank=rank)
        world = place.world if place else 1
        self.evidence = Evidence(world, rank, {rank: self.facts}, alone=place is None)
        self.listeners: list[socket.socket] = []
        self.window: Window | None = None
        self.table: Table | None = None
        self.store: Any = None
        self.stuck = False  # its thread did not end
        self.opening = False  # the store

    def run(self) -> None:
        """Find out what can be found out. Raises RuntimeError when the store goes meanwhile."""
        self.facts = facts.collect(self.facts.rank, self.environment)
        self.evidence.ranks = {self.facts.rank: self.facts}
        self.listen()
        if self.place is None:
            return
        self.evidence.reached = Reached(
            self.place.address, self.place.port
        )  # if it gets no further
        self.opening = True
        self.lines.step("looking for the store")
        self.store, self.evidence.reached = open_store(self.place, self.clock, STORE)
        self.opening = False
        self.evidence.own_store = not self.place.agent
        if self.store is None:
            return
        self.evidence.met = True
        self.table = Table(self.store, self.place, self.clock)
        self.lines.step(f"waiting for {self.place.world} ranks", advance=1)
        keys = self.call_roll()
        if self.evidence.excluded:
            return
        acceptor = Acceptor(self.facts.rank, keys, self.listeners)
        acceptor.start()
        self.lines.step("connecting every pair", advance=1)
        sockets = self.connect(keys)
        self.exchange_verdicts()
        self.lines.step("measuring every pair", advance=1)
        self.measure(acceptor, sockets)
        self.lines.step("gathering what was found", advance=1)
        self.gather()

    # ---- listening

    def listen(self) -> None:
        """Listen as ringcomm does: on the chosen addresses, and for peers of this host."""
        try:
            there = addresses.list_interfaces()
            self.facts.interfaces = [interface.as_dict() for interface in there]
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
        self.evidence.excluded = self.facts.rank not in agreed["ranks"]
        told.update(self.table.gather("facts", set(agreed["ranks"]) - set(told), ROLL))
        self.evidence.ranks = {
            rank: Facts.of(told[rank]) for rank in agreed["ranks"] if rank in told
        }
        self.evidence.ranks[self.facts.rank] = self.facts
        self.evidence.leader = min(agreed["ranks"])
        self.evidence.called = True
        return Keys(agreed["token"], own_secret(self.environment))

    # ---- connecting

    def connect(self, keys: Keys) -> dict[int, socket.socket]:
        """Connect to all peers. Returns the sockets of those that answered."""
        rank = self.facts.rank
        attempts: list[Attempt] = []
        asked: dict[str, Attempt] = {}
        links = {peer: Reachability() for peer in self.evidence.ranks if peer != rank}
        sockets: dict[int, socket.socket] = {}
        for peer, link in links.items():
            theirs = self.evidence.ranks[peer]
            if shares_memory(self.facts, theirs) == "" and rank < peer and self.window:
                connection, why = probe.share_memory(keys, rank, peer, theirs.socket, self.window)
                link.memory = why or "shared"
                if connection is not None:
                    sockets[peer] = connection
                    continue
            if shares_memory(self.facts, theirs) == "" and rank > peer:
                continue
            for index, address in enumerate(theirs.addresses):
                attempts.append(Attempt(peer, index, address))
                host, _ = endpoints.split(address)
                asked.setdefault(host, Attempt(-1, 0, endpoints.endpoint(host, probe.CLOSED_PORT)))
        seconds = min(SYN_SECONDS, self.clock.left(CONNECT))
        probe.Connector(rank, keys).run([*asked.values(), *attempts], seconds)
        for attempt in attempts:
            links[attempt.peer].answers[attempt.address] = attempt.answer
            if attempt.socket is not None and attempt.peer not in sockets:
                sockets[attempt.peer], links[attempt.peer].chosen = attempt.socket, attempt.index
        self.evidence.links = {(rank, peer): link for peer, link in links.items()}
        self.evidence.closed = {(rank, host): attempt.answer for host, attempt in asked.items()}
        return sockets

    def exchange_verdicts(self) -> None:
        """Tell all ranks which connections this one has, and learn theirs."""
        assert self.table
        rank = self.facts.rank
        mine = {
            "links": {peer: asdict(link) for (_, peer), link in self.evidence.links.items()},
            "closed": {host: answer for (_, host), answer in self.evidence.closed.items()},
        }
        self.table.put("links", mine)
        others = [peer for peer in self.evidence.ranks if peer != rank]
        told = self.table.gather("links", others, VERDICTS)
        for peer, theirs in told.items():
            for to, link in theirs["links"].items():
                self.evidence.links[peer, int(to)] = Reachability(**facts.known(Reachability, link))
            for host, answer in theirs["closed"].items():
                self.evidence.closed[peer, host] = answer
        for peer in others:
            if peer not in told:
                self.evidence.lost[peer] = "connecting"

    # ---- measuring

    def measure(self, acceptor: Acceptor, sockets: dict[int, socket.socket]) -> None:
        before = load.count([os.getpid()])
        order, count = turns([*machines(self.evidence).values()])
        burst = min(BURST_SECONDS, self.clock.left(MEASURE) / max(1, count) / BURSTS_A_PAIR)
        for first, other in order:
            if self.facts.rank in (first, other) and self.clock.left(MEASURE) > 0:
                self.measure_pair(first, other, acceptor, sockets, burst)
        time.sleep(max(0.0, before.when + min(WATCHED, self.clock.left(GATHER)) - time.monotonic()))
        span = load.between(before, load.count([os.getpid()]))
        self.evidence.spans[self.facts.rank] = span

    def measure_pair(
        self,
        first: int,
        other: int,
        acceptor: Acceptor,
        sockets: dict[int, socket.socket],
        burst: float,
    ) -> None:
        """Ask or answer, as who has the connection."""
        asks, answers = asker(self.evidence.links, first, other)
        if asks < 0:
            return
        link, end = self.evidence.links[asks, answers], time.monotonic() + self.clock.left(MEASURE)
        if self.facts.rank == asks:
            memory = self.window.map if self.window and link.memory == "shared" else None
            pair = Pair((asks, answers))
            if Asker(sockets[answers], pair, memory).run(end, burst):
                self.evidence.pairs[asks, answers] = pair
            sockets[answers].close()
            return
        lane = acceptor.taken.get((asks, NO_ADDRESS if link.memory == "shared" else link.chosen))
        if lane is None:
            return
        try:
            memory = None
            if link.memory == "shared":
                memory = probe.map_window(acceptor.windows.pop(asks))
            measure.serve(lane, memory, end)
        except (OSError, KeyError):
            pass  # the side that asks tells what it met
        lane.close()

    # ---- the end

    def gather(self) -> None:
        """Bring what every rank measured to the leader."""
        assert self.table
        rank = self.facts.rank
        self.table.put("pairs", [pair.as_dict() for pair in self.evidence.pairs.values()])
        self.table.put("spans", asdict(self.evidence.spans[rank]))
        if rank != self.evidence.leader:
            return
        others = [peer for peer in self.evidence.ranks if peer != rank]
        told = self.table.gather("pairs", others, GATHER)
        for pairs in told.values():
            for pair in map(Pair.of, pairs):
                if set(pair.ranks) <= set(self.evidence.ranks):
                    self.evidence.pairs[pair.ranks] = pair
        for peer in others:
            if peer not in told:
                self.evidence.lost.setdefault(peer, "measuring")
        for peer, span in self.table.gather("spans", told, GATHER).items():
            self.evidence.spans[peer] = Span(**facts.known(Span, span))

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
        if self.table is None or self.evidence.excluded:
            return status
        others = [peer for peer in self.evidence.ranks if peer != self.facts.rank]
        with contextlib.suppress(RuntimeError):  # the store has gone: the report has said so
            if self.facts.rank == self.evidence.leader:
                self.table.put("status", status)
            else:
                told = self.table.await_word("status", self.evidence.leader, END)
                status = status if told is None else int(told)
            if self.facts.rank == 0 and self.evidence.own_store:
                self.table.gather("bye", others, END)
            else:
                self.table.put("bye", True)
        return status


def own_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret as the library has it, and random bytes where it would refuse it."""
    try:
        return secret_of(environment).encode()
    except ValueError:
        return os.urandom(16)  # such a rank joins no group: facts.secret_error


def examine(
    place: Place | None, environment: Mapping[str, str], wait: float, lines: Lines
) -> Examination:
    """Examine in a thread, and return in time even where it hangs.

    The other ranks are waited for `wait` seconds.
    """
    examination = Examination(place, environment, wait, lines)

    def work() -> None:
        try:
            examination.run()
        except Exception as error:  # noqa: BLE001  the report says what broke, and the rest
            examination.evidence.broken = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=work, daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive() and examination.clock.now() < END + 1:
        thread.join(0.1)
    examination.evidence.seconds = time.monotonic() - began
    table = examination.table
    owes = examination.opening or (table is not None and table.unanswered)
    examination.evidence.silent = owes and (thread.is_alive() or bool(examination.evidence.broken))
    if thread.is_alive():
        examination.evidence.broken = "it did not end in time"
        examination.stuck = True
        examination.table = None  # the thread may be using it
    return examination
