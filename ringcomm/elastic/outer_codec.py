"""How a pseudo-gradient becomes few bytes: 16, 8, 4 or 2 bits for each number, or for the largest.

A codec makes bytes of fp32 numbers, and numbers of bytes. How many bytes depends on the count of
numbers alone, so all members send equally many. What the codes leave out is for the caller to add
to the next numbers (error feedback).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ringcomm.compression.codecs import UNIT, codec_of

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 4096  # numbers from which the largest are taken: an index among them has 12 bits
SCALE_BYTES = 4
# The best distance between levels for normally distributed numbers of variance 1, by bits
# (Max 1960, "Quantizing for minimum distortion", table 2).
STEPS = {2: 0.9957, 4: 0.3352}
KNOWN = {8: "int8", 16: "bf16"}  # formats of ringcomm.compression
BITS = (32, 16, 8, 4, 2)


class Codec(Protocol):
    """Turns fp32[count] into uint8[bytes_of(count)] and back, on any device."""

    def bytes_of(self, count: int) -> int: ...

    def encode(self, numbers: Tensor) -> Tensor: ...

    def decode(self, codes: Tensor, count: int) -> Tensor: ...


def codec_for(bits: int, topk: int | None = None) -> Codec | None:
    """Return the codec; None for plain fp32, which needs none. Raises ValueError."""
    if bits not in BITS:
        raise ValueError(f"bits={bits}: one of {', '.join(map(str, BITS))}")
    if topk is not None:
        return TopK(bits, topk)
    if bits in STEPS:
        return FewBits(bits)
    return KnownFormat(KNOWN[bits]) if bits in KNOWN else None


class KnownFormat:
    """A format of docs/compression.md."""

    def __init__(self, name: str) -> None:
        self._codec = codec_of(name)

    def bytes_of(self, count: int) -> int:
        return -(-count // UNIT) * self._codec.unit_bytes

    def encode(self, numbers: Tensor) -> Tensor:
        codes = numbers.new_empty(self.bytes_of(numbers.numel()), dtype=torch.uint8)
        self._codec.encode(numbers, codes, None, None, 0)
        return codes

    def decode(self, codes: Tensor, count: int) -> Tensor:
        numbers = torch.empty(count, device=codes.device)
        self._codec.decode(codes, numbers)
        return numbers


class FewBits:
    """4 or 2 bits for each number, and a scale for each block of 256."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def bytes_of(self, count: int) -> int:
        return -(-count // UNIT) * (SCALE_BYTES + UNIT * self.bits // 8)

    def encode(self, numbers: Tensor) -> Tensor:
        return _quantized(_rows(numbers, UNIT), self.bits).flatten()

    def decode(self, codes: Tensor, count: int) -> Tensor:
        rows = codes.view(-1, SCALE_BYTES + UNIT * self.bits // 8)
        return _dequantized(rows, self.bits).flatten()[:count]


class TopK:
    """The `count` largest of each 4,096 numbers, in 32, 4 or 2 bits, and 12 bits for their places.

    That is how SparseLoCo compresses (arXiv 2508.15706), with which Covenant-72B was trained (arXiv
    2603.08163).
    """

    def __init__(self, bits: int, count: int) -> None:
        if bits not in (32, *STEPS):
            raise ValueError(f"topk with bits={bits}: 32, 4 or 2 bits for each of the numbers")
        if not 0 < count <= CHUNK or count % 4:
            raise ValueError(f"topk={count}: a multiple of 4, at most {CHUNK}")
        self.bits, self.count = bits, count
        self._value_bytes = 4 * count if bits == 32 else SCALE_BYTES + count * bits // 8

    def bytes_of(self, count: int) -> int:
        return -(-count // CHUNK) * (self._value_bytes + self.count * 12 // 8)

    def encode(self, numbers: Tensor) -> Tensor:
        rows = _rows(numbers, CHUNK)
        places = rows.abs().topk(self.count, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, places)
        first = values.view(torch.uint8) if self.bits == 32 else _quantized(values, self.bits)
        return torch.cat([first, _packed_places(places)], dim=1).flatten()

    def decode(self, codes: Tensor, count: int) -> Tensor:
        rows = codes.view(-1, self._value_bytes + self.count * 12 // 8)
        first, last = rows.split([self._value_bytes, self.count * 12 // 8], dim=1)
        if self.bits == 32:
            values = first.contiguous().view(torch.float32)
        else:
            values = _dequantized(first, self.bits)
        numbers = torch.zeros(len(rows), CHUNK, device=codes.device)
        return numbers.scatter_(1, _places(last), values).flatten()[:count]


def _rows(numbers: Tensor, length: int) -> Tensor:
    """Return the numbers in rows; the last one ends with zeros."""
    missing = -numbers.numel() % length
    return torch.nn.functional.pad(numbers, (0, missing)).view(-1, length)


def _quantized(rows: Tensor, bits: int) -> Tensor:
    """Return each row's scale and its codes, as bytes.

    A code is a level, ±0.5, ±1.5 and so on, with the sign of its number. The scale is the one with
    the least squared error for these levels, which is therefore less than the squares of the row:
    with error feedback, that is enough for SGD to converge (Karimireddy et al. 2019, arXiv
    1901.09847).
    """
    half = 1 << (bits - 1)
    step = rows.square().mean(1, keepdim=True).sqrt_().mul_(STEPS[bits]).clamp_min_(1e-30)
    levels = (rows / step).floor_().clamp_(-half, half - 1).add_(0.5)
    scale = (rows * levels).sum(1, keepdim=True) / levels.square().sum(1, keepdim=True)
    codes = levels.add_(half - 0.5).to(torch.uint8).view(len(rows), -1, 8 // bits)
    packed = codes[:, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= codes[:, :, place] << (place * bits)
    return torch.cat([scale.view(torch.uint8), packed], dim=1)


def _dequantized(rows: Tensor, bits: int) -> Tensor:
    scale = rows[:, :SCALE_BYTES].contiguous().view(torch.float32)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)
    codes = (rows[:, SCALE_BYTES:, None] >> shifts) & ((1 << bits) - 1)
    return (codes.flatten(1).float() - ((1 << (bits - 1)) - 0.5)) * scale


def _packed_places(places: Tensor) -> Tensor:
    """Two places of 12 bits in three bytes."""
    low, high = places[:, 0::2], places[:, 1::2]
    parts = [low & 0xFF, (low >> 8) | ((high & 0xF) << 4), high >> 4]
    return torch.stack(parts, dim=2).to(torch.uint8).flatten(1)


def _places(packed: Tensor) -> Tensor:
    first, middle, last = packed.view(len(packed), -1, 3).long().unbind(2)
    pairs = [first | ((middle & 0xF) << 8), (middle >> 4) | (last << 4)]
    return torch.stack(pairs, dim=2).flatten(1)
