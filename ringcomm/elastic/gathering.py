"""The operations by which the ranks of a world tell one another of themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# The calling thread does it, and no other one is woken.
AT_ONCE = dist.distributed_c10d.AllgatherOptions()
AT_ONCE.asyncOp = False


def gather(every: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
    # Not through torch.distributed's function: its name changes, and it costs as much as the vote.
    group = group or dist.distributed_c10d._get_default_group()
    if work := group._allgather_base(every, own, AT_ONCE):
        work.wait()


def tell(mine: str) -> list[str]:
    """Tell all ranks; returns what each says."""
    data = mine.encode()
    lengths = torch.empty(dist.get_world_size(), dtype=torch.int64)
    gather(lengths, torch.tensor([len(data)]))
    room = int(lengths.max()) + 1  # never none
    every = torch.empty(len(lengths) * room, dtype=torch.uint8)
    gather(every, torch.frombuffer(bytearray(data.ljust(room, b"\0")), dtype=torch.uint8))
    rows = zip(every.view(-1, room), lengths.tolist(), strict=True)
    return [bytes(row[:length].tolist()).decode(errors="replace") for row, length in rows]
