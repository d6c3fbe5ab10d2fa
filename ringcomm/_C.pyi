from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ErrorType

class Options(_Backend.Options):
    """What a user may say about a group: `init_process_group("ringcomm", pg_options=Options())`."""

    algorithm: str | None
    """ "direct", "ring", "tree", …: used wherever a collective has it. None: as the table says."""

    def __init__(self, timeout: timedelta = ...) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class Backend(_Backend):
    """The backend of one group, as `group._get_backend(device)` returns it."""

    @property
    def options(self) -> Options: ...
    @property
    def uid(self) -> str: ...
    def get_error(self) -> ErrorType: ...
    def flight_record(self) -> list[dict[str, Any]]:
        """Return this rank's last 256 operations in the group, oldest first.

        Those that wait for their turn stand at the end. Each has `operation` ("all_reduce #412
        float32[500000] SUM"), `sequence` (0 for messages), `state` ("queued", "running", "done" or
        "failed"), `began` (seconds since the epoch) and `seconds` (how long it took, or has been
        running). Any thread may ask, also while a call hangs.
        """
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Give the next call so much more time."""
    def _is_initialized(self) -> bool: ...
    def comm_split_count(self) -> int: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def register_mem_pool(self, pool: Any, symm: bool = False) -> None: ...
    def deregister_mem_pool(self, pool: Any) -> None: ...

def create_backend(
    options: Any, backend_options: Options | None = None, cuda: bool = True
) -> Backend:
    """Make the backend of one group from torch's _DistributedBackendOptions.

    `cuda`: whether the group's CUDA tensors are its own, too, or another backend's.
    Waits for the group's other ranks, at most `options.timeout`.
    """

# ---- the core, for the benchmarks and the tests

def algorithms(collective: str) -> list[str]: ...
def copy_seconds(bytes: int, past_caches: bool, passes: int) -> list[float]: ...
def selection_text(size: int, costs: str = "") -> str:
    """The table of a group of `size` hosts, one row a line, limits in bytes.

    `costs` is "alpha 1.8e-05 beta 8.4e-09 gamma 2e-11", or a file of `ringcomm tune`; "": the
    defaults. Raises ValueError.
    """
