"""What started this process, and whether it lets the others live when one rank dies."""

from __future__ import annotations

import os
from collections.abc import Mapping


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
