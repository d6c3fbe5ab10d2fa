"""How the ranks meet: the store at MASTER_ADDR, what it answers, and what ranks tell through it."""

from __future__ import annotations

import base64
import datetime
import errno
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringcomm._runtime.addresses import family, number
from ringcomm.tools.doctor.endpoints import endpoint

PAUSE = 0.2  # seconds between two tries to connect
PART = 500  # bytes of a message in the store
BATCH = 8  # ranks that are looked for by one message, which stays small
LOOK = 0.05  # seconds between two looks into the store
REQUEST = 5.0  # seconds that the store has for one answer, at least


@dataclass
class Clock:
    """The one clock of a run: every stage ends at so many seconds after its beginning."""

    began: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.began

    def left(self, until: float) -> float:
        return max(0.0, until - self.now())


# A rank's number and the number of ranks, as torchrun, srun and mpirun name them. Only torchrun
# says where the store is.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass
class Place:
    """Where the launcher says this rank is."""

    rank: int
    world: int
    address: str
    port: int
    agent: bool  # the launcher serves the store, not rank 0
    prefix: str

    @staticmethod
    def of(environment: Mapping[str, str]) -> Place | None:
        """Return None where no launcher has set RANK and the others. Raises ValueError."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        said = {name: environment.get(name, "") for name in names}
        for rank_name, world_name in LAUNCHERS:
            if environment.get(rank_name) and environment.get(world_name):
                said |= {"RANK": environment[rank_name], "WORLD_SIZE": environment[world_name]}
                break
        missing = [name for name in names if not said[name]]
        if len(missing) == len(names) or said["WORLD_SIZE"] == "1":
            return None
        if missing:
            raise ValueError(
                f"the launcher did not set {', '.join(missing)}: "
                "start it by torchrun, or set them as torchrun does"
            )
        rank, world, address, port = said.values()
        numbers = rank.isdigit() and world.isdigit() and port.isdigit()
        if not (numbers and int(rank) < int(world) and 0 < int(port) < 1 << 16):
            raise ValueError(f"RANK={rank} WORLD_SIZE={world} MASTER_PORT={port} do not fit")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        turn = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Place(int(rank), int(world), address, int(port), agent, f"ringcomm-doctor/{turn}")


@dataclass
class Reached:
    """The answers of the store's addresses; `answers` is by "10.0.0.1:29500"."""

    name: str = ""
    port: int = 0
    resolved: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    error: str = ""  # about the name, or about something that answered and is no store

    @property
    def loopback(self) -> bool:
        return any(host.startswith("127.") or host == "::1" for host in self.resolved)


def answer_of(code: int) -> str:
    """Return the word for how a connection ended: an errno, 0 where it was made."""
    if code == 0:
        return "connected"
    if code == errno.ECONNREFUSED:
        return "refused"
    if code == errno.ETIMEDOUT:
        return "timed out"
    if code in (errno.EMFILE, errno.ENFILE):
        return "no descriptor"
    return f"unreachable: {os.strerror(code)}"


def resolve(name: str, seconds: float) -> tuple[list[str], str]:
    """Return the addresses of a name, and the error; a name server that is silent is given up."""
    if number(name) is not None:
        return [name], ""
    answers: list[tuple[list[str], str]] = []

    def ask() -> None:
        try:
            told = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.append((list(dict.fromkeys(str(entry[4][0]) for entry in told)), ""))
        except OSError as error:
            answers.append(([], error.strerror or str(error)))

    asking = threading.Thread(target=ask, daemon=True)  # getaddrinfo takes no timeout
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else ([], f"no name server answered within {seconds:.0f} s")


def try_once(address: str, port: int, seconds: float) -> str:
    """Connect and hang up. Returns the answer."""
    try:
        with socket.socket(family(address), socket.SOCK_STREAM) as probe:
            probe.settimeout(seconds)
            return answer_of(probe.connect_ex((address, port)) or 0)
    except OSError as error:
        return answer_of(error.errno or errno.ETIMEDOUT)


def knock(place: Place, clock: Clock, until: float) -> Reached:
    """Try the store's addresses in turn until one connects: its process may start later."""
    reached = Reached(place.address, place.port)
    reached.resolved, reached.error = resolve(place.address, min(3.0, clock.left(until)))
    while reached.resolved and clock.left(until) > 0:
        share = max(0.5, clock.left(until) / len(reached.resolved) / 2)
        for host in reached.resolved:
            answer = try_once(host, place.port, min(share, max(0.1, clock.left(until))))
            if answer == "unreachable: Resource temporarily unavailable":
                answer = "timed out"  # what connect_ex says when its time is over
            reached.answers[endpoint(host, place.port)] = answer
            if answer == "connected":
                return reached
        time.sleep(PAUSE)
    return reached


def open_store(place: Place, clock: Clock, until: float) -> tuple[Any, Reached]:
    """Return torch's store, None where it cannot be had, and what its addresses answered."""
    from torch.distributed import PrefixStore, TCPStore

    limit = datetime.timedelta(seconds=max(REQUEST, clock.left(until)))
    served, reached = None, Reached(place.address, place.port)
    if place.rank == 0 and not place.agent:
        try:
            # By loopback: whether MASTER_ADDR leads here is found out below.
            served = TCPStore(
                "localhost", place.port, None, True, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            reached.error = f"this rank cannot serve the store: {first_sentence(error)}"
            return None, reached
        until = min(until, clock.now() + 3.0)
    reached = knock(place, clock, until)
    if served is not None:
        return PrefixStore(place.prefix, served), reached
    if "connected" not in reached.answers.values():
        return None, reached
    try:
        store = TCPStore(place.address, place.port, None, timeout=limit, wait_for_workers=False)
        return PrefixStore(place.prefix, store), reached
    except RuntimeError as error:
        reached.error = (
            "the program that listens there is silent, or is no store of torch: "
            f"{first_sentence(error)}"
        )
        return None, reached


def first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def pack(what: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(what).encode())).decode()


def unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


class Asked:
    """A store that knows whether it owes an answer."""

    def __init__(self, store: Any) -> None:
        self._store, self.waits = store, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ask = getattr(self._store, name)

        def asked(*args: Any) -> Any:
            self.waits = True  # and stays so where it raises
            answer = ask(*args)
            self.waits = False
            return answer

        return asked


class Table:
    """The words of the ranks for one another, by stage, through the store.

    Every message is small and is answered before the next: where large packets get lost, the ranks
    can still say so.
    """

    def __init__(self, store: Any, place: Place, clock: Clock) -> None:
        self._asks = Asked(store)
        self._store: Any = self._asks
        self._place, self._clock = place, clock

    @property
    def unanswered(self) -> bool:
        """Whether the store has not answered the last request."""
        return self._asks.waits

    def put(self, stage: str, what: Any) -> None:
        """Tell all ranks. Raises RuntimeError when the store has gone."""
        key, text = f"{stage}/{self._place.rank}", pack(what)
        parts = [text[at : at + PART] for at in range(0, len(text), PART)]
        for index, part in enumerate(parts):
            self._store.compare_set(f"{key}/{index}", "", part)
        self._store.compare_set(key, "", str(len(parts)))

    def gather(
        self, stage: str, ranks: Iterable[int], until: float, or_key: str = ""
    ) -> dict[int, Any]:
        """Return what these ranks have told; those that have not by then are missing.

        It ends when all are there, or when `or_key` is.
        """
        waited, told = sorted(ranks), {}
        batches = [waited[at : at + BATCH] for at in range(0, len(waited), BATCH)]
        # By looking again and again: a wait() that ends by its time writes to stderr.
        while batches:
            late = [batch for batch in batches if not self._there(stage, batch)]
            over = self._clock.left(until) == 0 or (or_key and self._store.check([or_key]))
            if over:
                late = [[rank for rank in batch if not self._there(stage, [rank])]
                        for batch in late]  # fmt: skip
            missing = {rank for batch in late for rank in batch}
            done = [rank for batch in batches for rank in batch if rank not in missing]
            told.update({rank: self._read(f"{stage}/{rank}") for rank in done})
            if over:
                break
            batches = late
            # Many ranks look less often, so that the store has time for what they tell.
            time.sleep(LOOK * (1 + self._place.world / 16) if late else 0)
        return told

    def _there(self, stage: str, ranks: list[int]) -> bool:
        return bool(self._store.check([f"{stage}/{rank}" for rank in ranks]))

    def _read(self, key: str) -> Any:
        count = int(self._store.get(key))
        return unpack("".join(self._store.get(f"{key}/{i}").decode() for i in range(count)))

    def agree(self, stage: str, what: Any) -> Any:
        """Return what the first rank that called has said; all get the same."""
        return unpack(self._store.compare_set(stage, "", pack(what)).decode())

    def await_word(self, stage: str, rank: int, until: float) -> Any:
        """Return what one rank has told; None where it has not by then."""
        return self.gather(stage, [rank], until).get(rank)
