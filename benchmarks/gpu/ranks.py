"""Ranks on a GPU, and the places where their tensors are.

On the simulated device tensors of the CPU stand in for those of a GPU: RINGCOMM_CUDA_LIBRARY names
the library, which also gives the memory, so that it can be exported as cudaMalloc's can.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lab import benchmark
from lab.benchmark import Measured
from lab.ranks import HOST, Rank, RankError, end_with_parent

T = TypeVar("T")

LIBRARY = "RINGCOMM_CUDA_LIBRARY"
NODE = "GPU_CHECK_NODE"
START_SECONDS = 120.0  # to import a torch that lies on no cached page, make a context, and meet


def gpus() -> int:
    """Return how many GPUs the ranks share out: all with gpu_check.py's --node, else one."""
    return torch.cuda.device_count() or 1 if os.environ.get(NODE) else 1


class Place:
    """Where tensors are: "cuda", "simulated", or "cpu" for results to compare with."""

    def __init__(self, kind: str, rank: int = 0) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"
        self.device = torch.device("cuda", rank % gpus()) if self.is_cuda else torch.device("cpu")
        self._library: ctypes.CDLL | None = None
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        if kind == "simulated":
            self._library = ctypes.CDLL(os.environ[LIBRARY])
            self._library.ringcomm_sim_allocate.restype = ctypes.c_void_p
            self._library.ringcomm_sim_allocate.argtypes = [ctypes.c_uint64]
            self._library.ringcomm_sim_release.argtypes = [ctypes.c_void_p]

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self._library is None or count == 0:
            return torch.empty(count, dtype=dtype, device=self.device)
        block = self._library.ringcomm_sim_allocate(count * dtype.itemsize)
        if not block:
            raise MemoryError(f"the simulated device has no {count * dtype.itemsize} bytes")
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(block)
        weakref.finalize(memory, self._library.ringcomm_sim_release, block)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)

    def full(self, count: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.empty(count, dtype).fill_(value)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat copy of a tensor of the CPU's."""
        there = self.empty(tensor.numel(), tensor.dtype)
        there.view(torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
        return there

    def empty_cache(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif self._library is not None:
            self._library.ringcomm_sim_empty_cache()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def stream(self) -> Any:
        """Return a context in which a new stream is the current one."""
        if not self.is_cuda:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def busy(self, milliseconds: float) -> None:
        """Keep the current stream busy about so long; the host goes on."""
        if self.is_cuda:
            torch.cuda._sleep(int(milliseconds * 1.7e6))  # cycles

    def seconds(self, enqueue: Callable[[], Any]) -> float:
        """Return how long the current stream takes for what `enqueue` puts there."""
        if not self.is_cuda:
            start = time.perf_counter()
            enqueue()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        enqueue()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


@dataclass(frozen=True)
class Entry:
    """How ranks begin."""

    kind: str  # the kind of place
    library: str = ""  # RINGCOMM_CUDA_LIBRARY, where tensors are not the CPU's
    environment: dict[str, str] = field(default_factory=dict)
    timeout: float = 60.0
    with_device: bool = False  # init_process_group(device_id=…)
    apart: bool = False  # ranks take the device that they share for one of their own


def place_of(rank: Rank) -> Place:
    place: Place = rank.kept["place"]
    return place


def enter(rank: Rank, entry: Entry) -> float:
    """Make the default group, and meet; returns seconds."""
    os.environ.pop(LIBRARY, None)
    if entry.kind != "cpu" and entry.library:
        os.environ[LIBRARY] = entry.library
    for name, value in entry.environment.items():
        os.environ[name] = value.replace("{rank}", str(rank.index))
    benchmark.prepare(rank)
    if entry.apart:
        take_apart(rank, entry)
    start = time.perf_counter()
    place = rank.kept["place"] = Place(entry.kind, rank.index)
    more: dict[str, Any] = {"device_id": place.device} if entry.with_device else {}
    dist.init_process_group(
        rank.backend,
        store=rank.store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=entry.timeout),
        **more,
    )
    tensor = place.full(1, 1.0)
    dist.all_reduce(tensor)
    assert tensor.item() == rank.size
    return time.perf_counter() - start


def take_apart(rank: Rank, entry: Entry) -> None:
    """Have this rank's device look like another than its peers': csrc/device/library.cc."""
    import ringcomm

    installed = Path(ringcomm.__file__).parent / "libringcomm_cuda.so"
    library = ctypes.CDLL(entry.library or str(installed))
    library.ringcomm_device_salt(ctypes.c_uint8(1 + rank.index))


def preload_training() -> None:
    """Have ranks forked from a process that has what DDP imports, which takes seconds."""
    forkserver.set_forkserver_preload(["torch.distributed", "torch._dynamo"])
    forkserver.ensure_running()


class DeviceRanks(Measured):
    """Ranks that have entered, and what a test of failures needs of them."""

    def __init__(self, size: int, entry: Entry, *, fresh: bool = False) -> None:
        """`fresh` ones have this process's environment from their first line on."""
        super().__init__(size, "ringcomm", lifetime=600, fresh=fresh)
        self._abandoned = False
        self._entry = entry

    def __enter__(self) -> DeviceRanks:
        try:
            self(enter, self._entry, seconds=START_SECONDS)
        except BaseException:
            self.abandon()
            self.__exit__(None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(RankError if self._abandoned else kind, *rest)

    def abandon(self) -> None:
        """They have failed, as they were meant to: end them without a word."""
        self._abandoned = True

    def await_key(self, key: str) -> None:
        """Wait until a rank has set `key`."""
        assert self._store is not None
        self._store.wait([key], timedelta(seconds=START_SECONDS))

    def collect(self, seconds: float) -> dict[int, Any]:
        """Return the answers by rank; an exception in place of one that failed, died or is late."""
        late = RankError(f"no answer within {seconds:.0f} s")
        given = self.answers(seconds)
        said = {i: a if good else RankError(self._says(i, a)) for i, (good, a) in given.items()}
        return dict.fromkeys(range(self.size), late) | said


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables for what is started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def meet(rank: Rank) -> None:
    """Wait for all ranks, and for what the place was given to do."""
    place_of(rank).synchronize()
    dist.barrier()


def group_by(algorithm: str | None) -> Any:
    """Make a group that uses `algorithm` wherever a collective has it; None: the default group."""
    if algorithm is None:
        return dist.group.WORLD
    from ringcomm import Options

    options = Options()
    options.algorithm = algorithm
    return dist.new_group(backend="ringcomm", pg_options=options)


def small_run(kind: str, index: int, size: int, port: int) -> None:
    """Do a little of everything: what a sanitizer looks at."""
    store = dist.TCPStore(HOST, port, wait_for_workers=False)
    rank = Rank(index, size, store)
    enter(rank, Entry(kind, os.environ.get(LIBRARY, "")))
    place = place_of(rank)
    for count in (1, 1001, 300_000):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = place.full(count, index + 1, dtype)
            dist.all_reduce(tensor)
            whole = place.empty(count * size, dtype)
            dist.all_gather(list(whole.chunk(size)), tensor)
            assert whole.eq(size * (size + 1) / 2).all(), "a wrong sum"
    meet(rank)
    rank.kept.clear()
    dist.destroy_process_group()
    print("all sums are right", flush=True)


if __name__ == "__main__":
    end_with_parent(300)
    small_run(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
