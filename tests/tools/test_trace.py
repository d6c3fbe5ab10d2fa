"""`ringcomm trace` says what went wrong, of jobs in which just that went wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.flights import MS, TICKS, Clock, Flight, together, training, write
from ringcomm.__main__ import main
from ringcomm._flight.records import read_folder
from ringcomm._text import ranks_text
from ringcomm.tools.trace import job_of
from ringcomm.tools.trace.analysis import analyse
from ringcomm.tools.trace.findings import Finding, Kind

DIED = "all_reduce #21: Connection closed by rank 3: its process died (had begun #20); look at it"


@pytest.fixture(autouse=True)
def _utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    del os.environ["TZ"]
    if before is not None:
        os.environ["TZ"] = before
    time.tzset()


def findings(folder: Path, flights: list[Flight]) -> list[Finding]:
    return analyse(job_of(read_folder(write(folder, flights))))


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (8, 2), (64, 8)])
def test_nothing_is_wrong(tmp_path: Path, size: int, hosts: int) -> None:
    assert findings(tmp_path, training(size, hosts=hosts)[0]) == []


@pytest.mark.parametrize(("size", "hosts"), [(4, 1), (8, 2), (64, 8)])
def test_a_missing_rank(tmp_path: Path, size: int, hosts: int) -> None:
    flights, now = training(size, hosts=hosts)
    for flight in flights:
        if flight.rank != 3:
            flight.call("all_reduce", now + 7000 * MS, elements=500_000)
    (finding,) = findings(tmp_path, flights)
    assert finding.kind == Kind.MISSING
    assert finding.sentence == (
        "rank 3 never called all_reduce #21; the others wait there since 22:13:27; it was last in "
        "all_reduce #20, which ended there at 22:13:20"
    )
    (row,) = [row for row in finding.rows if "never called" in row]
    assert row[0] == "3"
    assert len(finding.rows) == (size if size <= 16 else 2)


def test_lines_of_the_program_are_shown(tmp_path: Path) -> None:
    flights, now = training(2)
    flights[0].call("all_reduce", now, line=2)
    flights[1].call("broadcast", now, root=0, line=1)
    for rank in range(2):
        lines = "/home/me/train.py:40 in step\n/home/me/train.py:42 in step\n"
        (tmp_path / f"rank{rank}-{1000 + rank}.lines").write_text(lines)
    (finding,) = findings(tmp_path, flights)
    assert [row[2].partition("(")[2] for row in finding.rows] == [
        "train.py:42 in step)",
        "train.py:40 in step)",
    ]


def test_several_missing_ranks(tmp_path: Path) -> None:
    flights, now = training(8)
    for flight in flights[:4]:
        flight.call("barrier", now)
    (finding,) = findings(tmp_path, flights)
    assert finding.sentence.startswith("ranks 4-7 never called barrier #21; the others wait there")


def test_a_mismatch(tmp_path: Path) -> None:
    flights, now = training(4)
    for flight in flights:
        name = "all_gather" if flight.rank == 2 else "all_reduce"
        flight.call(name, now, elements=8)
        flight.call("barrier", now + MS)
    (finding,) = findings(tmp_path, flights)
    assert finding.kind == Kind.MISMATCH
    assert finding.sentence == (
        "the ranks differ in collective #21: rank 2 called all_gather float32[8], ranks 0, 1 and 3 "
        "called all_reduce float32[8] SUM; the last that they agreed on is all_reduce #20"
    )


def test_a_dead_rank(tmp_path: Path) -> None:
    flights, now = training(4)
    for flight in flights:
        if flight.rank != 3:
            flight.call("all_reduce", now, now + MS, state="failed")
            flight.failure = DIED
    told = findings(tmp_path, flights)
    assert [finding.kind for finding in told] == [Kind.DEAD, Kind.FAILED]
    assert told[0].sentence.startswith("rank 3 died before all_reduce #21; the others wait there")
    assert told[0].sentence.endswith(f"rank 0 says: {DIED}")


def test_a_rank_that_died_in_a_collective(tmp_path: Path) -> None:
    flights, now = training(4)
    for flight in flights:
        state = "running" if flight.rank == 3 else "failed"
        flight.call("all_reduce", now, state=state)
        flight.failure = "" if flight.rank == 3 else "all_reduce #21: Timed out"
    told = findings(tmp_path, flights)
    assert told[0].kind == Kind.DEAD
    assert "the record of rank 3 ends in all_reduce #21 with no word of a failure" in (
        told[0].sentence
    )


def test_a_rank_without_record(tmp_path: Path) -> None:
    flights, now = training(4)
    for flight in flights:
        flight.call("all_reduce", now)
    (finding,) = findings(tmp_path, flights[:3])
    assert finding.kind == Kind.DEAD
    assert finding.sentence.startswith(
        "rank 3 left no record, and the others wait in all_reduce #21"
    )


def test_a_deadlock_of_two_groups(tmp_path: Path) -> None:
    first = [Flight(rank, [0, 1], group="1") for rank in range(2)]
    two = [Flight(rank, [0, 1], group="2") for rank in range(2)]
    together(first, "all_reduce", [0, 0])
    first[0].call("all_reduce", 5 * MS)
    two[1].call("broadcast", 5 * MS, root=0)
    (finding,) = findings(tmp_path, first + two)
    assert finding.kind == Kind.DEADLOCK
    assert finding.sentence == (
        "ranks 0 and 1 wait for each other in different groups: rank 0 in all_reduce #2 of group "
        "1, rank 1 in broadcast #1 of group 2; every rank must use its groups in the same order"
    )


def test_the_cause_comes_before_what_follows(tmp_path: Path) -> None:
    """Rank 1 keeps rank 0 waiting, for it waits for rank 2 itself."""
    one_group = [Flight(rank, [0, 1], group="1") for rank in range(2)]
    two = [Flight(rank, [1, 2], group="2") for rank in range(2)]
    one_group[0].call("all_reduce", 5 * MS)
    two[0].call("barrier", 4 * MS)
    first, second = findings(tmp_path, one_group + two)
    assert first.sentence.startswith("rank 2 never called barrier #1 of group 2; rank 1 waits")
    assert second.sentence.endswith("it is in barrier #1 of group 2")
    assert second.follows


def test_a_straggler(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, training(8, steps=40, slow=5)[0])
    assert finding.kind == Kind.STRAGGLER
    assert "rank 5 is a straggler: it was the last to call 40 of 40" in finding.sentence
    assert finding.rows[0][:3] == ("5", "node0", "40 of 40")


def test_a_straggler_is_found_across_clocks(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, training(16, steps=40, hosts=4, slow=9)[0])
    assert "rank 9 is a straggler" in finding.sentence


def test_a_straggling_host(tmp_path: Path) -> None:
    """All of its ranks are late: it is named, and not its ranks one by one."""
    (finding,) = findings(tmp_path, training(16, steps=40, hosts=4, slow_host="node2")[0])
    assert finding.kind == Kind.STRAGGLER
    assert finding.sentence.startswith(
        "host node2 is a straggler: all of its ranks 8-11 were the last to call 40 of 40 "
        "collectives, 4.37 ms after the last rank of the other hosts on average; the others lost "
    )
    assert finding.rows[0][:3] == ("node2", "8-11", "40 of 40")
    assert len(finding.rows) == 4


def test_one_slow_rank_is_no_slow_host(tmp_path: Path) -> None:
    for size in (2, 3):  # node1 has rank 1, or ranks 1 and 2
        (finding,) = findings(tmp_path / str(size), training(size, steps=40, hosts=2, slow=1)[0])
        assert finding.sentence.startswith("rank 1 is a straggler")
    # Rank 3 is late by 1 ms more than rank 2 of its host: the host costs most.
    flights, _ = training(4, steps=40, hosts=2, slow_host="node1")
    for i, operation in enumerate(flights[3].operations):
        called, began, *rest = operation[8:]
        flights[3].operations[i] = (*operation[:8], called + MS * TICKS, began + MS * TICKS, *rest)
    (finding,) = findings(tmp_path / "both", flights)
    assert finding.sentence.startswith("host node1 is a straggler: all of its ranks 2 and 3 were")


def test_where_a_straggler_is_between_its_calls(tmp_path: Path) -> None:
    flights, _ = training(8, steps=40, slow=5)
    folder = write(tmp_path, flights)
    process = flights[5].name().rpartition("-")[0]
    (folder / f"{process}.often").write_text("train.py:42 in load\ntrain.py:9 in step\n")
    (finding,) = analyse(job_of(read_folder(folder)))
    assert "; between its calls it is mostly at train.py:42 in load (host node0" in finding.sentence


@pytest.mark.parametrize(("sent", "said"), [(500_000, True), (50_000_000, False), (5000, False)])
def test_a_slow_network(tmp_path: Path, sent: int, said: bool) -> None:
    """Time goes by while bytes move, though nobody is late: 5 MB/s of each rank."""
    flights, now = training(3, steps=2, hosts=3)
    for step in range(4):
        at = now + step * 110 * MS
        for flight in flights:
            flight.call("all_reduce", at, at + 100 * MS, sent=sent, waited=90 * MS, peer=1)
    told = findings(tmp_path, flights)
    assert [finding.kind for finding in told] == [Kind.NETWORK] * said
    assert all("the ranks send 5 MB/s each, and wait, most of all" in f.sentence for f in told)


def test_the_dearest_slowness_comes_first(tmp_path: Path) -> None:
    flights, now = training(4, steps=40, hosts=2, slow=1)
    for flight in flights:
        stalled: dict[str, Any] = {"waited": 300 * MS, "longest": 290 * MS, "peer": 3}
        flight.call("all_reduce", now, now + 310 * MS, **(stalled if flight.rank == 0 else {}))
    assert [f.kind for f in findings(tmp_path / "a", flights)] == [Kind.NETWORK, Kind.STRAGGLER]
    flights, now = training(4, steps=400, hosts=2, slow=1, capacity=1024)
    for flight in flights:
        flight.call("all_reduce", now, now + 310 * MS, **(stalled if flight.rank == 0 else {}))
    assert [f.kind for f in findings(tmp_path / "b", flights)] == [Kind.STRAGGLER, Kind.NETWORK]


def test_a_network_that_stood_still(tmp_path: Path) -> None:
    flights, now = training(4, hosts=2)
    for flight in flights:
        stalled: dict[str, Any] = {
            "waited": 3000 * MS,
            "longest": 2900 * MS,
            "peer": 3,
            "resent": 12,
        }
        facts = stalled if flight.rank == 1 else {}
        flight.call("all_reduce", now, now + 3010 * MS, elements=500_000, **facts)
    (finding,) = findings(tmp_path, flights)
    assert finding.kind == Kind.NETWORK
    assert finding.sentence == (
        "the network between node0 and node1 stood still: rank 1 waited 2.9 s for rank 3 in "
        "all_reduce #21, though all ranks had called it; 12 frames were sent again"
    )


def test_all_ranks_stand_in_a_collective(tmp_path: Path) -> None:
    flights, now = training(4)
    for flight in flights:
        flight.call("all_reduce", now, elements=500_000, waited=9 * MS, peer=(flight.rank + 1) % 4)
    (finding,) = findings(tmp_path, flights)
    assert finding.kind == Kind.STILL
    assert finding.sentence.startswith(
        "all ranks are in all_reduce #21, which the last rank called"
    )
    assert finding.sentence.endswith("; rank 0 waited longest: 9 ms for rank 1")


def test_a_message_without_partner(tmp_path: Path) -> None:
    flights = [Flight(rank, [0, 1]) for rank in range(2)]
    for tag in (1, 1, 2):
        flights[0].call("send", MS, 2 * MS, root=1, tag=tag)
    flights[1].call("recv", MS, 2 * MS, root=0, tag=1)
    flights[1].call("recv", 3 * MS, root=0, tag=1)  # has its partner
    flights[1].call("recv", 4 * MS, root=0, tag=7)
    flights[0].call("send", 4 * MS, root=1, tag=8)
    (finding,) = findings(tmp_path, flights)
    assert finding.kind == Kind.MESSAGE
    assert [row[3] for row in finding.rows] == ["8", "7"]
    assert finding.sentence == (
        "rank 0 waits in its send with tag 8 to rank 1 since 22:13:20, and rank 1 never called "
        "recv for it (rank 1 waits in a recv with tag 7 instead); 1 other messages wait so too"
    )


def test_a_signal_that_nobody_gave(tmp_path: Path) -> None:
    """Rank 0 has put and signaled once. Rank 1 waits for a second signal; puts wait for nobody."""
    flights, now = training(2)
    tag = 2**31 + 3
    flights[0].call("send", now, now + MS, elements=10, root=1, tag=tag)
    flights[0].call("send", now, now + MS, elements=0, root=1, tag=tag)
    flights[0].call("send", now, elements=10, root=1, tag=tag)
    flights[1].call("recv", now, now + MS, elements=0, root=0, tag=tag)
    flights[1].call("recv", now + MS, elements=0, root=0, tag=tag)
    (finding,) = findings(tmp_path, flights)
    assert finding.sentence.startswith(
        "rank 1 waits in a wait_signal of window 3 from rank 0 since"
    )
    assert finding.sentence.endswith("and rank 0 never gave that signal")
    assert finding.rows[0][1:4] == ("wait_signal", "0", "window 3")


def test_a_failure_is_quoted(tmp_path: Path) -> None:
    flights, _ = training(2)
    flights[1].failure = "the disk is full"
    (finding,) = findings(tmp_path, flights)
    assert finding.sentence == "group 0 failed on rank 1: the disk is full"


# ---- the command


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flights, now = training(2)
    assert main(["trace", str(write(tmp_path / "well", flights))]) == 0
    assert capsys.readouterr().out.startswith("nothing is wrong: every operation")
    flights[0].call("barrier", now)
    assert main(["trace", str(write(tmp_path / "hang", flights))]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("rank 1 never called barrier #21")
    assert out[1].split()[:4] == ["rank", "host", "call", "state"]
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty")]) == 2
    assert "there is no flight record that can be read" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train/0", "train/1"])
def test_another_job_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Also one of the same name, whose ranks never met these."""
    old, now = training(2)
    old[0].call("barrier", now)
    new, _ = training(2)
    for flight in old:
        flight.meeting = 7
    for flight in new:
        flight.job, flight.made, flight.pid = name, 10**12, 5000 + flight.rank
        flight.meeting = 8
    if name == "train/0":
        name = "train/0 (2)"
    write(tmp_path, old + new)
    assert main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "note: 2 records are of other jobs and left out: --job takes train/0" in told
    assert main(["trace", str(tmp_path), "--job", "train/0"]) == 1
    assert main(["trace", str(tmp_path), "--job", name]) == 0
    assert main(["trace", str(tmp_path), "--job", "none"]) == 2


def test_what_is_odd_is_told(tmp_path: Path) -> None:
    flights, _ = training(3)
    flights[0].header = {"ringcomm": "0.2.0"}
    later = Flight(1, [0, 1], Clock("node0", error=40_000 * MS), group="7", made=100 * MS)
    job = job_of(read_folder(write(tmp_path, [*flights[:2], later])))
    assert "the ranks have different versions of ringcomm: 0.2.0 on rank 0, 0.1.0 on rank 1" in (
        job.remarks
    )
    assert "rank 2 left no record in this folder" in job.remarks
    assert any("the wall clock of node0 jumped by" in remark for remark in job.remarks)


def test_a_name_of_a_group_that_is_used_again(tmp_path: Path) -> None:
    """The second group of that name begins at #1 again: this is no mismatch with the first."""
    first = [Flight(rank, [0, 1]) for rank in range(2)]
    second = [Flight(rank, [0, 1], made=500 * MS) for rank in range(2)]
    together(first, "all_reduce", [0, 0])
    together(second, "barrier", [600 * MS, 600 * MS])
    job = job_of(read_folder(write(tmp_path, first + second)))
    assert [group.name for group in job.groups] == ["0", "0 (2)"]
    assert analyse(job) == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0 and 1"), ([5, 0, 1, 2], "ranks 0-2 and 5")],
)
def test_ranks_are_put_together(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
