"""Registers the backend with torch, and loads the library when a group first asks for it.

torch calls `register` at the end of its own import, in every program on the machine: it must be
quick, may be called any number of times, and may never raise. Hence torch is imported inside the
functions, and the library not at all before a process group is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ringcomm._exit import close_groups_with

if TYPE_CHECKING:
    from types import ModuleType

NAME = "ringcomm"
# Read at run time (csrc/base/config.cc, _groups.py), or when ringcomm is built and tested.
VARIABLES = [
    f"RINGCOMM_{name}"
    for name in (
        *("ALGORITHM", "AS", "COSTS", "CUDA", "CUDA_ARCHS", "CUDA_LIBRARY", "CUDA_MEMORY"),
        *("CUDA_MODE", "DEFAULT", "ELASTIC", "ELASTIC_RUN", "FLOWS", "IFNAME", "LOG", "PORTS"),
        *("RESUME_SECONDS",),
        *("SANITIZE", "SECRET", "SECRET_FILE", "SEED", "SPIN_US", "TEST_LEVEL", "TRANSPORT"),
        *("WERROR", "WHEEL"),
    )
]


def register() -> None:
    """Make the name "ringcomm" known to torch.distributed. Warns, and never raises."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
            return
        from ringcomm import _groups

        # A list: torch up to 2.13 takes a string for a sequence of one-letter devices.
        devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=devices)
        with contextlib.suppress(ValueError):  # told when the first group is made
            for device in _groups.default_devices():
                dist.Backend.default_device_backend_map[device] = NAME
        _groups.take_part(create_stand_in)
    except Exception as error:  # noqa: BLE001  raising would break `import torch` for everybody
        warnings.warn(f"ringcomm could not register itself: {error!r}", stacklevel=2)


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of one process group; torch calls it on every rank.

    Raises what `load_library` raises, and TypeError when `backend_options` are not
    `ringcomm.Options`; where the group has another backend too, they may be that one's. It waits
    for the group's other ranks, at most `options.timeout`.
    """
    from ringcomm import _groups

    library = load_library()
    if _groups.is_shared() and not isinstance(backend_options, library.Options):
        backend_options = None
    warn_of_unknown_variables()
    return library.create_backend(options, backend_options, _groups.serve_cuda())


def create_stand_in(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of a group that asked for Gloo; its options are those of other backends."""
    from ringcomm import _groups

    ours = backend_options if isinstance(backend_options, load_library().Options) else None
    backend = create_backend(options, ours)
    _groups.say_who_serves_gloo(options)
    return backend


@functools.cache
def warn_of_unknown_variables() -> None:
    """Say, once a process, which variables nobody reads: on stderr, as the library warns."""
    import difflib

    if os.environ.get("RINGCOMM_LOG") in ("error", "off"):
        return
    for name in os.environ:
        simulated = name.startswith("RINGCOMM_SIM_")  # tests/sim
        if name.startswith("RINGCOMM_") and name not in VARIABLES and not simulated:
            nearest = difflib.get_close_matches(name, VARIABLES, 1, 0)[0]
            sys.stderr.write(  # one call, so that lines of several ranks do not mix
                f"ringcomm WARNING: unknown environment variable {name} is ignored: "
                f"did you mean {nearest}?\n"
            )


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
    close_groups_with(library)
    return library


def minor(version: str) -> str:
    """Return the first two numbers of a version: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])
