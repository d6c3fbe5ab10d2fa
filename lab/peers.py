"""The others that a benchmark measures: backends of torch, DeepSpeed's kernel, MPI libraries.

MPI needs mpirun and `pip install mpi4py`, DeepSpeed's kernel needs `pip install deepspeed`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lab import benchmark
from lab.benchmark import BenchmarkError, Measured
from lab.quotas import Quotas
from lab.ranks import Rank
from ringcomm.tools.bench import cases
from ringcomm.tools.bench.ddp import Trainer
from ringcomm.tools.bench.sharing import Model

MPI = {"openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
       "mpich": ["mpirun.mpich"]}  # fmt: skip
MPI_PROGRAM = Path(__file__).parent / "mpi_rank.py"
FEWEST, MOST = 5, 20_000  # calls of a round
DDP = "ddp"  # instead of a collective: a step of training
LAYERS, BATCH = 4, 64  # of its model


@dataclass(frozen=True)
class Call:
    """So many collectives in a row, which are timed as one. `size`: bytes, of DDP's gradients."""

    collective: str
    size: int
    row: int = 1
    type: str = "float32"


@dataclass(frozen=True)
class Settings:
    """How every peer runs."""

    ranks: int
    transport: str = "auto"  # ringcomm's
    deadline: float = 3600
    quotas: Quotas | None = None  # each rank's share of a core


class Peer(Protocol):
    """A context manager; its ranks live in it."""

    def __enter__(self) -> Peer: ...
    def __exit__(self, *error: Any) -> None: ...
    def times(self, call: Call, seconds: float) -> list[float]:
        """Return the seconds of each call on its slowest rank; none if it has no such call.

        They are as many as take about `seconds`, or at least half of that.
        """


def peer(name: str, settings: Settings) -> Peer:
    return OfMpi(name, settings) if name in MPI else OfTorch(name, settings)


# ---- on a rank


def enter(rank: Rank, backend: str, transport: str) -> None:
    if backend == "ringcomm":
        os.environ["RINGCOMM_TRANSPORT"] = transport
        benchmark.prepare(rank)
    benchmark.join(rank)
    if backend == "deepspeed":
        rank.kept["deepspeed"] = load_deepspeed(rank)


def load_deepspeed(rank: Rank) -> Callable[[torch.Tensor], None]:
    """Build DeepSpeed's shared-memory kernel, or load it, and return its all-reduce."""
    os.environ["LOCAL_SIZE"] = str(rank.size)
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False).initialize(rank.size, rank.index)
    reduce: Callable[[torch.Tensor], None] = torch.ops.deepspeed.inference_all_reduce_
    return reduce


def process_of(_rank: Rank) -> int:
    return os.getpid()


def make(rank: Rank, call: Call) -> bool:
    """Keep what is timed, once it is checked. Returns false if there is no such call."""
    once = once_of(rank, call)
    if once is None:
        return False
    rank.kept["call"] = once if call.row == 1 else lambda: [once() for _ in range(call.row)]
    return True


def once_of(rank: Rank, call: Call) -> Callable[[], object] | None:
    if call.collective == DDP:
        width = max(1, int((call.size / 4 / LAYERS) ** 0.5))
        model = Model("mlp", "ddp", width, LAYERS, BATCH)
        return None if "deepspeed" in rank.kept else Trainer(rank, model, "cpu", silent=False).step
    form = cases.Form(call.type)
    count = cases.elements(call.collective, call.size, rank.size, form.dtype.itemsize)
    if reduce := rank.kept.get("deepspeed"):
        # Without AVX-512 its kernel ends the process by an illegal instruction, but for float32.
        able = call.type == "float32" or "avx512" in Path("/proc/cpuinfo").read_text()
        if call.collective != "all_reduce" or not able:
            return None
        return summed_by(reduce, torch.ones(count, dtype=form.dtype), rank.size)
    cases.verify(call.collective, count, rank.index, rank.size, form)
    case = cases.make(call.collective, count, rank.index, rank.size, form)
    case.given.zero_()
    return case.call


def summed_by(
    reduce: Callable[[torch.Tensor], None], tensor: torch.Tensor, ranks: int
) -> Callable[[], None]:
    """Return a function that calls it; `tensor` holds ones."""
    reduce(tensor)
    assert tensor.eq(ranks).all(), f"DeepSpeed's sum of ones is {tensor}"
    tensor.zero_()
    return lambda: reduce(tensor)


def sample(rank: Rank, calls: int) -> list[float]:
    """Return the seconds of each call."""
    call: Callable[[], Any] = rank.kept["call"]
    dist.barrier()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


# ---- peers


class OfTorch:
    """A backend of torch, or DeepSpeed's kernel beside Gloo."""

    def __init__(self, backend: str, settings: Settings) -> None:
        group = "gloo" if backend == "deepspeed" else backend
        self.ranks = Measured(settings.ranks, group, settings.deadline)
        self.backend, self.settings = backend, settings

    def __enter__(self) -> OfTorch:
        self.ranks.__enter__()
        self.ranks(enter, self.backend, self.settings.transport)
        if self.settings.quotas is not None:
            self.settings.quotas.take(self.ranks(process_of))
        return self

    def __exit__(self, *error: Any) -> None:
        self.ranks.__exit__(*error)

    def times(self, call: Call, seconds: float) -> list[float]:
        if not all(self.ranks(make, call)):
            return []
        calls, times = FEWEST, list[float]()
        while calls < MOST and sum(times) < seconds / 2:  # the first ones find the ranks asleep
            calls = min(MOST, 4 * calls)
            times = benchmark.slowest(self.ranks(sample, calls))
        return times


def error_in(text: str) -> str:
    """Return the line of a traceback that says what is wrong, or all of the text."""
    lines = [line for line in text.splitlines() if re.match(r"\w*Error: ", line)]
    hint = " (`pip install mpi4py`)" if "mpi4py" in text and "No module" in text else ""
    return (lines[0] if lines else text) + hint


class OfMpi:
    """An MPI library. Its ranks spin while they wait, so they only live as long as they measure."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings

    def __enter__(self) -> OfMpi:
        return self

    def __exit__(self, *_: object) -> None: ...

    def times(self, call: Call, seconds: float) -> list[float]:
        if call.collective != "all_reduce" or call.type != "float32":
            return []
        ranks, quotas = self.settings.ranks, self.settings.quotas
        folders = quotas.folders(ranks) if quotas is not None else []
        numbers = (call.size, call.row, seconds)
        command = [*MPI[self.name], "-np", str(ranks), sys.executable, str(MPI_PROGRAM)]
        try:
            done = subprocess.run(
                [*command, *map(str, numbers), *map(str, folders)],
                capture_output=True,
                text=True,
                timeout=min(self.settings.deadline, 60 + 20 * seconds),
                env={**os.environ, "MPI4PY_MPIABI": self.name},
                check=True,
            )
        except FileNotFoundError:
            what = f"{command[0]} is not installed: install it, or leave {self.name} out"
            raise BenchmarkError(what) from None
        except subprocess.TimeoutExpired as error:
            late = f"{self.name} did not finish within {error.timeout:.0f} s"
            raise BenchmarkError(f"{late}: give it fewer ranks, or leave it out") from None
        except subprocess.CalledProcessError as error:
            raise BenchmarkError(f"{self.name}: {error_in(error.stderr)}") from None
        times: list[float] = json.loads(done.stdout)
        return times
