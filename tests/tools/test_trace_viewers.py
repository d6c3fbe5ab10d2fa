"""Perfetto opens what `--perfetto` writes, and finds in it what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import perfetto
from lab.flights import MS, Flight, training, write
from ringcomm._flight.records import read_folder
from ringcomm.tools.trace import job_of
from ringcomm.tools.trace.job import Job
from ringcomm.tools.trace.perfetto import write_perfetto

pytestmark = pytest.mark.skipif(not perfetto.HERE, reason=perfetto.REASON)

SLICES = """
select process.pid, thread.name, count(*), cast(sum(dur) as int)
from slice join thread_track on slice.track_id = thread_track.id
join thread using (utid) join process using (upid)
group by process.pid, thread.name
"""
# Between which ranks arrows go, and whether both ends are the same collective.
FLOWS = """
select a.name, b.name, p.pid, q.pid from flow
join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id
join thread_track s on a.track_id = s.id join thread_track t on b.track_id = t.id
join thread u using (utid) join thread v on t.utid = v.utid
join process p on u.upid = p.upid join process q on v.upid = q.upid
"""
PROBLEMS = "select name, value from stats where severity != 'info' and value > 0"


def hang(size: int, hosts: int) -> list[Flight]:
    """The last rank never calls the barrier, and a message overlaps other operations."""
    flights, now = training(size, steps=12, hosts=hosts)
    flights[0].call("send", 15 * MS, 60 * MS, root=1, tag=4)
    flights[1].call("recv", 15 * MS, 60 * MS, root=0, tag=4)
    for flight in flights[:-1]:
        flight.call("barrier", now + MS)
    return flights


def lanes_of(job: Job) -> dict[tuple[int, str], int]:
    """Return how many slices of calls, waits and moves each rank's records have."""
    counts: dict[tuple[int, str], int] = {}
    for record in job.records:
        for operation in record.operations:
            called, began = operation.called_ns or 0, operation.began_ns or 0
            ended = job.at(record, operation.ended_ns) if operation.ended_ns else job.end
            moves = ended > job.at(record, began) + operation.waited_ns
            waits = int(began > called) + int(operation.waited_ns > 0)
            for kind, count in {"calls": 1, "wait": waits, "move": int(moves)}.items():
                key = (record.global_rank, kind)
                counts[key] = counts.get(key, 0) + count
    return {key: count for key, count in counts.items() if count}


@pytest.mark.parametrize(
    ("size", "hosts"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        (8, 2),
        pytest.param(64, 8, marks=pytest.mark.slow),
    ],
)
def test_perfetto_opens_the_trace(tmp_path: Path, size: int, hosts: int) -> None:
    job = job_of(read_folder(write(tmp_path / "records", hang(size, hosts))))
    write_perfetto(job, tmp_path / "job.json")
    with perfetto.opened(tmp_path / "job.json") as viewer:
        assert viewer.query(PROBLEMS) == []
        names = viewer.query("select pid, name from process where pid is not null order by pid")
        hosts_of = job.hosts()
        ranks = [[rank, f"rank {rank} on {hosts_of[rank]}"] for rank in range(size)]
        assert [row for row in names if row[1]] == ranks
        slices = {(pid, lane): (count, ns) for pid, lane, count, ns in viewer.query(SLICES)}
        flows = viewer.query(FLOWS)
        not_ended = viewer.query("select count(*) from slice where name glob '*(not ended)'")
    # Overlapping operations stand in a lane with a number: count them together.
    counts: dict[tuple[int, str], int] = {}
    for (pid, lane), (count, _) in slices.items():
        key = (pid, lane.partition(" ")[0])
        counts[key] = counts.get(key, 0) + count
    computed = {key: count for key, count in counts.items() if key[1] == "compute"}
    assert {key: count for key, count in counts.items() if key not in computed} == lanes_of(job)
    # Between 12 steps are 11 gaps, of which the message covers some on ranks 0 and 1.
    assert sorted(computed) == [(rank, "compute") for rank in range(size)]
    assert all(8 <= computed[rank, "compute"] <= 12 for rank in range(size))
    assert (0, "calls 2") in slices
    assert not_ended == [[size - 1]]
    # A flow goes through all ranks of a collective: one arrow less than there are ranks.
    assert len(flows) == 12 * (size - 1) + max(size - 2, 0)
    assert all(name == other and a != b for name, other, a, b in flows)


def test_perfetto_knows_how_long_a_rank_waited(tmp_path: Path) -> None:
    """Rank 1 is 5 ms late in each of 10 steps, on another host with another clock."""
    job = job_of(read_folder(write(tmp_path / "records", training(2, 10, 2, slow=1)[0])))
    write_perfetto(job, tmp_path / "job.json")
    with perfetto.opened(tmp_path / "job.json") as viewer:
        sums = {(pid, lane): ns for pid, lane, _, ns in viewer.query(SLICES)}
        starts = viewer.query("select ts from slice where name = 'all_reduce #1' order by ts")
        flows = viewer.query("select count(*) from flow")
    assert sums[0, "wait"] == pytest.approx(10 * 5 * MS, rel=0.05)
    assert sums[1, "wait"] < MS
    assert sums[1, "move"] == pytest.approx(10 * 3 * MS, rel=0.05)
    # The wall clocks of the hosts are 2.5 s apart; the trace's are not.
    assert abs(starts[1][0] - starts[0][0]) < 10 * MS
    assert flows == [[10]]
