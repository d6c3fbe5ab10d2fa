"""What a collective costs: the model of Hockney (1994) for the plans of csrc/plan.

A message of m bytes takes alpha + m beta seconds, adding m bytes up takes m gamma. So an operation
takes `rounds * alpha + sent * beta + reduced * gamma`, with what lies on its longest path: messages
that wait for one another, bytes that leave one link after one another, bytes one core adds up.

    ring, pairwise, tree: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
        Operations in MPICH", 2005
    doubling with ranks beyond a power of two: Rabenseifner, Traeff, "More Efficient Reduction
        Algorithms for Non-Power-of-Two Number of Processors", 2004
    bruck: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient Algorithms for All-to-All Communications
        in Multiport Message-Passing Systems", 1997; Traeff, "Optimal, Non-pipelined Reduce-scatter
        and Allreduce Algorithms", 2024
    hierarchical: the sum of its parts, in memory and between hosts; the longer of the two in
        long all_reduces

A ring's rounds count in full, though its segments hide most of them where a rank's share of the
message is more than 16 KiB.

The model knows two fabrics. The ranks of a host share its link to the network, and each has a core
of its own. tests/network/test_tune.py compares it with the plans themselves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SLOT = 128 << 10  # bytes of a message between hosts; longer ones are several: csrc/plan/shape.cc
INBOX = 8 * SLOT
FEW = 16  # ranks, or hosts, that may talk to one another each: csrc/plan/shape.h
FEW_RANKS = FEW * FEW  # of so few hosts
SEGMENT = 256 << 10  # of a window in memory
PIPELINED = 4 * SLOT  # beyond it a hierarchical all_reduce is in memory and between hosts at once
ANY_SIZE = 2**64 - 1
# Where links were full, bytes that come from all ranks at once took longer than a ring's: up to a
# fifth; this much is assumed.
INCAST = 0.1

ALGORITHMS = {
    "all_reduce": ["ring", "doubling", "bruck", "tree", "direct", "hierarchical"],
    "reduce_scatter": ["ring", "bruck", "pairwise", "direct", "hierarchical"],
    "all_gather": ["ring", "bruck", "pairwise", "direct", "hierarchical"],
    "broadcast": ["ring", "tree", "hierarchical"],
    "reduce": ["ring", "tree"],
}


class Costs(NamedTuple):
    """Of one fabric, in seconds: a message, each byte sent, each byte added up."""

    alpha: float
    beta: float
    gamma: float

    def __str__(self) -> str:
        return f"alpha {self.alpha!r} beta {self.beta!r} gamma {self.gamma!r}"


class Fabrics(NamedTuple):
    """What connects ranks of one host, and hosts."""

    memory: Costs
    network: Costs


# The network is that of csrc/plan/shape.h. Both were measured by `ringcomm tune`, see
# docs/performance.md.
DEFAULT = Fabrics(Costs(0.3e-6, 0.13e-9, 0.02e-9), Costs(18e-6, 8.4e-9, 0.02e-9))


class Work(NamedTuple):
    """What an operation's longest path has of each."""

    rounds: float = 0
    sent: float = 0  # bytes
    reduced: float = 0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def seconds(self, costs: Costs) -> float:
        return sum(amount * cost for amount, cost in zip(self, costs, strict=True))


def work(collective: str, algorithm: str, size: float, ranks: int) -> Work:
    """Return the work among ranks that each have a link of their own.

    `size` is the whole message in bytes: all shards of reduce_scatter and all_gather together.
    Raises ValueError where the collective has no such algorithm.
    """
    if algorithm not in ALGORITHMS.get(collective, []) or algorithm == "hierarchical":
        raise ValueError(f"the model has no {algorithm} {collective}")
    if ranks == 1:
        return Work()
    if algorithm == "doubling":
        return _doubling(size, ranks)
    if collective in ("broadcast", "reduce"):
        levels = _binomial if algorithm == "tree" else _chain
        return levels(size, ranks, collective == "reduce")
    if algorithm == "tree":
        return _binomial(size, ranks, True).plus(_binomial(size, ranks, False))
    adds = collective != "all_gather"
    others = ranks - 1
    half = Work(0, size * others / ranks, size * others / ranks * adds)
    if algorithm == "direct" and collective == "all_reduce":
        return Work(1, size * others, size * others)
    if algorithm in ("pairwise", "direct"):
        return half._replace(rounds=1)
    if algorithm == "bruck":
        others = _bruck_rounds(ranks) * max(1, math.ceil(size / ranks / _bruck_pass(ranks)))
    if collective == "all_reduce":
        return Work(2 * others, 2 * half.sent, half.reduced)
    return half._replace(rounds=others)


def _bruck_rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _bruck_pass(ranks: int) -> int:
    """Return the bytes of each shard in a pass: two messages of half the shards fill an inbox."""
    room = INBOX // 2 // (1 << (ranks // 2 - 1).bit_length())
    return room // 64 * 64 if room >= 64 else room


def _doubling(size: float, ranks: int) -> Work:
    rounds, before, after = _doubling_rounds(ranks)
    # Who stands for a rank beyond hears from it while its first partner sends as well. Of a long
    # message that overlaps with what follows, but for its first slot.
    sent = (rounds + 2 * before) * size + before * min(size, SLOT)
    return Work(rounds + before + after, sent, (rounds + before) * size)


def _doubling_rounds(ranks: int) -> tuple[int, int, int]:
    """Count rounds within the largest power of two, and those before and after them.

    Ranks beyond it cost a round before. Up to half as many are all in one half: what that half
    waits for in the last round has been under way while it was late.
    """
    rounds = ranks.bit_length() - 1
    within = 1 << rounds
    return rounds, int(ranks > within), int(2 * (ranks - within) > within)


# Both begin or end with a signal that tells the root that all ranks are there.


def _binomial(size: float, ranks: int, adds: bool) -> Work:
    deep, levels = ranks.bit_length() - 1, (ranks - 1).bit_length()
    return Work(1 + deep, levels * size, _most_added(ranks) * size * adds)


def _most_added(ranks: int) -> int:
    """Messages that are added up on the way to the root: a rank adds all its children's at once."""
    if ranks == 1:
        return 0
    children = (ranks - 1).bit_length()
    half = 1 << children - 1
    return children + max(_most_added(ranks - half), _most_added(max(1, half // 2)))


def _chain(size: float, ranks: int, adds: bool) -> Work:
    passed = size + (ranks - 2) * min(size, SLOT)
    return Work(ranks, passed, passed * adds)


def in_memory(collective: str, size: float, ranks: int) -> Work:
    """Return the work of the direct plans, among ranks of one host that read each other's memory.

    What a rank publishes or loads counts as sent.
    """
    if ranks == 1:
        return Work()
    others = size * (ranks - 1) / ranks
    rounds = max(1, math.ceil(size / ranks / SEGMENT))
    if collective == "all_reduce":
        return Work(1 + max(1, math.ceil(size / SEGMENT)), 2 * others, others)
    if collective == "reduce_scatter":
        return Work(max(1, math.ceil(size / SEGMENT)), others, others)
    if collective == "all_gather":
        return Work(rounds, size / ranks + others)
    if collective == "broadcast":  # a scatter and an all_gather
        return Work(1 + rounds, others).plus(Work(0, size / ranks + others))
    raise ValueError(f"the model has no {collective} in memory")


def seconds(
    collective: str, algorithm: str, size: float, hosts: int, local: int, costs: Fabrics
) -> float:
    """Return how long an operation takes on hosts with `local` ranks each.

    Raises ValueError where the collective has no such algorithm.
    """
    if hosts == 1:
        return in_memory(collective, size, local).seconds(costs.memory)
    if algorithm == "hierarchical":
        return _hierarchical(collective, size, hosts, local, costs)
    whole = work(collective, algorithm, size, hosts * local)
    network = _between(collective, algorithm, size, hosts, local)
    inside = Work(whole.rounds - network.rounds)
    crowd = algorithm == "pairwise" and hosts > 2
    return inside.seconds(costs.memory) + _across(crowd, network, costs.network)


def _across(crowded: bool, whole: Work, costs: Costs) -> float:
    crowd = INCAST if crowded else 0
    return whole._replace(sent=whole.sent * (1 + crowd)).seconds(costs)


def _between(collective: str, algorithm: str, size: float, hosts: int, local: int) -> Work:
    """What a host's link carries where all its ranks take part in one flat algorithm."""
    whole = work(collective, algorithm, size, hosts * local)
    few = work(collective, algorithm, size, hosts)
    if local == 1:
        return whole
    if algorithm == "ring":  # every local-th round leaves the host, and the link is never idle
        return whole._replace(rounds=whole.rounds / local)
    if algorithm == "doubling":  # each rank sends all it has in the rounds between hosts
        return Work(few.rounds, few.sent * local, whole.reduced)
    if algorithm == "tree":  # the ranks of a host are one branch
        return Work(few.rounds, few.sent, whole.reduced)
    if algorithm == "bruck":  # most rounds leave the host, with what all its ranks send
        return whole._replace(sent=whole.sent * local)
    return whole._replace(sent=size * (hosts - 1) / hosts * local)


def _hierarchical(collective: str, size: float, hosts: int, local: int, costs: Fabrics) -> float:
    """In the host, between ranks of equal index of all hosts, in the host."""
    if collective == "reduce":
        raise ValueError("the model has no hierarchical reduce")
    share, others = size / local, (hosts - 1) / hosts
    added = share * (local - 1) + share * others
    if collective == "reduce_scatter":  # one round: what a host has for another it adds up first
        inside = Work(1, size * (local - 1) / local).seconds(costs.memory)
        return inside + _across(hosts > 2, Work(1, size * others, added), costs.network)
    pipelined = hosts <= FEW and hosts * local <= FEW_RANKS
    if collective == "all_reduce" and local > 1 and size > PIPELINED and pipelined:
        inside = Work(2, 2 * size * (local - 1) / local).seconds(costs.memory)
        across = _across(hosts > 2, Work(2, 2 * size * others, added), costs.network)
        return max(inside, across)
    shared = costs.network._replace(beta=costs.network.beta * local)
    algorithm = selected(collective, share, hosts, shared)
    between = work(collective, algorithm, share, hosts)
    # A chain's last rank waits for one segment of its own, while the link has those of all.
    chain = collective == "broadcast" and algorithm == "ring"
    volume = share if chain else between.sent
    between = between._replace(sent=between.sent + volume * (local - 1))
    parts = {
        "all_reduce": [("reduce_scatter", size), ("all_gather", size)],
        "all_gather": [("all_gather", size / hosts)] * hosts,
        "broadcast": [("reduce_scatter", size), ("all_gather", size)],  # a scatter, as to its bytes
    }[collective]
    memory = [in_memory(part, part_size, local) for part, part_size in parts]
    if collective == "broadcast":
        memory[0] = memory[0]._replace(reduced=0)
    inside = sum(part.seconds(costs.memory) for part in memory)
    crowd = algorithm == "pairwise" and hosts > 2
    return inside + _across(crowd, between, costs.network)


# ---- what is chosen: the same as csrc/plan/select.cc


def doubling_limit(costs: Costs, ranks: int) -> int:
    rounds, before, after = _doubling_rounds(ranks)
    ring = 2.0 * (ranks - 1)
    slope = (rounds + 3 * before - ring / ranks) * costs.beta
    slope += (rounds + before - ring / 2 / ranks) * costs.gamma
    least = rounds + before + after
    limit = _crossing((2.0 * _bruck_rounds(ranks) - least) * costs.alpha, slope)
    if ranks > FEW or limit < bruck_limit(ranks) * ranks:
        return limit
    return _crossing((ring - least) * costs.alpha, slope)


def bruck_limit(ranks: int) -> int:
    """Return up to how many bytes a shard bruck is taken, with links that no ranks share.

    Its rounds cost as much as a ring's, which hides them in shards of several segments.
    """
    rounds = _bruck_rounds(ranks)
    if ranks - 1 <= rounds:
        return 0
    return min((ranks - 1) // rounds * _bruck_pass(ranks), SLOT // 8)


def pairwise_limit(costs: Costs, ranks: int) -> int:
    saved = (ranks - 2) / (ranks - 1) * costs.alpha
    one_segment = min(_crossing(saved, INCAST * costs.beta), SLOT // 8)
    return max(one_segment, _crossing(saved, 0.75 * costs.beta))


def tree_limit(costs: Costs, ranks: int, slot: int = SLOT) -> int:
    deep, children = ranks.bit_length() - 1, (ranks - 1).bit_length()
    passed = (ranks - 2) * float(slot) * costs.beta
    return _crossing((ranks - 1 - deep) * costs.alpha + passed, (children - 1) * costs.beta)


def _crossing(steps: float, slope: float) -> int:
    if steps <= 0:
        return 0
    return ANY_SIZE if slope * 1e18 <= steps else int(steps / slope)


def selected(collective: str, size: float, hosts: int, costs: Costs) -> str:
    """Return the algorithm between hosts of one rank each."""
    if collective in ("broadcast", "reduce"):
        return "tree" if size <= tree_limit(costs, hosts) else "ring"
    if collective == "all_reduce" and (hosts == 2 or size <= doubling_limit(costs, hosts)):
        return "doubling"
    if hosts > FEW or collective == "all_reduce":
        return "bruck" if size / hosts <= bruck_limit(hosts) else "ring"
    return "pairwise" if size / hosts <= pairwise_limit(costs, hosts) else "ring"


def limits(costs: Costs, hosts: int) -> dict[str, int]:
    """Up to how many bytes each algorithm is taken; of pairwise and bruck, a shard's."""
    return {
        "doubling": doubling_limit(costs, hosts),
        "bruck": bruck_limit(hosts),
        **({"pairwise": pairwise_limit(costs, hosts)} if hosts <= FEW else {}),
        "tree": tree_limit(costs, hosts),
    }
