"""What started this process, and whether it lets the others live when one rank dies."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def advice(env: Mapping[str, str] = os.environ) -> str:
    """Return what to say of the launcher that `env` shows; "" where nothing is to be said."""
    if "TORCHELASTIC_RUN_ID" in env and int(env.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return (
            f"torchrun started {env['LOCAL_WORLD_SIZE']} workers here and stops them all when one "
            "dies: start one torchrun for each unit that may fail (docs/elastic.md)"
        )
    if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 or int(env.get("PMI_SIZE", "1")) > 1:
        return (
            "mpirun stops all ranks when one dies: start them with srun --no-kill, or without a "
            "launcher (docs/elastic.md)"
        )
    if env.get("SLURM_KILL_BAD_EXIT") == "1":
        return (
            "srun stops all ranks when one dies, as SLURM_KILL_BAD_EXIT=1 says: use "
            "--kill-on-bad-exit=0 --no-kill (docs/elastic.md)"
        )
    return ""


def own_device() -> torch.device:
    """Choose a GPU by the place of this process on its host; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    device = int(place) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return torch.device("cuda", device)
