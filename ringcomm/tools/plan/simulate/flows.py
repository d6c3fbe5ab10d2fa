"""Transfers that share links: each has its max-min fair share of its route at any moment.

Shares are as large as they can be without making a smaller one smaller: Bertsekas and Gallager,
"Data Networks", 1992, 6.5.2. That is what many TCP connections on one link come to, and it has no
packets to count. A transfer is cut through, not stored in each node: its bytes are on all links
of its route at once. Storing whole messages in each node would make a second link cost as much as
the first, which no network of packets does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ringcomm.tools.plan.simulate.topology import Link


@dataclass(eq=False)
class Transfer:
    """Bytes on their way over a route; `since` is the time at which `left` were left."""

    number: int
    route: tuple[int, ...]
    left: float
    since: float
    rate: float = 0.0
    version: int = 0  # counts its rates: an end computed for an earlier rate is void


@dataclass
class Flows:
    """All transfers under way."""

    links: Sequence[Link]
    on: list[dict[int, Transfer]] = field(init=False)  # by link, in the order of their numbers

    def __post_init__(self) -> None:
        self.on = [{} for _ in self.links]

    def add(self, transfer: Transfer) -> None:
        for link in transfer.route:
            self.on[link][transfer.number] = transfer

    def remove(self, transfer: Transfer) -> None:
        for link in transfer.route:
            del self.on[link][transfer.number]

    def share(self, changed: set[int], now: float) -> list[tuple[float, Transfer]]:
        """Give those their share that a change of these links can reach; others keep theirs.

        Returns the transfers whose rate is new, and when each ends if nothing changes.
        """
        some, links = self.reached(changed)
        rates = self.rates(some, links)
        renewed = []
        for transfer in sorted(some.values(), key=lambda transfer: transfer.number):
            rate = rates[transfer.number]
            if rate != transfer.rate:
                transfer.left -= (now - transfer.since) * transfer.rate
                transfer.since, transfer.rate = now, rate
                transfer.version += 1
                renewed.append((now + max(0.0, transfer.left) / rate, transfer))
        return renewed

    def reached(self, changed: set[int]) -> tuple[dict[int, Transfer], set[int]]:
        """Return the transfers that share a link, directly or through others, and their links."""
        some: dict[int, Transfer] = {}
        links, waiting = set(changed), list(changed)
        while waiting:
            for number, transfer in self.on[waiting.pop()].items():
                if number not in some:
                    some[number] = transfer
                    fresh = [link for link in transfer.route if link not in links]
                    links.update(fresh)
                    waiting += fresh
        return some, links

    def rates(self, some: dict[int, Transfer], links: set[int]) -> dict[int, float]:
        """Fill the links up together: the first to be full fixes the share of its transfers."""
        room = {link: self.links[link].rate for link in links if self.on[link]}
        count = {link: len(self.on[link]) for link in room}
        shares: dict[int, float] = {}
        while len(shares) < len(some):
            full = min(count, key=lambda link: (room[link] / count[link], link))
            share = room[full] / count[full]
            for number, transfer in self.on[full].items():
                if number in shares:
                    continue
                shares[number] = share
                for link in transfer.route:
                    room[link] = max(0.0, room[link] - share)
                    count[link] -= 1
                    if count[link] == 0:
                        del count[link]
        return shares
