"""NVIDIA's multi-process service (MPS): its effect where ranks share a GPU.

Without it processes get the GPU in turns; with it their kernels run side by side. The same figures
are taken without it, then under a daemon of our own, in folders of our own, that is ended again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu.table
from gpu.behaviour import Check, Crew, in_the_current_stream, memory_comes_and_goes, run_checks
from gpu.ranks import DeviceRanks, Entry
from gpu.speed import median, time_all_reduce, time_calls, time_in_stream
from gpu.stages import Settings, last_line, parts
from gpu.table import Row
from lab import report
from lab.benchmark import slowest
from lab.ranks import RankError

CONTROL = "nvidia-cuda-mps-control"
LENGTHS = [1 << 20, 64 << 20, 256 << 20]
COUNTS = [2, 4096]  # elements of small operations
SECONDS = 10  # for the daemon to come, and to go

Figures = dict[str, float]  # by what was measured: seconds


class Daemon:
    """A control daemon of our own, our child: it serves those that know its folder."""

    def __init__(self, control: str, folder: Path) -> None:
        self._control, self._folder = control, folder
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        for path in self.environment.values():
            Path(path).mkdir(parents=True)
        self._process = subprocess.Popen(
            [self._control, "-f"],  # in the foreground, so that it is ours to end
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._await()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _await(self) -> None:
        assert self._process is not None
        end = time.monotonic() + SECONDS
        while self._tell("get_server_list")[0] != 0:
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the daemon does not start: {self.said()}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        """Have it end by its own command, with the server that it has started."""
        assert self._process is not None
        if self._process.poll() is None:
            self._tell("quit")
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, words: str) -> tuple[int, str]:
        """Give it a command; returns the status and what it says."""
        try:
            done = subprocess.run(
                [self._control],
                input=f"{words}\n",
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env={**os.environ, **self.environment},
            )
        except subprocess.TimeoutExpired:
            return 1, "no answer"
        return done.returncode, done.stdout.strip()

    def served(self) -> bool:
        """Return whether it has a server, which it starts for the first client."""
        status, said = self._tell("get_server_list")
        return status == 0 and bool(said)

    def said(self) -> str:
        """Return the last line of its log."""
        logs = sorted((self._folder / "log").glob("*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return gpu.table.first_line(lines[-1]) if lines else "nothing in its log"


@contextlib.contextmanager
def daemon(control: str, settings: Settings) -> Iterator[Daemon]:
    """Run one in a new folder with a short name, as sockets need; keep its logs."""
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    try:
        with Daemon(control, folder) as running:
            yield running
    finally:
        for log in (folder / "log").glob("*.log"):
            shutil.copy(log, Path(settings.folder) / f"mps_{log.name}")
        shutil.rmtree(folder, ignore_errors=True)


def figures(size: int, settings: Settings, environment: dict[str, str]) -> Figures:
    """Return the seconds of some all_reduces."""
    figures_: Figures = {}
    entry = Entry(settings.kind, settings.library, environment)
    with DeviceRanks(size, entry) as ranks:
        for count in COUNTS:
            name = report.show_size(4 * count)
            times = slowest(ranks(time_calls, count, 200, seconds=30))
            figures_[f"all_reduce {name}, the host waits"] = statistics.median(times)
            figures_[f"all_reduce {name}, in a stream"] = max(
                ranks(time_in_stream, count, 32, seconds=30)
            )
        for length in LENGTHS:
            times_of_ranks = ranks(time_all_reduce, length, 8, 5, seconds=30)
            figures_[f"all_reduce {report.show_size(length)}"] = median(times_of_ranks)
    return figures_


def rows_of(size: int, without: Figures, under: Figures) -> Iterator[Row]:
    for name, seconds in under.items():
        note = f"without {report.show_time(without[name])} µs"
        note += f", {without[name] / seconds:.2f} times as long"
        yield gpu.table.info(f"{size} ranks under MPS: {name}", 1e6 * seconds, "µs", note)


def compared(
    size: int,
    settings: Settings,
    control: str,
    measure: Callable[[int, Settings, dict[str, str]], Figures] = figures,
) -> Iterator[Row]:
    """Measure without the service, then under it."""
    without = measure(size, settings, {})
    try:
        with daemon(control, settings) as service:
            under = measure(size, settings, service.environment)
            served = service.served()
            yield gpu.table.info("the service has a server", float(served), note="1: yes")
            yield from rows_of(size, without, under)
            entry = Entry(settings.kind, settings.library, service.environment)
            checks: list[Check] = [in_the_current_stream, memory_comes_and_goes]
            yield from run_checks(Crew(size, entry), checks, f"{size} ranks under MPS", 30)
    except (OSError, RuntimeError, RankError) as error:
        if isinstance(error, RankError) and "MPS" not in str(error):
            raise  # else CUDA says that the service does not work here
        print(f"MPS: {error}", flush=True)
        yield gpu.table.info("MPS", note=f"not run: {last_line(error)}")


def mps(settings: Settings, size: int) -> Iterator[Row]:
    """Compare where the service is; its absence is information."""
    control = shutil.which(CONTROL)
    if settings.simulated or not control:
        why = "it needs a GPU" if settings.simulated else f"there is no {CONTROL} here"
        yield gpu.table.info("MPS", note=f"not run: {why}")
        return
    yield from parts(functools.partial(compared, size, settings, control))
