from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ErrorType

class Options(_Backend.Options):
    """What a user may say about a group: `init_process_group("ringcomm", pg_options=Options())`."""

    algorithm: str | None
    """ "direct", "ring", "tree", …: used wherever a collective has it. None: as the table says."""

    _timeout: timedelta
    enable_reconfigure: bool
    """Whether the group is to be connected by `reconfigure`, not when it is made (torch 2.14)."""
    _agreement: Agreement | None
    """Of an elastic world: the members of its next epoch make this group."""

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
    def _reconfigure_handle(self) -> str:
        """Return what the others need to reach this group; it never changes."""
    def _reconfigure(self, uuid: int, handles: list[str], timeout: timedelta | None = None) -> None:
        """Give this group the ranks of these handles, in that order, in place.

        Every one of them calls with the same arguments. No store takes part. torch 2.14 calls the
        same `reconfigure`; before that, torch's own group does not see that ranks have changed.
        """
    def _is_initialized(self) -> bool: ...
    def comm_split_count(self) -> int: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def register_mem_pool(self, pool: Any, symm: bool = False) -> None: ...
    def deregister_mem_pool(self, pool: Any) -> None: ...

def close_groups(error: str) -> None:
    """End all groups, because the program ends; `error` is why, or ""."""

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

# ---- for ringcomm.elastic

def checksum(tensor: torch.Tensor) -> int:
    """64 bits of the bytes of a contiguous tensor on the CPU. Raises ValueError for another."""

def belong_to(run: str, resume: timedelta) -> None:
    """Say, before the first group, that this process is in an elastic world of that name.

    A host that is silent for `resume`, in whole seconds, is given up.
    """

def card() -> str:
    """Return what other processes know this one by: its host, and its socket there."""

class Answer:
    """What an agreement has decided, as one member sees it."""

    @property
    def epoch(self) -> int: ...
    @property
    def stays(self) -> bool:
        """Whether this member goes on."""
    @property
    def ranks(self) -> list[int]:
        """The members that go on, by their ranks so far."""
    @property
    def step(self) -> int:
        """The last commit that counts."""
    @property
    def extra(self) -> str: ...

class Agreement:
    """One process's part in the agreements of its world; a process has one."""

    def __init__(self, run: str) -> None: ...
    def adopt(
        self,
        backend: Backend,
        epoch: int,
        guests: int = 0,
        ranks: list[int] = ...,
        step: int = 0,
        extra: str = "",
    ) -> None:
        """Have links to all ranks of the group that was made for `epoch`.

        Its last ranks are guests. What follows is the decision that made the epoch.
        """
    def expect(self, guests: list[str]) -> None:
        """Look whether these guests, by their cards, live while the group is being made."""
    def agree(
        self,
        decided: int,
        voted: bool,
        extra: str,
        store: Any,
        key: str,
        patience: timedelta,
        timeout: timedelta,
    ) -> Answer:
        """Agree with the other members on who goes on, and wait for the decision.

        The witness is `key` of `store`; None: there is none. Members that live and do not come
        within `patience` are suspected. Raises DistBackendError where too few can be reached.
        """
    def leave(self) -> None: ...
