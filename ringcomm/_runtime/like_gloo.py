"""Has torch treat our groups as Gloo's, where it looks for Gloo's own types and settings."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from ringcomm._runtime import process
from ringcomm._runtime.backend import backend_of
from ringcomm.options import checked_timeout


def wrap() -> None:
    """Wrap two functions of torch's, once a process.

    `_set_pg_timeout` sets the timeout of Gloo's and NCCL's groups alone: with ours it warned, and
    changed nothing. `_set_default_backend(GLOO)` names the backend that a group's hooks and name
    come from; C++ would look for a ProcessGroupGloo, and ours is none.
    """
    from torch.distributed import distributed_c10d as c10d

    set_others: Any = c10d._set_pg_timeout

    @functools.wraps(set_others)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        chosen = c10d._get_default_group() if group is None else group
        backends = {} if c10d._rank_not_in_group(chosen) else _backends_of(chosen)
        ours = [backend for backend in backends if hasattr(backend, "flight_record")]
        for backend in ours:
            backend._set_default_timeout(checked_timeout(timeout))
        if not ours or len(ours) < len(backends):
            set_others(timeout, group)

    c10d._set_pg_timeout = set_timeout

    set_default: Any = c10d.ProcessGroup._set_default_backend
    kinds = c10d.ProcessGroup.BackendType

    @functools.wraps(set_default)
    def set_backend(group: Any, kind: Any) -> None:
        is_ours = kind == kinds.GLOO and any(
            hasattr(backend, "flight_record") for backend in _backends_of(group)
        )
        set_default(group, kinds.CUSTOM if is_ours else kind)

    c10d.ProcessGroup._set_default_backend = set_backend


def _backends_of(group: Any) -> dict[Any, None]:
    return dict.fromkeys(backend_of(group, device) for device in group._device_types)


def take_interfaces() -> None:
    """Before the first group, use GLOO_SOCKET_IFNAME's interfaces, unless RINGCOMM_IFNAME is set.

    Gloo's are whole names.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names and process.configured is None:
        os.environ.setdefault("RINGCOMM_IFNAME", f"={names}")
