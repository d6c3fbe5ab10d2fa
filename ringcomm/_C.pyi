from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, overload

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ErrorType
from torch.cuda import MemPool

from ringcomm._runtime.options import Options as _UsersOptions

class Config:
    """The values that the core is given; `log` is a number, and the run is the launcher's."""

    log: int
    algorithm: str | None
    congestion: str
    costs: str
    cuda_connections: int
    cuda_library: str
    cuda_memory: int | None
    cuda_blocks: int
    cuda_mode: str
    flows: int
    host: str
    ifname: str
    metrics: str
    ports: str
    resume_seconds: int
    run: str
    secret: str
    shared_buffers: int | None
    spin_us: int | None
    threads: int
    tls: str
    tls_ca: str
    tls_cert: str
    tls_key: str
    trace: str
    trace_lines: str
    transport: str
    def __init__(self) -> None: ...
    def check(self) -> None:
        """Raise ValueError where a text does not follow its grammar."""

class Options(_Backend.Options):
    """What the library knows of `ringcomm.Options`, which ringcomm/_runtime/options.py derives."""

    @overload
    def __init__(self, timeout: timedelta = ...) -> None: ...
    @overload
    def __init__(self, options: Options, /) -> None: ...

    _timeout: timedelta
    enable_reconfigure: bool
    """Whether the group is to be connected by `reconfigure`, not when it is made (torch 2.14)."""
    _links: Links | None
    """Of an elastic world: its members make this group through them, and need no store."""
    _check_members: Callable[[], None] | None
    """Called while the ranks meet; raises where they never will."""
    _config: Config
    _given: set[str]
    """The names of the settings that code has set."""

class Backend(_Backend):
    """The backend of one group, as `group._get_backend(device)` returns it."""

    @property
    def options(self) -> _UsersOptions: ...
    @property
    def uid(self) -> str: ...
    def get_error(self) -> ErrorType: ...
    def _flight_rings(self) -> list[bytes]: ...
    def flight_record(self) -> list[dict[str, Any]]:
        """Return this rank's last 4,096 operations in the group, oldest first.

        Each has `operation` ("all_reduce float32[500000] SUM"), `sequence` (0 for messages),
        `state` ("queued", "running", "done" or "failed") and `algorithm`. `began` is in seconds
        since the epoch, and `seconds` says how long it took, or has been running. `waited` are
        the seconds of these in which it waited for peers. Any thread may ask, also while a call
        hangs.
        """
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def _close(self) -> None:
        """Leave the group, as shutdown() does, in a process that goes on and drains by and by."""
    def _forget_batch(self) -> None:
        """Forget what this thread's coalescing has collected: its block has raised."""
    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Give the next call so much more time."""
    def _reconfigure_handle(self) -> str:
        """Return what the others need to reach this group; it never changes."""
    def _reconfigure(
        self,
        uuid: int,
        handles: list[str],
        timeout: timedelta | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Give this group the ranks of these handles, in that order, in place.

        Every one of them calls with the same arguments. No store takes part. torch 2.14 calls the
        same `reconfigure`; before that, torch's own group does not see that ranks have changed.
        `check` is called while they meet, and raises where they never will.
        """
    def _readable_operations(self) -> int:
        """Return how many collectives have read the ranks' tensors where they lie."""

    def _set_codes(self, codes: int) -> None:
        """Have ranks compare this with each collective from now on: what is in the bytes."""
    def _is_initialized(self) -> bool: ...
    def comm_split_count(self) -> int: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def register_mem_pool(self, pool: MemPool, symm: bool = False) -> None:
        """Have all ranks map a pool's memory, so that no operation copies it first.

        Every rank calls it with a pool of its own, which may be empty: they meet, within the
        group's timeout. What is there stays mapped until it is freed or deregistered. Call it
        again when the pool has grown. What does not fit, or cannot be mapped, is said in one line
        of the log. Where tensors go through memory of the host it does nothing. `symm` is NCCL's,
        and changes nothing.

        Raises TypeError for what is no pool, ValueError where it has memory on several devices,
        and RuntimeError where a rank does not come.
        """
    def deregister_mem_pool(self, pool: MemPool) -> None:
        """Let other memory take the place of what was registered; no rank waits.

        Raises ValueError where the pool was not registered with this group.
        """
    def register_tensors(self, tensors: Tensor | Iterable[Tensor]) -> None:
        """Do as `register_mem_pool`, with the memory of these tensors.

        They may be of torch's symmetric memory. Of torch's allocator, the whole segment is mapped
        in which a tensor lies.
        """
    def deregister_tensors(self, tensors: Tensor | Iterable[Tensor]) -> None:
        """Do as `deregister_mem_pool`, with the memory of these tensors."""
    def _register_memory(
        self, asked: str, memory: dict[str, list[tuple[int, int]]], device: int | None
    ) -> None: ...
    def _deregister_memory(self, name: str) -> bool: ...

def configure(config: Config) -> None:
    """Give the process its settings, before its first group."""

def close_groups(error: str) -> None:
    """End all groups, because the program ends; `error` is why, or ""."""

def flight_rings() -> list[bytes]:
    """Return the flight records of all groups, as their files show them (_flight/records.py)."""

def tell_failures_to(pipe: int) -> None:
    """Write a byte to that descriptor whenever a group fails."""

def ask_for_records() -> None:
    """Ask all peers, of groups that have not failed, to write their flight records."""

calls_hooks: bool  # whether torch has any

def tell_failures() -> None:
    """Call the hooks that torch has registered with each group that has failed."""

def look_at_groups() -> int:
    """Let groups hear of failures at peers; return how often ranks have asked for records."""

def create_backend(
    options: Any, backend_options: Options, cuda: bool = True, waits: bool = False
) -> Backend:
    """Make the backend of one group from torch's _DistributedBackendOptions.

    `cuda`: whether the group's CUDA tensors are its own, too, or another backend's.
    Waits for the group's other ranks, at most `options.timeout`.
    """

# ---- for ringcomm.compression.hooks

def quantize(
    src: torch.Tensor,
    blocks: torch.Tensor,
    coding: int,
    residual: torch.Tensor | None = None,
    seed: int | None = None,
    first: int = 0,
) -> None:
    """Write the numbers of `src` plus `residual` into blocks (csrc/reduce/quantize.h).

    `coding` is 0 for int8, 1 for float8_e4m3fn. The residual gets what the codes leave out. With a
    seed numbers are rounded by chance, and their indices count from `first`. Blocks that are left
    over get zeros. Raises ValueError for wrong sizes, and RuntimeError for wrong types.
    """

def dequantize(
    blocks: torch.Tensor, out: torch.Tensor, coding: int, sources: int = 1, divisor: float = 1.0
) -> None:
    """Write the sum of the sources, which follow one another, over the divisor.

    Raises ValueError for wrong sizes, and RuntimeError for wrong types.
    """

# ---- the core, for the benchmarks and the tests

def copy(to: torch.Tensor, source: torch.Tensor, past_caches: bool, /) -> None:
    """Copy in steps, as plans do, between contiguous tensors on the CPU of the same size."""

def empty(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate where the other processes of this host can read, if there is room."""

def kernel_seconds(
    collective: str, ranks: int, bytes: int, nvlink: bool, capability: int
) -> tuple[str, dict[str, float]]:
    """By the model of devices: the kernel that is chosen, and the seconds of each that serves.

    `bytes` are those of the message, as rules count them: of the largest shard where there are any.
    `capability` is 90 for sm_90. Raises ValueError for an unknown collective, or no such group.
    """

def register_algorithm(name: str, collectives: list[int]) -> None:
    """Have plans by that name made of the scripts of ringcomm/algorithms/registry.py.

    Raises ValueError where the name is taken, by the library or by another registered one.
    """

PURPOSES: tuple[str, ...]  # of an operation, by number: "call", "several", "sparse" ...

# ---- hosts: the one rule for who shares one

def host_identity() -> tuple[str, str, str, int]:
    """Return the host's name, boot id, network namespace and user. "unknown" equals nothing.

    Raises RuntimeError when nothing can be read.
    """

def build() -> str:
    """Return the hash of the engine's source, which ranks compare when they meet."""

def same_host(one: tuple[str, str, str, int], other: tuple[str, str, str, int]) -> bool:
    """Whether processes of these identities may share memory."""

# ---- for ringcomm.elastic

def checksum(tensor: torch.Tensor) -> int:
    """64 bits of the bytes of a contiguous tensor on the CPU. Raises ValueError for another."""

def card() -> str:
    """Return what other processes know this one by: its host, and its socket there."""

def has_ended(card: str) -> bool:
    """Whether the process of that card was one of this host, and is gone."""

class Request:
    """What the witness of an agreement is asked for."""

    def answer(self, before: bytes) -> bytes:
        """Return what the witness becomes by it, as the store keeps it; b"": new."""

class Decree:
    """The protocol of one epoch's agreement (csrc/elastic/decree.h), at one member."""

    def __init__(
        self, rank: int, size: int, epoch: int, ranks: Sequence[int], step: int, extra: str, /
    ) -> None:
        """Begin an epoch; the last three are the decision that made it."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def enter(self, decided: int, voted: bool, extra: str, /) -> None: ...
    def entered(self) -> bool: ...
    def leave(self) -> None: ...
    def tick(self) -> None: ...
    def asks(self) -> Request | None: ...
    def hear_witness(self, answer: bytes, /) -> None: ...
    def is_working(self, rank: int, /) -> bool: ...
    def awaited(self) -> list[int]: ...
    def dead(self) -> list[int]: ...
    def suspected(self) -> list[int]: ...
    def gone(self) -> list[int]: ...
    def decision(self) -> tuple[list[int], int, str] | None:
        """Return the ranks that go on, the last step that counts, and the leader's words."""
    def left_behind(self) -> bool: ...

class Links:
    """The links of this process to the ranks of its world (csrc/elastic/link.h)."""

    def __init__(self, run: str, /) -> None: ...
    def __len__(self) -> int: ...
    def adopt(self, backend: Backend, decree: Decree, /) -> None: ...
    def keep(self, ranks: list[int], guests: int, decree: Decree, /) -> None: ...
    def show(self, decree: Decree, /) -> None: ...
    def hear(self, decree: Decree, /) -> None: ...
    def give_up(self, decree: Decree, all: bool, waited: float, /) -> None: ...
    def sleep(self, most: timedelta, /) -> None: ...
    def condition(self, rank: int, /) -> str: ...
