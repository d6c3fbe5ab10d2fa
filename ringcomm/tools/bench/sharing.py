"""The models that steps of training are measured with, and what shares them among ranks.

Either kind of sharing has a silent form, which does all but communicate: the step of a rank alone.

DDP reads the annotations of its hook: so there is no `from __future__ import annotations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ringcomm.tools.bench.ranks import Rank

TOKENS = 32  # in an example for a transformer
HEAD = 64  # width of each head of attention


@dataclass(frozen=True)
class Model:
    """A model to train, the wrapper that shares it, and the examples of a rank's batch."""

    kind: str
    wrapper: str
    width: int
    layers: int
    batch: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return the shape of a batch, and of what is wanted for it."""
        tokens = (TOKENS,) if self.kind == "transformer" else ()
        return (self.batch, *tokens, self.width)

    def network(self) -> nn.Sequential:
        width = self.width
        if self.kind == "mlp":
            modules = [nn.Linear(width, width) for _ in range(self.layers)]
            return nn.Sequential(*(part for layer in modules for part in (layer, nn.ReLU())))
        heads = max(1, width // HEAD)
        heads = heads if width % heads == 0 else 1
        return nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
                for _ in range(self.layers)
            )
        )


def wrap(what: Model, network: nn.Sequential, rank: Rank, *, silent: bool) -> Any:
    """Share the network among the ranks."""
    if what.wrapper == "ddp":
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        if silent:
            model.register_comm_hook(None, nothing)
        return model
    mesh = init_device_mesh(next(network.parameters()).device.type, (rank.size,))
    blocks = [block for block in network if next(block.parameters(), None) is not None]
    for module in (*blocks, network):
        fully_shard(module, mesh=mesh)
        if silent:
            module.set_custom_all_gather(Nothing(rank))
            module.set_custom_reduce_scatter(Nothing(rank))
        elif rank.backend == "ringcomm":
            module.set_allocate_memory_from_process_group_for_comm(True)
    return network


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return all of a parameter, which ranks may have shared out."""
    tensor: torch.Tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def nothing(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank's gradients as they are: a communication hook."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Nothing:
    """An all_gather and a reduce_scatter for FSDP2 that leave the others' parts as they are."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)  # no numbers that slow a core down

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        if output_tensor.numel() < input_tensor.numel():  # a reduce_scatter: its own part
            output_tensor.copy_(input_tensor.chunk(self.rank.size)[self.rank.index])
