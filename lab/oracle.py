"""The results of collectives, from all ranks' inputs: exact for integers, else in float64."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = [*SIGNED, *UNSIGNED]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *FLOAT8, *COMPLEX]
# Only moved: no arithmetic is defined for them here.
MOVED = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32]

ARITHMETIC = ["SUM", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
EPSILON = {
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.complex64: 2.0**-24,
    torch.float64: 2.0**-53,
    torch.complex128: 2.0**-53,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype == torch.bool:
        return [*ARITHMETIC, *BITWISE]
    if dtype in INTEGERS:
        return [*ARITHMETIC, *BITWISE, "AVG"]
    if dtype in COMPLEX:
        return ["SUM", "AVG"]
    return [*ARITHMETIC, "AVG", "PREMUL_SUM"]


def raw(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return elements made of any bits, the same in every process."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:  # torch keeps one of its bits
        return raw(rank, count, torch.uint8, seed).gt(127)
    random = np.random.default_rng((seed, rank, count))
    data = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype)


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return what `rank` gives: the same in every process. Integers fill their type."""
    if dtype in INTEGERS or dtype == torch.bool:
        return raw(rank, count, dtype, seed)
    random = np.random.default_rng((seed, rank, count))
    numbers = torch.from_numpy(random.uniform(-2, 2, count))
    if dtype.is_complex:
        numbers = torch.complex(numbers, torch.from_numpy(random.uniform(-2, 2, count)))
    return numbers.to(dtype)


def bits(tensor: torch.Tensor) -> str:
    """Return a digest of the tensor's bytes."""
    if tensor.numel() == 0:
        return "nothing"
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def factor(rank: int) -> float:
    """The factor that a rank gives to PREMUL_SUM."""
    return 0.5 + rank


def reduce_op(name: str, rank: int) -> Any:
    if name == "PREMUL_SUM":
        return torch.distributed._make_nccl_premul_sum(factor(rank))
    return getattr(torch.distributed.ReduceOp, name)


def check_reduced(result: torch.Tensor, inputs: list[torch.Tensor], op: str, what: str) -> None:
    """Raise AssertionError, with `what`, unless `result` is `op` over the inputs."""
    if result.numel() == 0:
        return
    dtype = result.dtype
    if dtype == torch.bool or dtype in INTEGERS:
        expected = _integers([_numpy(tensor) for tensor in inputs], op)
        wrong = _numpy(result) != expected
        assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} elements differ"
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = torch.stack([tensor.to(wide) for tensor in inputs])
    expected, scale = _floats(exact, op)
    # Each hop of a ring rounds once to the type, the result once more.
    bound = EPSILON[dtype] * (len(inputs) + 1) * (scale + _smallest(dtype))
    error = (result.to(wide) - expected).abs()
    worst = (error - bound).argmax()
    assert bool((error <= bound).all()), (
        f"{what}: element {worst} is {result[worst]}, not {expected[worst]} "
        f"(of {[float(x[worst].abs()) for x in inputs]})"
    )


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).numpy()


def _integers(inputs: list[np.ndarray], op: str) -> np.ndarray:
    if inputs[0].dtype == np.bool_:
        logical = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
        op = logical.get(op, op)
    functions: dict[str, Callable[..., np.ndarray]] = {
        "SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum,
        "MAX": np.maximum, "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
    }  # fmt: skip
    result = inputs[0].copy()
    for other in inputs[1:]:
        result = functions[op](result, other)  # wraps
    if op == "AVG":  # the wrapped sum's, towards zero
        ranks = result.dtype.type(len(inputs))
        result, rest = result // ranks, result % ranks
        result[(result < 0) & (rest != 0)] += 1
    return result


def _floats(inputs: torch.Tensor, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result, and the magnitude that its error is measured by."""
    if op in ("MIN", "MAX"):
        result = inputs.amin(0) if op == "MIN" else inputs.amax(0)  # both propagate NaN
        return result, torch.zeros_like(result)
    if op == "PRODUCT":
        result = inputs.prod(0)
        return result, result.abs()
    if op == "PREMUL_SUM":
        inputs = torch.stack([tensor * factor(rank) for rank, tensor in enumerate(inputs)])
    divisor = len(inputs) if op == "AVG" else 1
    return inputs.sum(0) / divisor, inputs.abs().sum(0) / divisor


def _smallest(dtype: torch.dtype) -> float:
    """The smallest normal number: errors below it are absolute."""
    return torch.finfo(dtype).tiny
