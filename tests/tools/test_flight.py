"""Flight records are written where something has gone wrong, on every rank that still lives."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import JOB, Run

import ringcomm
from lab.flights import MS, training, write
from lab.limits import limit
from lab.ranks import Rank, Ranks, ranks
from ringcomm.__main__ import main
from ringcomm._flight import recorder
from ringcomm._flight.records import GroupRecord, by_job, read_folder
from ringcomm.tools.trace.job import groups_of


def records_of(folder: Path) -> dict[int, GroupRecord]:
    folder_records = read_folder(folder)
    assert not folder_records.remarks
    return {record.rank: record for record in folder_records.records}


def test_a_killed_rank_leaves_its_records(job: Any, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    job(
        "if rank == 1:\n"
        "    dist.all_reduce(torch.ones(20), async_op=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    for i in range(2): dist.all_reduce(torch.ones(20))\n"
        "except dist.DistBackendError: time.sleep(1)\n",
        RINGCOMM_TRACE=str(folder),
    )
    records = records_of(folder)
    assert set(records) == {0, 1}
    killed, other = records[1].operations, records[0].operations
    assert [operation.sequence for operation in killed] == [1, 2, 3, 4, 5, 6]
    assert {operation.state for operation in killed[:5]} == {"done"}
    assert killed[5].elements == 20
    assert not records[1].failure
    assert "rank 1" in records[0].failure
    assert other[-1].state == "failed"
    for call in killed[:5]:
        assert 0 < (call.called_ns or 0) <= (call.began_ns or 0) <= (call.ended_ns or 0)
    assert (folder / "rank_0").exists()
    assert not (folder / "rank_1").exists()


def test_an_error_makes_all_ranks_write(job: Any, tmp_path: Path) -> None:
    """Also where nobody has said where; the failing rank ends by an exception."""
    text = job(
        "if rank == 1: raise RuntimeError('a bad batch')\n"
        "try:\n"
        "    dist.all_reduce(torch.ones(30))\n"
        "except dist.DistBackendError: time.sleep(1)\n",
        RINGCOMM_TRACE=None,
        TMPDIR=str(tmp_path),
    )
    (folder,) = tmp_path.glob("ringcomm-*/*")
    wrote = f"wrote flight records: run `ringcomm trace {folder}`"
    assert f"a group has failed: {wrote}" in text
    assert text.count(wrote) == 1, "no group of rank 1 has failed: it writes, and says nothing"
    records = records_of(folder)
    assert set(records) == {0, 1}
    assert records[0].operations[-1].elements == 30
    assert "a bad batch" in records[0].failure
    for rank in (0, 1):
        entries = pickle.loads((folder / f"rank_{rank}").read_bytes())["entries"]
        assert len(entries) == 6 - rank


def test_torchs_tool_opens_them(job: Any, tmp_path: Path) -> None:
    job("ringcomm.dump('dumped')\ndist.barrier()\n")
    tool = Path(sys.prefix) / "bin" / "torchfrtrace"
    for extra in tmp_path.glob("dumped/*.ring"):
        extra.unlink()
    done = subprocess.run(
        [tool, tmp_path / "dumped", "-o", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=limit(100),
    )
    assert done.returncode == 0, done.stderr
    _, database = pickle.loads((tmp_path / "out").read_bytes())
    names = [call.collective_name for call in database.collectives if call.pass_check]
    assert names == 5 * ["gloo:all_reduce"]


def test_runs_in_one_folder_are_told_apart(python: Run, tmp_path: Path) -> None:
    """A second run may use the folder of the first, also one of the same name."""
    folder = tmp_path / "records"
    folder.mkdir()
    program = f"""
import os, sys, torch.distributed as dist
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("ringcomm", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
"""
    for more in ("", "dist.barrier(dist.new_group([0, 1]))\n"):
        done = python(
            program + more + "dist.barrier()\nif not rank: os.wait()\n", RINGCOMM_TRACE=str(folder)
        )
        assert done.returncode == 0, done.stderr
    jobs = by_job(read_folder(folder).records)
    assert [name.rpartition("/")[2] for name in jobs] == ["0", "0 (2)"]
    assert [len(records) for records in jobs.values()] == [2, 4]
    groups = groups_of([*jobs.values()][1])
    assert [(group.name, sorted(group.records)) for group in groups] == [
        ("0", [0, 1]),
        ("1", [0, 1]),
    ]


def test_live_files_stay_live(python: Run, tmp_path: Path) -> None:
    """A dump into the folder of the live files does not replace them, however it is spelt."""
    (tmp_path / "records").mkdir()
    program = """
import os, torch, torch.distributed as dist, ringcomm
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
(file,) = [name for name in os.listdir("records") if name.endswith(".ring")]
before = os.stat("records/" + file).st_ino
for folder in (None, "records", "./records/", os.path.abspath("records")):
    ringcomm.dump(folder)
    assert os.stat("records/" + file).st_ino == before, folder
dist.all_reduce(torch.ones(2))
"""
    done = python(program, RINGCOMM_TRACE="records/")
    assert done.returncode == 0, done.stderr
    assert len(records_of(tmp_path / "records")[0].operations) == 1


def test_many_descriptors_and_forks(python: Run, tmp_path: Path) -> None:
    """Also a descriptor past 1024 is watched, and a forked child has lines and rings of its own."""
    program = f"""
import os, resource, signal, time, torch, torch.distributed as dist, ringcomm
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2000), most))
held = [open("/dev/null") for _ in range(1100)]
def group():
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
group()
dist.all_reduce(torch.ones(2))
child = os.fork()
if not child:
    dist.distributed_c10d._world.pg_map.clear()
    dist.distributed_c10d.GroupMember.WORLD = None
    group()
    dist.all_reduce(torch.ones(3))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os.kill(os.getpid(), signal.SIGUSR2)
while not os.path.exists({str(tmp_path)!r} + "/rank_0"): time.sleep(0.01)
"""
    done = python(program, RINGCOMM_TRACE=str(tmp_path), RINGCOMM_TRACE_LINES="1")
    assert done.returncode == 0, done.stderr
    calls = [call for record in read_folder(tmp_path).records for call in record.operations]
    lines = {call.elements: call.line.rpartition(":")[2] for call in calls}
    assert lines == {2: "9 in <module>", 3: "15 in <module>"}


class Library:
    """Stands for the compiled library, for the recorder."""

    calls_hooks = True

    def __init__(self, rings: list[bytes]) -> None:
        self.rings, self.asked = rings, 0

    def flight_rings(self) -> list[bytes]:
        return self.rings

    def ask_for_records(self) -> None:
        self.asked += 1

    def tell_failures(self) -> None:
        pass

    def look_at_groups(self) -> int:
        return self.asked


def test_a_signal_writes_them_during_a_hang(job: Any, tmp_path: Path) -> None:
    """The signal goes to a rank that waits in the library; Python's own handlers could not run."""
    folder = tmp_path / "records"
    folder.mkdir()
    text = job(
        "if rank == 0:\n"
        "    import threading\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()\n"
        "    dist.all_reduce(torch.ones(40))\n"
        "    assert os.path.exists(os.environ['RINGCOMM_TRACE'] + '/rank_0')\n"
        "else:\n"
        "    while not os.path.exists(os.environ['RINGCOMM_TRACE'] + '/rank_0'): time.sleep(0.01)\n"
        "    dist.all_reduce(torch.ones(40))\n",
        RINGCOMM_TRACE=str(folder),
    )
    assert (folder / "rank_0").exists(), text
    (last,) = [
        entry
        for entry in pickle.loads((folder / "rank_0").read_bytes())["entries"]
        if entry["ringcomm"]["elements"] == 40
    ]
    assert last["state"] == "started"
    (stacks,) = folder.glob("rank0-*.stacks")
    assert "in all_reduce" in stacks.read_text()


def test_each_signal_is_heard(python: Run, tmp_path: Path) -> None:
    """The watching goes on after the first signal; metrics go on, too."""
    program = f"""
import os, signal, time, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
for name in ("rank_0", "rank_0", "metrics", "metrics"):
    path = {str(tmp_path)!r} + "/" + name
    if name == "rank_0": os.kill(os.getpid(), signal.SIGUSR2)
    deadline = time.monotonic() + {limit(5)}
    while not os.path.exists(path):
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
    os.remove(path)
"""
    done = python(program, RINGCOMM_TRACE=str(tmp_path), RINGCOMM_METRICS=f"{tmp_path}/metrics")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SIGUSR2: wrote flight records") == 2, done.stderr
    assert "a group has failed" not in done.stderr


def test_signals_harm_no_thread(job: Any, tmp_path: Path) -> None:
    """Another process sends many, while threads of Python come and go."""
    folder = tmp_path / "records"
    folder.mkdir()
    text = job(
        "import subprocess, threading\n"
        "deep = lambda n: n and deep(n - 1)\n"
        "over = threading.Event()\n"
        "def churn():\n"
        "    while not over.is_set():\n"
        "        some = [threading.Thread(target=deep, args=(50,)) for _ in range(5)]\n"
        "        for thread in some: thread.start()\n"
        "        for thread in some: thread.join()\n"
        "threads = [threading.Thread(target=churn) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "send = 'import os, sys, time\\nfor i in range(1500): os.kill(int(sys.argv[1]), 12)'\n"
        "send += '; time.sleep(0.2 if i % 250 == 0 else 0.001)'\n"  # 0.2 s: a dump each time
        "subprocess.run([sys.executable, '-c', send, str(os.getpid())], check=True)\n"
        "over.set()\n"
        "dist.barrier()\n"
        "print(f'rank {rank} lives')\n",
        RINGCOMM_TRACE=str(folder),
    )
    assert "rank 0 lives" in text, text[-2000:]
    assert "rank 1 lives" in text, text[-2000:]
    stacks = [path.read_text() for path in folder.glob("*.stacks")]
    assert len(stacks) == 2
    assert all("thread MainThread:" in text for text in stacks)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_of_other_groups_write_too(job: Any, tmp_path: Path, transport: str) -> None:
    """Ranks 0 and 1 call different things in a group of theirs; rank 2 waits for nobody."""
    folder = tmp_path / "records"
    folder.mkdir()
    job(
        "pair = dist.new_group([0, 1])\n"
        "if rank < 2:\n"
        "    try: dist.all_reduce(torch.ones(50 + rank), group=pair)\n"
        "    except dist.DistBackendError: pass\n"
        "while not os.path.exists(os.environ['RINGCOMM_TRACE'] + '/rank_2'): time.sleep(0.01)\n"
        "dist.barrier()\n",
        ranks=3,
        RINGCOMM_TRACE=str(folder),
        RINGCOMM_TRANSPORT=transport,
    )
    assert {path.name for path in folder.glob("rank_*")} == {"rank_0", "rank_1", "rank_2"}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_calls_nothing_writes_too(job: Any, tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    text = job(
        "from datetime import timedelta\n"
        "if rank == 0:\n"
        "    try: dist.all_reduce(torch.ones(60), async_op=True).wait(timedelta(seconds=0.2))\n"
        "    except RuntimeError: dist.group.WORLD._get_backend(torch.device('cpu')).abort()\n"
        "while not os.path.exists(os.environ['RINGCOMM_TRACE'] + '/rank_1'): time.sleep(0.01)\n",
        RINGCOMM_TRACE=str(folder),
        RINGCOMM_TRANSPORT=transport,
    )
    assert (folder / "rank_1").exists(), text
    assert records_of(folder)[1].failure


def test_trace_has_the_line_of_the_rank_that_is_missing(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a group fails, ranks that were not even in it write where they are."""
    folder = tmp_path / "records"
    text = job(
        "from datetime import timedelta\n"
        "loading = os.environ['RINGCOMM_TRACE'] + '/loading'\n"
        "def load_batch():\n"
        "    open(loading, 'w').close()\n"
        "    while not os.path.exists(os.environ['RINGCOMM_TRACE'] + '/rank_1'): time.sleep(0.01)\n"
        "if rank == 0:\n"
        "    while not os.path.exists(loading): time.sleep(0.01)\n"
        "    try: dist.all_reduce(torch.ones(60), async_op=True).wait(timedelta(seconds=0.2))\n"
        "    except RuntimeError: dist.group.WORLD._get_backend(torch.device('cpu')).abort()\n"
        "else: load_batch()\n",
        RINGCOMM_TRACE=str(folder),
    )
    assert main(["trace", str(folder)]) == 1, text
    first = capsys.readouterr().out.splitlines()[0]
    assert re.search(
        r"^rank 1 never called all_reduce #\d+: it was at .+ in load_batch \(host", first
    )


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_hang_can_be_read_while_it_lasts(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    """After 10 s the waiting rank warns, once, and all ranks write: nothing has to be set."""
    folder = tmp_path / "records"
    text = job(
        "import subprocess, sys\n"
        "def load_batch():\n"
        "    print('rank 1 is', os.getpid(), flush=True)\n"
        "    trace = [sys.executable, '-m', 'ringcomm', 'trace']\n"
        "    told, end = '', time.monotonic() + 80\n"
        "    while 'load_batch' not in told and time.monotonic() < end:\n"
        "        time.sleep(3)\n"
        "        told = subprocess.run(trace, capture_output=True, text=True).stdout\n"
        "    print(told)\n"
        "if rank == 1: load_batch()\n"
        "dist.all_reduce(torch.ones(70))\n",
        RINGCOMM_TRACE=str(folder) if named else None,
        TMPDIR=str(tmp_path),
    )
    pid = re.findall(r"rank 1 is (\d+)", text)[0]
    (warning,) = re.findall(r".*: has waited 10 s for rank 1 \(.*", text)
    assert f", has not called #6; pid {pid} on {socket.gethostname()}); to see the line" in warning
    assert warning.endswith(f"`ringcomm trace {folder}`" if named else "`ringcomm trace` there")
    assert re.search(
        r"^rank 1 has not called all_reduce #6 yet: it is at \S+ in load_batch", text, re.M
    ), text
    assert text.count("WARNING") == 2, text  # and rank 1 says where it has written


def test_a_collective_that_hangs_has_all_ranks_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, and messages may wait as long as they like."""
    flights, now = training(1, steps=2)
    flights[0].call("recv", now, root=0, tag=3)
    library = Library([flights[0].data()])
    dumped: list[str] = []
    monkeypatch.setattr(recorder, "setting", lambda name: "")
    monkeypatch.setattr(recorder, "dump_after", lambda event, **_: dumped.append(event))
    watcher = recorder._Watcher(library, 0)
    at = flights[0].clock.steady + now
    monkeypatch.setattr(time, "monotonic_ns", lambda: at + int(20 * recorder.STILL * 1e9))
    watcher.look_for_a_hang()
    assert not dumped
    flights[0].call("all_reduce", now + MS)
    library.rings[:] = [flights[0].data()]
    for after, times in ((recorder.STILL / 2, 0), (recorder.STILL * 2, 1), (recorder.STILL * 3, 1)):
        monkeypatch.setattr(time, "monotonic_ns", lambda after=after: at + int(after * 1e9))
        watcher.look_for_a_hang()
        assert len(dumped) == library.asked == times


def test_stacks_of_long_ago_are_not_shown(tmp_path: Path) -> None:
    flights, _ = training(1)
    write(tmp_path, flights)
    (ring,) = tmp_path.glob("*.ring")
    stacks = ring.with_name(ring.stem.rpartition("-")[0] + ".stacks")
    stacks.write_text(
        'thread MainThread:\n  File "/home/me/train.py", line 7, in <module>\n    step()\n'
        '  File "/home/me/train.py", line 4, in step\n    pull()\n'
        '  File "/usr/lib/python3/dist-packages/torch/a.py", line 9, in pull\n'
    )
    assert read_folder(tmp_path).records[0].at == "train.py:4 in step"
    os.utime(stacks, (1, 1))
    assert read_folder(tmp_path).records[0].at == ""


def test_records_have_the_line_that_called(job: Any, tmp_path: Path) -> None:
    """Also those of a rank that was killed; and torch's tool has them as frames."""
    folder = tmp_path / "records"
    folder.mkdir()
    job(
        "def step():\n"
        "    dist.all_reduce(torch.ones(70), async_op=True).wait()\n"
        "    dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.ones(5), 0)\n"
        "for _ in range(3): step()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))\n"
        "model(torch.ones(3)).sum().backward()\n"
        "ringcomm.dump('dumped')\n"
        "dist.barrier()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n",
        RINGCOMM_TRACE=str(folder),
        RINGCOMM_TRACE_LINES="1",
    )
    first = JOB.count("\n")
    script = tmp_path / "program.py"
    records = records_of(folder)
    assert set(records) == {0, 1}
    for record in records.values():
        lines = {(call.collective, call.line) for call in record.operations}
        assert ("all_reduce", f"{script}:{first} in <module>") in lines
        assert ("all_reduce", f"{script}:{first + 2} in step") in lines
        message = "send" if record.rank == 0 else "recv"
        assert (message, f"{script}:{first + 3} in step") in lines
        assert ("all_reduce", f"{script}:{first + 6} in <module>") in lines, "backward()"
    for rank, record in records_of(tmp_path / "dumped").items():
        assert {call.line for call in record.operations} > {f"{script}:{first + 2} in step"}
        entries = pickle.loads((tmp_path / "dumped" / f"rank_{rank}").read_bytes())["entries"]
        assert {"name": "step", "filename": str(script), "line": first + 2} in [
            frame for entry in entries for frame in entry["frames"]
        ]


def test_code_may_say_where(python: Run, tmp_path: Path) -> None:
    program = f"""
import os, time, torch, torch.distributed as dist, ringcomm
folder = {str(tmp_path)!r}
options = ringcomm.Options(trace=folder, trace_lines="1", metrics=folder + "/%r")
store = dist.HashStore()
dist.init_process_group("ringcomm", store=store, rank=0, world_size=1, pg_options=options)
dist.all_reduce(torch.ones(2))
while not os.path.exists(folder + "/0"): time.sleep(0.01)
"""
    python(program, RINGCOMM_TRACE=None)
    (record,) = read_folder(tmp_path).records
    assert [call.line.rpartition(":")[2] for call in record.operations] == ["7 in <module>"]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as pair:
        yield pair


def check_dump(rank: Rank, folder: Path) -> None:
    dist.all_reduce(torch.ones(3))
    assert ringcomm.dump(folder) == folder
    with pytest.raises(ValueError, match="RINGCOMM_TRACE=off: name a folder"):
        ringcomm.dump()
    dist.barrier()


def test_a_program_may_ask_for_them(two: Ranks, tmp_path: Path) -> None:
    two(check_dump, tmp_path)
    assert {path.name for path in tmp_path.glob("rank_*")} == {"rank_0", "rank_1"}
    told_of = {record.global_rank for record in read_folder(tmp_path).records}
    assert told_of == {0, 1}
