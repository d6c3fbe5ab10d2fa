"""How numbers of fp32 become fewer bytes, and come back: docs/compression.md has the formats.

A codec writes numbers into a buffer of bytes, unit by unit of 256, so that a part of a buffer is a
part of the numbers. Tensors of the CPU go through the kernels of csrc/reduce/quantize.h. Others go
through torch's operations, which give the same bits.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Protocol

import torch

from ringcomm._runtime.library import load_library

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 256  # numbers of a block, and of every part of a buffer
BLOCK_BYTES = 4 + UNIT
LEAST_SCALE = 2.0**-117
WORD = 0xFFFFFFFF


class Codec(Protocol):
    """Encodes and decodes parts of a tensor; `codec_of` returns it."""

    name: str
    unit_bytes: int

    def encode(
        self, src: Tensor, wire: Tensor, residual: Tensor | None, seed: int | None, first: int
    ) -> None:
        """Write `src` plus `residual`, which gets the remainder; the rest of `wire` is 0.

        With a seed a number is rounded by chance: the seed and its index, from `first`, decide.
        """

    def decode(self, wire: Tensor, out: Tensor, sources: int = 1, divisor: float = 1) -> None:
        """Write the sum of the sources, which follow one another in `wire`, over `divisor`."""


class Blocks:
    """Numbers of 8 bits, and a scale for each block of them."""

    unit_bytes = BLOCK_BYTES

    def __init__(self, name: str, coding: int) -> None:
        self.name, self.coding = name, coding

    def encode(
        self, src: Tensor, wire: Tensor, residual: Tensor | None, seed: int | None, first: int
    ) -> None:
        if src.device.type == "cpu":
            load_library().quantize(src, wire, self.coding, residual, seed, first & WORD)
        else:
            quantize(src, wire, self.coding, residual, seed, first & WORD)

    def decode(self, wire: Tensor, out: Tensor, sources: int = 1, divisor: float = 1) -> None:
        if out.device.type == "cpu":
            load_library().dequantize(wire, out, self.coding, sources, divisor)
        else:
            dequantize(wire, out, self.coding, sources, divisor)


class Cast:
    """Numbers of a 16-bit type. A number that is too large for it becomes inf."""

    unit_bytes = 2 * UNIT

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def encode(
        self, src: Tensor, wire: Tensor, residual: Tensor | None, seed: int | None, first: int
    ) -> None:
        del seed, first  # hooks and calls refuse them for this codec
        numbers = wire.view(self.dtype)
        numbers[src.numel() :].zero_()
        if residual is None:
            numbers[: src.numel()].copy_(src)
            return
        residual += src
        numbers[: src.numel()].copy_(residual)
        residual -= numbers[: src.numel()]
        residual.nan_to_num_(0, 0, 0)

    def decode(self, wire: Tensor, out: Tensor, sources: int = 1, divisor: float = 1) -> None:
        parts = wire.view(self.dtype).view(sources, -1)[:, : out.numel()]
        out.copy_(parts[0])
        for part in parts[1:]:
            out += part
        divide(out, divisor)


_KNOWN: tuple[Codec, ...] = (
    Blocks("int8", 0),
    Blocks("fp8", 1),
    Cast("fp16", torch.float16),
    Cast("bf16", torch.bfloat16),
)
_CODECS = {codec.name: codec for codec in _KNOWN}
FORMATS = tuple(_CODECS)
BY_CHANCE = ("int8", "fp8")  # the formats that can round so


def codec_of(name: str) -> Codec:
    """Return the codec of a format. Raises ValueError."""
    if name not in _CODECS:
        raise ValueError(f"there is no format {name!r}: choose one of {', '.join(FORMATS)}")
    return _CODECS[name]


def divide(numbers: Tensor, divisor: float) -> None:
    """Divide in place, as the kernels do."""
    if divisor != 1:  # a GPU would multiply with the inverse of a Python number: it rounds twice
        numbers /= torch.full_like(numbers[:1], divisor)


def mixed(*numbers: int) -> int:
    """Return a seed of 64 bits made of several numbers, the same in every run."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number & (1 << 64) - 1 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


# ---- the kernels, as operations of torch


def quantize(
    src: Tensor,
    wire: Tensor,
    coding: int,
    residual: Tensor | None = None,
    seed: int | None = None,
    first: int = 0,
) -> None:
    """Do what `_C.quantize` does, on any device."""
    count, blocks = src.numel(), wire.view(-1, BLOCK_BYTES)
    numbers = src.new_zeros(len(blocks), UNIT)
    flat = numbers.view(-1)
    flat[:count] = src if residual is None else src + residual
    largest = numbers.abs().amax(1, keepdim=True)
    finite = largest.isfinite()
    scale = (largest / torch.full_like(largest, (127, 448)[coding])).clamp_min(LEAST_SCALE)
    values = torch.where(finite, numbers * (torch.ones_like(scale) / scale), 0.0)
    if seed is None:
        codes = values.round() if coding == 0 else values
    else:
        indices = torch.arange(first, first + flat.numel(), device=src.device).view_as(values)
        codes = (_int8_by_chance, _float8_by_chance)[coding](values, _chance(indices, seed))
    codes = codes.to((torch.int8, torch.float8_e4m3fn)[coding])
    used = -(-count // UNIT)
    blocks.zero_()
    nan = torch.full_like(scale, float("nan"))
    blocks[:used, :4] = torch.where(finite, scale, nan).view(torch.uint8)[:used]
    order = codes.view(torch.uint8).view(-1, 4, UNIT // 4).transpose(1, 2)
    blocks[:used, 4:] = order.reshape(-1, UNIT)[:used]
    if residual is not None:
        left = torch.where(finite, numbers - codes.float() * scale, 0.0)
        residual.copy_(left.view(-1)[:count])


def dequantize(
    wire: Tensor, out: Tensor, coding: int, sources: int = 1, divisor: float = 1
) -> None:
    """Do what `_C.dequantize` does, on any device."""
    total = None
    for blocks in wire.view(sources, -1, BLOCK_BYTES):
        scale = blocks[:, :4].contiguous().view(torch.float32)
        order = blocks[:, 4:].reshape(-1, UNIT // 4, 4).transpose(1, 2).contiguous()
        codes = order.view((torch.int8, torch.float8_e4m3fn)[coding]).view(-1, UNIT)
        numbers = codes.float() * scale
        total = numbers if total is None else total + numbers
    assert total is not None
    flat = total.view(-1)[: out.numel()]
    divide(flat, divisor)
    out.copy_(torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat))


def _chance(index: Tensor, seed: int) -> Tensor:
    """Return 32 bits by chance for each index: MurmurHash3's finalizer with two keys."""
    keys = seed & WORD, seed >> 32
    bits = (index + keys[0]) & WORD
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & WORD
    bits = ((bits ^ (bits >> 13) ^ keys[1]) * 0xC2B2AE35) & WORD
    return bits ^ (bits >> 16)


def _int8_by_chance(values: Tensor, chance: Tensor) -> Tensor:
    drawn = (chance >> 16).float() * 2**-16 - (0.5 - 2**-17)
    return (values.clamp(-127, 127) + drawn).round()


def _float8_by_chance(values: Tensor, chance: Tensor) -> Tensor:
    """Return codes as numbers: chance is added below the last bit, and what is below it is cut."""
    size = values.abs().clamp_max(448)
    least = 2.0**-6  # denormals are cut in the binade above theirs, whose last bit weighs as much
    raised = torch.where(size < least, size + least, size)
    bits = raised.view(torch.int32) + (chance >> 12).to(torch.int32)
    cut = (bits & -(1 << 20)).view(torch.float32)
    return torch.where(size < least, cut - least, cut).copysign(values)
