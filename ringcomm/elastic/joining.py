"""How a program enters a world: `join`, the first call of an elastic training."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any, Literal

from ringcomm._runtime.options import checked_timeout, configure
from ringcomm._runtime.registration import load_library
from ringcomm.elastic.entrance import Entrance
from ringcomm.elastic.epochs import Settings
from ringcomm.elastic.launcher import advice
from ringcomm.elastic.log import log
from ringcomm.elastic.store import open_store
from ringcomm.elastic.world import World


def join(
    store: str | Any | None = None,
    *,
    min_size: int = 1,
    start: int | None = None,
    max_size: int | None = None,
    dead_after: timedelta | None = None,
    witness: Literal["store", "none"] = "store",
    timeout: timedelta = timedelta(minutes=10),
    options: Any = None,
) -> World:
    """Enter the world of this run, and make the default process group.

    `store` is "host:port" or a torch.distributed store; None: that of RINGCOMM_ELASTIC, else of
    MASTER_ADDR and MASTER_PORT. Several addresses, with commas between them, are places where the
    store may be. The first `start` processes found the world (default: the larger of
    WORLD_SIZE and `min_size`). One that comes later has a group of its own until `World.track`
    admits it.

    Below `min_size` ranks the world waits for others, and ends after `timeout`. At `max_size` it
    admits nobody. A host that is silent for `dead_after` is suspected to be dead (default: the
    options' `resume_seconds`). `witness="none"` keeps the store out of agreements: then a world of
    two hosts stops when one of them is silent. `options` are those of the groups
    (ringcomm.Options): their timeout is how long an operation waits for a rank.

    Raises TimeoutError when the others do not come within `timeout`, RuntimeError where no store
    answers, ValueError for sizes that cannot be.
    """
    wanted = start or max(int(os.environ.get("WORLD_SIZE", "0")), min_size)
    if not 1 <= min_size <= wanted <= (max_size or wanted):
        raise ValueError(
            f"min_size={min_size}, start={wanted}, max_size={max_size}: they must be in this order"
        )
    mine = copy.copy(options) if options else load_library().Options()
    silence = dead_after or timedelta(seconds=mine.resume_seconds)
    if silence < timedelta(seconds=1):
        raise ValueError(f"dead_after={silence}: at least a second, hosts are silent for a moment")
    if witness not in ("store", "none"):
        raise ValueError(f'witness={witness!r}: "store" or "none"')
    timeout = checked_timeout(timeout)
    settings = Settings(
        timeout=(options._timeout if options else timedelta(minutes=10)).total_seconds(),
        patience=silence.total_seconds(),
        witness=witness == "store",
        options=mine,
    )
    if said := advice():
        log(said)
    job = os.environ.get("SLURM_JOB_ID", "run")
    run = os.environ.get("RINGCOMM_ELASTIC_RUN", job)
    if dead_after:
        mine.resume_seconds = min(int(silence.total_seconds()), 86_400)
    configure(mine, run=f"elastic/{run}/")
    keys = open_store(run, store)
    world = World(keys, settings, (min_size, wanted, max_size), timeout.total_seconds())
    world._entrance = Entrance(run, keys, settings, wanted, log)
    if entered := world._entrance.enter(timeout.total_seconds()):
        world._begin(entered)
    return world
