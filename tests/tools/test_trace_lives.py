"""`ringcomm trace` and `top` know which processes live: a job that was canceled is no hang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab.flights import MS, Clock, Flight, training, write
from lab.limits import limit
from ringcomm.__main__ import main
from ringcomm._flight.processes import Life, Process, here, life_of, start_of, this_process

S = 1000 * MS


def gone() -> Process:
    """Return a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return Process(ended.pid, *here(), "1")


def job(
    size: int, life: Process | None = None, slow: int | None = None, ago: int = 0
) -> tuple[list[Flight], int]:
    """Record a job whose processes are gone, or `life`; its last collective ended `ago` ns ago."""
    flights, now = training(size, slow=slow)
    steady = time.monotonic_ns() - now - ago
    for flight in flights:
        flight.clock = Clock("vm", steady)
        flight.process = life or gone()
        flight.pid = flight.process.pid
    return flights, now


def told(folder: Path, flights: list[Flight], capsys: Any) -> tuple[int, list[str]]:
    status = main(["trace", str(write(folder, flights))])
    return status, capsys.readouterr().out.splitlines()


def call(flights: list[Flight], ranks: list[int], at: int, seen: int) -> None:
    for flight in flights:
        if flight.rank in ranks:
            flight.call("all_reduce", at, elements=500_000)
        flight.seen = seen


def test_a_canceled_job_is_no_hang(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3)
    call(flights, [0, 2], now + MS, now + 2 * MS)
    status, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith(
        "all 3 processes are gone; no failure was recorded: the job was canceled or killed, it "
        "seems; the last sign of life is of "
    )
    assert status == 1
    assert not [line for line in lines if line.startswith(("also", "so"))]


def test_nor_is_one_that_was_slow(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3, slow=1)
    call(flights, [0, 2], now + MS, now + 2 * MS)
    _, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith("all 3 processes are gone; no failure was recorded")
    assert lines[1].startswith("also rank 1 is a straggler")


def test_a_canceled_hang_is_told_second(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3)
    call(flights, [0, 2], now + MS, now + 42 * S)
    _, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith("all 3 processes are gone; no failure was recorded")
    assert lines[1].startswith(
        "also rank 1 never called all_reduce #21; the others had waited there since "
    )


def test_one_process_was_killed_after_the_others_ended(tmp_path: Path, capsys: Any) -> None:
    flights, _ = job(3)
    for rank in (0, 2):
        flights[rank].left = True
    _, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith(
        "rank 1 left neither an end nor a failure in the record, and the process is gone"
    )


def test_a_job_that_ended_well(tmp_path: Path, capsys: Any) -> None:
    flights, _ = job(3)
    for flight in flights:
        flight.left = True
    status, lines = told(tmp_path, flights, capsys)
    assert (status, lines[0]) == (0, "nothing is wrong: every operation that was called has ended")


def test_a_slow_job_that_runs(tmp_path: Path, capsys: Any) -> None:
    """The straggler comes first; who has just not come is a note."""
    flights, now = job(3, this_process(), slow=1)
    call(flights, [0, 2], now - MS, now)
    status, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith("rank 1 is a straggler")
    assert status == 1
    (note,) = [line for line in lines if "#21" in line]
    assert note.startswith("note: rank 1 has not called all_reduce #21 yet; the others wait there")
    assert not [line for line in lines if "never" in line]


def test_a_job_that_runs_well(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3, this_process())
    call(flights, [2], now - MS, now)
    status, lines = told(tmp_path, flights, capsys)
    assert (status, lines[0]) == (
        0,
        "nothing is wrong so far: no rank has waited for long",
    )
    assert any("ranks 0 and 1 have not called all_reduce #21 yet" in line for line in lines)


def test_a_wait_is_measured_by_those_before(tmp_path: Path, capsys: Any) -> None:
    """Steps of a minute: ten seconds are no hang. Two minutes are one."""
    for wait, first in (
        (10, "nothing is wrong so far"),
        (200, "rank 1 has not called barrier #31"),
    ):
        flights, now = job(2, this_process(), ago=wait * S)
        for _ in range(10):
            for flight in flights:
                flight.call("barrier", now - 60 * S, now)
        flights[0].call("barrier", now)
        _, lines = told(tmp_path / str(wait), flights, capsys)
        assert lines[0].startswith(first), lines


def test_a_job_that_hangs(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3, this_process(), ago=40 * S)
    call(flights, [0, 2], now, now)
    _, lines = told(tmp_path, flights, capsys)
    match = re.match(
        r"rank 1 has not called all_reduce #21 yet; the others wait there since \S+, for (\S+) s; "
        r"it was last in all_reduce #20, which ended there at ",
        lines[0],
    )
    assert match, lines
    assert 40 <= float(match[1]) < 40 + limit(60)
    assert "not called yet" in lines[3]


def test_a_process_of_a_running_job_is_gone(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3, this_process())
    flights[1].process = gone()
    call(flights, [0, 2], now - MS, now)
    _, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith("rank 1 died before all_reduce #21; the others wait there since")
    assert lines[0].endswith(f"its process, {flights[1].pid} on vm, is gone")


def test_what_another_host_knows_is_not_claimed(tmp_path: Path, capsys: Any) -> None:
    flights, now = job(3)
    for flight in flights:
        flight.process = Process(flight.pid, "another start", "x", "1")
    call(flights, [0, 2], now + MS, now + 42 * S)
    _, lines = told(tmp_path, flights, capsys)
    assert lines[0].startswith("rank 1 never called all_reduce #21; the others wait there since")


def test_a_snapshot_says_nothing_of_the_end(tmp_path: Path, capsys: Any) -> None:
    """A process that wrote its records on request may have ended well since."""
    flights, _ = job(2)
    for flight in flights:
        assert flight.process is not None
        boot, numbers = here()
        flight.process = Process(flight.pid, boot, numbers, "1", snapshot=True)
    status, lines = told(tmp_path, flights, capsys)
    assert (status, lines[0]) == (0, "nothing is wrong: every operation that was called has ended")


def test_numbers_of_processes_are_used_again() -> None:
    me = this_process()
    assert life_of(me) == Life.LIVES
    boot, numbers = here()
    assert life_of(Process(me.pid, boot, numbers, "1")) == Life.GONE
    assert life_of(Process(me.pid, boot, "another container", me.started)) == Life.UNKNOWN
    assert life_of(Process(me.pid)) == Life.UNKNOWN
    ended = subprocess.Popen(["true"])
    try:
        end = time.monotonic() + limit(10)
        while start_of(ended.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert life_of(Process(ended.pid, boot, numbers, "1")) == Life.GONE, "nobody has waited"
    finally:
        ended.wait()


# ---- real jobs

PROGRAM = """
import os, sys, torch, torch.distributed as dist
folder, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("ringcomm", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for i in range(9): dist.all_reduce(torch.ones(8))  # too few for a verdict on stragglers
if how == "destroys": dist.destroy_process_group()
print("there", flush=True)
while how == "goes on": dist.all_reduce(torch.ones(8))
"""


def start(folder: Path, how: str) -> list[subprocess.Popen[str]]:
    records = folder / "records"
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(rank), how],
            env={**os.environ, "RINGCOMM_TRACE": str(records), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in jobs:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
    return jobs


def stop(jobs: list[subprocess.Popen[str]]) -> None:
    """Kill all of them while none runs: no rank is left to see another one die."""
    for job in jobs:
        job.send_signal(signal.SIGSTOP)
        os.waitpid(job.pid, os.WUNTRACED)
    for job in jobs:
        job.send_signal(signal.SIGKILL)
    for job in jobs:
        job.communicate()


def test_a_job_is_watched_and_canceled(tmp_path: Path, capsys: Any) -> None:
    records = str(tmp_path / "records")
    jobs = start(tmp_path, "goes on")
    try:
        main(["trace", records])
        lines = capsys.readouterr().out.splitlines()
        # On a busy machine one of the two may come late each time.
        assert re.match("nothing is wrong|rank . is a straggler", lines[0]), lines
        assert "note: the job runs: look again whether it goes on" in lines
    finally:
        stop(jobs)
    assert main(["trace", records]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("all 2 processes are gone; no failure was recorded"), lines
    assert main(["top", records, "--every", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("all 2 processes are gone; no failure was recorded")
    for rank, line in enumerate(lines[2:]):
        assert re.match(rf"{rank} .* SUM +gone +\S+ \S+ +0 +0 B/s +0%", line), line


@pytest.mark.parametrize("how", ["ends", "destroys"])
def test_a_job_says_that_it_has_ended(tmp_path: Path, capsys: Any, how: str) -> None:
    records = str(tmp_path / "records")
    for process in start(tmp_path, how):
        process.communicate(timeout=limit(60))
        assert process.returncode == 0
    assert main(["trace", records]) == 0
    assert capsys.readouterr().out.startswith("nothing is wrong: every operation")
    assert main(["top", records, "--every", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("all 2 processes ended")
    assert len(lines) == 4
    assert all(" ended " in line for line in lines[2:])


def test_the_latest_of_two_runs_in_one_folder_is_shown(tmp_path: Path, capsys: Any) -> None:
    for _ in range(2):
        for process in start(tmp_path, "ends"):
            process.communicate(timeout=limit(60))
        (tmp_path / "store").unlink(missing_ok=True)
    assert main(["top", str(tmp_path / "records"), "--every", "0.01"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_top_names_another_version(tmp_path: Path, capsys: Any) -> None:
    flights, _ = training(2)
    for flight in flights:
        flight.header = {"version": 1}
    assert main(["top", str(write(tmp_path, flights))]) == 1
    assert "it has version 1 of the format, and this ringcomm reads" in capsys.readouterr().err
