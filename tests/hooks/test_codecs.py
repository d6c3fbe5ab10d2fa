"""The codecs of compression: their errors, their extremes, and the same bits everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ringcomm import _C
from ringcomm.compression import codecs

LARGEST = {0: 127.0, 1: 448.0}
CODINGS = pytest.mark.parametrize("coding", [0, 1], ids=["int8", "fp8"])


def numbers(count: int, seed: int = 0) -> Tensor:
    """Blocks whose scales are far apart, with zeros of both signs among them."""
    seeded = torch.Generator().manual_seed(seed)
    some = torch.randn(count, generator=seeded)
    scales = 10.0 ** torch.randint(-30, 30, (count // 256 + 1,), generator=seeded)
    some *= scales.repeat_interleave(256)[:count]
    some[::7], some[::11] = 0.0, -0.0
    return some


def encoded(src: Tensor, coding: int, units: int | None = None, **words: Any) -> Tensor:
    blocks = -(-src.numel() // 256) if units is None else units
    wire = torch.full((blocks * 260,), 0xEE, dtype=torch.uint8)
    _C.quantize(src, wire, coding, **words)
    return wire


def decoded(wire: Tensor, count: int, coding: int, sources: int = 1, divisor: float = 1) -> Tensor:
    out = torch.full((count,), 7.0)
    _C.dequantize(wire, out, coding, sources, divisor)
    return out


def scales(wire: Tensor) -> Tensor:
    return wire.view(-1, 260)[:, :4].contiguous().view(torch.float32).view(-1)


def steps(src: Tensor, wire: Tensor, coding: int) -> Tensor:
    """How far apart the codes around each number are."""
    scale = scales(wire).repeat_interleave(256)[: len(src)]
    if coding == 0:
        return scale
    # An eighth of the number's binade, and 2^-9 below the normal ones.
    return scale * 2.0 ** (src.abs() / scale).clamp_min(2.0**-6).log2().floor() / 8


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


@CODINGS
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 4096, 10_001])
def test_the_error_of_a_number_is_bounded(coding: int, count: int) -> None:
    src = numbers(count, count)
    wire = encoded(src, coding)
    error = (decoded(wire, count, coding) - src).abs()
    assert (error <= steps(src, wire, coding) / 2 * (1 + 1e-4)).all()


@CODINGS
def test_the_largest_number_of_a_block_keeps_its_value(coding: int) -> None:
    src = numbers(100 * 256)
    out = decoded(encoded(src, coding), len(src), coding)
    largest = src.view(-1, 256).abs().max(1)
    got = out.view(-1, 256).abs().gather(1, largest.indices[:, None])[:, 0]
    torch.testing.assert_close(got, largest.values, rtol=2e-7, atol=0)


@CODINGS
def test_blocks_of_zeros_and_of_very_small_numbers(coding: int) -> None:
    src = torch.zeros(512)
    src[256:] = 1e-42  # a denormal
    wire = encoded(src, coding)
    assert (scales(wire) == 2.0**-117).all()
    assert decoded(wire, 512, coding).tolist() == [0.0] * 512


@CODINGS
def test_very_large_numbers_stay_finite(coding: int) -> None:
    largest = torch.finfo(torch.float32).max * (1 - 2e-7)
    src = torch.tensor([largest, -largest, 0.0])
    out = decoded(encoded(src, coding), 3, coding)
    torch.testing.assert_close(out, src, rtol=2e-7, atol=0)


@CODINGS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 100, 255])
def test_a_number_that_is_not_finite_spoils_its_block_alone(
    coding: int, bad: float, place: int
) -> None:
    src = torch.ones(3 * 256)
    src[256 + place] = bad
    residual = torch.zeros_like(src)
    wire = encoded(src, coding, residual=residual)
    out = decoded(wire, len(src), coding)
    assert out[256:512].isnan().all()
    assert (out[:256] == 1).all()
    assert (out[512:] == 1).all()
    assert residual.isfinite().all()  # else all later gradients would be NaN
    assert bits(out[256:257]) == [0, 0, 0xC0, 0x7F]


@CODINGS
def test_blocks_that_are_left_over_hold_zeros(coding: int) -> None:
    wire = encoded(torch.ones(300), coding, units=5)
    assert wire.view(5, 260)[2:].eq(0).all()
    assert decoded(wire, 5 * 256, coding)[300:].eq(0).all()


@CODINGS
def test_sources_are_added_in_fp32_in_their_order(coding: int) -> None:
    some = [numbers(1000, seed) for seed in range(3)]
    wires = [encoded(source, coding) for source in some]
    first, second, third = (decoded(wire, 1000, coding) for wire in wires)
    together = decoded(torch.cat(wires), 1000, coding, 3, 3.0)
    assert bits(together) == bits((first + second + third) / torch.full((1,), 3.0))


@CODINGS
def test_what_is_left_out_adds_up(coding: int) -> None:
    """With feedback the sum of what was sent is the sum of what was meant, but for one error."""
    residual, sent = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)
    meant = torch.zeros_like(sent)
    for step in range(50):
        src = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        sent += decoded(encoded(src, coding, residual=residual), 1000, coding)
        meant += src
    torch.testing.assert_close(sent + residual, meant, rtol=0, atol=1e-4)
    assert residual.abs().max() < 0.2
    forgotten = torch.zeros_like(sent)
    for step in range(50):
        src = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        forgotten += decoded(encoded(src, coding), 1000, coding)
    assert (forgotten - meant).square().mean() > 4 * (sent - meant).square().mean()


@CODINGS
def test_rounding_by_chance_is_right_on_average(coding: int) -> None:
    src = torch.randn(1024, generator=torch.Generator().manual_seed(1))
    src[:20] *= 1e-4  # below half a step of int8, and denormals of fp8
    rounds = 3000
    total = torch.zeros(1024, dtype=torch.float64)
    for seed in range(rounds):
        total += decoded(encoded(src, coding, seed=codecs.mixed(seed)), 1024, coding)
    mean = total / rounds
    deviation = steps(src, encoded(src, coding), coding) / 2 / math.sqrt(rounds)  # at most
    assert ((mean - src).abs() / deviation).max() < 5
    nearest = decoded(encoded(src, coding), 1024, coding)
    assert (nearest[:20] - src[:20]).abs().mean() > 2 * (mean - src)[:20].abs().mean()


@CODINGS
def test_equal_seeds_give_equal_codes(coding: int) -> None:
    src = numbers(5000)
    assert bits(encoded(src, coding, seed=5)) == bits(encoded(src, coding, seed=5))
    assert bits(encoded(src, coding, seed=5)) != bits(encoded(src, coding, seed=6))
    # A part of a tensor is rounded as it is in the whole one.
    part = encoded(src[512:].contiguous(), coding, seed=5, first=512)
    assert bits(part) == bits(encoded(src, coding, seed=5)[2 * 260 :])


@CODINGS
@pytest.mark.parametrize("seed", [None, 0x123456789ABCDEF0])
def test_operations_of_torch_give_the_same_bits(coding: int, seed: int | None) -> None:
    """The code for GPUs, run on the CPU beside the kernels."""
    src = numbers(5003)
    src[700], src[1500] = math.nan, -math.inf
    src[2000:2100] = 1e-40
    ours, theirs = (numbers(5003, 9) for _ in range(2))
    wires = [torch.full((22 * 260,), 0xEE, dtype=torch.uint8) for _ in range(2)]
    _C.quantize(src, wires[0], coding, ours, seed, 0xFFFFFF00)
    codecs.quantize(src, wires[1], coding, theirs, seed, 0xFFFFFF00)
    assert bits(wires[0]) == bits(wires[1])
    assert bits(ours + 0.0) == bits(theirs + 0.0)  # a zero may have either sign here
    wire = torch.cat([wires[0], encoded(numbers(5003, 2), coding, units=22)])
    out = torch.empty(5003)
    codecs.dequantize(wire, out, coding, 2, 3.0)
    assert bits(out) == bits(decoded(wire, 5003, coding, 2, 3.0))


def test_a_code_of_8_bits_is_torchs() -> None:
    """Block and order on the wire: byte 4 w + p is number 64 p + w."""
    src = torch.linspace(-448, 448, 256)
    codes = encoded(src, 1)[4:].view(64, 4).t().reshape(-1)
    assert bits(codes) == bits(src.to(torch.float8_e4m3fn))
    src = torch.arange(-128.0, 128.0).clamp_min(-127)
    assert encoded(src, 0)[4:].view(torch.int8).view(64, 4).t().flatten().tolist() == src.tolist()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_16_bits(name: str) -> None:
    codec = codecs.codec_of(name)
    src, residual = numbers(1000), torch.zeros(1000)
    src[3], src[4] = math.inf, math.nan
    wire = torch.empty(5 * codec.unit_bytes, dtype=torch.uint8)
    codec.encode(src, wire, residual, None, 0)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    assert residual.isfinite().all()
    out = torch.empty(1000)
    codec.decode(torch.cat([wire, wire]), out, 2, 2)
    torch.testing.assert_close(out, src.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_what_is_refused() -> None:
    good = torch.ones(256), torch.empty(260, dtype=torch.uint8)
    for src, wire, kind in [
        (torch.ones(256).double(), good[1], RuntimeError),
        (torch.ones(512)[::2], good[1], ValueError),
        (good[0], torch.empty(259, dtype=torch.uint8), ValueError),
        (torch.ones(257), good[1], ValueError),
        (good[0], torch.empty(260, dtype=torch.int8), RuntimeError),
    ]:
        with pytest.raises(kind, match=r"must be|expected scalar type"):
            _C.quantize(src, wire, 0)
    for sources in (0, 3):
        with pytest.raises(ValueError, match="blocks whole"):
            _C.dequantize(good[1], good[0], 0, sources)
