"""Algorithms by hand in tests: the examples, and the ways of a rank's tensors."""

from __future__ import annotations

import os

from lab import ROOT
from lab.simulated_device import SIMULATED
from ringcomm.algorithms import Algorithm
from ringcomm.tools.plan.source import load

EXAMPLES = ROOT / "examples" / "algorithms"
WAYS = ("auto", "tcp", "device")


def example(name: str, function: str = "") -> Algorithm:
    return load(f"{EXAMPLES / name}.py:{function or name}")


def go(way: str) -> None:
    """Let this rank's tensors go over TCP, or stand in for those of the simulated device."""
    if way == "device":
        os.environ["RINGCOMM_CUDA_LIBRARY"] = str(SIMULATED)
    else:
        os.environ["RINGCOMM_TRANSPORT"] = way
