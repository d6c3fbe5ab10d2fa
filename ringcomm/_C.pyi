from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Backend as _Backend
from torch._C._distributed_c10d import ErrorType

class Config:
    """The values that the core is given; `log` is a number, and the run is the launcher's."""

    log: int
    algorithm: str | None
    congestion: str
    costs: str
    cuda_connections: int
    cuda_library: str
    cuda_memory: int | None
    cuda_mode: str
    flows: int
    ifname: str
    metrics: str
    ports: str
    resume_seconds: int
    run: str
    secret: str
    spin_us: int | None
    trace: str
    trace_lines: str
    transport: str
    def __init__(self) -> None: ...
    def check(self) -> None:
        """Raise ValueError where a text does not follow its grammar."""

class Options(_Backend.Options):
    """What a user may say: `init_process_group("ringcomm", pg_options=Options())`.

    `timeout` is how long an operation waits for a rank; that of `init_process_group` wins. Each
    other argument is an attribute, too, and None takes back what code has said. Code wins over the
    environment variable, and that over the default. Raises ValueError for a value that cannot be,
    and TypeError for a wrong type or an unknown keyword.
    """

    # The settings, by docs/write_options.py.
    @property
    def algorithm(self) -> str | None:
        """The attribute of `RINGCOMM_ALGORITHM`.

        Used wherever a collective has it; what rank 0 says holds for all. Not between GPUs.
        Default: the table chooses. Values: `direct`, `ring`, `tree`, `pairwise`, `dissemination`,
        `hierarchical`, `doubling`.
        """
    @algorithm.setter
    def algorithm(self, value: str | None) -> None: ...
    @property
    def spin_us(self) -> int | None:
        """The attribute of `RINGCOMM_SPIN_US`.

        Microseconds for which a call that waits keeps its core, before it sleeps. Default: fits the
        host. Values: 0 to 1,000,000.
        """
    @spin_us.setter
    def spin_us(self, value: int | None) -> None: ...
    @property
    def cuda_mode(self) -> str:
        """The attribute of `RINGCOMM_CUDA_MODE`.

        How CUDA tensors go. `ipc`: an error where ranks cannot map one another's memory; `host`:
        through the host's memory. Default: `auto`. Values: `auto`, `ipc`, `host`.
        """
    @cuda_mode.setter
    def cuda_mode(self, value: str | None) -> None: ...
    @property
    def cuda_memory(self) -> int | None:
        """The attribute of `RINGCOMM_CUDA_MEMORY`.

        Bytes of its device that a rank gives the group. Default: a 512th of the device's, 16 to 256
        MiB. Values: 262,144 to 1,099,511,627,776.
        """
    @cuda_memory.setter
    def cuda_memory(self, value: int | None) -> None: ...
    @property
    def ifname(self) -> str:
        """The attribute of `RINGCOMM_IFNAME`.

        Interfaces or networks, as `eth0`, `10.0.0.0/8`, `^docker`. Default: all.
        """
    @ifname.setter
    def ifname(self, value: str | None) -> None: ...
    @property
    def ports(self) -> str:
        """The attribute of `RINGCOMM_PORTS`.

        Where ranks listen: `40000-40015`, or one port. Default: any.
        """
    @ports.setter
    def ports(self, value: str | None) -> None: ...
    @property
    def transport(self) -> str:
        """The attribute of `RINGCOMM_TRANSPORT`.

        `tcp`: between ranks of one host too, for tests and comparisons. Default: `auto`. Values:
        `auto`, `tcp`.
        """
    @transport.setter
    def transport(self, value: str | None) -> None: ...
    @property
    def flows(self) -> int:
        """The attribute of `RINGCOMM_FLOWS`.

        TCP connections between two processes: for links on which one is not enough, or several
        network cards. The same on every rank. Default: `1`. Values: 1 to 16.
        """
    @flows.setter
    def flows(self, value: int | None) -> None: ...
    @property
    def congestion(self) -> str:
        """The attribute of `RINGCOMM_CONGESTION`.

        TCP's congestion control, as `bbr`, of those in `sysctl
        net.ipv4.tcp_allowed_congestion_control`. Default: as the kernel is set.
        """
    @congestion.setter
    def congestion(self, value: str | None) -> None: ...
    @property
    def resume_seconds(self) -> int:
        """The attribute of `RINGCOMM_RESUME_SECONDS`.

        Seconds for which a peer that does not answer is waited for. Default: `30`. Values: 1 to
        86,400.
        """
    @resume_seconds.setter
    def resume_seconds(self, value: int | None) -> None: ...
    @property
    def secret(self) -> str:
        """The attribute of `RINGCOMM_SECRET`.

        The secret of the job: only ranks that have the same can connect. In code a `pathlib.Path`
        is a file with it. Default: none.
        """
    @secret.setter
    def secret(self, value: str | Path | None) -> None: ...
    @property
    def costs(self) -> str:
        """The attribute of `RINGCOMM_COSTS`.

        A file of `ringcomm tune`, at rank 0: what messages cost here. Default: none.
        """
    @costs.setter
    def costs(self, value: str | None) -> None: ...
    @property
    def cuda_library(self) -> str:
        """The attribute of `RINGCOMM_CUDA_LIBRARY`.

        The library for CUDA tensors, in place of the one that was built. Default: the one
        installed.
        """
    @cuda_library.setter
    def cuda_library(self, value: str | None) -> None: ...
    @property
    def log(self) -> str:
        """The attribute of `RINGCOMM_LOG`.

        The least level of lines on stderr. `info` says what a group uses and why. Default:
        `warning`. Values: `debug`, `info`, `warning`, `error`, `off`.
        """
    @log.setter
    def log(self, value: str | None) -> None: ...
    @property
    def trace(self) -> str:
        """The attribute of `RINGCOMM_TRACE`.

        The folder in which flight records are kept, also of ranks that are killed. `off`: none is
        written, unless the program asks. Default: a temporary one, when something fails.
        """
    @trace.setter
    def trace(self, value: str | None) -> None: ...
    @property
    def trace_lines(self) -> str:
        """The attribute of `RINGCOMM_TRACE_LINES`.

        `1`: flight records have the line of the program that called, for some microseconds more.
        Default: `0`. Values: `0`, `1`.
        """
    @trace_lines.setter
    def trace_lines(self, value: str | None) -> None: ...
    @property
    def metrics(self) -> str:
        """The attribute of `RINGCOMM_METRICS`.

        A file that is written each second, for Prometheus; `%r` in its name is the rank. Default:
        none.
        """
    @metrics.setter
    def metrics(self, value: str | None) -> None: ...
    def __init__(
        self,
        timeout: timedelta = ...,
        *,
        algorithm: str | None = None,
        spin_us: int | None = None,
        cuda_mode: str | None = None,
        cuda_memory: int | None = None,
        ifname: str | None = None,
        ports: str | None = None,
        transport: str | None = None,
        flows: int | None = None,
        congestion: str | None = None,
        resume_seconds: int | None = None,
        secret: str | Path | None = None,
        costs: str | None = None,
        cuda_library: str | None = None,
        log: str | None = None,
        trace: str | None = None,
        trace_lines: str | None = None,
        metrics: str | None = None,
    ) -> None: ...
    # The settings end.

    _timeout: timedelta
    enable_reconfigure: bool
    """Whether the group is to be connected by `reconfigure`, not when it is made (torch 2.14)."""
    _agreement: Agreement | None
    """Of an elastic world: the members of its next epoch make this group."""
    _config: Config
    _given: set[str]
    """The names of the settings that code has set."""

    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class Backend(_Backend):
    """The backend of one group, as `group._get_backend(device)` returns it."""

    @property
    def options(self) -> Options: ...
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

def configure(config: Config) -> None:
    """Give the process its settings, before its first group."""

def close_groups(error: str) -> None:
    """End all groups, because the program ends; `error` is why, or ""."""

def flight_rings() -> list[bytes]:
    """Return the flight records of all groups, as their files show them (tools/records.py)."""

def tell_failures_to(pipe: int) -> None:
    """Write a byte to that descriptor whenever a group fails."""

def ask_for_records() -> None:
    """Ask all peers, of groups that have not failed, to write their flight records."""

def look_at_groups() -> int:
    """Let groups hear of failures at peers; return how often peers have asked for records."""

def create_backend(options: Any, backend_options: Options, cuda: bool = True) -> Backend:
    """Make the backend of one group from torch's _DistributedBackendOptions.

    `cuda`: whether the group's CUDA tensors are its own, too, or another backend's.
    Waits for the group's other ranks, at most `options.timeout`.
    """

# ---- for ringcomm.hooks

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
    over get zeros. Raises ValueError for wrong sizes and types.
    """

def dequantize(
    blocks: torch.Tensor, out: torch.Tensor, coding: int, sources: int = 1, divisor: float = 1.0
) -> None:
    """Write the sum of the sources, which follow one another, over the divisor.

    Raises ValueError for wrong sizes and types.
    """

# ---- the core, for the benchmarks and the tests

def copy_seconds(bytes: int, past_caches: bool, passes: int) -> list[float]: ...
def plan(
    shape: tuple[int, int, int, int, int, int, list[int], list[int], list[int], str],
    rank: int,
    algorithm: str | None,
) -> tuple[str, str, list[tuple[int, int, int, int, int, list[tuple[int, int, int, int]]]]]:
    """One rank's plan: the algorithm, the row of the table that fits, and the steps.

    A step is (verb, peer, lane, bytes, number of targets, operands: targets, then sources), an
    operand (space, rank, writer, offset). ringcomm.tools.plan_steps has names for all of it, and
    checks shapes. `algorithm` None: that of the row. Raises ValueError where there is none.
    """

def selection_text(size: int, costs: str = "") -> str:
    """The table of a group of `size` hosts, one row a line, limits in bytes.

    `costs` is "alpha 1.8e-05 beta 8.4e-09 gamma 2e-11", or the text of a file of
    `ringcomm tune`; "": the defaults. Raises ValueError.
    """

# ---- for ringcomm.elastic

def checksum(tensor: torch.Tensor) -> int:
    """64 bits of the bytes of a contiguous tensor on the CPU. Raises ValueError for another."""

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
