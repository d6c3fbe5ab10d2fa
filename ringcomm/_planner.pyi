"""Plans, the table that selects them, and the verifier, without torch: csrc/verify/module.cc."""

from typing import TypedDict

from ringcomm.algorithms.call import Call

COLLECTIVES: tuple[str, ...]  # by the numbers that the library gives them
ROOTED: tuple[str, ...]
SHARDED: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
KERNELS: tuple[str, ...]  # in place of an algorithm, on devices
VERBS: tuple[str, ...]  # of a step
SPACES: tuple[str, ...]  # of an operand
LANES: tuple[str, ...]  # of a signal or a wait

# any_size, few_ends, few_host_ranks, inbox_bytes and slot_bytes (between hosts), line_bytes,
# most_ranks, one_shot_bytes, segment_bytes (in memory): csrc/plan/shape.h
LIMITS: dict[str, int]
DEFAULT_COSTS: tuple[float, float, float]  # of a network: alpha, beta, gamma
INCAST: float  # how much longer bytes are assumed to take that come from all ranks at once

# A step: the verb, the peer, the lane, bytes, the number of targets, and the operands, targets
# first: the space, the rank, the writer, and the offset. ringcomm.algorithms.steps names them all.
_Step = tuple[int, int, int, int, int, list[tuple[int, int, int, int]]]
# The rank, the operation of the sequence, that of the script or -1, the pass, the signal that a
# wait meets or -1, and the step in words.
_Event = tuple[int, int, int, int, int, str]

def plan(
    call: Call, costs: str, names: list[str], rank: int, algorithm: str | None
) -> tuple[str, str, list[_Step]]:
    """Return one rank's plan: the algorithm, the row of the table that fits, and the steps.

    `costs` and `names` are those of the hosts' network. Raises ValueError where the collective has
    no such algorithm.
    """

class SelectionRow(TypedDict):
    """A row of the selection table, as it is for one group."""

    collective: str
    algorithm: str
    limit: int  # bytes of the message, or of the largest shard; LIMITS["any_size"]: any
    needs: str  # "", mapped, hosts, few_hosts, sites, few, many
    fits: bool  # the group has what the row needs
    text: str  # "all_reduce, up to 8275 B, at most 16 ranks", as plan() says it

def selection(
    size: int, costs: str = "", local: int = 1, names: list[str] = []
) -> list[SelectionRow]:
    """Return the table of a group of `size` ranks, `local` on a host.

    The first row decides that fits, and whose limit is no smaller than the message. `costs` is
    "alpha 1.8e-05 beta 8.4e-09 gamma 2e-11"; "": the defaults. Where they have hosts, `names` are
    those of the group's. Raises ValueError.
    """

def geometry(size: int, mapped: bool) -> list[int]:
    """Return the memory of a group, in the order of csrc/plan/shape.h."""

def prove(
    call: Call, geometry: list[int], scripts: list[list[int]]
) -> tuple[str, str, bool, int, int, list[_Event], list[_Event]] | None: ...
def mutants(
    call: Call, geometry: list[int], scripts: list[list[int]]
) -> tuple[int, list[tuple[int, int, int, int, int]]]: ...
def steps(call: Call, geometry: list[int], rank: int, script: list[int]) -> list[_Step]: ...
def text(call: Call, geometry: list[int], rank: int, script: list[int]) -> str: ...
