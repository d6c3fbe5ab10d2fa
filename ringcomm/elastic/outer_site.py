"""The ranks of a site: one, or a unit of the world, in which DDP keeps them equal.

All ranks of a unit have the same parameters, so each sends its share of a round to those at the
same place in other units, and they put the shares together afterwards: a round crosses the slow
link once for a site, not once for each of its ranks. After a change of the world, the ranks of a
unit tell one another where they are. If that differs, or one of them has just come, they begin
anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.compression.exchange import all_gather_single
from ringcomm.elastic import ddp
from ringcomm.elastic.shards import is_sharded


class Site:
    """A rank's place in its site. Without `groups` of units, a site is one rank."""

    def __init__(self, groups: Any, model: nn.Module) -> None:
        """Raise TypeError for a model that isn't held as `World.outer` wants it."""
        self._groups = groups
        self._wrappers = ddp.wrappers_in([model])
        self._came_with: tuple[Any, ...] = ()  # the world, and the unit there, at the last change
        if any(map(is_sharded, model.parameters())):
            raise TypeError(
                "the model is sharded, and rounds need it whole on each rank of a site: use DDP "
                'over world.mesh["shard"].get_group()'
            )
        if groups is None:
            if self._wrappers:
                raise TypeError(
                    "the model is in DDP, but inner steps are local: give the module itself, or "
                    "tell elastic.join(unit=...) how many ranks a site has"
                )
        elif [wrapper.process_group for wrapper in self._wrappers] != [groups.unit]:
            raise TypeError(
                "a site of several ranks trains by DDP over its own group: give world.outer a "
                'DDP(net, process_group=world.mesh["shard"].get_group(), init_sync=False)'
            )

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return 1 if self._groups is None else int(self._groups.size)

    @property
    def across(self) -> Any:
        """The group of those that get the same share of a round; None: all ranks of the world."""
        return None if self._groups is None else self._groups.replicas

    def share_of(self, moved: Tensor) -> Tensor:
        """Return what this rank sends of fp32[n]: its share, with zeros at the end of the last."""
        if self._groups is None:
            return moved
        length = -(-moved.numel() // self.size)
        padded = torch.nn.functional.pad(moved, (0, length * self.size - moved.numel()))
        return padded.view(self.size, length)[self._groups.place].clone()

    def whole(self, share: Tensor, count: int) -> Tensor:
        """Return fp32[count] of the shares of all ranks of the site."""
        return share if self._groups is None else self._told(share)[:count]

    def give_first(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks of the site what its first one has."""
        if self._groups is not None:
            first = dist.get_global_rank(self._groups.unit, 0)
            for tensor in tensors:
                dist.broadcast(tensor.detach(), first, group=self._groups.unit)

    def changed(self, world: Any, position: tuple[int, int]) -> bool:
        """Go on after a change of the world; returns whether the site has to begin anew.

        `position` is equal on the ranks of a site that may go on. One that came just now, or that
        has another unit, is nowhere. Raises DistBackendError if one of them is lost meanwhile.
        """
        if self._groups is None:
            return False
        changes = world._at
        came_with = (changes, changes.epochs.me.unit)
        if came_with != self._came_with:
            position = (-1 - self._groups.place, 0)
        for wrapper in self._wrappers:
            ddp.regroup(wrapper, self._groups.unit, rebuild=True)
        told = self._told(torch.tensor(position)).view(-1, 2)
        self._came_with = came_with
        return bool((told != told[0]).any())

    def begin(self, world: Any) -> None:
        """Note that this rank is with its mates from now on."""
        self._came_with = (world._at, world._at.epochs.me.unit)

    def _told(self, mine: Tensor) -> Tensor:
        every = mine.new_empty(self.size * mine.numel())
        all_gather_single(every, mine, group=self._groups.unit)
        return every
