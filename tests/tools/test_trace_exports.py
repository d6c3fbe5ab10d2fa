"""Clocks are aligned, and a job is exported as a trace for Perfetto and as a page."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab import browser
from lab.flights import MS, TICKS, Flight, training, write
from ringcomm._flight.records import read_folder
from ringcomm.tools.trace import job_of
from ringcomm.tools.trace.analysis import analyse
from ringcomm.tools.trace.clocks import Moment, solve
from ringcomm.tools.trace.html import write_page
from ringcomm.tools.trace.job import Job
from ringcomm.tools.trace.perfetto import write_perfetto

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)


def job(folder: Path, flights: list[Flight]) -> Job:
    return job_of(read_folder(write(folder, flights)))


def hang(size: int, hosts: int = 1) -> list[Flight]:
    flights, now = training(size, hosts=hosts)
    for flight in flights[:-1]:
        flight.call("barrier", now + MS, op=None)
    return flights


# ---- clocks


def test_clocks_are_aligned_by_the_operations(tmp_path: Path) -> None:
    """The second host's wall clock is 2.5 s ahead."""
    told = job(tmp_path, training(4, hosts=2)[0])
    shift = told.shifts["node1"]
    assert shift.lowest is not None
    assert shift.highest is not None
    assert shift.lowest <= shift.ns <= shift.highest
    assert shift.lowest <= -2500 * MS <= shift.highest
    assert abs(shift.ns + 2500 * MS) < MS
    assert told.shifts["node0"].ns == 0
    assert any(
        "the clock of node1 is shifted by -2.500" in text and "at least" in text
        for text in told.remarks
    )
    for group in told.groups:
        for calls in group.calls.values():
            last = max(told.called(group.records[rank], op) for rank, op in calls.items())
            ends = [told.at(group.records[rank], op.ended_ns or 0) for rank, op in calls.items()]
            assert min(ends) >= last


def test_bounds_go_through_other_clocks() -> None:
    """Nothing says how a and c differ, but both are bounded by b."""
    moments = [
        Moment({"b": 110, "a": 10}, {"a": 0, "b": 100}),
        Moment({"b": 120, "c": 1020}, {"c": 1000, "b": 105}),
    ]
    shifts = solve(["a", "b", "c"], moments)
    assert shifts is not None
    assert (shifts["b"].lowest, shifts["b"].highest) == (-110, -90)
    assert (shifts["c"].lowest, shifts["c"].highest) == (-1025, -970)


def test_clocks_that_fit_stay() -> None:
    shifts = solve(["a", "b"], [Moment({"a": 10, "b": 12}, {"a": 0, "b": 3})])
    assert shifts is not None
    assert (shifts["b"].ns, shifts["b"].lowest, shifts["b"].highest) == (0, -12, 7)


def test_the_middle_of_the_bounds_is_taken() -> None:
    """Operations that end far apart say nothing better."""
    far = Moment({"a": 600, "b": 1500}, {"a": 0, "b": 0})
    shifts = solve(["a", "b"], [Moment({"a": 10, "b": 1000}, {"a": 0, "b": 996}), far, far])
    assert shifts is not None
    assert (shifts["b"].lowest, shifts["b"].ns, shifts["b"].highest) == (-1000, -993, -986)


def test_one_bound_is_enough() -> None:
    """A broadcast bounds one way only: the clock is shifted no more than it has to be."""
    shifts = solve(["a", "b"], [Moment({"b": 10}, {"a": 50})])
    assert shifts is not None
    assert (shifts["b"].ns, shifts["b"].lowest, shifts["b"].highest) == (40, 40, None)


def test_clocks_that_contradict_each_other() -> None:
    moments = [Moment({"a": 10}, {"b": 60}), Moment({"b": 110}, {"a": 50})]
    assert solve(["a", "b"], moments) is not None
    assert solve(["a", "b"], [*moments, Moment({"b": 100}, {"a": 70})]) is None


def drift(flight: Flight) -> None:
    """Let the clock gain 10 ms with each operation: far more than an operation takes."""
    for i, operation in enumerate(flight.operations):
        times = [at + i * 10 * MS * TICKS for at in operation[8:11]]
        flight.operations[i] = (*operation[:8], *times, *operation[11:])


def test_a_straggler_is_found_though_clocks_drift(tmp_path: Path) -> None:
    flights, _ = training(2, steps=40, hosts=2, slow=0)
    drift(flights[1])
    (finding,) = analyse(job(tmp_path, flights))
    assert finding.sentence.startswith("rank 0 is a straggler: it was the last to call 40 of 40")


def test_a_clock_that_drifts_is_aligned_at_the_end(tmp_path: Path) -> None:
    flights, _ = training(2, steps=40, hosts=2)
    drift(flights[1])
    told = job(tmp_path, flights)
    assert any("the clocks of the hosts drift" in remark for remark in told.remarks)
    assert abs(told.shifts["node1"].ns + (2500 + 390) * MS) < 20 * MS


# ---- Perfetto


def trace_of(folder: Path, flights: list[Flight], last: int = 1000) -> dict[str, Any]:
    write_perfetto(job(folder, flights), folder / "out.json", last)
    loaded: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return loaded


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (8, 2), (64, 8)])
def test_a_trace_keeps_the_rules_of_trace_events(tmp_path: Path, size: int, hosts: int) -> None:
    flights = hang(size, hosts)
    flights[0].call("send", 50 * MS, 90 * MS, root=1)  # while collectives run
    trace = trace_of(tmp_path, flights)
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"} | (
        {"t"} if size > 2 else set()
    )
    assert {event["pid"] for event in events} == set(range(size))
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(lanes) <= named
    for lane in lanes.values():
        ordered = sorted(lane)
        for (begin, lasts), (after, _) in itertools.pairwise(ordered):
            assert begin + lasts <= after + 1e-3, "slices of a lane overlap"


def test_flows_join_the_ranks_of_a_collective(tmp_path: Path) -> None:
    events = trace_of(tmp_path, training(8, steps=3)[0])["traceEvents"]
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    assert len(flows) == 3
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *"tttttt", "f"]
        assert sorted(event["pid"] for event in flow) == list(range(8))
        assert {(e["pid"], e["tid"], e["ts"]) for e in flow} <= slices
        times = [event["ts"] for event in flow]
        assert times == sorted(times)


def test_lanes_say_where_the_time_went(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, training(2, steps=10, hosts=2, slow=1)[0])
    sums: Counter[tuple[int, str]] = Counter()
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            sums[event["pid"], event["name"].partition(" ")[0]] += round(event["dur"])
    assert sums[0, "wait"] == pytest.approx(10 * 5000, rel=0.05)
    assert sums[1, "wait"] == 0
    assert sums[1, "move"] == pytest.approx(10 * 3000, rel=0.05)
    assert sums[1, "compute"] == pytest.approx(9 * 15000, rel=0.05)
    assert "the clock of node1 is shifted by" in trace["otherData"]["clocks"][1]


def test_only_the_newest_are_drawn(tmp_path: Path) -> None:
    events = trace_of(tmp_path, training(2)[0], last=3)["traceEvents"]
    names = {e["name"] for e in events if e["ph"] == "X" and e["cat"] == "calls"}
    assert names == {"all_reduce #18", "all_reduce #19", "all_reduce #20"}


# ---- the page


@needs_chromium
@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (8, 2), (64, 8)])
def test_a_page_shows_the_finding_and_the_figures(tmp_path: Path, size: int, hosts: int) -> None:
    pytest.importorskip("jinja2")
    told = job(tmp_path, hang(size, hosts))
    write_page(told, analyse(told), tmp_path / "page.html")
    text = browser.document(tmp_path / "page.html")
    assert f"rank {size - 1} never called barrier #21" in text
    assert text.count("<canvas") == 2
    for words in ("ms since the oldest operation here", "rank that waited", "not ended"):
        assert words in text
    assert re.search(r">[\d.]+ [mµ]s waited<", text)
