"""What started this process, and whether it lets the others live when one rank dies."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# What makes srun stop the ranks that live: the variable, slurm.conf's default for it, and when.
SRUN_STOPS = (
    ("SLURM_KILL_BAD_EXIT", "KillOnBadExit", "when one dies"),
    ("SLURM_WAIT", "WaitTime", "so many seconds after the first one ends"),
)


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
    found = re.findall(rf"^\s*{setting}\s*=\s*(\d+)", text, re.MULTILINE | re.IGNORECASE)
    return found[-1] if found else "0"


def own_device() -> torch.device:
    """Choose a GPU by the place of this process on its host; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    device = int(place) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return torch.device("cuda", device)
