"""Sharded models in the units of a world: FSDP2's modules, and DTensors of tensor parallelism.

A rank's state is its own parts of them. After a step that was cut short, FSDP2's modules begin
anew; after a change, those over both dimensions of the world's mesh find the group of their
replicas (`_groups_of`, `_has_run` and `_drop_gradients` know of torch's privates). Gradients of all
other modules are averaged over replicas here, when a backward pass has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from ringcomm.elastic.unit_groups import UnitGroups

LARGE_BYTES = 1 << 20  # gradients from here on are averaged where they lie, smaller ones together


# ---- a rank's part


def is_sharded(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor. Without that module imported there are none."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def part_of(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, over its own memory; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local().detach()


def like(part: Any, tensor: Any) -> Any:
    """Return the DTensor of which `part` is this rank's, laid out as `tensor` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# ---- the modules of a world


class Shards:
    """The sharded modules that a world tracks. Without `groups` there are none."""

    def __init__(self, modules: dict[str, nn.Module], groups: UnitGroups | None) -> None:
        """Have gradients averaged over replicas from now on.

        Raises TypeError or ValueError, in a sentence, for modules that aren't sharded over the
        world's mesh, or in a way that no change survives.
        """
        self._groups = groups
        self._roots: list[Any] = []
        self._parts: list[Any] = []  # all modules that are sharded
        self._of_both: list[Any] = []  # FSDP's own notes about a mesh with both dimensions
        self._averaged: list[Any] = []  # parameters whose gradients are averaged here
        self._is_due = False
        for name, module in modules.items():
            check(name, module, groups)
            if groups is not None:
                self._take(name, module)
        for parameter in self._averaged:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _take(self, name: str, module: nn.Module) -> None:
        notes, theirs = [], set()
        inside: set[nn.Module] = set()
        for part in _fsdp_modules(module):
            self._parts.append(part)
            if part not in inside:
                self._roots.append(part)
                inside |= set(part.modules())
            for note, parameters in _groups_of(name, part):
                if hasattr(note, "replicate_process_group"):
                    notes.append(note)
                    theirs |= set(map(id, parameters))
        self._of_both += {id(note): note for note in notes}.values()
        self._averaged += [
            parameter
            for parameter in module.parameters()
            if parameter.requires_grad and id(parameter) not in theirs
        ]

    def reset(self) -> None:
        """Have modules begin anew after a step that was cut short. Gradients are put back apart."""
        self._is_due = False
        for root in self._roots:
            if _has_run(root):
                root.reset_iter_state()
        for part in self._parts:
            _drop_gradients(part)

    def regroup(self) -> None:
        """Have modules go on with the replicas of the present epoch."""
        for note in self._of_both:
            assert self._groups is not None
            note.replicate_process_group = self._groups.replicas
            note.replicate_mesh_size = self._groups.replicas.size()
            note.replicate_mesh_rank = self._groups.replicas.rank()

    # ---- gradients

    def _note(self, _: Any) -> None:
        if not self._is_due:
            self._is_due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Average all gradients over the replicas: the last act of a backward pass."""
        self._is_due = False
        assert self._groups is not None
        group = self._groups.replicas
        gradients = [part_of(p.grad) for p in self._averaged if p.grad is not None]
        with torch.no_grad():
            together = [(tensors, torch.cat([t.view(-1) for t in tensors])) for tensors in
                        _small(gradients)]  # fmt: skip
            alone = [gradient for gradient in gradients if _is_large(gradient)]
            works = [
                dist.all_reduce(data, dist.ReduceOp.AVG, group=group, async_op=True)
                for data in (*alone, *(data for _, data in together))
            ]
            for work in works:
                work.wait()
            for tensors, data in together:
                parts = data.split([tensor.numel() for tensor in tensors])
                torch._foreach_copy_(
                    tensors, [p.view_as(t) for p, t in zip(parts, tensors, strict=True)]
                )


def _is_large(gradient: Any) -> bool:
    return bool(gradient.numel() * gradient.element_size() >= LARGE_BYTES)


def _small(gradients: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the small gradients of one type and device together."""
    kinds: dict[Any, list[Any]] = {}
    for gradient in gradients:
        if not _is_large(gradient) and gradient.numel():
            kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    yield from kinds.values()


# ---- what is refused


def check(name: str, module: nn.Module, groups: UnitGroups | None) -> None:
    """Raise TypeError for shards of which a world without units would lose some with a rank.

    In a world with units, raises ValueError for what isn't sharded over its mesh.
    """
    meshes = {  # two that are equal may have other groups
        id(tensor.device_mesh): tensor.device_mesh
        for tensor in (*module.parameters(), *module.buffers())
        if is_sharded(tensor)
    }
    if groups is None:
        if meshes:
            raise TypeError(
                f"{name!r} has DTensors, whose shards die with their rank: tell "
                "elastic.join(unit=...) how many ranks hold a copy of the model, and shard over "
                "world.mesh"
            )
        return
    if not meshes and any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"{name!r} is not sharded, in a world of units of {groups.size}: shard it over "
            'world.mesh["shard"], or join without unit'
        )
    ours = [[id(groups.unit)], [id(groups.replicas), id(groups.unit)]]
    for mesh in meshes.values():
        if list(map(id, mesh.get_all_groups())) not in ours:
            raise ValueError(
                f"{name!r} is sharded over another mesh than world.mesh: no change of ranks "
                'survives that; use world.mesh, or world.mesh["shard"]'
            )


def _fsdp_modules(module: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _has_run(root: Any) -> bool:
    """Tell whether a module has begun a forward pass. Before, FSDP has nothing to reset yet."""
    return root._get_fsdp_state()._is_root is not None


def _drop_gradients(module: Any) -> None:
    """Drop gradients of whole parameters, which FSDP has not reduced yet and would add to others.

    A step that is cut short leaves those of the outermost module, and steps without gradient sync
    leave all; `reset_iter_state` does not see to them.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def _groups_of(name: str, module: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield FSDP's note about the mesh of each group of parameters, and these."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        after_forward = group.post_forward_mesh_info
        if after_forward is not None and after_forward.mesh != group.mesh_info.mesh:
            raise ValueError(
                f"{name!r} has reshard_after_forward as a number, which makes groups that no "
                "change of ranks survives: use True or False"
            )
        yield group.mesh_info, [part.sharded_param for part in group.fsdp_params]
