"""The states of the generators that a process draws from, as plain data that another can load."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def take() -> dict[str, Any]:
    """Return the states of torch's generators, Python's, and NumPy's if the program uses it."""
    numpy = sys.modules.get("numpy.random")
    kept = numpy.get_state(legacy=False) if numpy else None
    if kept is not None and "key" in kept["state"]:
        kept = {**kept, "state": {**kept["state"], "key": kept["state"]["key"].tolist()}}
    return {
        "torch": _bytes(torch.default_generator.get_state()),
        "device": _bytes(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": kept,
    }


def put(states: dict[str, Any]) -> None:
    """Have this process draw from now on as the one in which `take` was called."""
    torch.default_generator.set_state(_tensor(states["torch"]))
    if states["device"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(states["device"]))
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy.random")
    if numpy and states["numpy"] is not None:
        numpy.set_state(states["numpy"])


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
