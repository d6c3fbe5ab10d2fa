"""Where flight records lie: no folder, disk or stream that cannot be used ends or stops a job."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Run

from lab.flights import Clock, training, write
from lab.limits import limit
from lab.outcomes import in_child
from ringcomm._flight import recorder
from ringcomm._flight.processes import Process, here, this_process
from ringcomm._flight.records import read_folder

ONE = """
import torch, torch.distributed as dist, ringcomm
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
"""
IN_MEMORY = "flight records are kept in memory"


def test_a_folder_that_is_missing_is_made(python: Run, tmp_path: Path) -> None:
    folder = tmp_path / "some" / "records"
    done = python(ONE, RINGCOMM_TRACE=str(folder), RINGCOMM_TRACE_LINES="1")
    assert done.returncode == 0, done.stderr
    (record,) = read_folder(folder).records
    assert [call.line.rpartition(":")[2] for call in record.operations] == ["4 in <module>"]


UNUSABLE = {
    "a file": ("", "open(trace, 'w').close()"),
    "in a file": ("/under", "open(os.path.dirname(trace), 'w').close()"),
    "not allowed": ("", "os.environ['RINGCOMM_TRACE'] = '/proc/self/records'"),
    "full": (
        "",
        "def full(*_): raise OSError(28, 'No space left on device')\nos.posix_fallocate = full",
    ),
}


@pytest.mark.parametrize("how", UNUSABLE)
def test_records_stay_in_memory(python: Run, tmp_path: Path, how: str) -> None:
    """One line says so, whatever the number of groups; on request they go to the other folder."""
    under, spoil = UNUSABLE[how]
    program = f"""
import os
trace = os.environ["RINGCOMM_TRACE"]
{spoil}
{ONE}
for _ in range(3): dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
print("dumped to", ringcomm.dump())
"""
    trace = f"{tmp_path}/records{under}"
    done = python(program, RINGCOMM_TRACE=trace, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(IN_MEMORY) == 1, done.stderr
    assert not list(tmp_path.glob("records/rank0-*-[0-9].ring")), (
        "nothing half-made is left on a full disk"
    )
    assert len(read_folder(Path(done.stdout.split()[-1])).records) == 4


def test_a_disk_that_fills(run: Run, tmp_path: Path) -> None:
    """On a real one: the groups that came in time have their files, the others do without."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    program = f"""
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "none", {str(tmp_path)!r}], check=True)
{ONE}
groups = [dist.new_group([0]) for _ in range(5)]
for _ in range(5000):
    for group in groups: dist.all_reduce(torch.ones(3), group=group)
print(len([name for name in os.listdir({str(tmp_path)!r}) if name.endswith(".ring")]), "files")
"""
    done = run("unshare", "--mount", sys.executable, "-c", program, RINGCOMM_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "2 files" in done.stdout
    assert done.stderr.count(IN_MEMORY) == 1, done.stderr


def test_files_of_destroyed_groups_are_removed(python: Run, tmp_path: Path) -> None:
    """But for the newest, and for those of groups that have failed."""
    program = f"""{ONE}
def backend(group): return group._get_backend(torch.device("cpu"))
for i in range(30):
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(3), group=group)
    if i == 3: backend(group).abort()
    dist.destroy_process_group(group)
"""
    done = python(program, RINGCOMM_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    records = read_folder(tmp_path).records
    most = 1 + recorder.KEPT + 1 + 1
    assert len(records) == most, "the default group, the last, and the failed one"
    assert sum(bool(record.failure) for record in records) == 1
    assert all(record.has_left for record in records), "the program has ended as it should"


def test_a_file_of_the_same_name_is_not_cut(tmp_path: Path) -> None:
    """Another container may have the same number for a process that still writes to it."""

    def body() -> dict[str, object]:
        import mmap

        first = recorder.make_in(tmp_path, 0, 100_000)
        (path,) = tmp_path.glob("*.ring")
        memory = mmap.mmap(first, 100_000)
        path.rename(tmp_path / f"rank0-{os.getpid()}-1.ring")
        second = recorder.make_in(tmp_path, 0, 100_000)
        memory[90_000] = 7  # SIGBUS, had it been cut
        return {"same": os.fstat(first).st_ino == os.fstat(second).st_ino}

    assert in_child(body) == {"same": False}


def gone() -> Process:
    """Return a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return Process(ended.pid, *here(), "1")


def leave(folder: Path, process: Process | None, host: str = "", days: float = 0) -> Path:
    flights, _ = training(1)
    flights[0].clock = Clock(host or socket.gethostname())
    flights[0].pid = process.pid if process else 1
    flights[0].process = process
    write(folder, flights)
    at = time.time() - 86400 * days
    os.utime(folder, (at, at))
    return folder


def test_old_folders_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "JOBS", 2)
    mine = leave(tmp_path / "mine", this_process())
    kept = [
        leave(tmp_path / "recent", gone(), days=0.1),
        leave(tmp_path / "living", this_process(), days=30),
        leave(tmp_path / "elsewhere", gone(), host="another", days=30),
        leave(tmp_path / "unknown", None, days=1),
    ]
    removed = [
        leave(tmp_path / "one too many", gone(), days=2),
        leave(tmp_path / "old", gone(), days=8),
        leave(tmp_path / "old and unknown", Process(1, "another boot", "x", "1"), days=8),
    ]
    other = tmp_path / "target"
    other.mkdir()
    (tmp_path / "link").symlink_to(other)
    recorder.clean_up(tmp_path, mine)
    assert [folder.exists() for folder in (mine, *kept, other)] == [True] * 6
    assert not any(folder.exists() for folder in removed)


def test_large_folders_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "BYTES", 30_000)  # a record of these has some 13 kB
    folders = [leave(tmp_path / str(days), gone(), days=days) for days in range(4)]
    recorder.clean_up(tmp_path, tmp_path / "mine")
    assert [folder.exists() for folder in folders] == [True, True, False, False]


def test_a_stream_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """As a terminal after Ctrl-S: lines are lost, and the job goes on."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    program = f"{ONE}from ringcomm._runtime.process import say\nsay('a line')\nprint('over')\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=writing,
        timeout=limit(60),
        cwd=tmp_path,
        env={**os.environ, "RINGCOMM_LOG": "info"},
    )
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"x" * 4096
    assert (done.returncode, done.stdout) == (0, b"over\n")


def test_no_line_goes_into_a_file_of_the_program(tmp_path: Path) -> None:
    """Without stderr, its number is that of the first file which the program opens."""
    program = f"""
import os
file = os.open("mine", os.O_CREAT | os.O_RDWR)
assert file == 2, file
{ONE}
os._exit(0)
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program],
        timeout=limit(60),
        cwd=tmp_path,
        env={**os.environ, "RINGCOMM_LOG": "info", "ZYGOTE_OFF": "1"},
    )
    assert done.returncode == 0
    assert "ringcomm" not in (tmp_path / "mine").read_text()


def test_metrics_replace_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As /dev/null would be, for root; a line says once what is wrong."""
    os.mkfifo(tmp_path / "pipe")
    watcher = recorder._Watcher(None, 0)
    for _ in range(2):
        with watcher.saying("RINGCOMM_METRICS"):
            recorder.write_metrics(tmp_path / "pipe", 0)
    assert (tmp_path / "pipe").is_fifo()
    assert capsys.readouterr().err.count("is no regular file") == 1
