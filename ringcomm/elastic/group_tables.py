"""torch's tables of process groups, for groups that outlive the default one.

torch forgets all groups when the default one is destroyed. So a group is taken out of the tables
before, and put back with the ranks that it has then. These tables, and how torch names groups, are
all that the groups of elastic worlds know of torch's privates.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_DEFAULT_TAG = "ptd:"  # how torch's tag of a group begins to which the program gave none

Row = tuple[Any, ...]


def groups() -> list[Any]:
    """Return the groups that torch knows, but for the default one."""
    return [group for group in c10d._world.pg_map if group is not dist.group.WORLD]


def is_in(group: Any) -> bool:
    return group in c10d._world.pg_map


def name_of(group: Any) -> str:
    return str(c10d._world.pg_names[group])


def ranks_of(group: Any) -> list[int]:
    """Return the ranks of a group in the default one, in the group's order."""
    return list(c10d._world.pg_group_ranks[group])


def _by_group() -> Row:
    world = c10d._world
    return world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag


def take_out(group: Any) -> Row:
    """Take a group out, before the default group is destroyed; returns what `put_in` needs.

    Nothing of torch refers to the group any more when that has happened.
    """
    c10d._world.pg_group_ranks.pop(group)
    return tuple(table.pop(group) for table in _by_group())


def put_in(group: Any, row: Row, ranks: Sequence[int]) -> None:
    """Put a group back, over these ranks of the present default group, in the group's order."""
    for table, value in zip(_by_group(), row, strict=True):
        table[group] = value
    tag = str(row[-1])
    for name in {tag, "" if tag.startswith(_DEFAULT_TAG) else tag}:
        c10d._world.tags_to_pg.setdefault(name, []).append(group)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    register(group.group_name, group)
    if not hasattr(dist, "_reconfigure"):  # from torch 2.14 on a group asks its backend
        _say_new_size(group, ranks.index(dist.get_rank()), len(ranks))


def register(name: str, group: Any) -> None:
    """Have torch's operators, which know groups by name, find this one."""
    library = torch._C._distributed_c10d
    library._unregister_process_group(name)
    library._register_process_group(name, group)


# ---- a group that has another size than when it was made

_places: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def _say_new_size(group: Any, rank: int, size: int) -> None:
    """Have a group's `rank()` and `size()` return these: torch's own never change."""
    _places[group] = {"rank": rank, "size": size}
    for name in ("rank", "size"):
        theirs = getattr(dist.ProcessGroup, name)
        if not hasattr(theirs, "__wrapped__"):
            setattr(dist.ProcessGroup, name, _asking(name, theirs))


def _asking(name: str, theirs: Any) -> Any:
    @functools.wraps(theirs)
    def ask(group: Any) -> int:
        place = _places.get(group)
        return place[name] if place else theirs(group)

    return ask


# ---- the names of groups


def count_names_from(first: int, epoch: int) -> None:
    """Have torch name groups alike on all ranks in this epoch: some of them have had more groups.

    torch numbers groups by how many it has made, and those that only their own ranks make by how
    many it has. The latter are counted here, each time anew for an epoch and for the same ranks.
    """
    c10d._world.group_count = first
    made: Counter[tuple[int, ...]] = Counter()

    def name(ranks: Sequence[int]) -> str:
        made[tuple(ranks)] += 1
        words = f"{epoch} {list(ranks)} {made[tuple(ranks)]}"
        return hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()

    c10d._hash_ranks_to_str = name


def first_free_number(names: Iterable[str]) -> int:
    """Return the number from which on no group has one of these names, or is known to torch."""
    every = [*names, *map(str, c10d._world.pg_names.values())]
    return max([int(name) for name in every if name.isdecimal()], default=0) + 1
