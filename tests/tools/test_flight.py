"""Flight records are written where something has gone wrong, on every rank that still lives."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Run

import ringcomm
from lab.limits import limit
from lab.ranks import Rank, Ranks, ranks
from ringcomm.tools.records import GroupRecord, read_folder

START = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import ringcomm
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank has died
dist.init_process_group("ringcomm")
rank = dist.get_rank()
for i in range(5):
    dist.all_reduce(torch.ones(10))
"""


@pytest.fixture
def job(torchrun: Run, tmp_path: Path) -> Any:
    """Run a job of two ranks, whose program goes on as given; return its outputs."""

    def run_job(source: str, **environment: str | None) -> str:
        script = tmp_path / "program.py"
        script.write_text(START + source)
        done = torchrun(2, script, **environment)
        return done.stdout + done.stderr

    return run_job


def records_of(folder: Path) -> dict[int, GroupRecord]:
    found = read_folder(folder)
    assert not found.remarks
    return {record.rank: record for record in found.records}


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
    assert [each.sequence for each in killed] == [1, 2, 3, 4, 5, 6]
    assert {each.state for each in killed[:5]} == {"done"}
    assert killed[5].elements == 20
    assert not records[1].failure
    assert "rank 1" in records[0].failure
    assert other[-1].state == "failed"
    for each in killed[:5]:
        assert 0 < (each.called_ns or 0) <= (each.began_ns or 0) <= (each.ended_ns or 0)
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
    assert f"the program ends with RuntimeError: a bad batch: {wrote}" in text
    assert f"a group has failed: {wrote}" in text
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
    names = [each.collective_name for each in database.collectives if each.pass_check]
    assert names == 5 * ["gloo:all_reduce"]


def test_a_signal_writes_them_during_a_hang(job: Any, tmp_path: Path) -> None:
    """The signal goes to a rank that waits in the library; Python's own handlers could not run."""
    folder = tmp_path / "records"
    folder.mkdir()
    job(
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
    (last,) = [
        entry
        for entry in pickle.loads((folder / "rank_0").read_bytes())["entries"]
        if entry["ringcomm"]["elements"] == 40
    ]
    assert last["state"] == "started"
    (stacks,) = folder.glob("rank0-*.stacks")
    assert "in all_reduce" in stacks.read_text()


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
    found = {record.global_rank for record in read_folder(tmp_path).records}
    assert found == {0, 1}


# ---- numbers


def check_stats(rank: Rank) -> None:
    group = dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(250), group=group)
    dist.barrier(group=group)
    if rank.index == 1:
        time.sleep(0.2)
    dist.all_reduce(torch.ones(250), group=group)
    dist.all_to_all_single(torch.ones(2), torch.ones(2), group=group)
    numbers = ringcomm.stats(group)
    done = numbers["operations"]
    assert (done["all_reduce"]["operations"], done["all_reduce"]["bytes"]) == (4, 4000)
    assert (done["barrier"]["operations"], done["barrier"]["bytes"]) == (1, 0)
    assert (done["all_to_all"]["operations"], done["all_to_all"]["bytes"]) == (1, 8)
    assert set(numbers["waits"]) == {1 - rank.index}
    if rank.index == 0:
        assert 0.15 < numbers["waits"][1] < 10
        assert done["all_reduce"]["seconds"] > 0.15
    assert not numbers["failure"]
    lines = ringcomm.metrics().splitlines()
    name = re.escape(group.group_name)
    wanted = rf'ringcomm_operations_total{{group="{name}",rank="{rank.index}",memory="host",'
    assert any(re.fullmatch(wanted + 'collective="all_reduce"} 4', line) for line in lines)
    for line in lines:  # Prometheus' text format
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+{(\w+="[^"]*",?)+} [0-9.e+-]+', line), line
    dist.destroy_process_group(group)
    other = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="is not ringcomm's, or was destroyed"):
        ringcomm.stats(other)
    dist.destroy_process_group(other)


def test_numbers(two: Ranks) -> None:
    two(check_stats)


def test_what_goes_to_other_hosts_is_counted(job: Any, tmp_path: Path) -> None:
    text = job(
        "dist.all_reduce(torch.ones(1 << 20))\n"
        "print('sent', ringcomm.stats()['sent_bytes'])\n"
        "dist.barrier()\n",
        RINGCOMM_TRANSPORT="tcp",
    )
    sent = [int(number) for number in re.findall(r"sent (\d+)", text)]
    assert len(sent) == 2
    assert all(4 << 20 <= number < 5 << 20 for number in sent)  # 2(n - 1)/n of 4 MiB


def test_metrics_are_written_each_second(job: Any, tmp_path: Path) -> None:
    job(
        "path = f'metrics-{rank}.prom'\n"
        "while not os.path.exists(path): time.sleep(0.01)\n"
        "dist.barrier()\n",
        RINGCOMM_TRACE=str(tmp_path),
        RINGCOMM_METRICS=str(tmp_path / "metrics-%r.prom"),
    )
    for rank in (0, 1):
        text = (tmp_path / f"metrics-{rank}.prom").read_text()
        assert f'ringcomm_operations_total{{group="0",rank="{rank}"' in text
