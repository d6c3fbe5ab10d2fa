"""Facts of a machine that a reader needs to compare figures."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Return what a reader needs to compare these figures with others."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ringcomm": _ringcomm_version(),
        "load_average_before": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _ringcomm_version() -> str | None:
    if not find_spec("ringcomm"):
        return None
    return str(importlib.import_module("ringcomm").__version__)


def gpus() -> list[str]:
    """Return the names of the GPUs here."""
    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
