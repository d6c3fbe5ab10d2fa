"""The process groups of units, and the device mesh over them.

The group of a unit is one object for as long as its process lives: meshes, DTensors and FSDP
modules hold it. A change of the world gives it other processes in place, by the backend's
`_reconfigure`. The group of this rank's replicas has another size after a change, so each epoch
makes it anew, and the mesh finds it under its old name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm._runtime.backend import backend_of
from ringcomm.elastic import group_tables, units
from ringcomm.elastic.kept_groups import Meeting
from ringcomm.elastic.process import Process

NAMES = ("replicate", "shard")  # of the mesh's dimensions, as HSDP has them


class UnitGroups:
    """The groups of one process: `unit`, `replicas`, and the `mesh` of both."""

    def __init__(self, size: int, options: Any, device_type: str) -> None:
        """Make none yet: `begin` does, once there is a default group."""
        self.size = size
        self._options = copy.copy(options)
        self._options.enable_reconfigure = True  # they are connected by `connect` alone
        self._device_type = device_type
        self.unit: Any = None
        self.replicas: Any = None
        self.mesh: Any = None
        self.place = -1
        self._number = -1  # of the epoch in which they are connected
        self._row: tuple[Any, ...] = ()  # of torch's tables, while the unit's group is out of them

    def stay_apart(self, place: int) -> None:
        """Make a default group of a unit's size that takes no calls, with this rank at `place`."""
        dist.init_process_group(
            "ringcomm",
            store=dist.HashStore(),
            rank=place,
            world_size=self.size,
            pg_options=copy.copy(self._options),
        )
        if self.unit is None:
            self._begin(range(self.size), [place])

    def begin(self, me: Process, members: Sequence[Process]) -> None:
        """Make the groups and the mesh of a world's founders, not connected yet.

        So they take no calls before `track`, as those of one that joins later.
        """
        if self.unit is None:
            self._begin(units.mates_of(me, members), units.replicas_of(me, members))

    def _begin(self, mates: Sequence[int], replicas: Sequence[int]) -> None:
        self.unit, self.replicas = self._group(mates), self._group(replicas)
        self.place = list(mates).index(dist.get_rank())
        ranks = torch.arange(dist.get_world_size()).view(-1, self.size)
        self.mesh = DeviceMesh.from_group(
            [self.replicas, self.unit], self._device_type, ranks, mesh_dim_names=NAMES
        )

    def _group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(
            list(ranks),
            pg_options=copy.copy(self._options),
            use_local_synchronization=True,
            sort_ranks=False,
        )

    def connect(
        self, number: int, me: Process, members: Sequence[Process], meeting: Meeting
    ) -> None:
        """Connect the groups for the present epoch, whose members have the default group.

        `number` is new to each epoch of this process. Raises what the making of a group raises.
        """
        if number == self._number:
            return
        mates, replicas = units.mates_of(me, members), units.replicas_of(me, members)
        if not group_tables.is_in(self.unit):
            group_tables.put_in(self.unit, self._row, mates)
        self._renew_replicas(replicas)
        for group, ranks in ((self.unit, mates), (self.replicas, replicas)):
            meeting.connect(backend_of(group), number, ranks)
        self._number = number

    def _renew_replicas(self, ranks: Sequence[int]) -> None:
        """Make the group of the replicas, and have the mesh find it in the place of the last."""
        name = self.mesh._dim_group_names[0]
        self.replicas = self._group(ranks)
        self.mesh._pg_registry[name] = self.replicas
        group_tables.register(name, self.replicas)

    def take_out(self) -> None:
        """Take the unit's group out of torch's tables: the default group is about to go."""
        if self.unit is not None and group_tables.is_in(self.unit):
            self._row = group_tables.take_out(self.unit)
