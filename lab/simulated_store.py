"""Stores of simulated processes: one at home, and those that ranks serve when they lack it.

Each request takes a while, and others run meanwhile. Hosts may be cut off from home.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist

from lab.simulated_time import Owner, Time
from ringcomm.elastic.store import Address, RunStore, Served

T = TypeVar("T")

HOME = Address("home", 1)
SLOW, SLOWEST = 0.02, 0.3  # seconds that a request takes: some, and a few
HURRIED, PATIENT = 2.0, 30.0  # until a request fails that is not answered


def text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@dataclass
class Network:
    """The stores by their addresses, and the hosts that do not reach the one at home."""

    time: Time
    cut: set[str] = field(default_factory=set)
    stores: dict[Address, tuple[Owner | None, dict[str, bytes]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stores[HOME] = None, {}

    def reaches(self, address: Address) -> bool:
        server, _ = self.stores.get(address, (None, {}))
        if address == HOME:
            return self.time.owner.more.host not in self.cut
        return server is not None and server.alive

    def within(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        """Stand in for store.within: requests fail soon."""
        task = self.time.current
        task.hurried = True
        try:
            return call()
        finally:
            task.hurried = False


class Keys:
    """A client of one of them. It cannot be cloned, so nobody waits in the store."""

    def __init__(self, network: Network, address: Address, prefix: str = "") -> None:
        self.network, self.address, self.prefix = network, address, prefix

    def _act(self) -> dict[str, bytes]:
        time = self.network.time
        time.check()
        if (chance := time.random.random()) > 0.7:
            time.sleep(time.random.uniform(0, SLOWEST if chance > 0.99 else SLOW))
        began = time.now
        while not self.network.reaches(self.address):
            if time.now - began > (HURRIED if time.current.hurried else PATIENT):
                raise dist.DistStoreError("the store does not answer")
            time.sleep(0.5)
        return self.network.stores[self.address][1]

    def set(self, key: str, value: Any) -> None:
        self._act()[self.prefix + key] = text(value)

    def get(self, key: str) -> bytes:
        return self._act()[self.prefix + key]

    def check(self, keys: list[str]) -> bool:
        data = self._act()
        return all(self.prefix + key in data for key in keys)

    def add(self, key: str, value: int) -> int:
        data = self._act()
        total = int(data.get(self.prefix + key, b"0")) + value
        data[self.prefix + key] = text(total)
        return total

    def delete_key(self, key: str) -> bool:
        return self._act().pop(self.prefix + key, None) is not None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        data, key = self._act(), self.prefix + key
        if data.get(key, b"") == text(expected):
            data[key] = text(desired)
        return data.get(key, text(expected))


def prefixed(prefix: str, keys: Any) -> Any:
    """Stand in for dist.PrefixStore."""
    if not isinstance(keys, Keys):  # a HashStore, for a group that needs no store
        return SimpleNamespace(prefix=f"{prefix}/")
    return Keys(keys.network, keys.address, f"{keys.prefix}{prefix}/")


class SimulatedStore(RunStore):
    """The store of a run, as a simulated process sees it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        super().__init__("run", Keys(network, HOME), (HOME,))

    def of_run(self, client: Any) -> Any:
        return client

    def _connect(self, address: Address) -> None:
        lost = address != HOME and not self._network.reaches(address)
        with self._lock:
            self._keys, self._connecting = None if lost else Keys(self._network, address), None

    def look_at_home(self) -> Served | None:
        self._network.time.check()
        return Served(HOME, Keys(self._network, HOME)) if self._network.reaches(HOME) else None

    def serve(self) -> Served | None:
        owner = self._network.time.owner
        address = Address(owner.more.host, owner.more.pid)
        self._network.stores.setdefault(address, (owner, {}))
        return Served(address, Keys(self._network, address))
