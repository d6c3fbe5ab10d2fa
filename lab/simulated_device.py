"""The device of tests/sim, which threads simulate: groups on it, and torch's side of it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lab import ROOT
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, join

SIMULATED = ROOT / "build" / "tests" / "libringcomm_sim.so"
SMALL = {"RINGCOMM_CUDA_MEMORY": str(1 << 18)}  # windows of 32 KiB: many rounds
# Tensors of the CPU stay there: those of CUDA are on the device, once `pretend` was called.
CUDA = {"RINGCOMM_CUDA_LIBRARY": str(SIMULATED), "RINGCOMM_SIM_STAND_INS": "0", **SMALL}
SLOW = {**SMALL, "RINGCOMM_SIM_SLOW_US": "4000"}  # an operation takes some 40 ms


def on_device(
    rank: Rank,
    life: str,
    settings: dict[str, str],
    body: Callable[[Rank], Any],
    seconds: float = 20,
) -> Outcome:
    """Run `body` in a child whose group works on a simulated device; `log` is what it said."""

    def child() -> Outcome:
        os.environ.update({"RINGCOMM_CUDA_LIBRARY": str(SIMULATED), "RINGCOMM_LOG": "info"})
        os.environ["RANK"] = str(rank.index)
        for name, value in settings.items():  # "a,b,c": one for each rank
            os.environ[name] = value.split(",")[rank.index] if "," in value else value
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.set_blocking(reader, False)
        join(rank_of(rank, life), "cpu:ringcomm,cuda:ringcomm", seconds=seconds)
        answer = body(rank)
        outcome: Outcome = answer if isinstance(answer, dict) else {"answer": answer}
        if dist.is_initialized():
            dist.destroy_process_group()
        try:
            outcome["log"] = os.read(reader, 60_000).decode()
        except BlockingIOError:
            outcome["log"] = ""
        return outcome

    return in_child(child)


class SimulatedMemory:
    """Tensors in memory of the simulated device, which peers can map."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(SIMULATED))
        self.library.ringcomm_sim_allocate.restype = ctypes.c_void_p
        self.library.ringcomm_sim_allocate.argtypes = [ctypes.c_uint64]
        self.library.ringcomm_sim_release.argtypes = [ctypes.c_void_p]
        self.library.ringcomm_sim_used.restype = ctypes.c_uint64
        self.library.ringcomm_sim_remap.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        for name in ("copies", "copied", "pinned", "asked", "lost_slices"):
            getattr(self.library, f"ringcomm_sim_{name}").restype = ctypes.c_uint64

    def empty(self, count: int) -> torch.Tensor:
        address = self.library.ringcomm_sim_allocate(4 * count)
        assert address
        memory = (ctypes.c_float * count).from_address(address)
        return torch.frombuffer(memory, dtype=torch.float32)

    def release(self, tensor: torch.Tensor) -> None:
        self.library.ringcomm_sim_release(tensor.data_ptr())

    def empty_cache(self) -> int:
        return int(self.library.ringcomm_sim_empty_cache())

    def used(self) -> int:
        """Bytes of the device, those included that were released and others have mapped."""
        return int(self.library.ringcomm_sim_used())

    def copies(self) -> int:
        """How many copies were enqueued so far."""
        return int(self.library.ringcomm_sim_copies())

    def copied(self) -> int:
        """How many of them are over."""
        return int(self.library.ringcomm_sim_copied())

    def asked(self) -> int:
        """How many calls of the driver's asked about memory."""
        return int(self.library.ringcomm_sim_asked())

    def lost_slices(self) -> int:
        """How many slices of time have ended while kernels of this process waited."""
        return int(self.library.ringcomm_sim_lost_slices())

    def remap(self, tensor: torch.Tensor) -> None:
        """Put other memory behind its addresses, as torch's expandable segments do."""
        self.library.ringcomm_sim_remap(tensor.data_ptr(), 4 * tensor.numel())

    def pinned(self) -> int:
        """Bytes of the host's memory that devices can read and write."""
        return int(self.library.ringcomm_sim_pinned())

    def pinned_node(self) -> int:
        """Return the NUMA node that the last pinned memory was to be on, or -1."""
        return int(self.library.ringcomm_sim_pinned_node())


class Cuda:
    """torch's side of the simulated device."""

    def __init__(self) -> None:
        (path,) = SIMULATED.parent.glob("ringcomm_sim_cuda*.so")
        spec = importlib.util.spec_from_file_location("ringcomm_sim_cuda", path)
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.module.start(str(SIMULATED), self.module.interface)
        torch.cuda.get_device_capability = lambda device=None: (8, 0)  # dist.broadcast asks
        self._kept: list[torch.Tensor] = []

    def full(self, count: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor of the CPU, for looking at, and the same memory as one of the device."""
        memory = torch.full((count,), value)
        self._kept.append(memory)  # it is the heap's, and streams are late
        return memory, self.module.cuda_view(memory)

    def synchronize(self) -> None:
        self.module.synchronize()


class _Stream:
    """The current stream, as torch.cuda has it."""

    def __init__(self, cuda: Cuda) -> None:
        self.synchronize = cuda.synchronize


def pretend() -> Cuda:
    """Have torch.cuda say that there is the simulated device, as programs ask it.

    Tensors move there and are computed with. Kernels draw from the generator of the CPU. That of
    CUDA is there, and programs may name it.
    """
    cuda = Cuda()
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: 0
    stream = _Stream(cuda)
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.is_initialized = lambda: True
    torch.cuda.default_generators = (torch.Generator(),)
    return cuda


def met() -> Cuda:
    """The device, once the ranks of the default group have met there."""
    cuda = Cuda()
    dist.all_reduce(cuda.full(3, 1.0)[1])
    cuda.synchronize()
    return cuda


class Memory:
    """Tensors of the simulated device, mapped by peers or staged, with their view for the host."""

    def __init__(self, cuda: Cuda, mapped: bool) -> None:
        self.cuda = cuda
        self.simulated = SimulatedMemory() if mapped else None
        self.kept: list[torch.Tensor] = []

    def make(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = self.simulated.empty(count) if self.simulated else torch.empty(count)
        host.zero_()
        self.kept.append(host)
        return host, self.cuda.module.cuda_view(host)


class Graph:
    """The calls inside of `with graph:`, on a stream of its own."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.module.new_stream()
        self.id = 0

    def __enter__(self) -> None:
        self.before = self.cuda.module.use_stream(self.stream)
        self.cuda.module.begin_capture("global")

    def __exit__(self, kind: Any, *rest: object) -> None:
        with contextlib.suppress(RuntimeError) if kind else contextlib.nullcontext():
            self.id = self.cuda.module.end_capture()
        self.cuda.module.use_stream(self.before)

    def replay(self) -> None:
        self.cuda.module.launch_graph(self.id)
