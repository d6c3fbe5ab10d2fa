"""Tables of the collectives, types and operations that are measured, and how they are rated.

`algbw` is the bytes of the larger of a rank's two buffers, divided by the time. `busbw` multiplies
it by FACTORS, so that a figure can be compared with the speed of the memory or the link whatever
the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable


def _twice_the_others(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _the_others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


# busbw / algbw by the number of ranks, as nccl-tests has them (its doc/PERFORMANCE.md says why).
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": _twice_the_others,
    "all_gather": _the_others,
    "reduce_scatter": _the_others,
    "all_to_all": _the_others,
    "broadcast": _one,
    "reduce": _one,
    "gather": _the_others,
    "scatter": _the_others,
    "send_recv": _one,
    "barrier": _one,
}
# How often a rank copies the bytes of that size on the way, in the plans for ranks of one host: the
# one that copies the most; a sum counts as the copy of its result. A buffer that all ranks read or
# write in place is in here once on each.
COPIES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: (2 * n - 1) / n,  # all but its own part out, that summed, the rest in
    "all_gather": lambda n: (n + 1) / n,  # its part out, its part in place, the others' in
    "reduce_scatter": _one,  # all but its own part out, that summed
    "all_to_all": lambda n: (2 * n - 1) / n,  # all but one part out, all in
    "broadcast": _one,  # out, or in
    "reduce": _one,
    "gather": _one,
    "scatter": _one,
    "send_recv": lambda n: 2.0,  # out, and in
    "barrier": lambda n: 0.0,
}
# Each rank has one part of the larger buffer, so its length must be a multiple of the ranks.
IN_PARTS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
# Whether it is called in place, out of place, or both.
IN_PLACE: dict[str, tuple[bool, ...]] = dict.fromkeys(FACTORS, (False,)) | {
    "all_reduce": (True,),
    "broadcast": (True,),
    "reduce": (True,),
    "all_gather": (False, True),
    "reduce_scatter": (False, True),
}
REDUCING = {"all_reduce", "reduce_scatter", "reduce"}
# The integers up to here are exact in each type. Those of integers wrap around, alike everywhere.
EXACT = {
    "float32": 1 << 24,
    "float64": 1 << 53,
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    **dict.fromkeys(["int8", "uint8", "int32", "int64"], 1 << 53),
}
# As torch calls them: in ReduceOp, and between two tensors.
OPS = {
    "sum": ("SUM", "add"),
    "prod": ("PRODUCT", "mul"),
    "min": ("MIN", "minimum"),
    "max": ("MAX", "maximum"),
}


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s, 10⁹ bytes a second."""
    algbw = size / seconds / 1e9
    return algbw, algbw * FACTORS[collective](ranks)
