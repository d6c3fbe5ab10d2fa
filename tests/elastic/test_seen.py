"""A world is seen: its figures, the file for `ringcomm elastic top`, Prometheus and the log."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from lab import browser
from lab.devtools import Browser
from lab.limits import limit
from lab.trainees import Trainees, trainees
from ringcomm._flight.processes import this_process, written
from ringcomm.elastic import stats, status
from ringcomm.elastic.agreement import ENDED, GAVE_UP, SILENT
from ringcomm.elastic.process import Process
from ringcomm.elastic.prometheus import METRICS, text_of
from ringcomm.elastic.stats import History, PastChange, stats_of
from ringcomm.tools import top
from ringcomm.tools.world import html
from ringcomm.tools.world.state import State, lines, place_of, worlds_in

A, B, C, D, E, F, G = (
    Process(f"uuid-{name}", f"node{name}", at) for at, name in enumerate("abcdefg")
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def change(epoch: int, lost: list[tuple[Process, str]], joined: list[Process]) -> PastChange:
    return {
        "epoch": epoch,
        "step": 10 * epoch,
        "at": 1e9 + 60 * epoch,
        "size": 2,
        "lost": [{**stats.place(process), "why": why} for process, why in lost],
        "joined": [stats.place(process) for process in joined],
        "seconds": 0.25,
    }


# ---- what is remembered


def test_steps_a_second_are_those_of_the_last_looks() -> None:
    clock = Clock()
    history = History(clock)
    assert history.rate(7) == 0.0
    for step in range(0, 200, 10):  # ten a second, and then twice as many
        history.sample(clock.now, step)
        clock.now += 1.0
    assert history.rate(200) == 10.0
    for step in range(200, 400, 20):
        history.sample(clock.now, step)
        clock.now += 1.0
    assert 19 <= history.rate(400) <= 20
    clock.now += 10.0  # a step hangs
    assert history.rate(400) < 12


def test_a_long_night_is_thinned_evenly() -> None:
    history = History(Clock())
    for second in range(8 * 3600):
        history.sample(second, 2 * second)
    points = history.points
    assert stats.POINTS / 2 <= len(points) <= stats.POINTS
    assert {after[0] - before[0] for before, after in pairwise(points)} == {64}
    assert all(step == 2 * at for at, step in points)


def test_why_each_is_gone() -> None:
    history = History()
    history.expect(stats.LEFT, [A.uuid])
    history.expect(stats.DIFFERS, [B.uuid])
    fates = {A.uuid: ENDED, B.uuid: GAVE_UP, C.uuid: ENDED, D.uuid: SILENT, E.uuid: GAVE_UP}
    history.explain([A, B, C, D, E, F, G], fates, {F.uuid}, late=False)
    assert list(history.reasons.values()) == [
        *(stats.LEFT, stats.DIFFERS, ENDED, SILENT, GAVE_UP),
        *(stats.NOT_ENTERED, stats.UNKNOWN),
    ]
    history.add(change(1, [], []))
    history.explain([A, D], {A.uuid: ENDED, D.uuid: SILENT}, set(), late=True)
    assert history.reasons == {A.uuid: ENDED, D.uuid: stats.TIMED_OUT}


def test_a_hang_is_told_apart_from_a_death() -> None:
    history, asked = History(), []
    history.add(change(1, [(A, ENDED), (B, stats.LEFT), (C, ENDED)], []))

    def has_hung(uuid: str) -> bool:
        asked.append(uuid)
        if len(asked) == 2:
            raise RuntimeError("the store does not answer")
        return uuid == C.uuid

    with pytest.raises(RuntimeError, match="does not answer"):
        history.ask_why(has_hung)
    history.ask_why(has_hung)
    history.ask_why(has_hung)
    assert asked == [A.uuid, C.uuid, C.uuid]
    assert [lost["why"] for lost in history.changes[0]["lost"]] == [ENDED, stats.LEFT, stats.HUNG]


def figures(history: History) -> stats.Stats:
    return stats_of(history, None, 40, None, 0)


def test_a_joiner_takes_the_history_over() -> None:
    """It came in epoch 2, and both have seen the changes since then, which count once."""
    founder, joiner = History(began=50.0), History(entered=2, began=70.0)
    every = [change(1, [(A, ENDED)], []), change(3, [], [D]), change(4, [(B, stats.LEFT)], [])]
    for at, past in enumerate(every):
        founder.add(past)
        if at:
            joiner.add(past)
    last = change(5, [(C, ENDED), (E, stats.NOT_ENTERED)], [])
    joiner.add(last)
    joiner.points = [(71.0, 8)]
    joiner.adopt(figures(founder), [(51.0, 1), (69.0, 7), (71.5, 8)], 50.0)
    assert joiner.changes == [*every, last]
    assert joiner.totals == {"changes": 4, "lost": 3, "joined": 1, "seconds_lost": 1.0}
    assert joiner.points == [(51.0, 1), (69.0, 7), (71.0, 8)]
    assert joiner.began == 50.0
    before, told = dict(founder.totals), figures(joiner)
    told["checkpoint"] = {"step": 30, "path": "ckpt", "at": 1e9}
    founder.adopt(told, joiner.points, 1.0)
    assert (founder.totals, founder.changes) == (before, every)
    assert figures(founder)["checkpoint"] == told["checkpoint"]


# ---- files


def test_prometheus_reads_it() -> None:
    history = History()
    history.add(change(1, [(A, ENDED)], [B, C]))
    history.aborted = 3
    told = figures(history)
    lines = text_of(told).splitlines()
    sample = r"ringcomm_elastic_[a-z_]+ [0-9.e+-]+"
    for line in lines:
        assert re.fullmatch(rf"# HELP ringcomm_elastic_\w+ [A-Z].+\.|# TYPE \w+ \w+|{sample}", line)
    for name, kind, _, _ in METRICS:
        assert f"# TYPE ringcomm_elastic_{name} {kind}" in lines
        assert name.endswith("_total") == (kind == "counter")
    assert "ringcomm_elastic_lost_total 1" in lines
    assert "ringcomm_elastic_joined_total 2" in lines
    assert "ringcomm_elastic_changes_seconds_total 0.25" in lines
    assert "ringcomm_elastic_aborted_steps_total 3" in lines
    assert not [line for line in lines if line.startswith("ringcomm_elastic_checkpoint_step")]
    told["checkpoint"] = {"step": 30, "path": "ckpt", "at": 1e9}
    assert "ringcomm_elastic_checkpoint_step 30" in text_of(told)


def test_old_files_go(tmp_path: Path) -> None:
    now = time.time()
    for at in range(status.KEPT + 3):
        path = tmp_path / f"world-{at:016x}-node.json"
        path.touch()
        old = status.OLD_SECONDS + 100 if at < 2 else 10
        os.utime(path, (now - old + at, now - old + at))
    (tmp_path / "rank0-1-0.ring").touch()
    status.tidy(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[0] == "rank0-1-0.ring"
    assert left[1:] == [f"world-{at:016x}-node.json" for at in range(2, status.KEPT + 3)]


def test_the_folder_is_that_of_flight_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOMM_TRACE", "off")
    assert status.folder() is None
    monkeypatch.setenv("RINGCOMM_TRACE", str(tmp_path / "records"))
    assert status.folder() == place_of(None) == tmp_path / "records"
    monkeypatch.delenv("RINGCOMM_TRACE")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert status.folder() == place_of(None) == tmp_path / f"ringcomm-{os.getuid()}"


def night() -> dict[str, Any]:
    """The file of a world in which something of each kind has happened."""
    clock = Clock()
    history = History(clock, began=1e9)
    for epoch, why in enumerate(html.REASONS, 1):
        history.add(change(3 * epoch, [(Process(f"was-{why}", "node7", epoch), why)], []))
        history.add(change(3 * epoch + 2, [], [Process(f"came-{epoch}", "n" * 40, 100 + epoch)]))
    history.add(change(40, [(F, stats.NOT_ENTERED)], []))
    for second in range(2400):
        clock.now = second
        history.sample(1e9 + second, 20 * second)
    clock.now = 2400
    told = stats_of(history, None, 48_000, None, 0)
    told["members"] = [stats.place(process) for process in (A, B)]
    told["checkpoint"] = {"step": 30, "path": "/ckpt/step-000000030", "at": 1e9 + 2300}
    return {
        "format": status.FORMAT,
        "run": "night",
        "world": "ab",
        "at": 1e9 + 2400.0,
        "began": history.began,
        "pid": os.getpid(),
        "process": json.loads(written(this_process())),
        "points": history.points,
        "stats": told,
    }


def test_the_newest_file_of_a_world_counts(tmp_path: Path) -> None:
    first = night()
    (tmp_path / "world-ab-node1.json").write_text(json.dumps(first))
    (tmp_path / "world-ab-node2.json").write_text(json.dumps({**first, "at": 2e9, "run": "later"}))
    other = {**first, "world": "cd", "at": 3e9, "pid": 1 << 22}
    (tmp_path / "world-cd-node1.json").write_text(json.dumps(other))
    (tmp_path / "world-ef-node1.json").write_text("{}")
    some = worlds_in(tmp_path)
    assert [(state.world, state.run, state.runs()) for state in some] == [
        ("cd", "night", False),
        ("ab", "later", True),
    ]
    with pytest.raises(ValueError, match=r"world-ef-node1.json is no file of an elastic world"):
        worlds_in(tmp_path / "world-ef-node1.json")


def test_what_a_terminal_shows(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "world-ab-node1.json"
    path.write_text(json.dumps(night()))
    state = State(path)
    text = lines(state, state.at)
    assert "elastic world night: 2 ranks, epoch 0, step 48000, 20 steps/s" in text[0]
    assert "last seen" not in text[0]
    assert (
        "13 changes took 3.25 s; 0 steps computed again, 0 lost; 6 left or died, 6 joined" in text
    )
    assert "checkpoint of step 30, 100 s old, /ckpt/step-000000030" in text
    assert [line for line in text if re.match(r"1 +nodeb +1$", line)]
    assert [line for line in text if re.search(r"250 ms +node7 2 \(hung\) +-$", line)]
    assert "last seen 17 min ago" in lines(state, state.at + 1000)[0]
    assert len(lines(state, state.at, height=14)) <= 14
    done = run(sys.executable, "-m", "ringcomm", "elastic", "top", "--once", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nodea" in done.stdout
    done = run(sys.executable, "-m", "ringcomm", "elastic", "top", "--once", tmp_path / "none")
    assert done.returncode == 1
    assert "has no file of an elastic world" in done.stderr


# ---- the page

LOOK = """
(() => ({
  wide: document.documentElement.scrollWidth,
  rows: [...document.querySelectorAll(".ytick text")].map(text => text.textContent),
  legends: [...document.querySelectorAll(".legendtext")].map(text => text.textContent),
  drawn: document.querySelectorAll(".plot svg.main-svg").length,
}))()
"""


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
def test_the_page(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    path, page = tmp_path / "world-ab-node1.json", tmp_path / "world.html"
    path.write_text(json.dumps(night()))
    html.write_page(State(path), page)
    with Browser() as chromium:
        for width in (1200, 400):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            chromium.ask("Emulation.setDeviceMetricsOverride", **size)
            chromium.open(page.as_uri())
            chromium.wait_for("document.querySelectorAll('.plot svg.main-svg').length >= 6")
            seen = chromium.run(LOOK)
            assert seen["wide"] <= width
            assert {"nodea 0", "node7 1", "nnnnnnnnnnn… 106"} <= set(seen["rows"])
            assert not [row for row in seen["rows"] if row.startswith("nodef")]  # it never came
            assert {"member", *html.REASONS} <= set(seen["legends"])


# ---- a world


def state_of(folder: Path) -> State | None:
    return next(iter(worlds_in(folder)), None)


def await_state(folder: Path, what: Any) -> State:
    deadline = time.monotonic() + limit(20)
    while (state := state_of(folder)) is None or not what(state):
        assert time.monotonic() < deadline, state and state.stats
        time.sleep(0.05)
    return state


def log_of(errors: Path) -> list[str]:
    """Return ringcomm's lines, but for a guest's own, and for warnings that a machine is slow."""
    lines = [line for line in errors.read_text().splitlines() if line.startswith("ringcomm")]
    others = "admitted at world.track|is left out|WARNING"
    return [line for line in lines if not re.search(others, line)]


def test_a_world_is_seen(tmp_path: Path) -> None:
    """One is killed, one leaves, one comes, and then rank 0 is killed."""
    errors, folder, prom = tmp_path / "errors", tmp_path / "records", tmp_path / "world.prom"
    settings = {"RINGCOMM_TRACE": str(folder), "RINGCOMM_ELASTIC_PROMETHEUS": str(prom)}
    more: dict[str, Any] = {"errors": str(errors), "settings": settings}
    with trainees(4, epochs=10**6, pause=0.01, folder=str(tmp_path / "ckpt"), **more) as some:
        some.await_events([0, 1, 2, 3], "step")
        pids = [process.pid for process in some.processes]
        await_state(folder, lambda state: len(state.stats["members"]) == 4)
        assert log_of(errors) == []
        some.kill(3)
        some.await_events([0, 1, 2], "change")
        (line,) = log_of(errors)
        assert re.search(rf"going on without \S+ process {pids[3]} \(ended\): 3 ranks", line)
        some.kill(2, signal.SIGTERM)
        some.await_events([0, 1], "change", 2)
        some.start()
        some.await_events([0, 1], "change", 3)
        check_figures(some, folder, prom)
        some.kill(0)
        some.await_events([1, 4], "step", 30)
        state = await_state(folder, lambda state: state.process.pid == pids[1])
        assert [who["pid"] for who in state.stats["members"]] == [pids[1], some.processes[4].pid]
        assert state.stats["history"][-1]["lost"][0]["pid"] == pids[0]
        check_end(some, folder)
        said = log_of(errors)
        assert len(said) == 5, "\n".join(said)
        assert all("elastic: going on with" in line for line in said), "\n".join(said)


def check_end(some: Trainees, folder: Path) -> None:
    """Have the last two leave, and require that the last state and checkpoint are told."""
    some.kill(1, signal.SIGTERM)
    some.await_events([4], "change", 3)
    some.kill(4, signal.SIGTERM)
    _, last = some.await_ends([1, 4])
    (state,) = worlds_in(folder)
    written = state.stats["checkpoint"]
    assert written is not None
    assert state.stats["step"] == last["step"] == written["step"]
    assert not state.runs()


def check_figures(some: Trainees, folder: Path, prom: Path) -> None:
    """Require that the files tell the first three changes."""
    pids = [process.pid for process in some.processes]
    state = await_state(folder, lambda state: state.stats["changes"] == 3)
    figures, history = state.stats, state.stats["history"]
    assert [[(lost["pid"], lost["why"]) for lost in past["lost"]] for past in history] == [
        [(pids[3], "ended")],
        [(pids[2], "left")],
        [],
    ]
    assert [who["pid"] for who in history[2]["joined"]] == [pids[4]]
    assert [who["pid"] for who in figures["members"]] == [pids[0], pids[1], pids[4]]
    assert (figures["lost"], figures["joined"], figures["steps_lost"]) == (2, 1, 0)
    told = {event["epoch"]: event for event in some.events(0, "change")}
    for past in history:
        event = told[past["epoch"]]
        assert (past["step"], past["size"]) == (event["step"], event["size"])
        assert abs(past["at"] - time.time()) < limit(60)
    assert figures["seconds_lost"] == pytest.approx(sum(e["ms"] for e in told.values()) / 1e3)
    assert figures["aborted"] <= 1
    assert 0 < figures["steps_per_second"] < 100
    assert state.runs()
    assert "\nelastic world run: 3 ranks, epoch 4," in top.title_of(
        folder, top.look(folder, state.at)
    )
    deadline = time.monotonic() + limit(10)
    while "ringcomm_elastic_changes_total 3" not in (text := prom.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    assert "ringcomm_elastic_members 3" in text
