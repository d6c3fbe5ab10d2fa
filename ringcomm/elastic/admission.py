"""How a world admits guests: it says who they are, welcomes them, and gives them the state."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist

from ringcomm.elastic import transfer
from ringcomm.elastic.ballot import Ballot, vote
from ringcomm.elastic.errors import Evicted
from ringcomm.elastic.lobby import Lobby, Process
from ringcomm.elastic.store import within

if TYPE_CHECKING:
    from ringcomm.elastic.changes import Changes


def describe(changes: Changes, guests: list[Process]) -> list[Process]:
    """Write down who the guests are, for the other members; none where the store is gone."""

    def write() -> None:
        for guest in guests:
            changes.epochs.store.set(f"guest/{guest.uuid}", json.dumps(asdict(guest)))

    try:
        within(write)
    except dist.DistStoreError:
        return []
    return guests


def welcome(changes: Changes) -> None:
    epochs, keys = changes.epochs, changes.epochs.home.keys
    lobby = Lobby(keys, epochs.me)
    record, new = lobby.record(), epochs.record()
    if record is None or record.life != new.life or not lobby.replace(record, new):
        raise Evicted(
            "another world was founded in the place of this one, whose members were all taken "
            "for dead: this rank must not go on"
        )
    text = epochs.welcome().to_text()
    for guest in epochs.guests:
        keys.set(f"welcome/{guest.uuid}", text)


def give(changes: Changes) -> None:
    """Give the state to the guests. When all have it, they become members."""
    assert changes.tracked is not None
    epochs, began = changes.epochs, time.monotonic()
    givers = list(range(len(epochs.members)))
    joiners = list(range(len(givers), len(epochs.all)))
    try:
        state = changes.tracked.pack()
    except (TypeError, ValueError) as error:
        changes.closed = True
        changes.log(f"no rank can join any more, because the state cannot be sent: {error}")
        changes.meet()
        return
    sent = transfer.send(state, dist.group.WORLD, givers, joiners)
    vote(Ballot(epochs.epoch, changes.counters.commits), len(epochs.all))
    changes.numbers["sent_mb"] = changes.numbers.get("sent_mb", 0.0) + sent / 1e6
    changes.numbers["give_ms"] = (time.monotonic() - began) * 1e3
    changes.meet(" ".join("+" + guest.uuid for guest in epochs.guests))


def share(changes: Changes) -> None:
    """Give rank 0's state to all others, before anything was trained."""
    assert changes.tracked is not None
    others = list(range(1, len(changes.epochs.members)))
    if changes.epochs.rank == 0 and others:
        transfer.send(changes.tracked.pack(), dist.group.WORLD, [0], others)
    elif others:
        transfer.receive(changes.tracked.unpack, dist.group.WORLD, [0])
        commits = changes.counters.commits
        changes.tracked.finish()
        changes.counters.commits = commits


def take(changes: Changes) -> None:
    """As a guest: take the state, and become a member. Raises RuntimeError if that fails."""
    assert changes.tracked is not None
    epochs = changes.epochs
    givers = list(range(len(epochs.members)))
    changes.before, changes.since = epochs.members, time.monotonic()
    try:
        transfer.receive(changes.tracked.unpack, dist.group.WORLD, givers)
        changes.tracked.finish()
        vote(Ballot(epochs.epoch, changes.counters.commits), len(epochs.all))
    except RuntimeError as error:
        changes.check_failure(error)
    changes.stale = True
    epochs.agree(changes.counters.commits, False, "", failed=False)
    joined = [process.uuid for process in epochs.members if process not in changes.before]
    changes.counters.sow(joined.index(epochs.me.uuid))
    changes.deal()
    changes.regroup()
