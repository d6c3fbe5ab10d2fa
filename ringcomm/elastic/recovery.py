"""How the last unit goes on after a death in it: all go back to the newest step that is held whole.

Each shard of that step is in the memory of its own rank, or of the one that holds its copy, or it
is a checkpoint. Only then can a process that came in the place of a dead one train.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from ringcomm.elastic import transfer, units
from ringcomm.elastic.changes import Changes
from ringcomm.elastic.checkpoint import Checkpoints
from ringcomm.elastic.copies import room_for, shard_of
from ringcomm.elastic.gathering import tell
from ringcomm.elastic.newest import NONE, Found, search
from ringcomm.elastic.saving import Disk, Saving
from ringcomm.elastic.stats import LEFT


def step_in_memory(changes: Changes) -> int:
    """Return the newest step that members can go back to once others have come; NONE: to none.

    All members call it. Raises what the group raises.
    """
    epochs = changes.epochs
    return search([changes.copies], epochs.places, epochs.unit_size).step


def restore(changes: Changes, saving: Saving | None) -> int | None:
    """Go back to the newest step, all ranks of a unit that is whole again; return it, or NONE.

    None: it is whole no more. The shards then have new copies. Raises what the group raises, and
    ValueError where a process that came tracks something else.
    """
    epochs, tracked, copies = changes.epochs, changes.tracked, changes.copies
    if epochs.is_broken:
        return None
    assert tracked is not None
    saving = _with_folder(changes, saving)
    if saving is not None:
        saving.checkpoints.secure()  # it may still read what is changed below
    disk = saving.disk() if saving is not None else None
    answer = search([copies, *([disk] if disk else [])], epochs.places, epochs.unit_size)
    if answer.step == NONE:
        return NONE
    _hand_over(changes, answer)
    counters, before = changes.counters, changes.counters.steps
    commits = counters.commits
    shard = copies.shard(epochs.me.shard, answer.step)
    if shard is not None:
        shard.load(tracked)
        copies.go_back(answer.step, shard)
    elif saving is not None and disk is not None:
        saving.take(disk)
    counters.load_state_dict(json.loads(tell(json.dumps(counters.state_dict()))[0]))
    counters.commits, changes.redoes = commits, False
    counters.returns += 1
    tracked.forget_undo(free=True)
    copies.is_cut = True  # so that the copy is whole when this has ended
    copies.make(answer.step, tracked, units.holders(epochs.members_by_place), counters.history)
    changes.deal()  # after the copy, of which some rank may have the one before it: they are equal
    changes.history.steps_lost += max(0, before - answer.step)
    changes.history.restored = tell(_sentence(changes, answer, disk))[0]
    return answer.step


def _with_folder(changes: Changes, saving: Saving | None) -> Saving | None:
    """Return this rank's checkpoints; one that came just now looks where the others have theirs."""
    told = tell(str(saving.checkpoints.directory.parent) if saving is not None else "")
    parent = next(filter(None, told), "")
    if saving is not None or not parent:
        return saving
    me, size = changes.epochs.me, changes.epochs.unit_size
    folder = Path(parent) / folder_of(me.shard, size)
    return Saving("", Checkpoints(folder, every=1), changes)


def folder_of(place: int, size: int) -> str:
    """Return the name of the folder with the checkpoints of a shard."""
    return f"shard-{place}-of-{size}"


def _hand_over(changes: Changes, answer: Found) -> None:
    """Give each shard that lies in another rank's memory to the rank whose it is."""
    epochs, copies = changes.epochs, changes.copies
    for place, giver in enumerate(answer.givers):
        rank = epochs.places.index(place)
        if giver == rank:
            continue
        if epochs.rank == giver:
            shard = copies.shard(place, answer.step)
            assert shard is not None
            transfer.send(shard.packed(), dist.group.WORLD, [giver], [rank])
        elif epochs.rank == rank:
            packed = transfer.receive(room_for, dist.group.WORLD, [giver])
            own = shard_of(place, answer.step, packed.header, packed.parts[0])
            copies.go_back(answer.step, own)


def _sentence(changes: Changes, answer: Found, disk: Disk | None) -> str:
    """Say what has happened and where training goes on. It is rank 0's words that count."""
    members, torn = changes.epochs.members, changes.torn_from
    here = {process.uuid for process in members}
    gone = [rank for rank, process in enumerate(torn) if process.uuid not in here]
    left = all(changes.gone.get(torn[rank].uuid) == LEFT for rank in gone)
    held = {giver for place, giver in enumerate(answer.givers) if members[giver].shard != place}
    where = "of which there is a checkpoint"
    if disk is None or disk.whole is None:
        where = f"which {_ranks(sorted(held))} held in memory" if held else "which they have"
    return (
        f"{_ranks(gone).capitalize()} {'left' if left else 'died'} and "
        f"{'its' if len(gone) == 1 else 'their'} unit was the last one; training goes on from step "
        f"{answer.step}, {where}."
    )


def _ranks(ranks: list[int]) -> str:
    most, last = ", ".join(map(str, ranks[:-1])), ranks[-1] if ranks else "?"
    return f"ranks {most} and {last}" if most else f"rank {last}"
