"""Registers the backend with torch, and loads the library when a group first asks for it.

torch calls `register` at the end of its own import, in every program on the machine: it must be
quick, may be called any number of times, and may never raise. Hence torch is imported inside the
functions, and the library not at all before a process group is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ringcomm._runtime.exit import close_groups_with
from ringcomm.options import check_variables, unknown_variables

if TYPE_CHECKING:
    from types import ModuleType

NAME = "ringcomm"


def register() -> None:
    """Make the name "ringcomm" known to torch.distributed. Warns, and never raises."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
            return
        from ringcomm._runtime import groups

        # A list: torch up to 2.13 takes a string for a sequence of one-letter devices.
        devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=devices)
        with contextlib.suppress(ValueError):  # told when the first group is made
            for device in groups.default_devices():
                dist.Backend.default_device_backend_map[device] = NAME
        groups.take_part(create_stand_in)
    except Exception as error:  # noqa: BLE001  raising would break `import torch` for everybody
        warnings.warn(f"ringcomm could not register itself: {error!r}", stacklevel=2)


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of one process group; torch calls it on every rank.

    Raises what `load_library` raises, ValueError where a setting cannot be, and TypeError when
    `backend_options` are not `ringcomm.Options`; where the group has another backend too, they may
    be that one's. It waits for the group's other ranks, at most `options.timeout`.
    """
    from ringcomm._flight import recorder
    from ringcomm._runtime import groups

    library = load_library()
    from ringcomm._runtime.options import configure

    check_variables()
    if not isinstance(backend_options, library.Options):
        if backend_options is not None and not groups.is_shared():
            kind = type(backend_options).__name__
            raise TypeError(f"pg_options of a ringcomm group must be ringcomm.Options, not {kind}")
        backend_options = library.Options()
    configure(backend_options)
    warn_of_unknown_variables()
    ranks = options.global_ranks_in_group
    recorder.watch(library, ranks[options.group_rank] if ranks else options.group_rank)
    return library.create_backend(options, backend_options, groups.serve_cuda())


def create_stand_in(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of a group that asked for Gloo; its options are those of other backends."""
    import torch.distributed as dist

    from ringcomm._runtime import groups

    ours = backend_options if isinstance(backend_options, load_library().Options) else None
    try:
        backend = create_backend(options, ours)
    except dist.DistBackendError as error:
        if "join" not in str(error):
            raise
        raise dist.DistBackendError(
            f"{error} (RINGCOMM_AS=gloo is set for this rank: a rank without it waits in Gloo; set "
            "it for every rank, or for none)"
        ) from error
    groups.say_who_serves_gloo(options)
    return backend


@functools.cache
def warn_of_unknown_variables() -> None:
    """Say, once a process, which variables nobody reads: on stderr, as the library warns."""
    from ringcomm._runtime.options import warn

    for name, meant in unknown_variables():
        warn(f"unknown environment variable {name} is ignored: did you mean {meant}?")


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
    complete(library.Backend)
    importlib.import_module("ringcomm._flight.recorder")  # while there are descriptors to load it
    return library


def complete(backend: Any) -> None:
    """Give the class those methods of torch's own backends that are easier said in Python."""
    backend.flight_record = flight_record
    backend._is_initialized = lambda self: True
    # Ranks outside a split need to do nothing.
    backend.perform_nocolor_split = lambda self, device: None
    _pools = importlib.import_module("ringcomm._runtime.pools")
    backend.register_mem_pool = _pools.register_mem_pool
    backend.deregister_mem_pool = _pools.deregister_mem_pool
    backend.register_tensors = _pools.register_tensors
    backend.deregister_tensors = _pools.deregister_tensors


def flight_record(backend: Any) -> list[dict[str, Any]]:
    """Return the last operations of a group; `_C.pyi` says what of each."""
    from ringcomm._flight import recorder

    return recorder.last_operations(backend._flight_rings())


def minor(version: str) -> str:
    """Return the first two numbers of a version: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])
