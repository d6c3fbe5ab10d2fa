"""The example under launchers as they are: plain processes, and one torchrun for each unit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lab import ROOT
from lab.limits import limit
from ringcomm.elastic.joining import advice

EXAMPLE = [sys.executable, ROOT / "examples" / "elastic.py"]
# The interpreter itself: the worker of torchrun is to be its child.
UNIT: list[str | Path] = [
    Path(sys.prefix) / "bin" / "python",
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
]
UNIT += ["--nproc-per-node", "1", "--max-restarts", "3", ROOT / "examples" / "elastic.py"]
ACCURATE = re.compile(r"accuracy=(0\.9\d|1\.00) ranks=2")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command, its output into a file of its own; all are ended at last."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{len(started)}.out").open("w") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        for pid in [process.pid, *children(process.pid)]:  # torchrun's workers have sessions
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in done.stdout.split()]


def await_text(path: Path, pattern: str, seconds: float = 20) -> re.Match[str]:
    """Wait until a file has a line that fits."""
    deadline = time.monotonic() + limit(seconds)
    while True:
        text = path.read_text() if path.exists() else ""
        if match := re.search(pattern, text):
            return match
        assert time.monotonic() < deadline, f"{path.name} lacks {pattern}: {text[-2000:]}"
        time.sleep(0.02)


@pytest.fixture
def store(start: Start, tmp_path: Path) -> str:
    """The address of a store that is served by the command for it."""
    start([sys.executable, "-m", "ringcomm.elastic", "store", "--host", "127.0.0.1", "--port", "0"])
    port = await_text(tmp_path / "0.out", r"at port (\d+)")[1]
    return f"127.0.0.1:{port}"


FOREVER = ["--ranks", "2", "--pause", "0.02", "--epochs", "1000000"]


def test_processes_that_a_shell_starts(start: Start, store: str, tmp_path: Path) -> None:
    """One is killed, another one joins, and both leave when they are told to end."""
    processes = [start([*EXAMPLE, "--store", store, *FOREVER]) for _ in range(2)]
    leader = await_first(tmp_path, (1, 2), "epoch=0 ranks=2")
    os.killpg(processes.pop(2 - leader).pid, signal.SIGKILL)
    await_text(tmp_path / f"{leader}.out", "going on without")
    processes.append(start([*EXAMPLE, "--store", store, *FOREVER]))
    await_text(tmp_path / f"{leader}.out", "going on with ")
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(limit(20)) == 0


def test_it_learns(start: Start, store: str, tmp_path: Path) -> None:
    processes = [start([*EXAMPLE, "--store", store, "--workers", "1"]) for _ in range(2)]
    assert [process.wait(limit(60)) for process in processes] == [0, 0]
    assert ACCURATE.search("".join(path.read_text() for path in tmp_path.glob("*.out")))


def await_first(folder: Path, numbers: Sequence[int], pattern: str) -> int:
    """Wait until one of these outputs has a line that fits; return its number."""
    deadline = time.monotonic() + limit(20)
    while time.monotonic() < deadline:
        for number in numbers:
            if re.search(pattern, (folder / f"{number}.out").read_text()):
                return number
        time.sleep(0.02)
    texts = [(folder / f"{number}.out").read_text()[-1000:] for number in numbers]
    raise AssertionError(f"nobody has written {pattern}: {texts}")


@pytest.mark.slow
def test_one_torchrun_for_each_unit(start: Start, store: str, tmp_path: Path) -> None:
    """A rank that is killed is started again by its torchrun, and joins the others."""
    units = [start([*UNIT, *FOREVER], RINGCOMM_ELASTIC=store) for _ in range(2)]
    leader = await_first(tmp_path, (1, 2), "epoch=0 ranks=2")
    os.kill(children(units[2 - leader].pid)[0], signal.SIGKILL)
    await_text(tmp_path / f"{leader}.out", "going on without")
    await_text(tmp_path / f"{leader}.out", "going on with ")


def test_what_is_said_of_launchers_that_end_all() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}
    assert advice(torchrun).startswith("torchrun started 4 workers and stops")
    assert not advice({**torchrun, "WORLD_SIZE": "1"})
    assert advice({"OMPI_COMM_WORLD_SIZE": "2"}).startswith("mpirun stops")
    assert advice({"PMI_SIZE": "2", "SLURM_STEP_ID": "0"}).startswith("mpirun stops")
    assert not advice({})


def test_what_is_said_of_srun(tmp_path: Path) -> None:
    """Its variables count, else the cluster's configuration: tests/elastic/test_slurm.py."""
    configuration = tmp_path / "slurm.conf"
    srun = {"SLURM_STEP_ID": "0", "SLURM_CONF": str(configuration)}
    assert not advice(srun), "no configuration can be read"
    assert not advice({**srun, "PMI_SIZE": "2", "PMI_JOBID": "7.0"})
    assert advice({**srun, "SLURM_KILL_BAD_EXIT": "1"}).startswith("srun stops")
    assert "SLURM_WAIT=30 says" in advice({**srun, "SLURM_WAIT": "30"})
    assert not advice({"SLURM_KILL_BAD_EXIT": "1"}), "no srun has started it"
    configuration.write_text("#KillOnBadExit=1\nkillonbadexit=1\nWaitTime=0\n")
    assert "the cluster's KillOnBadExit=1 says" in advice(srun)
    assert not advice({**srun, "SLURM_KILL_BAD_EXIT": "0"})
    configuration.write_text("KillOnBadExit=0\nWaitTime = 60\n")
    assert "export SLURM_WAIT=0" in advice(srun)
