"""torchft over ringcomm: `torchft.Manager(pg=ProcessGroupRingcomm(...))`, on torch 2.11 to 2.13.

From torch 2.14 on, and with a torchft that knows it, the name alone will do: make the default group
by `init_process_group("ringcomm", enable_reconfigure=True)`, and give `Manager` that group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper


class ProcessGroupRingcomm(ProcessGroupWrapper):
    """A group of all replicas of this moment, which Manager makes again when they change."""

    def _create_pg(self, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout = self._timeout
        options.group_id = "torchft"
        backend: Any = dist.Backend._plugins["RINGCOMM"].creator_fn(options, None)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(kind)
        for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
            group._register_backend(torch.device(device), kind, backend)
        return group

    def getBackendName(self) -> str:  # noqa: N802  torchft's name
        return "torchft-ringcomm"
