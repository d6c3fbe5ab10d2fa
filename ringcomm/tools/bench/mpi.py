"""Ranks that call MPI on the same tensors: mpirun starts them, and mpi4py makes the calls.

torch's packages have no backend for MPI. So these calls go to MPI directly, without torch between.
Ranks wait at a pipe as those of the other backends do, and use no processor meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch

from ringcomm.tools.bench.cases import REDUCING, ROOT, Case
from ringcomm.tools.bench.measured import BenchmarkError, Measured
from ringcomm.tools.bench.ranks import Rank, end_with_parent, serve
from ringcomm.tools.bench.sample import Job

NAME = "mpi"
OPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}
START, A_RANK = 60.0, 5.0  # seconds that all ranks have to come, and those more for each
# As with the other backends: the kernel may move ranks, and there may be more of them than cores.
# MPICH needs none of these; Open MPI 5 reads those of PRTE.
SETTINGS = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Open MPI asks for both before it lets root start ranks, as in a container.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def launcher() -> str:
    """Return the path of mpirun. Raises ValueError where it or mpi4py is missing."""
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    missing = ["mpirun"] * (path is None) + ["mpi4py"] * (find_spec("mpi4py") is None)
    if missing or path is None:
        raise ValueError(
            f"--backends mpi: {' and '.join(missing)} cannot be found; it needs an installed MPI "
            "and `pip install mpi4py`"
        )
    return path


def version() -> str:
    """Return the name and version of the MPI: "Open MPI v4.1.4". It begins no MPI here.

    Raises ValueError where mpi4py finds no MPI.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"--backends mpi: mpi4py finds no MPI: {why}") from error
    text: str = MPI.Get_library_version()
    return text.partition("\n")[0].partition(",")[0].strip()


# ---- on a rank


@functools.cache
def library() -> Any:
    """Return mpi4py's MPI, which begins with the first call; it ends with the process."""
    from mpi4py import MPI

    return MPI


def barrier() -> None:
    library().COMM_WORLD.Barrier()


def called(case: Case, job: Job, rank: Rank) -> Case:
    """Return the case with a call to MPI on its buffers.

    Raises TypeError for sums of types that MPI does not have. Buffers of collectives that sum
    nothing are bytes to MPI, so it takes every type.
    """
    sums = job.collective in REDUCING
    if sums and job.form.type in ("float16", "bfloat16"):
        raise TypeError(f"MPI has no {job.form.op} of {job.form.type}")
    if job.collective == "reduce_scatter" and job.form.in_place:
        # MPI puts it at the beginning of the input, and torch where the rank's part was.
        case = replace(case, result=case.given[: len(case.result)])
    tensors = (case.given, case.result)
    given, result = (t.numpy() if sums else t.view(torch.uint8).numpy() for t in tensors)
    return replace(case, call=_CALLS[job.collective](given, result, job, rank))


def _all_reduce(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi, op = library(), _op(job)
    return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, result, op)


def _all_gather(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi = library()
    source = mpi.IN_PLACE if job.form.in_place else given
    return lambda: mpi.COMM_WORLD.Allgather(source, result)


def _reduce_scatter(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi, op = library(), _op(job)
    source, to = (mpi.IN_PLACE, given) if job.form.in_place else (given, result)
    return lambda: mpi.COMM_WORLD.Reduce_scatter_block(source, to, op)


def _all_to_all(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    return lambda: library().COMM_WORLD.Alltoall(given, result)


def _broadcast(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi = library()
    return lambda: mpi.COMM_WORLD.Bcast(result, ROOT)


def _reduce(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi, op = library(), _op(job)
    source, to = (mpi.IN_PLACE, result) if rank.index == ROOT else (given, None)
    return lambda: mpi.COMM_WORLD.Reduce(source, to, op, ROOT)


def _gather(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi, to = library(), result if rank.index == ROOT else None
    return lambda: mpi.COMM_WORLD.Gather(given, to, ROOT)


def _scatter(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi, source = library(), given if rank.index == ROOT else None
    return lambda: mpi.COMM_WORLD.Scatter(source, result, ROOT)


def _send_recv(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    mpi = library()
    after, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    return lambda: mpi.COMM_WORLD.Sendrecv(given, after, 0, result, before, 0)


def _barrier(given: Any, result: Any, job: Job, rank: Rank) -> Callable[[], Any]:
    found: Callable[[], Any] = library().COMM_WORLD.Barrier
    return found


def _op(job: Job) -> Any:
    return getattr(library(), OPS[job.form.op])


_CALLS: dict[str, Callable[[Any, Any, Job, Rank], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}


def main(path: str, lifetime: float) -> None:
    """Be a rank: come to the socket at `path`, and serve until it closes."""
    end_with_parent(lifetime)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's
    torch.set_num_threads(1)
    world = library().COMM_WORLD
    to = socket.socket(socket.AF_UNIX)
    to.connect(path)
    with Connection(to.detach()) as pipe:
        pipe.send((world.Get_rank(), world.Get_size(), os.getpid()))
        serve(pipe, Rank(world.Get_rank(), world.Get_size(), None, NAME), None)


# ---- where they are started


class MpiRanks(Measured):
    """Ranks that mpirun has started. A context manager: leaving it ends them."""

    def __init__(self, size: int, lifetime: float) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        super().__init__(size, NAME, lifetime)

    def start(self) -> None:
        """Start them, and wait until all are there. Raises BenchmarkError if they do not come."""
        os.environ["OMP_NUM_THREADS"] = "1"  # ranks inherit it
        self._folder = tempfile.TemporaryDirectory(prefix="ringcomm-bench-")
        place, said = Path(self._folder.name, "socket"), Path(self._folder.name, "said")
        own = f"from {__name__} import main; main({str(place)!r}, {self.lifetime})"
        words = [launcher(), "-n", str(self.size), sys.executable, "-c", own]
        settings = SETTINGS | (AS_ROOT if os.geteuid() == 0 else {})
        with socket.socket(socket.AF_UNIX) as listener, said.open("wb") as output:
            listener.bind(str(place))
            listener.listen(self.size)
            listener.settimeout(0.2)
            started = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**settings, **os.environ},
            )
            self._processes = [cast("BaseProcess", _Started(started))] * self.size
            try:
                self._meet(listener, started, said)
            except BaseException:
                self.kill()
                raise

    def _meet(self, listener: socket.socket, started: subprocess.Popen[bytes], said: Path) -> None:
        """Take the ranks' connections, in the order of ranks."""
        pipes: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        end = time.monotonic() + (START + A_RANK * self.size) * self.slower
        while len(pipes) < self.size:
            if started.poll() is not None or time.monotonic() > end:
                raise BenchmarkError(f"mpirun started no ranks: {words_of(said)}")
            with contextlib.suppress(TimeoutError):
                pipe = Connection(listener.accept()[0].detach())
                index, size, pid = pipe.recv()
                if size != self.size:
                    raise BenchmarkError(
                        f"--backends mpi: ranks find {size} of {self.size}: mpi4py uses another "
                        "MPI than mpirun"
                    )
                pipes[index], self._pids[index] = pipe, pid
        self._pipes = [pipes[index] for index in range(self.size)]

    @property
    def pids(self) -> list[int]:
        return [self._pids[index] for index in range(self.size)]

    def kill(self) -> None:
        super().kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Started:
    """A process by the names of `multiprocessing`: mpirun, which ends its ranks with itself."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        """End it, and by force where it does not; one that has ended is left alone."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its ranks
            self.join(5)
            self._process.kill()


def words_of(said: Path) -> str:
    """Return the first sentence of what mpirun has said, or that it was silent."""
    text = said.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip(" -\t")]
    return lines[0] if lines else "it says nothing"
