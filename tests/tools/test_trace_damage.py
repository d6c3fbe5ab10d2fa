"""Whatever bytes ring files hold, they are read, or refused with a sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.flights import MS, Clock, Flight, together, training, write
from lab.limits import seed
from ringcomm.__main__ import main
from ringcomm._flight.records import read_folder
from ringcomm.tools.trace import job_of
from ringcomm.tools.trace.analysis import analyse
from ringcomm.tools.trace.findings import nothing_wrong

SAMPLES = 60
VALUES = [0, 1, 7, 2**31, 2**62, 2**64 - 1]


def rings() -> list[tuple[str, bytes]]:
    flights, now = training(4, steps=12, hosts=2, capacity=16)
    flights[0].call("recv", now, root=1)
    flights[1].call("send", now, root=0, tag=3)
    flights[2].failure = "rank 1: its process died"
    for flight in flights[1:]:
        flight.call("barrier", now + MS)
    return [(flight.name(), flight.data()) for flight in flights]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes of the clocks, the header and the records, and cut some files short."""
    changed = bytearray(data)
    for _ in range(chance.randrange(4)):
        word = chance.randrange(4096, len(data) - 8) // 8 * 8
        changed[word : word + 8] = chance.choice(VALUES).to_bytes(8, "little")
        changed[chance.choice([*range(8, 32), *range(64, 900)])] = chance.randrange(256)
    if chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def test_damage_is_borne(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(seed())
    whole = rings()
    statuses = set()
    for sample in range(SAMPLES):
        folder = write(tmp_path / str(sample), [])
        for name, data in whole:
            (folder / name).write_bytes(damaged(data, chance))
        out, pickles = str(folder / "out.json"), str(folder / "pickles")
        status = main(["trace", str(folder), "--perfetto", out, "--torch", pickles])
        told = capsys.readouterr()
        # Where a rank left no record, the status is 2, and yet the others' records are told.
        assert told.out.strip() or (status == 2 and told.err.strip())
        statuses.add(status)
    assert statuses & {0, 1}


def test_a_deep_header_is_damage(tmp_path: Path) -> None:
    """The parser gives up on it with an error of its own kind."""
    name, data = rings()[0]
    write(tmp_path, [])
    (tmp_path / name).write_bytes(data[:64] + b"[" * 2900 + data[64 + 2900 :])
    assert main(["trace", str(tmp_path)]) == 2


def cut(path: Path, records: int) -> None:
    """Leave only so many records of a ring file."""
    path.write_bytes(path.read_bytes()[: 4096 + 64 + 128 * records + 7])


def test_nothing_is_claimed_of_what_a_cut_hides(tmp_path: Path) -> None:
    """Rank 0 is missing. Rank 1 had begun 21 operations, and the file has ten of them."""
    flights, now = training(4)
    for flight in flights[1:]:
        flight.call("barrier", now)
    write(tmp_path, flights)
    cut(tmp_path / flights[1].name(1), 10)
    job = job_of(read_folder(tmp_path))
    (finding,) = analyse(job)
    assert finding.sentence.startswith("rank 0 never called barrier #21; the others wait there")
    assert finding.sentence.endswith("; what rank 1 called last cannot be read")
    assert [row[2] for row in finding.rows] == [
        *("never called", "cannot be read", "barrier #21", "barrier #21")
    ]
    assert "the record of rank 1 in group 0 is cut short: 10 of 64 records are left" in job.remarks


def test_all_others_stand_in_a_collective(tmp_path: Path) -> None:
    flights, now = training(3)
    for flight in flights:
        flight.call("barrier", now)
    write(tmp_path, flights)
    cut(tmp_path / flights[1].name(1), 10)
    (finding,) = analyse(job_of(read_folder(tmp_path)))
    assert finding.sentence.startswith(
        "ranks 0 and 2 are in barrier #21, which the last rank called"
    )
    assert finding.sentence.endswith("; what rank 1 called last cannot be read")


def test_a_record_that_cannot_be_read_is_not_missing(tmp_path: Path) -> None:
    flights, _ = training(3)
    flights[1].header = {"version": 1}
    job = job_of(read_folder(write(tmp_path, flights[:2])))
    assert nothing_wrong(job) == (
        "ranks 1 and 2 left no record that can be read, so nothing is known of them; nothing is "
        "wrong in the record of rank 0"
    )
    assert main(["trace", str(tmp_path)]) == 2
    assert job.remarks[0].startswith("rank1-1001-01.ring is left out: it has version 1 of the")


def jumped(folder: Path) -> str:
    """The wall clock of rank 1 jumps by 40 s between two groups."""
    flights, _ = training(2)
    later = [Flight(rank, [0, 1], flights[0].clock, "7", made=300 * MS) for rank in range(2)]
    later[1].clock = Clock("node0", error=40_000 * MS)
    together(later, "all_reduce", [350 * MS, 351 * MS])
    write(folder, flights + later)
    return "the wall clock of node0 jumped by 40 s while rank 1 ran"


def two_jobs(folder: Path) -> str:
    other, _ = training(4)
    for flight in other:
        flight.job, flight.made, flight.pid = "other/0", -(10**12), 5000 + flight.rank
    write(folder, other + training(2)[0])
    return "4 records are of other jobs and left out: --job takes other/0"


def two_versions(folder: Path) -> str:
    flights, _ = training(4)
    flights[1].header = {"ringcomm": "0.2.0"}
    write(folder, flights)
    return "the ranks have different versions of ringcomm: 0.1.0 on ranks 0, 2 and 3, 0.2.0 on rank"


def half_a_file(folder: Path) -> str:
    flights, _ = training(2)
    write(folder, flights)
    cut(folder / flights[1].name(1), 10)
    return "the record of rank 1 in group 0 is cut short: 10 of 64 records are left"


@pytest.mark.parametrize("damage", [jumped, two_jobs, two_versions, half_a_file])
def test_each_way_out_says_what_is_odd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], str]
) -> None:
    """The command, the page and the trace say it, and the rest is used."""
    pytest.importorskip("plotly")
    said = damage(tmp_path)
    page, trace = tmp_path / "job.html", tmp_path / "job.json"
    assert main(["trace", str(tmp_path), "--html", str(page), "--perfetto", str(trace)]) == 0
    assert f"note: {said}" in capsys.readouterr().out
    assert said in page.read_text()
    loaded = json.loads(trace.read_text())
    assert any(said in note for note in loaded["otherData"]["notes"])
    slices = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(4 if damage is two_versions else 2))
    # All clocks are one: 20 steps take 260 ms, and a group of 50 ms may follow.
    assert max(event["ts"] + event["dur"] for event in slices) < 400_000
