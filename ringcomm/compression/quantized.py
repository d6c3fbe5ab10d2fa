"""`quantized_all_reduce`: an all_reduce of a quarter of the bytes, and not exact.

For sums that stand some noise, such as the outer steps of DiLoCo, over slow links.
docs/compression.md says when that pays.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringcomm.compression.codecs import BY_CHANCE, codec_of
from ringcomm.compression.exchange import Compression, Exchange
from ringcomm.options import checked_timeout

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor

TYPES = (torch.float32, torch.float16, torch.bfloat16)
USUAL = {8: "int8", 16: "bf16"}  # the format of so many bits
WIDTHS = {"int8": 8, "fp8": 8, "fp16": 16, "bf16": 16}
# By group, made at its first call: when torch lets go of the group, subgroups go with it.
_exchanges: weakref.WeakKeyDictionary[Any, Exchange] = weakref.WeakKeyDictionary()


class QuantizedWork(dist.Work):
    """An all_reduce under way; `wait()` raises what went wrong."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = threading.Event()  # Ctrl-C ends waiting for it, and not for a future
        self._future.add_done_callback(lambda _: done.set())
        if not done.wait(checked_timeout(timeout).total_seconds() if timeout else None):
            raise RuntimeError(
                f"Operation timed out! quantized_all_reduce has not ended within {timeout}, and "
                "goes on: wait for longer, or see what the other ranks do"
            )
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._error() is None

    def exception(self) -> Any:
        return self._error()

    def get_future(self) -> Any:
        return self._future

    def _error(self) -> Exception | None:
        try:
            self._future.value()
        except Exception as error:  # noqa: BLE001  whatever it is, the caller asked for it
            return error
        return None


def quantized_all_reduce(
    tensor: Tensor,
    bits: int = 8,
    group: Any = None,
    *,
    op: Any = dist.ReduceOp.SUM,
    format: str | None = None,
    seed: int | None = None,
    async_op: bool = False,
) -> QuantizedWork | None:
    """Replace the tensor by its sum, or mean, over the group's ranks, as `bits` can tell it.

    `bits` is 8 or 16, and `format` one of "int8", "fp8", "bf16" and "fp16"; 8 bits are int8's, 16
    are bf16's, unless it says more. `op` is SUM or AVG. With a `seed`, numbers of 8 bits are
    rounded up or down by chance, so that the result is right on average: give each call another
    seed, and all ranks the same. All ranks get the same bits. A sum with an inf or a NaN in it
    comes out as inf or NaN; with 8 bits so do the up to 255 numbers that share its block.

    Ranks of one host add up in fp32 first, and only what goes between hosts has fewer bits. The
    first call with a group makes subgroups, so all ranks of the group make it together. Takes
    tensors of float32, float16 and bfloat16. Raises ValueError and TypeError for others, and what
    collectives of the group raise.
    """
    codec = codec_of(_format_of(bits, format, seed))
    divisor = _divisor(op, group)
    check_type(tensor)
    flat = tensor.detach()
    dense = flat if flat.is_contiguous() else flat.contiguous()
    exchange = _exchange_of(dist.group.WORLD if group is None else group)
    future = exchange.submit(dense, Compression(codec, divisor, seed=seed))
    if dense is not flat:
        future = future.then(lambda done: flat.copy_(done.value()))
    work = QuantizedWork(future)
    if async_op:
        return work
    work.wait()
    return None


def check_type(tensor: Tensor) -> None:
    """Raise TypeError for a tensor whose numbers cannot be quantised."""
    if tensor.is_sparse or tensor.layout != torch.strided or tensor.dtype not in TYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided:
            kind = f"sparse {kind}"
        raise TypeError(
            f"only dense tensors of float32, float16 and bfloat16 are quantised, not {kind}: "
            "convert it, or use dist.all_reduce"
        )


def _format_of(bits: int, name: str | None, seed: int | None) -> str:
    if name is None:
        if bits not in USUAL:
            raise ValueError(f"bits is 8 or 16, not {bits}")
        name = USUAL[bits]
    codec_of(name)
    if bits != WIDTHS[name] and bits != 8:  # which may be the default
        raise ValueError(f"{name} has {WIDTHS[name]} bits, not {bits}")
    if seed is not None and name not in BY_CHANCE:
        raise ValueError(f"{name} is rounded to the nearest: leave the seed out")
    return name


def _divisor(op: Any, group: Any) -> int:
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.AVG:
        return dist.get_world_size(group)
    raise ValueError(f"quantized_all_reduce can compute SUM and AVG, not {op}")


def _exchange_of(group: Any) -> Exchange:
    exchange = _exchanges.get(group)
    if exchange is None:
        exchange = _exchanges[group] = Exchange(group)
    return exchange
