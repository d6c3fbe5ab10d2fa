"""The store of a run: who serves it, how it is found, and where it goes when it dies.

Processes that join look for the store at its home: the addresses that users give. When it dies, the
lowest rank serves another one, at home where that is on its host. Members learn its address with a
decision. At home, once somebody serves a store there again, those that join learn it from the
record of the world.

`ringcomm elastic store --port 29500` serves one, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")

TIMEOUT = timedelta(seconds=30)  # for a connection, for a key, and for a host that is silent
ASK_SECONDS = 10.0  # for an answer
PROBE_SECONDS = 1.0  # for a connection
LOOK_SECONDS = 0.1  # between looks for one that serves


def within(call: Callable[[], T], seconds: float = ASK_SECONDS) -> T:
    """Call what asks a store; requests of torch's have no end of their own.

    Raises dist.DistStoreError after so long, and where the store fails.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if errors and not isinstance(errors[0], dist.DistError):
        raise errors[0]
    why = str(errors[0]) if errors else f"no answer in {seconds:.0f} s"
    raise dist.DistStoreError(why) from (errors[0] if errors else None)


class Address(NamedTuple):
    """Where a store is served."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """Read "host:port". Raises ValueError."""
        host, _, port = text.strip().rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(
                f"{text!r} is not a store address: give join() host:port, or set RINGCOMM_ELASTIC"
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Tell whether it is an address of this host."""
        try:
            family, _, _, _, at = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((at[0], 0))
        except OSError:
            return False
        return True

    def answers(self) -> bool:
        """Tell whether a process listens there."""
        try:
            socket.create_connection((self.host, self.port), PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    def way_here(self) -> str:
        """Return this host's own address, on the way to that one. Nothing is sent."""
        try:
            family, kind, _, _, at = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as trial:
                trial.connect(at)
                return str(trial.getsockname()[0])
        except OSError:
            return socket.gethostname()


class Served(NamedTuple):
    """A store that answers, and where."""

    address: Address
    client: Any  # dist.Store


class RunStore:
    """The store of one run, as this process sees it. Any thread may call any function."""

    def __init__(self, run: str, client: Any, home: tuple[Address, ...] = ()) -> None:
        """`home` is empty for a store that the user has made: it cannot move."""
        self.run, self.home = run, home
        self.offer: Served | None = None  # where this rank wants the members to go
        self.address = ""  # where it has moved to; "": it is where it was found
        self._lock = threading.Lock()
        self._keys: Any = self.of_run(client)
        self._connecting: threading.Thread | None = None
        self._error = ""

    def of_run(self, client: Any) -> Any:
        return dist.PrefixStore(f"ringcomm-elastic/{self.run}", client)

    @property
    def ready(self) -> Any | None:
        """The keys of the run, or None while there is no connection to where they are."""
        with self._lock:
            return self._keys

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection, and none is being made."""
        connecting = self._connecting is not None and self._connecting.is_alive()
        return self.ready is None and not connecting

    @property
    def keys(self) -> Any:
        """The keys of the run. Waits for a connection. Raises dist.DistStoreError."""
        if (connecting := self._connecting) is not None:
            connecting.join(ASK_SECONDS)
        if (keys := self.ready) is None:
            raise dist.DistStoreError(self._error)
        return keys

    def lose(self, error: Exception) -> None:
        """Use this connection no more: it has failed, and torch logs pages at each further use."""
        with self._lock:
            self._keys, self._error = None, str(error)

    @property
    def error(self) -> str:
        """Why there is no connection."""
        return self._error

    def move(self, text: str) -> None:
        """Use the store at `text`, "host:port", from now on."""
        address, offer = Address.of(text), self.offer
        self.offer, self.address = None, "" if address in self.home else text
        if offer is not None and offer.address == address:
            with self._lock:
                self._keys, self._connecting = self.of_run(offer.client), None
            return
        # A new client may wait long for the names of addresses, and for nothing else.
        connecting = threading.Thread(target=self._connect, args=(address,))
        with self._lock:
            self._keys, self._connecting = None, connecting
            self._error = f"the store has moved to {address}, and does not answer"
        connecting.start()

    def move_back(self, keys: Any, address: str) -> None:
        """Use the keys again that were `ready` before a move, and `address`: that store is lost."""
        with self._lock:
            self._keys, self._connecting, self.address = keys, None, address

    def _connect(self, address: Address) -> None:
        keys, error = None, self._error
        try:
            keys = self.of_run(client(address))
        except RuntimeError as why:
            error += f": {why}"
        with self._lock:
            if self._connecting is threading.current_thread():  # else it has moved again
                self._keys, self._error = keys, error

    def look_at_home(self) -> Served | None:
        """Connect to a store that is served at home, if one is."""
        for address in self.home:
            if address.answers():
                return Served(address, client(address))
        return None

    def serve(self) -> Served | None:
        """Serve the store from this process: at home if that is here, else at another address."""
        for address in self.home:
            if address.is_here() and (served := serve(address.host, address.port)):
                return Served(address, served)
        host = self.home[0].way_here()
        for port in (self.home[0].port, 0):
            if served := serve(host, port):
                return Served(Address(host, served.port), served)
        return None


def open_store(run: str, given: str | Any | None) -> RunStore:
    """Return the store of `run` at "host:port", or in the store that is given.

    Several addresses, with commas between them, are places where it may be served. None: that of
    RINGCOMM_ELASTIC, else of MASTER_ADDR and MASTER_PORT. Where it is not served, and the first
    address is of this host, this process does; under a launcher that gives ranks, rank 0 does.
    Raises ValueError for an address that is none, RuntimeError where none answers.
    """
    if given is not None and not isinstance(given, str):
        return RunStore(run, given)
    named = given or os.environ.get("RINGCOMM_ELASTIC")
    home = tuple(map(Address.of, (named or _of_launcher()).split(",")))
    by_agent = not named and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = not by_agent and os.environ.get("RANK", "0") == "0"
    return RunStore(run, _first_client(home, serves), home)


def _of_launcher() -> str:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"{host}:{port}"


def _first_client(home: tuple[Address, ...], serves: bool) -> Any:
    others = [address for address in home[1:] if address.answers()]
    if others and not home[0].answers():
        return client(others[0])
    if serves and home[0].is_here() and (served := serve(*home[0])):
        return served
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while len(home) > 1 and time.monotonic() < deadline:
        for address in home:
            if address.answers():
                return client(address)
        time.sleep(LOOK_SECONDS)
    return client(home[0])


def client(address: Address) -> Any:
    """Connect to a store. Raises RuntimeError where none is served for so long."""
    connected = dist.TCPStore(address.host, address.port, is_master=False, timeout=TIMEOUT)
    end_when_silent(address)
    return connected


def end_when_silent(address: Address) -> None:
    """Have requests fail that the host at `address` does not acknowledge for TIMEOUT.

    Those of a group that is being made are not `within` anything. Connections that are not in use
    are left alone. torch keeps its sockets to itself; the kernel lists them.
    """
    with contextlib.suppress(OSError):  # also where there is no /proc
        answers = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        peers = {info[4][:2] for info in answers}
        for file in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                _limit_silence(os.dup(int(file.name)), peers)


def _limit_silence(file: int, peers: set[Any]) -> None:
    """Do that where the descriptor, which is closed here, is a connection to one of them."""
    try:
        connection = socket.socket(fileno=file)
    except OSError:
        os.close(file)
        raise
    with connection:
        if (
            connection.family in (socket.AF_INET, socket.AF_INET6)
            and connection.type == socket.SOCK_STREAM
        ):
            host, port = connection.getpeername()[:2]
            if (host.removeprefix("::ffff:"), port) in peers:
                wait = int(TIMEOUT.total_seconds() * 1e3)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, wait)


def serve(host: str, port: int) -> Any:
    """Serve a store there; None where another process does."""
    try:
        return dist.TCPStore(host, port, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    except RuntimeError:
        return None
