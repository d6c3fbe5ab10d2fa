"""What torch's symmetric memory reaches where it lets ranks share a device: information."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import gpu.table
from gpu.ranks import DeviceRanks, Entry, environment, meet, place_of
from gpu.speed import LARGE, MIB
from gpu.stages import Settings, of_a_rival
from gpu.table import Row
from lab import report
from lab.ranks import Rank


def symmetric_all_reduce(rank: Rank, name: str, size: int) -> float:
    """Return seconds of torch's own all_reduce; it spins in kernels, so slices of time decide."""
    import torch.distributed._symmetric_memory as symmetric

    place = place_of(rank)
    group: Any = dist.group.WORLD
    tensor = symmetric.empty(size // 4, dtype=torch.float32, device=place.device)
    symmetric.rendezvous(tensor, group)
    function = getattr(torch.ops.symm_mem, name)
    tensor.fill_(rank.index + 1)
    function(tensor, "sum", group.group_name)
    torch.cuda.synchronize()
    assert tensor.eq(rank.size * (rank.size + 1) // 2).all(), "a wrong sum"
    times = []
    for _ in range(3):
        meet(rank)
        times.append(place.seconds(lambda: function(tensor, "sum", group.group_name)))
    return statistics.median(times)


def symmetric(settings: Settings, size: int) -> Iterator[Row]:
    """Measure it where torch lets ranks share a device; whether it does is no target of ours."""
    if settings.simulated:
        yield gpu.table.info("torch symmetric memory", note="not run: it needs a GPU")
        return
    with environment(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1"):
        for length in (MIB, LARGE):
            what = f"{size} ranks: two_shot_all_reduce_ {report.show_size(length)}"
            yield from of_a_rival(what, functools.partial(_measured, what, size, length, settings))


def _measured(what: str, size: int, length: int, settings: Settings) -> Iterator[Row]:
    with DeviceRanks(size, Entry(settings.kind), "gloo", fresh=True) as ranks:
        times = ranks(symmetric_all_reduce, "two_shot_all_reduce_", length, seconds=15)
    yield gpu.table.info(what, 1e6 * max(times), "µs", "it spins in kernels")
