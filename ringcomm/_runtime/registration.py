"""Registers the backend with torch, and makes the backend of each group.

torch calls `register` at the end of its own import, in every program on the machine: it must be
quick, may be called any number of times, and may never raise. Hence torch is imported inside the
functions, and the library not at all before a process group is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from ringcomm._runtime import library, process
from ringcomm.options import check_variables, unknown_variables

NAME = "ringcomm"
INSTALLED = re.compile(rf"{NAME}-.*\.(dist|egg)-info")


def torch_registers() -> bool:
    """Tell whether torch calls `register` when it is imported, so that nobody else needs to."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    # Else its folder is just on the path. importlib.metadata would take 20 ms to say so.
    for folder in sys.path:
        with contextlib.suppress(OSError):
            if any(INSTALLED.fullmatch(file.name) for file in Path(folder).iterdir()):
                return True
    return False


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
    from ringcomm._runtime import groups

    loaded = library.load_library()
    from ringcomm._runtime.options import Options, configure

    check_variables()
    if isinstance(backend_options, loaded.Options):
        own = Options._of(backend_options)
    elif backend_options is None or groups.is_shared():
        own = Options()
    else:
        kind = type(backend_options).__name__
        raise TypeError(f"pg_options of a ringcomm group must be ringcomm.Options, not {kind}")
    configure(own)
    warn_of_unknown_variables()
    ranks = options.global_ranks_in_group
    rank = ranks[options.group_rank] if ranks else options.group_rank
    library.load_recorder().watch(loaded, rank)
    connect = groups.connect if ranks and not own.enable_reconfigure else None
    if connect is not None:
        from torch.distributed import HashStore

        options.store = HashStore()  # it is asked for nothing
    if groups.serve_cuda():
        loaded.announce_device(groups.chosen_device())
    backend = loaded.create_backend(options, own, groups.serve_cuda(), waits=connect is not None)
    if connect is not None:
        connect(backend, options.group_id, list(ranks), options.timeout)
    return backend


def create_stand_in(options: Any, backend_options: Any = None) -> Any:
    """Make the backend of a group that asked for Gloo; its options are those of other backends."""
    import torch.distributed as dist

    from ringcomm._runtime import groups, like_gloo

    like_gloo.take_interfaces()
    kind = library.load_library().Options
    ours = backend_options if isinstance(backend_options, kind) else None
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
    """Warn, once a process, of variables that have no meaning: on stderr, as the library warns."""
    for name, meant in unknown_variables():
        process.say(
            f"WARNING: unknown environment variable {name} is ignored: did you mean {meant}?"
        )
