"""`ringcomm top` shows where each rank is, and who waits for whom, from the files alone."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from lab.flights import training, write
from lab.limits import limit
from ringcomm.__main__ import main
from ringcomm._flight.records import GroupRecord, Operation, Total, last_ns
from ringcomm.tools import top

PROGRAM = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("ringcomm")
dist.all_reduce(torch.ones(1000))
if dist.get_rank() == 1:
    input()
dist.all_gather_single(torch.ones(8), torch.ones(4)) if hasattr(dist, "all_gather_single") else \\
    dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
"""


def waits_for_the_other(rows: list[str]) -> bool:
    """Whether rank 0 is in a call that rank 1, which has ended the one before, has not made."""
    wanted = [
        r"0 .*all_gather #2 float32\[8\] +running .* 1 +\S+ +\S+ .?B/s +\d+%",
        r"1 .*all_reduce #1 float32\[1000\] SUM +done ",
    ]
    return len(rows) >= 2 and all(map(re.match, wanted, rows))


def test_a_running_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 has not called what rank 0 waits in; both live."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2"}
    environment |= {"RINGCOMM_TRACE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    start = f"import os; os.environ['RANK'] = '%d'\n{PROGRAM}".replace(
        'init_process_group("ringcomm")',
        f'init_process_group("ringcomm", init_method="file://{tmp_path}/store", '
        "rank=int(os.environ['RANK']), world_size=2)",
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", start % rank],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        text, end = "", time.monotonic() + limit(60)
        while not waits_for_the_other(text.splitlines()[2:]):
            assert time.monotonic() < end, text
            if len(list(tmp_path.glob("*.ring"))) == 2:
                main(["top", str(tmp_path), "--every", "0.1"])  # 1: they have no header yet
                text = capsys.readouterr().out
        assert "\x1b" not in text
        jobs[1].communicate("\n", timeout=limit(60))
        assert jobs[0].wait(limit(60)) == 0
    finally:
        for job in jobs:
            job.send_signal(signal.SIGKILL)
            job.wait()


def numbers(operations: int, size: int, waited_ms: int) -> dict[str, Any]:
    done = {"all_reduce": Total(operations, size, 1.0)}
    return {"totals": done, "waits_ns": (0, waited_ms * 1_000_000)}


def test_rates_are_of_the_last_look() -> None:
    operation = Operation(*(1, 1, "all_reduce", "float32", "SUM", None, 10, 0, 0, "ring", 5, 6, 7))
    record = GroupRecord("run/0", 1, "a", 0, (0, 1), "0", 0, 0, operations=[operation])
    earlier, later = numbers(100, 1000, 1000), numbers(300, 5_001_000, 1500)
    before = top.Look(10.0, {"x": replace(record, **earlier)})
    now = top.Look(12.0, {"x": replace(record, **later)})
    (row,) = top.rows(before, now)
    assert dict(zip(top.COLUMNS, row, strict=True)) == {
        "rank": "0",
        "host": "a",
        "group": "0",
        "operation": "all_reduce #1 float32[10] SUM",
        "state": "done",
        "since": "12 s",
        "waits for": "",
        "ops/s": "100",
        "rate": "2.5 MB/s",
        "waits": "25%",
    }


def test_a_folder_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.ring").write_bytes(b"RINGREC1")
    assert main(["top", str(tmp_path)]) == 1
    assert f"start the job with RINGCOMM_TRACE={tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_screen(size: int) -> None:
    """All ranks have a row that fits into 120 columns, and a rank that waits stands out."""
    console = pytest.importorskip("rich.console")
    operation = Operation(
        *(412, 412, "all_reduce", "bfloat16", "SUM", None, 500_000_000, 0, 0, "ring", 5, 6)
    )
    operation.state = "running"
    records = {}
    for rank in range(size):
        mine = [] if rank == 1 else [operation]
        earlier = Operation(*(411, 411, "barrier", "uint8", None, None, 0, 0, 0, "ring", 1, 2, 3))
        records[str(rank)] = GroupRecord(
            *("run/0", 1, f"node{rank}", rank, tuple(range(size)), "0", 0, 0),
            operations=[earlier, *mine],
            **numbers(100, 1000, 1000),
        )
    look = top.Look(10.0, records)
    screen = console.Console(width=120, height=size + 6, record=True, file=io.StringIO())
    screen.print(top.table(look, look, "job", top.View()))
    text = screen.export_text()
    lines = [line for line in text.splitlines() if "node" in line]
    assert len(lines) == size
    assert "…" not in text
    assert all("bfloat16[500000000] SUM" in line for line in lines if "#412" in line)
    waiting = [line for line in lines if "running" in line]
    assert len(waiting) == size - 1
    assert all(re.search(r" s │ 1 +│", line) for line in waiting)


def hang(folder: Path, size: int) -> tuple[top.Look, top.Look]:
    """Return two looks, a second apart, at a job whose last rank has not called as the others."""
    flights, now = training(size, hosts=max(size // 8, 1))
    for flight in flights[:-1]:
        flight.call("all_reduce", now, elements=500_000_000, dtype="bfloat16")
    write(folder, flights)
    return top.look(folder, 1.7e9 + 1), top.look(folder, 1.7e9 + 2)


@pytest.mark.parametrize("width", [50, 80, 200])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_screens_of_all_sizes(tmp_path: Path, size: int, width: int) -> None:
    """Nothing is cut; where there is too little room, columns that say less are left out."""
    console = pytest.importorskip("rich.console")
    screen = console.Console(width=width, record=True, file=io.StringIO())
    screen.print(top.table(*hang(tmp_path, size), "job", top.View(width)))
    text = screen.export_text()
    assert "…" not in text
    lines = [line for line in text.splitlines() if line.startswith("│")]
    assert len(lines) == size
    assert width < 80 or sum("│ running │" in line for line in lines) == size - 1
    # For whom it waits, or its own number.
    assert all(re.search(rf"│ +{size - 1} +│", line) for line in lines)
    assert all("#21" in line for line in lines if not line.startswith(f"│{size - 1:>5} │"))
    assert ("bfloat16[500000000] SUM" in text) == (width == 200)


def drawn(looks: tuple[top.Look, top.Look], view: top.View) -> list[str]:
    """Return the first column of the screen: ranks, in the order in which they are shown."""
    console = pytest.importorskip("rich.console")
    screen = console.Console(width=120, record=True, file=io.StringIO())
    screen.print(top.table(*looks, "job", view))
    text = screen.export_text()
    assert len(text.splitlines()) <= view.height
    return re.findall(r"^│ +(\d+) │", text, re.M)


def test_the_rank_that_others_wait_for_comes_first(tmp_path: Path) -> None:
    looks = hang(tmp_path, 64)
    view = top.View(120, 24)
    assert drawn(looks, view) == ["63", *map(str, range(16))]
    for _ in range(3):
        view.press("\x1b[B")
    assert drawn(looks, view) == [str(rank) for rank in range(2, 19)]
    view.press("s")
    assert drawn(looks, view) == [str(rank) for rank in range(17)]
    for _ in range(9):
        view.press("\x1b[6~")
    assert drawn(looks, view)[-1] == "63"
    assert not view.over
    view.press("q")
    assert view.over


def test_only_the_culprit_is_marked(tmp_path: Path) -> None:
    _, now = hang(tmp_path, 8)
    assert top.styles([[str(rank), *[""] * 9] for rank in range(8)], now) == [
        *[top.WAITS] * 7,
        top.CULPRIT,
    ]


def test_a_wait_of_milliseconds_is_no_reason_to_blame_anybody(tmp_path: Path) -> None:
    _, now = hang(tmp_path, 8)
    lines = [[str(rank), *[""] * 9] for rank in range(8)]
    first = next(iter(now.records.values()))
    now.at = (first.wall_ns + last_ns(first) - first.steady_ns) * 1e-9 + 0.1
    assert top.styles(lines, now) == [top.WELL] * 8


def test_it_waits_for_a_job_that_has_not_begun(tmp_path: Path) -> None:
    """A screen without records says so, and `q` ends it."""
    pytest.importorskip("rich")
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ringcomm", "top", str(tmp_path / "later"), "--every", "0.05"],
        stdin=follower,
        stdout=follower,
    )
    os.close(follower)
    text = b""
    try:
        while b"quits" not in text:  # words are never split where lines are folded
            assert select.select([leader], [], [], limit(30))[0], text
            text += os.read(leader, 4096)
        assert b"waiting" in text
        os.write(leader, b"q")
        assert process.wait(limit(30)) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_file_that_was_cut_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hang(tmp_path, 2)
    first = sorted(tmp_path.glob("rank0-*"))[0]
    first.write_bytes(first.read_bytes()[:5000])
    assert main(["top", str(tmp_path), "--once", "--every", "0.01"]) == 0
    assert "1 ranks at" in capsys.readouterr().out


def test_the_picture_in_the_docs_is_true(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    script = ROOT / "docs" / "draw_pages.py"
    command = [sys.executable, str(script), "top", "--to", str(tmp_path)]
    subprocess.run(command, check=True, timeout=limit(60))
    drawn, there = tmp_path / "top.svg", ROOT / "docs" / "pictures" / "top.svg"
    assert drawn.read_text() == there.read_text(), "draw it again: `python docs/draw_pages.py top`"
    assert "all_reduce&#160;#141" in there.read_text()
