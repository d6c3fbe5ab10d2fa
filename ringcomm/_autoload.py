"""Registers the backend with torch, and loads the library when a group first asks for it.

torch calls `register` at the end of its own import, in every program on the machine: it must be
quick, may be called any number of times, and may never raise. Hence torch is imported inside the
functions, and the library not at all before a process group is made.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

NAME = "ringcomm"
# Read at run time (csrc/base/config.cc), or when ringcomm is built and tested.
VARIABLES = [
    f"RINGCOMM_{name}"
    for name in (
        *("ALGORITHM", "COSTS", "CUDA", "CUDA_ARCHS", "CUDA_LIBRARY", "CUDA_MEMORY", "CUDA_MODE"),
        *("FLOWS", "IFNAME", "LOG", "PORTS", "RESUME_SECONDS", "SANITIZE", "SECRET"),
        *("SECRET_FILE", "SPIN_US", "TEST_LEVEL", "TRANSPORT", "WERROR"),
    )
]


def register() -> None:
    """Make the name "ringcomm" known to torch.distributed. Warns, and never raises."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
            return
        # A list: torch up to 2.13 takes a string for a sequence of one-letter devices.
        dist.Backend.register_backend(
            NAME, create_backend, extended_api=True, devices=["cpu", "cuda"]
        )
        if minor(torch.__version__) in {"2.11", "2.12", "2.13"}:
            _give_mixed_groups_a_default_backend()
    except Exception as error:  # noqa: BLE001  raising would break `import torch` for everybody
        warnings.warn(f"ringcomm could not register itself: {error!r}", stacklevel=2)


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of one process group; torch calls it on every rank.

    Raises what `load_library` raises, and ValueError when `backend_options` are not
    `ringcomm.Options`. It waits for the group's other ranks, at most `options.timeout`.
    """
    library = load_library()
    warn_of_unknown_variables()
    return library.create_backend(options, backend_options)


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
    return importlib.import_module("ringcomm._C")


def minor(version: str) -> str:
    """Return the first two numbers of a version: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def _give_mixed_groups_a_default_backend() -> None:
    """Complete groups that name a backend per device, such as "cpu:ringcomm,cuda:ringcomm".

    torch up to 2.13 looks for the plug-in's upper-case name among lower-case ones, does not find
    it, and leaves such a group without a default backend: its name is "undefined" and its hooks
    raise. The group is otherwise sound, so the default is set once it has been made. It does so to
    "cpu:gloo,cuda:gloo" too as soon as one plug-in exists: where that is us, we put it right.
    """
    from torch.distributed import distributed_c10d as c10d

    helper: Callable[..., Any] = c10d._new_process_group_helper
    if getattr(helper, "completed_by", None) == NAME:
        return

    @functools.wraps(helper)
    def make_and_complete(*args: Any, **kwargs: Any) -> Any:
        group, store = helper(*args, **kwargs)
        ours = _serves(group)
        if not ours and list(c10d.Backend._plugins) != [NAME.upper()]:
            return group, store
        if isinstance(group, c10d.ProcessGroup) and group._get_backend_name() == "undefined":
            kinds = c10d.ProcessGroup.BackendType
            group._set_default_backend(kinds.CUSTOM if ours else kinds.GLOO)
        return group, store

    make_and_complete.completed_by = NAME  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make_and_complete


def _serves(group: Any) -> bool:
    """Whether one of the backends of `group` is ours."""
    from torch.distributed import distributed_c10d as c10d

    config = c10d._world.pg_backend_config.get(group, "")  # "cpu:gloo,cuda:ringcomm"
    return any(entry.rpartition(":")[2] == NAME for entry in str(config).split(","))
