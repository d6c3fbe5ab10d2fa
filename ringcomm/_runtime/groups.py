"""Where ringcomm takes part in the making of torch's process groups.

torch makes each of them in one function, `_new_process_group_helper`, which this module wraps: it
is the one place where the backend is known by its name, its devices and its group at once.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from typing import TYPE_CHECKING, Any

from ringcomm._runtime import coalescing, like_gloo, process
from ringcomm.options import checked_timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

NAME = "ringcomm"
STAND_IN = "ringcomm_as_gloo"  # torch's word for our part of a group that asked for Gloo
GLOO = "gloo"
DEVICES = ("cpu", "cuda")


def stands_in_for_gloo() -> bool:
    """Tell whether RINGCOMM_AS=gloo. Raises ValueError for any other value."""
    value = os.environ.get("RINGCOMM_AS", "")
    if value not in ("", GLOO):
        raise ValueError(
            f"RINGCOMM_AS={value} is no backend that ringcomm can stand in for: set "
            "RINGCOMM_AS=gloo, or unset it"
        )
    return value == GLOO


def default_devices() -> list[str]:
    """Return the device types of RINGCOMM_DEFAULT. Raises ValueError for others than ours."""
    value = os.environ.get("RINGCOMM_DEFAULT", "")
    devices = [device.strip() for device in value.split(",")] if value else []
    if not set(devices) <= set(DEVICES):
        raise ValueError(
            f"RINGCOMM_DEFAULT={value} is no list of device types that ringcomm serves: set it "
            "to cpu, to cuda or to cpu,cuda"
        )
    return devices


# In an elastic world, whose store may be dead, this connects a group of some ranks. It gets the
# backend, the group's name, its ranks in the default group, and how long to wait.
connect: Callable[[Any, str, list[int], timedelta], None] | None = None

_parts: dict[str, str] = {}  # the backend of each device, for the group that is being made


def serve_cuda() -> bool:
    """Tell whether the group that is being made gives its CUDA tensors to ringcomm."""
    return not _parts or _parts.get("cuda") == NAME


def chosen_device() -> int | None:
    """Return the CUDA device that this process has chosen, or None if it uses none so far."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def is_shared() -> bool:
    """Tell whether the group that is being made has another backend for some device."""
    return any(backend != NAME for backend in _parts.values())


def take_part(create_stand_in: Callable[[Any, Any], Any]) -> None:
    """Wrap torch's function, once; `create_stand_in` makes the backends of RINGCOMM_AS=gloo."""
    from torch.distributed import distributed_c10d as c10d

    helper: Callable[..., Any] = c10d._new_process_group_helper
    if getattr(helper, "completed_by", None) == NAME:
        return
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = str(call.arguments["backend"])
        if _is_unknown(asked):
            return helper(*args, **kwargs)  # which says so
        _refresh_devices()
        wanted = _wanted(asked, call.arguments.get("backend_options"))
        if STAND_IN in wanted and STAND_IN.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(
                STAND_IN, create_stand_in, extended_api=True, devices=["cpu"]
            )
        call.arguments["backend"] = c10d.Backend(wanted)
        _parts.update(_parts_of(wanted))
        ours = not {NAME, STAND_IN}.isdisjoint(_parts.values())
        if ours:
            _prepare_torch()
        if ours and call.arguments.get("timeout") is not None:
            call.arguments["timeout"] = checked_timeout(call.arguments["timeout"])
        try:
            group, store = helper(*call.args, **call.kwargs)
        finally:
            _parts.clear()
        if isinstance(group, c10d.ProcessGroup):
            _give_a_default_backend(group)
            if ours:
                coalescing.watch(group)
            if wanted != asked:
                named = c10d.Backend(asked)
                c10d._world.pg_map[group] = (named, store)
                c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(named))
        return group, store

    make.completed_by = NAME  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make
    coalescing.wrap()
    like_gloo.wrap()


def _prepare_torch() -> None:
    """Have torch let go of a default group that is destroyed, and DDP take its buckets from ours.

    A module of torch has the default group in its functions' defaults if it is imported while there
    is one, as optimizers do: the group's memory and threads would stay until the program ends.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        import torch.distributed.nn.functional  # noqa: F401

    if {NAME, STAND_IN}.issuperset(_parts.values()):  # another backend's memory is its own affair
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")


def _is_unknown(asked: str) -> bool:
    """Tell whether torch knows no backend of that name. Raises ValueError for a misspelt ringcomm.

    Looking at such a name in any other way makes torch warn of it.
    """
    from torch.distributed import distributed_c10d as c10d

    names = [part.rpartition(":")[2].lower() for part in asked.split(",")]
    unknown = [name for name in names if name and name not in c10d.Backend.backend_list]
    for name in unknown:
        if difflib.get_close_matches(name, [NAME], cutoff=0.75):
            raise ValueError(f"Unknown backend type {name!r}: did you mean {NAME!r}?")
    return bool(unknown)


def _refresh_devices() -> None:
    """Name "cuda" among our devices only where there is one.

    Programs that look for a device of a group, other than the CPU, take it for one that can be
    used. By now programs have chosen their devices, and this counts them without starting CUDA,
    which `import torch` must not do and which is slow there.
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    devices = list(DEVICES) if torch.cuda.device_count() > 0 else ["cpu"]
    c10d.Backend.backend_capability[NAME] = devices


def _wanted(asked: str, options: Any) -> str:
    """Return what torch shall make of `asked`: the same, or per device with our parts in it."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    ours, stand_in = default_devices(), stands_in_for_gloo()
    if not ours and not stand_in:
        return asked
    parts = _parts_of(asked)
    if asked == c10d.Backend.UNDEFINED and NAME in parts.values():
        here = c10d.Backend.backend_capability[NAME]
        parts = {device: NAME for device in ours if device in here}  # torch: the accelerator alone
    elif stand_in and parts.get("cpu") == GLOO and not _are_gloos(options):
        parts["cpu"] = STAND_IN
        if torch.cuda.device_count() == 0 and parts.get("cuda") == GLOO:
            del parts["cuda"]  # it would connect for nothing
    else:
        return asked
    return ",".join(f"{device}:{backend}" for device, backend in parts.items())


def _parts_of(backend: str) -> dict[str, str]:
    """Return the backend of each device type, as torch understands the whole."""
    from torch.distributed import distributed_c10d as c10d

    config = c10d.BackendConfig(c10d.Backend(backend))
    return {device: str(part) for device, part in config.get_device_backend_map().items()}


def _are_gloos(options: Any) -> bool:
    """Tell whether these are Gloo's own options: who has some wants Gloo itself."""
    from torch.distributed import distributed_c10d as c10d

    gloo = getattr(c10d, "ProcessGroupGloo", None)
    return gloo is not None and isinstance(options, gloo._Options)


_spoken: list[bool] = []


def say_who_serves_gloo(options: Any) -> None:
    """Write a line to stderr, as the library does: at a process's first such group, on rank 0."""
    first = not _spoken
    _spoken.append(True)
    if first and options.group_rank == 0:
        process.say(
            "INFO: RINGCOMM_AS=gloo: groups that ask for gloo on the CPU are ringcomm's", "info"
        )


def _give_a_default_backend(group: Any) -> None:
    """Complete groups that name a backend per device, such as "cpu:ringcomm,cuda:ringcomm".

    torch up to 2.13 looks for the plug-in's upper-case name among lower-case ones, does not find
    it, and leaves such a group without a default backend: its name is "undefined" and its hooks
    raise. The group is otherwise sound, so the default is set once it has been made. It does so to
    "cpu:gloo,cuda:gloo" too as soon as one plug-in exists: where that is us, we put it right. A
    group made of the default backends of its devices is missed likewise.

    Ours is never called Gloo here, also where it stands in for it: torch's C++ would take it for a
    ProcessGroupGloo, and read members that it does not have.
    """
    from torch.distributed import distributed_c10d as c10d

    config = c10d._world.pg_backend_config.get(group, "")  # "cpu:gloo,cuda:ringcomm"
    ours = any(entry.rpartition(":")[2] in (NAME, STAND_IN) for entry in str(config).split(","))
    alone = set(c10d.Backend._plugins) <= {NAME.upper(), STAND_IN.upper()}
    if (ours or alone) and group._get_backend_name() == "undefined":
        kinds = c10d.ProcessGroup.BackendType
        group._set_default_backend(kinds.CUSTOM if ours else kinds.GLOO)
