"""DistributedDataParallel over another group: all that elastic worlds know of torch's privates.

`regroup` gives a wrapper a new group and a new reducer. The wrapper, its module, the parameters and
the optimizer stay the objects they are. A wrapper that cannot be taken over a change is
refused when it is given to the world, by `refuse`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The reducer is made with these. If a torch lacks one, that shows before anything changes.
_OF_WRAPPER = (
    "_remove_autograd_hooks",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_ddp_init_helper",
    "_get_ddp_logging_data",
    "_register_builtin_comm_hook",
    "_comm_hooks",
    "register_comm_hook",
    "process_group",
    "reducer",
    "logger",
    "static_graph",
    "require_forward_param_sync",
)
_OF_REDUCER = ("_remove_autograd_hooks", "_set_static_graph")
_HELPER = ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]
_BUILT_IN = "BuiltinCommHookType."  # how torch's log begins the name of such a hook
_OVERLAP = "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks"
_POWER = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"


# ---- which modules


def wrappers_in(objects: Iterable[object]) -> list[Any]:
    """Return each DistributedDataParallel in the modules among `objects`, once.

    Compiled modules and modules that hold wrappers deeper inside are searched too.
    """
    wrappers = {
        id(part): part
        for thing in objects
        if isinstance(thing, nn.Module)
        for part in thing.modules()
        if isinstance(part, DistributedDataParallel)
    }
    return list(wrappers.values())


def unwrapped(module: Any) -> Any:
    """Return the user's module inside DistributedDataParallel and torch.compile, in any order."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


# ---- what cannot be taken over a change


def refuse(name: str, thing: object) -> None:
    """Raise TypeError or ValueError, in a sentence, for what cannot be taken over a change.

    TypeError is for objects whose shards die with their rank, ValueError for a wrapper that is
    made in a way that cannot be taken up again.
    """
    if _is_a(thing, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
        raise TypeError(
            f"{name!r} is a ZeroRedundancyOptimizer, whose shards die with their rank: use the "
            "plain optimizer on every rank"
        )
    if not isinstance(thing, nn.Module):
        return
    for part in thing.modules():
        if _is_a(part, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise TypeError(
                f"{name!r} is sharded by FullyShardedDataParallel, whose shards die with their "
                "rank: use DistributedDataParallel"
            )
    for wrapper in wrappers_in([thing]):
        for what, instead in _obstacles(wrapper):
            raise ValueError(f"{name!r} {what}, which no change of ranks survives: {instead}")


def _is_a(thing: object, module: str, name: str) -> bool:
    """Tell whether a thing is of a class; a module that was never imported has no instances."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(thing, kind)


def _obstacles(wrapper: Any) -> Iterator[tuple[str, str]]:
    if getattr(wrapper, "mixed_precision", None) is not None:
        yield "has DDP's mixed_precision", "use torch.autocast"
    if getattr(wrapper, "_delay_all_reduce_params", None):
        yield "has delay_all_reduce_named_params", "leave it out"
    if getattr(wrapper, "_use_python_reducer", False):
        yield "was made under optimize_ddp='python_reducer'", "use optimize_ddp=True"
    hooks = getattr(wrapper, "_comm_hooks", [])
    inside = any(hasattr(p, "_in_backward_optimizers") for p in wrapper.parameters())
    if inside or any(getattr(hook, "__module__", "") == _OVERLAP for hook, _ in hooks):
        yield "steps its optimizer in backward", "call step() after backward()"
    if wrapper.process_group is not dist.group.WORLD:
        yield "is over a subgroup", "make it over the default group"
    for _, state in hooks:
        if any(group is not wrapper.process_group for group in _groups_of(state)):
            yield "has a communication hook over a subgroup", "use the default group"
    mesh = wrapper.__dict__.get("device_mesh")
    if mesh is not None and mesh.size() != dist.get_world_size():
        yield "is over a part of a device mesh", "make it over the default group"


def _groups_of(state: object) -> list[Any]:
    """The groups that a hook's state is or holds."""
    names = [*getattr(state, "__dict__", {}), *getattr(type(state), "__slots__", ())]
    values = [state, *(getattr(state, name, None) for name in names)]
    return [value for value in values if isinstance(value, dist.ProcessGroup)]


def layout_of(wrapper: Any) -> dict[str, str]:
    """Return the arguments and hooks by which a wrapper lays out its operations."""
    names = ("bucket_bytes_cap", "find_unused_parameters", "gradient_as_bucket_view",
             "static_graph", "broadcast_buffers")  # fmt: skip
    layout = {name: str(getattr(wrapper, name, None)) for name in names}
    hooks = [getattr(hook, "__qualname__", repr(hook)) for hook, _ in wrapper._comm_hooks]
    layout["communication hook"] = (
        ", ".join([*hooks, _built_in_hook(wrapper)]).strip(", ") or "none"
    )
    return layout


def check_step(wrapper: Any) -> None:
    """Raise RuntimeError if a step runs inside `wrapper.join()`, whose group would be stale."""
    config = getattr(wrapper, "_join_config", None)
    if config is not None and config.enable:
        raise RuntimeError(
            "DistributedDataParallel.join() is for ranks with uneven batches, and no change of "
            "ranks survives it: take the batches from the world"
        )


# ---- a change


def missing(wrapper: Any) -> str:
    """Return the first attribute that making a reducer needs and this torch lacks, else ""."""
    for name in _OF_WRAPPER:
        if not hasattr(wrapper, name):
            return f"DistributedDataParallel.{name}"
    for name in _OF_REDUCER:
        if not hasattr(wrapper.reducer, name):
            return f"Reducer.{name}"
    if list(inspect.signature(wrapper._ddp_init_helper).parameters) != _HELPER:
        return f"DistributedDataParallel._ddp_init_helper({', '.join(_HELPER)})"
    if wrapper.static_graph and not hasattr(wrapper, "_static_graph_delay_allreduce_enqueued"):
        return "DistributedDataParallel._static_graph_delay_allreduce_enqueued"
    return ""


def regroup(ddp: Any, group: Any, rebuild: bool) -> None:
    """Have a wrapper, also one whose backward pass was cut short, go on over `group`.

    Its reducer is made anew, so that buckets are laid out alike on all ranks of the new group,
    however far each got before. Gradients keep their values. A torch that lacks an attribute of
    `missing` keeps the buckets instead; with `rebuild`, which joiners need, that is RuntimeError.
    """
    check_step(ddp)
    absent = missing(ddp)
    if absent and (rebuild or _holds_group(ddp)):
        raise RuntimeError(
            f"this torch ({torch.__version__}) has no {absent}, which joining needs for DDP: "
            "ranks may leave but not join"
        )
    old = ddp.process_group
    for part in ddp.module.modules():
        if isinstance(part, nn.SyncBatchNorm) and part.process_group is old:
            part.process_group = group
    if absent:
        for _, state in getattr(ddp, "_comm_hooks", []):
            _moved(state, old, group)
        ddp._update_process_group(group)
    else:
        _make_reducer(ddp, old, group)
    if ddp.__dict__.get("device_mesh") is not None:
        ddp.device_mesh = _mesh_over(group, ddp)
    # The first forward pass shares buffers, also after one that did not (no_grad, no_sync): a
    # joiner's does.
    ddp.require_forward_param_sync = True


def _holds_group(ddp: Any) -> bool:
    """Tell whether the reducer holds a hook with the old group: only a new reducer drops it."""
    hooks = getattr(ddp, "_comm_hooks", [])
    return bool(_built_in_hook(ddp)) or any(state is ddp.process_group for _, state in hooks)


def _built_in_hook(ddp: Any) -> str:
    """The name of the hook in C++ that is registered, of which torch keeps only that; or ""."""
    if ddp._comm_hooks or not hasattr(ddp, "_get_ddp_logging_data"):
        return ""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    return name.removeprefix(_BUILT_IN) if name.startswith(_BUILT_IN) else ""


def _make_reducer(ddp: Any, old: Any, group: Any) -> None:
    """Do as DistributedDataParallel.__setstate__, and add the hooks, which it forgets."""
    built_in = _built_in_hook(ddp)
    hooks = [(hook, _moved(state, old, group)) for hook, state in ddp._comm_hooks]
    ddp._remove_autograd_hooks()
    ddp.process_group = group
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp.reducer = None  # its buckets go before the new ones come
    ddp._has_rebuilt_buckets = False
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.static_graph:  # its first iteration comes again
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    ddp._comm_hooks = []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if built_in:
        ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, built_in))
    if getattr(ddp, "require_manual_backward_finalization", False):  # torch 2.15: tell the new one
        ddp.require_manual_backward_finalization = True


def _moved(state: Any, old: Any, group: Any) -> Any:
    """The state of a communication hook, over the new group instead of the old one."""
    if state is old and old is not None:
        return group
    if getattr(state, "process_group", None) is old and old is not None:
        state.process_group = group
    if _is_a(state, _POWER, "PowerSGDState"):
        _begin_again(state)
    return state


def _begin_again(state: Any) -> None:
    """Return PowerSGD's state as a joiner has it: it is by bucket, and the buckets are new."""
    state.iter = state.next_stats_report = 0
    state.total_numel_before_compression = state.total_numel_after_compression = 0
    state.rng.seed(0)  # drawn from alike on all ranks
    for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        memory.clear()


def _mesh_over(group: Any, ddp: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    names = ddp.device_mesh.mesh_dim_names
    return DeviceMesh.from_group(group, ddp.device_type, mesh_dim_names=names)
