"""Tensors that the other ranks of the host can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ringcomm._runtime import library

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor on the CPU that the other ranks of this host can read.

    Collectives of 1 MiB and more between ranks of one host then read it where it lies, instead of
    copying it in and out. Allocate what you send again and again this way, on every rank: an
    `all_reduce` needs all ranks' tensors there, a `broadcast` only the root's. Results have the
    same bits as those of other tensors. DDP and FSDP2 ask for such tensors by themselves.

    `size` and `dtype` are as for `torch.empty`. Without room for it, or where processes can't
    share memory, this is `torch.empty`. The memory belongs to the process: the tensor outlives its
    groups, and serves all of them. A forked child gets a copy that is its own from its first
    write on. `share_memory_()` moves the tensor elsewhere, and such a tensor can't be resized.
    """
    sizes = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    return library.load_library().empty(list(sizes), dtype or torch.get_default_dtype())
