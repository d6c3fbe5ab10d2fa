"""How a program enters a world: `join`, the first call of an elastic training.

It looks at what started the process, too: some launchers stop all ranks when one dies.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringcomm._runtime.options import Options, configure
from ringcomm._runtime.process import say
from ringcomm.elastic import units
from ringcomm.elastic.entrance import Entrance
from ringcomm.elastic.epochs import Settings
from ringcomm.elastic.hang import Progress
from ringcomm.elastic.job import Job
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.store import open_store
from ringcomm.elastic.unit_groups import UnitGroups
from ringcomm.elastic.world import World
from ringcomm.options import checked_timeout

OLDEST = (2, 13)  # of torch for units: FSDPModule.reset_iter_state(), new_group(sort_ranks)
UNNAMED = "run"  # the name of a job that has none
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# The reasons for srun to stop live ranks: the variable, slurm.conf's default for it, and when.
SRUN_STOPS = (
    ("SLURM_KILL_BAD_EXIT", "KillOnBadExit", "when one dies"),
    ("SLURM_WAIT", "WaitTime", "so many seconds after the first one ends"),
)


def join(
    store: str | Any | None = None,
    *,
    min_size: int = 1,
    start: int | None = None,
    max_size: int | None = None,
    unit: int = 1,
    dead_after: timedelta | None = None,
    hung_after: timedelta | None = timedelta(seconds=30),
    lease: timedelta | None = timedelta(minutes=5),
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

    With `unit` S, S ranks hold a copy of a sharded model together: shard it over `World.mesh`. A
    unit that loses a rank goes out of the world until it is whole again, and sizes are multiples
    of S, 8 at most.

    Below `min_size` ranks the world waits for others, and ends after `timeout`. At `max_size` it
    admits nobody. A host that is silent for `dead_after` is suspected to be dead (default: the
    options' `resume_seconds`). A rank that made no progress in a step for `hung_after`, and for 20
    times as long as a step usually takes, while others waited for it, writes its stacks and ends
    itself; None: never. A world of which the store hears nothing for the time of `lease` is taken
    to be lost, and those that wait for so long, so with a longer `timeout`, found another one;
    None: never. One that comes when the world
    has come to its end, without enough others for a new one, ends by SystemExit(0).

    `witness="none"` keeps the store out of agreements: then a world of two hosts stops when one of
    them is silent. `options` are those of the groups (ringcomm.Options): their timeout is how long
    an operation waits for a rank.

    Raises TimeoutError when the others do not come within `timeout`, RuntimeError where no store
    answers, ValueError for sizes that cannot be, and where the store has no name for its jobs and
    another script's world runs there.
    """
    wanted = _founders(min_size, start, max_size)
    units.check(unit, min_size, wanted, max_size)
    progress, lapse = Progress.of(hung_after), Lapse.of(lease)
    settings, timeout = _settings(options, dead_after, witness), checked_timeout(timeout)
    if said := advice():
        say(f"elastic: {said}")
    run = os.environ.get("RINGCOMM_ELASTIC_RUN", os.environ.get("SLURM_JOB_ID", UNNAMED))
    configure(settings.options, run=f"elastic/{run}/")
    keys, device, seconds = open_store(run, store), own_device(), timeout.total_seconds()
    groups = _groups(unit, settings.options, device)
    job = Job.this() if run == UNNAMED else None
    entrance = Entrance(run, keys, settings, wanted, lapse, job, groups)
    world = World(keys, entrance, (min_size, max_size), seconds, device, progress, groups)
    if entered := entrance.enter(seconds):
        world._begin(entered)
    return world


def _groups(unit: int, options: Options, device: torch.device) -> UnitGroups | None:
    if unit == 1:
        return None
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(
            f"unit={unit}: units need torch 2.13 or newer, which can take up a sharded model after "
            f"a step that was cut short; this is torch {torch.__version__}"
        )
    if dist.get_debug_level() is dist.DebugLevel.DETAIL:
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes a Gloo group beside each of a unit's, which no "
            "change of ranks survives: set it to INFO"
        )
    return UnitGroups(unit, options, device.type)


def _settings(options: Any, dead_after: timedelta | None, witness: str) -> Settings:
    """Return the settings of a world's groups. The options are copied."""
    mine = copy.copy(options) if options else Options()
    silence = dead_after or timedelta(seconds=mine.resume_seconds)
    if silence < timedelta(seconds=1):
        raise ValueError(f"dead_after={silence}: at least a second, hosts are silent for a moment")
    if witness not in ("store", "none"):
        raise ValueError(f'witness={witness!r}: "store" or "none"')
    if dead_after:
        mine.resume_seconds = min(int(silence.total_seconds()), 86_400)
    return Settings(
        timeout=(options._timeout if options else timedelta(minutes=10)).total_seconds(),
        patience=silence.total_seconds(),
        options=mine,
        witness=witness == "store",
    )


def _founders(least: int, start: int | None, most: int | None) -> int:
    """Return how many processes found a world."""
    wanted = start or max(int(os.environ.get("WORLD_SIZE", "0")), least)
    if not 1 <= least <= wanted <= (most or wanted):
        raise ValueError(
            f"min_size={least}, start={wanted}, max_size={most}: they must be in this order"
        )
    return wanted


def advice(env: Mapping[str, str] = os.environ) -> str:
    """Return what to say of the launcher that `env` shows; "" where nothing is to be said."""
    if "TORCHELASTIC_RUN_ID" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        return (
            f"torchrun started {env['WORLD_SIZE']} workers and stops them all when one dies: start "
            "one torchrun --nnodes=1 for each unit that may fail (docs/elastic.md)"
        )
    by_srun = "SLURM_STEP_ID" in env and "PMI_JOBID" in env  # PMI of srun's own
    mpi_ranks = 1 if by_srun else int(env.get("PMI_SIZE", "1"))
    if max(mpi_ranks, int(env.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1:
        return (
            "mpirun stops all ranks when one dies: start them with srun --no-kill, or without a "
            "launcher (docs/elastic.md)"
        )
    return _of_srun(env) if "SLURM_STEP_ID" in env else ""


def _of_srun(env: Mapping[str, str]) -> str:
    """Read what srun's variables say, else the cluster's configuration. Options leave no trace."""
    for variable, setting, when in SRUN_STOPS:
        value, says = env.get(variable), f"{variable}={env.get(variable)}"
        if value is None:
            value = _configured(env.get("SLURM_CONF", "/etc/slurm/slurm.conf"), setting)
            says = f"the cluster's {setting}={value}"
        if value != "0":
            return (
                f"srun stops all ranks {when}, as {says} says: before srun --no-kill, export "
                f"{variable}=0 (docs/elastic.md)"
            )
    return ""


def _configured(path: str, setting: str) -> str:
    """Return a number of slurm.conf; "0", which is Slurm's default, where it cannot be read."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return "0"
    numbers = re.findall(rf"^\s*{setting}\s*=\s*(\d+)", text, re.MULTILINE | re.IGNORECASE)
    return numbers[-1] if numbers else "0"


def own_device() -> torch.device:
    """Choose a GPU by the place of this process on its host; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    device = int(place) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return torch.device("cuda", device)
