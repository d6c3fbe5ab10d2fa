"""Evidence that a doctor could have found, made up: for the tests of its rules and of its page."""

from __future__ import annotations

from ringcomm.tools.doctor.evidence import Evidence
from ringcomm.tools.doctor.facts import Facts
from ringcomm.tools.doctor.measure import Pair
from ringcomm.tools.doctor.meeting import Reached
from ringcomm.tools.doctor.probe import CONNECTED, Reachability

STORE = "10.0.0.1:29500"


def facts(rank: int, host: int) -> Facts:
    address = f"10.0.0.{host + 1}"
    eth0 = {"name": "eth0", "address": address, "up": True, "loopback": False, "mtu": 1500}
    return Facts(
        rank=rank,
        host=f"host{host}",
        boot_id=f"boot{host}",
        network="4:1",
        build="fc2a07301553",
        torch="2.13.0",
        python="3.11.7",
        cores=64,
        descriptors_limit=65536,
        descriptors_open=10,
        memory_available=64 << 30,
        interfaces=[eth0],
        addresses=[f"{address}:{40000 + rank}"],
    )


def healthy(ranks: int = 4, per_host: int = 2) -> Evidence:
    """Make up a run in which nothing is wrong."""
    evidence = Evidence(ranks, 0, {rank: facts(rank, rank // per_host) for rank in range(ranks)})
    evidence.reached = Reached("10.0.0.1", 29500, ["10.0.0.1"], {STORE: CONNECTED})
    evidence.own_store = evidence.met = True
    for rank in range(ranks):
        for other in range(ranks):
            if rank == other:
                continue
            local = rank // per_host == other // per_host
            link = evidence.links[rank, other] = Reachability()
            if local and rank < other:
                link.memory = "shared"
            elif not local:
                link.answers, link.chosen = {evidence.ranks[other].addresses[0]: CONNECTED}, 0
            if rank < other:
                rate = (4e9 if local else 1e9) * (1 + (rank * 7 + other * 3) % 10 / 20)
                pair = Pair((rank, other), 8e-6 if local else 30e-6, rate, rate * 0.9)
                if not local:
                    pair.local, pair.remote = (
                        evidence.ranks[r].addresses[0].partition(":")[0] for r in (rank, other)
                    )
                evidence.pairs[rank, other] = pair
    return evidence
