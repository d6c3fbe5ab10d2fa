"""Loads the compiled library, which happens when a group first asks for it."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ringcomm._runtime.exit import close_groups_with

if TYPE_CHECKING:
    from types import ModuleType

load_recorder: Any = None  # returns ringcomm._flight.recorder, above: ringcomm/__init__.py sets it


def load_library() -> ModuleType:
    """Return the compiled library, loading it the first time.

    Raises ImportError when it is not built, or built for another Python or another minor version
    of torch. torch's C++ classes change between minor versions, so the wrong one would not fail to
    load: it would crash later. That is why this is compared first.
    """
    import torch

    try:
        built = importlib.import_module("ringcomm._build_info")
    except ModuleNotFoundError as error:
        raise ImportError(
            "ringcomm is not built: run `pip install --no-build-isolation .` in its folder"
        ) from error
    for what, then, now in (
        ("torch", built.torch, torch.__version__),
        ("Python", built.python, sys.version),
    ):
        if minor(then) != minor(now):
            raise ImportError(
                f"ringcomm was built for {what} {minor(then)} but {what} {minor(now)} is running: "
                "rebuild it with "
                "`pip install --no-build-isolation --force-reinstall --no-deps .`"
            )
    library = importlib.import_module("ringcomm._C")
    complete(library.Backend)
    # The recorder is loaded now, while there are descriptors for that.
    recorder = load_recorder()
    close_groups_with(library, recorder.end, recorder.await_torch)
    return library


def complete(backend: Any) -> None:
    """Give the class those methods of torch's own backends that are easier said in Python."""
    backend.flight_record = flight_record
    backend._is_initialized = lambda self: True
    # Ranks outside a split need to do nothing.
    backend.perform_nocolor_split = lambda self, device: None
    pools = importlib.import_module("ringcomm._runtime.pools")
    backend.register_mem_pool = pools.register_mem_pool
    backend.deregister_mem_pool = pools.deregister_mem_pool
    backend.register_tensors = pools.register_tensors
    backend.deregister_tensors = pools.deregister_tensors


def flight_record(backend: Any) -> list[dict[str, Any]]:
    """Return the last operations of a group; `_C.pyi` says what of each."""
    operations: list[dict[str, Any]] = load_recorder().last_operations(backend._flight_rings())
    return operations


def minor(version: str) -> str:
    """Return the first two numbers of a version: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])
