"""Facts of one rank's own host and process, read from /proc, /sys and the kernel.

Functions take the roots of /proc and /sys, so that tests can give them others.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ringcomm.options import secret_of

PROC, SYS = Path("/proc"), Path("/sys")
UNKNOWN = "unknown"
UNLIMITED = 1 << 60  # version 1 of cgroups tells such a number
SECRETS = ("RINGCOMM_SECRET", "RINGCOMM_SECRET_FILE")


@dataclass
class Facts:
    """The facts of one rank. Memory is in bytes; -1 and "unknown" stand for what cannot be read."""

    rank: int = 0
    host: str = UNKNOWN
    pid: int = 0
    user: int = 0
    boot_id: str = UNKNOWN
    network: str = UNKNOWN  # namespaces, by inode
    ipc_namespace: str = UNKNOWN
    pid_namespace: str = UNKNOWN
    ringcomm: str = UNKNOWN
    build: str = UNKNOWN
    library_error: str = ""
    torch: str = UNKNOWN
    python: str = UNKNOWN
    kernel: str = UNKNOWN
    cores: float = 0  # by affinity and the cgroup's quota
    descriptors_limit: int = -1
    descriptors_hard: int = -1
    descriptors_open: int = -1
    memory_available: int = -1  # on the host
    memory_limit: int = -1  # the cgroup's; -1: none
    memory_used: int = -1
    oom_kills: int = 0
    memfd_error: str = ""
    secret_error: str = ""
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)  # "10.0.0.1:4000", where it listens
    listen_error: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    cuda: dict[str, Any] = field(default_factory=dict)
    socket: str = ""  # abstract Unix socket

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, Any]) -> Facts:
        """Return what a rank has told; another version may tell more or less."""
        return Facts(**known(Facts, told))

    @property
    def machine(self) -> tuple[str, str, int]:
        """Return what tells one host from another; what is not known equals nothing."""
        unknown = UNKNOWN in (self.boot_id, self.network)
        return self.boot_id, self.network, self.rank if unknown else -1

    @property
    def tcp(self) -> bool:
        return self.settings.get("RINGCOMM_TRANSPORT") == "tcp"


def first_line(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.readline().strip() or UNKNOWN
    except OSError:
        return UNKNOWN


def number_in(path: Path) -> int:
    """Return the number in a file; -1 where there is none, as "max"."""
    text = first_line(path)
    return int(text) if text.isdigit() else -1


def namespace(proc: Path, kind: str) -> str:
    try:
        status = (proc / "self" / "ns" / kind).stat()
    except OSError:
        return UNKNOWN
    return f"{status.st_dev}:{status.st_ino}"


def cgroups(proc: Path, sys: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of those above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = sys / "fs" / "cgroup"
        elif controller in controllers.split(","):
            root = sys / "fs" / "cgroup" / controller
        else:
            continue
        folder = root / path.strip("/")
        folders += [parent for parent in (folder, *folder.parents) if parent.is_relative_to(root)]
    return [folder for folder in folders if folder.is_dir()]


def memory(proc: Path = PROC, sys: Path = SYS) -> dict[str, int]:
    """Return the memory of the host, and the tightest limit of the cgroups, in bytes."""
    facts = {"memory_available": -1, "memory_limit": -1, "memory_used": -1, "oom_kills": 0}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                facts["memory_available"] = int(line.split()[1]) * 1024
    except OSError:
        pass
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    room = None
    folders = cgroups(proc, sys, "memory")
    for folder in folders:
        for limit_name, used_name in names:
            limit, used = number_in(folder / limit_name), number_in(folder / used_name)
            if 0 <= limit < UNLIMITED and (room is None or limit - used < room):
                room = limit - used
                facts["memory_limit"], facts["memory_used"] = limit, used
    for name in ("memory.events", "memory.oom_control"):
        for folder in folders[:1]:
            try:
                words = (folder / name).read_text().split()
            except OSError:
                continue
            if "oom_kill" in words:
                facts["oom_kills"] = int(words[words.index("oom_kill") + 1])
    return facts


def cores(proc: Path = PROC, sys: Path = SYS) -> float:
    """Return how many cores this process may use: by affinity, and by the quota of cgroups."""
    count = float(len(os.sched_getaffinity(0)))
    for folder in cgroups(proc, sys, "cpu"):
        quota, period = -1, 100000
        words = first_line(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            quota, period = int(words[0]), int(words[1])
        elif (v1 := number_in(folder / "cpu.cfs_quota_us")) > 0:
            quota, period = v1, number_in(folder / "cpu.cfs_period_us")
        if quota > 0 and period > 0:
            count = min(count, quota / period)
    return count


def descriptors(proc: Path = PROC) -> dict[str, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(list((proc / "self" / "fd").iterdir()))
    except OSError:  # EMFILE too: the table is full
        used = -1
    return {"descriptors_limit": soft, "descriptors_hard": hard, "descriptors_open": used}


def known(kind: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a dataclass of this version has of what a rank has told."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in told.items() if name in names}


def secret_error(environment: Mapping[str, str]) -> str:
    """Return why the library would refuse the file with the secret; "" where it takes it."""
    try:
        secret_of(environment)
    except ValueError as error:
        return str(error)
    return ""


def memfd_error() -> str:
    """Return why memory cannot be reserved and sealed as ringcomm does it; "" where it can."""
    try:
        memory = os.memfd_create("ringcomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(memory, 1 << 20)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        return f"sealing shared memory: {error.strerror}"
    finally:
        os.close(memory)
    return ""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ringcomm; of a secret only that there is one."""
    named = {name: value for name, value in environment.items() if name.startswith("RINGCOMM_")}
    return {name: "(set)" if name in SECRETS else value for name, value in sorted(named.items())}


def versions() -> dict[str, str]:
    """Return the versions of all parts; what fails to load says why, as `library_error`."""
    import torch

    import ringcomm

    told = {
        "ringcomm": ringcomm.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    try:
        told["build"] = build()
    except Exception as error:  # noqa: BLE001  a library that does not load is what is looked for
        told["library_error"] = f"{type(error).__name__}: {error}"
    return told


def build() -> str:
    """Return the hash of the engine's source. Raises ImportError and what the library raises."""
    from ringcomm._runtime.library import load_library

    return str(load_library().build())


def cuda(proc: Path = PROC) -> dict[str, Any]:
    """Return what of CUDA is here: the driver, torch's and ringcomm's own part, and the GPUs."""
    import torch

    folder = Path(str(importlib.import_module("ringcomm").__file__)).parent
    told: dict[str, Any] = {
        "driver": (proc / "driver" / "nvidia" / "version").exists(),
        "torch": torch.version.cuda or "",
        "library": (folder / "libringcomm_cuda.so").exists(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": [],
        "peers": True,
    }
    try:
        if told["torch"] and torch.cuda.is_available():
            count = torch.cuda.device_count()
            told["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
            told["peers"] = all(
                torch.cuda.can_device_access_peer(device, peer)
                for device in range(count)
                for peer in range(count)
                if device != peer
            )
    except Exception as error:  # noqa: BLE001  drivers fail in many ways, and each is a fact
        told["error"] = f"{type(error).__name__}: {error}"
    return told


def collect(rank: int, environment: Mapping[str, str]) -> Facts:
    """Collect the facts of this process; those of its network are added by the caller."""
    facts = Facts(
        rank=rank,
        host=first_line(PROC / "sys" / "kernel" / "hostname"),
        pid=os.getpid(),
        user=os.geteuid(),
        boot_id=first_line(PROC / "sys" / "kernel" / "random" / "boot_id"),
        network=namespace(PROC, "net"),
        ipc_namespace=namespace(PROC, "ipc"),
        pid_namespace=namespace(PROC, "pid"),
        cores=cores(),
        settings=settings(environment),
    )
    parts = (descriptors(), memory(), versions())
    for name, value in ((name, value) for part in parts for name, value in part.items()):
        setattr(facts, name, value)
    facts.memfd_error = memfd_error()
    facts.secret_error = secret_error(environment)
    facts.cuda = cuda()
    return facts
