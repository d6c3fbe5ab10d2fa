"""Units: the ranks that hold one copy of a sharded model together.

A world may stand in units of S ranks. The rank at place c of its unit holds shard c, and so do the
ranks at that place in all other units: they are its replicas. When a rank dies, its unit is broken,
and its mates go on only with others that hold what it held. All of this is computed from the list
of members alone, which is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringcomm.elastic.process import Process

MOST = 8  # ranks of a unit: they come as the guests of one epoch


def check(unit: int, least: int, start: int, most: int | None) -> None:
    """Raise ValueError for a world's sizes that are no multiples of its unit."""
    if not 1 <= unit <= MOST:
        raise ValueError(f"unit={unit}: from 1 to {MOST} ranks hold a copy of the model together")
    for name, size in (("min_size", least), ("start", start), ("max_size", most)):
        if size is not None and size % unit and not (name == "min_size" and size == 1):
            raise ValueError(f"{name}={size} is no multiple of unit={unit}: count whole units")


def in_units(processes: Sequence[Process], unit: int) -> tuple[Process, ...]:
    """Return the founders of a world in units, those of a host together where that goes."""
    if unit == 1:
        return tuple(processes)
    hosts = list(dict.fromkeys(process.host for process in processes))
    near = sorted(processes, key=lambda process: hosts.index(process.host))
    return tuple(
        replace(process, unit=near[index // unit * unit].uuid, place=index % unit)
        for index, process in enumerate(near)
    )


def arrange(
    members: Sequence[Process], unit: int
) -> tuple[tuple[Process, ...], tuple[Process, ...]]:
    """Return the members that stand in whole units, in their order, and those that don't.

    Whole units stay as they are. From what is left of broken ones, new units are made, as many as
    there are holders of each shard.
    """
    if unit == 1:
        return tuple(members), ()
    mates: dict[str, list[Process]] = {}
    for process in members:
        mates.setdefault(process.unit, []).append(process)
    left = [process for unit_ in mates.values() if len(unit_) < unit for process in unit_]
    moved = {process.uuid: process for process in _complete(left, unit)}
    spare = {process.uuid for process in left} - set(moved)
    stay = tuple(moved.get(p.uuid, p) for p in members if p.uuid not in spare)
    return stay, tuple(process for process in members if process.uuid in spare)


def are_broken(members: Sequence[Process], unit: int) -> bool:
    """Tell whether no unit of a world is whole, so that all of its members wait for others."""
    return bool(members) and not arrange(members, unit)[0]


def complete(
    came: Sequence[Process], unit: int, most: int, members: Sequence[Process] = ()
) -> list[Process]:
    """Return those that came and make whole units, at most so many ranks, unit by unit.

    If no unit of the members is whole, those alone that complete one with the members.
    """
    if unit == 1:
        return list(came)[:most]
    ready = [process for process in came if process.ready]
    if not are_broken(members, unit):
        return _complete(ready, unit)[: most // unit * unit]
    inside = {process.uuid for process in members}
    made = _complete([*members, *ready], unit)[:unit]
    return [process for process in made if process.uuid not in inside][:most]


def _complete(some: Sequence[Process], unit: int) -> list[Process]:
    by_place = _by_place(some, unit)
    return [
        replace(process, unit=mates[0].uuid)
        for mates in zip(*by_place, strict=False)
        for process in mates
    ]


def _by_place(some: Sequence[Process], unit: int) -> list[list[Process]]:
    return [[process for process in some if process.place == place] for place in range(unit)]


def place_for(others: Sequence[Process], unit: int) -> int:
    """Return the place of a newcomer: the one that the fewest of the others that wait have."""
    counts = [len(some) for some in _by_place(others, unit)]
    return counts.index(min(counts))


def are_complete(some: Sequence[Process], unit: int) -> bool:
    """Tell whether each place has as many holders as any other: none is missing."""
    return len(set(map(len, _by_place(some, unit)))) == 1


def holders(mates: Sequence[Process]) -> list[int]:
    """Return, by places of a unit, the place of the mate that holds the copy of each shard.

    Each holds one copy, never of its own shard, and on another host wherever that goes.
    """
    hosts = [process.host for process in mates]
    near = sorted(range(len(mates)), key=lambda place: (hosts.index(hosts[place]), place))
    largest = max(map(hosts.count, hosts))
    shift = largest if largest < len(mates) else 1  # so the next host's, if it is large enough
    result = [0] * len(mates)
    for index, place in enumerate(near):
        result[place] = near[(index + shift) % len(mates)]
    return result


def mates_of(me: Process, members: Sequence[Process]) -> list[int]:
    """Return the ranks of a member's unit, by their places."""
    ranks = [rank for rank, process in enumerate(members) if process.unit == me.unit]
    return sorted(ranks, key=lambda rank: members[rank].place)


def replicas_of(me: Process, members: Sequence[Process]) -> list[int]:
    """Return the ranks that hold the same shard as a member, itself included."""
    return [rank for rank, process in enumerate(members) if process.place == me.place]
