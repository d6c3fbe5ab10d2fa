"""Kernels of ranks that have a device each, as streams of one process: gpu_kernels.cc's rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gpu.table
from gpu.build import CUDA_LIBRARY, run_probe
from gpu.stages import ROOT, Settings
from gpu.table import Row

PROGRAM = "gpu_kernels"  # tests/cpp/device/gpu_kernels.cc


def program_of(settings: Settings) -> Path:
    """Return where it is: beside the probe that was brought, else where the tests are built."""
    folder = Path(settings.probe).parent if settings.probe else ROOT / "build" / "tests"
    return folder / PROGRAM


def library_of(settings: Settings) -> Path:
    if settings.simulated:
        return Path(settings.library)
    import ringcomm

    return Path(ringcomm.__file__).parent / CUDA_LIBRARY


def kernels(settings: Settings, size: int) -> Iterator[Row]:
    """Check random operations bit by bit, and time all_reduce by each kernel."""
    program = program_of(settings)
    if not program.exists():
        note = f"there is no {program}: scripts/build.sh tests, or gpu_pack.sh, makes it"
        yield gpu.table.info("gpu_kernels", note=f"not run: {note}")
        return
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # each rank's stream has its own
    operations = settings.pick(20_000, 2_000, 80)
    yield from run_probe(program, library_of(settings), size, operations)
