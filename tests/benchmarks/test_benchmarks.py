"""The benchmarks run, write what they promise, and end what they start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lab import ROOT
from lab.limits import limit
from lab.namespaces import missing
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.steps import Step, plans_of
from ringcomm.tools.bench import traits

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = ROOT / "benchmarks"


class Run:
    """A benchmark that runs; the file that it writes errors to shows what it leaves behind."""

    def __init__(self, folder: Path, script: str, *arguments: str) -> None:
        self.script, self.report = script, folder / f"{script}.json"
        self.output, self.errors = (
            folder / f"{script}{len(arguments)}.{n}" for n in ("out", "err")
        )
        command = [sys.executable, str(FOLDER / script), "--json", str(self.report), *arguments]
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=errors, start_new_session=True
            )

    def finish(self, seconds: float = 80) -> tuple[int, str, str]:
        """Return its status, output and errors. Nothing it started may outlive it."""
        try:
            status = self.process.wait(timeout=limit(seconds))
        finally:
            self.process.kill()
        end = time.monotonic() + limit(2)
        while (left := processes_that_write(self.errors)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left
        return status, self.output.read_text(), self.errors.read_text()

    def body(self) -> dict[str, Any]:
        """Return the JSON it wrote, and what it printed under "printed"."""
        status, output, errors = self.finish()
        assert status == 0, errors
        body: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        assert f"{body['benchmark']}.py" == self.script
        assert {"cpu", "cores", "kernel", "torch", "ringcomm", "date"} <= body["machine"].keys()
        assert body["machine"]["ringcomm"]
        return body | {"printed": output}


def processes_that_write(file: Path) -> list[str]:
    """Return the command lines of processes whose stderr is this file."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd/2").samefile(file):
                commands.append((process / "cmdline").read_text(encoding="utf-8"))
        except OSError:  # it has ended meanwhile
            continue
    return commands


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Every benchmark, tiny, all at once: most of their time is spent importing torch."""
    folder = tmp_path_factory.mktemp("benchmarks")
    over_tcp = tmp_path_factory.mktemp("over_tcp")
    short = ("--rounds", "2", "--deadline", f"{limit(60):.0f}")
    timed = (*short, "--seconds", "0.005")
    groups = ("--groups", "3", "--idle", "0.2", "--init", "2", "--backends", "ringcomm")
    started = {
        "ladder": Run(folder, "ladder.py", *timed, "--sizes", "8,64K"),
        "segments": Run(folder, "segments.py", *timed, "--sizes", "256K"),
        "shared_buffers": Run(
            folder,
            *("shared_buffers.py", "--turns", "2", "--calls", "2", "--sizes", "1M"),
        ),
        "cores": Run(
            folder,
            *("cores.py", *timed, "--threads", "1,2", "--sizes", "1M"),
            *("--collectives", "broadcast", "--svg", str(folder / "cores.svg")),
        ),
        "peers": Run(folder, "peers.py", *timed, *("--sizes", "1K", "--busy", "0,1")),
        "peers_of_training": Run(
            tmp_path_factory.mktemp("training"),
            *("peers.py", *timed, "--collectives", "ddp", "--sizes", "64K", "--row", "2"),
        ),
        "ladder_tcp": Run(
            over_tcp, "ladder.py", *timed, "--tcp", "--sizes", "64K", "--stream", "8"
        ),
        "groups": Run(folder, "groups.py", *short, *groups),
        "tail": Run(folder, "tail.py", "--calls", "2000", "--others", "1000", "--bytes", "8"),
        "compressed_training": Run(
            folder,
            "compressed_training.py",
            "--seeds",
            "1",
            "--steps",
            "3",
            "--plot",
            str(folder / "compressed.png"),
        ),
        "soak": Run(folder, "soak.py", "--minutes", "0.1", "--slack", "100"),
    }
    if missing() is None:
        tiny = (*short, "--local", "1", "--models", "small", "--steps", "2")
        curves = ("--plot", str(folder / "losses.png"))
        started["convergence"] = Run(folder, "convergence.py", *tiny, *curves)
        sizes = ("--sizes", "64K", "--turns", "2", "--ways", "gloo,fp32,fp8,int8")
        started["compressed"] = Run(folder, "compressed.py", *sizes)
        few = ("--ranks", "2,3", "--calls", "1", "--plot", str(folder / "wide.png"))
        started["wide"] = Run(folder, "wide.py", *few)
    yield started
    for run in started.values():
        run.process.kill()


@pytest.mark.parametrize("size", [2, 4])
def test_copies_are_those_of_the_plans(size: int) -> None:
    """The column compares with the rank that copies and adds up the most."""
    for collective in set(traits.COPIES) - {"send_recv", "barrier"}:
        algorithm = "pairwise" if collective == "all_to_all" else "direct"
        group = plans_of(call_of(collective, size, 1 << 22, size), algorithm)
        most = max(sum(moved(step, collective) for step in steps) for steps in group.steps)
        assert traits.COPIES[collective](size) * (1 << 22) == pytest.approx(most), collective


def moved(step: Step, collective: str) -> int:
    """Bytes that a step copies or adds up, in place where the benchmark's calls are."""
    in_place = collective == "broadcast" and step.verb == "copy"
    if in_place and step.sources[0].space == "input" and step.targets[0].space == "output":
        return 0
    return step.bytes


def test_ladder_prices_every_rung(runs: dict[str, Run]) -> None:
    body = runs["ladder"].body()
    assert [figures["bytes"] for figures in body["sizes"]] == [8, 65536]
    for figures in body["sizes"]:
        medians = figures["median_s"]
        rungs = ["handwritten", "plan", "engine", "torch"]
        assert list(medians) == [*rungs, "torch_fake", "clock_pair"]
        assert all(seconds > 0 for seconds in medians.values())
        top = medians["handwritten"] + sum(figures["price_s"].values())
        assert top == pytest.approx(medians["torch"])


def test_ladder_over_tcp_prices_every_rung(runs: dict[str, Run]) -> None:
    body = runs["ladder_tcp"].body()
    measured = {(figures["pattern"], figures["bytes"]): figures for figures in body["measured"]}
    rungs = ["blocking", "socket", "session", "checksum", "network", "torch"]
    for case, climbed in {
        ("connect", 1): ["socket", "handshake", "network"],
        ("ping", 65536): rungs,
        ("stream", 8): rungs,
        ("all_reduce", 65536): ["torch"],
    }.items():
        figures = measured.pop(case)
        medians = figures["median_s"]
        assert list(medians) == climbed + ["gloo"] * (case[0] != "connect")
        assert all(seconds > 0 for seconds in medians.values())
        assert all(seconds > 0 for seconds in figures["cpu_s_a_gb"].values())
        top = medians[climbed[0]] + sum(figures["price_s"].values())
        assert top == pytest.approx(medians[climbed[-1]])
    assert not measured


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_convergence_reaches_equal_losses(runs: dict[str, Run]) -> None:
    (result,) = runs["convergence"].body()["results"]
    assert result["equal_to_the_bit"] is True
    trainings = [t for backend in ("ringcomm", "gloo") for t in result["rounds"][backend]]
    assert len(trainings) == 4
    for training in trainings:
        assert len(training["losses"]) == 10
        assert training["losses"][-1] < training["losses"][0]
        assert training["seconds"] == sorted(training["seconds"])
    medians = [result[backend]["seconds_to_target"]["median"] for backend in ("ringcomm", "gloo")]
    assert result["ratio"] == pytest.approx(medians[1] / medians[0])
    picture = runs["convergence"].report.with_name("losses.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_wide_counts_what_a_rank_takes(runs: dict[str, Run]) -> None:
    now = runs["wide"].body()["now"]
    assert [row["ranks"] for row in now["rows"]] == [2, 3]
    for row in now["rows"]:
        for plans in ("sparse", "dense"):
            assert not row[plans]["failed"]
            last = row[plans]["stages"][-1]
            assert 0 < last["connections"] < row["ranks"]
            assert last["requests"] > 0
            assert last["pss_bytes"] > 0
    model = now["model"]
    assert model["costs"]["network"]["alpha"] > 0
    assert {shown["ranks"] for shown in model["all_reduce"]} == {2, 3}
    picture = runs["wide"].report.with_name("wide.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_compressed_times_each_way(runs: dict[str, Run]) -> None:
    (result,) = runs["compressed"].body()["results"]
    assert result["bytes"] == 64 << 10
    assert list(result["seconds"]) == ["gloo", "fp32", "fp8", "int8"]
    assert all(len(times) == 2 and min(times) > 0 for times in result["seconds"].values())


def test_compressed_training_trains_alike(runs: dict[str, Run]) -> None:
    results = runs["compressed_training"].body()["results"]
    assert [result["model"] for result in results] == ["digits CNN", "transformer"]
    for result in results:
        curves = {
            way: [float(loss) for loss in text.split()] for way, (text,) in result["losses"].items()
        }
        exact = curves["fp32"]
        for way, losses in curves.items():
            assert losses == pytest.approx(exact, rel=0.01), way
            if "16" not in way:  # which may differ in no digit that is shown
                assert (losses == exact) == (way == "fp32")
    picture = runs["compressed_training"].report.with_name("compressed.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_groups_looks_at_every_stage(runs: dict[str, Run]) -> None:
    body = runs["groups"].body()
    (backend,) = body["backends"]
    stages = {stage["stage"]: stage for stage in backend["stages"]}
    assert list(stages) == ["imported", "default group", "+ 3 groups", "each used, 1M"]
    assert stages["imported"]["shared_mapped_bytes"] == 0
    assert stages["each used, 1M"]["shared_mapped_bytes"] > 0
    assert all(stage["rss_bytes"] > 0 and stage["threads"] > 0 for stage in stages.values())
    assert backend["idle_cpu_s_per_s"].keys() == {"unused", "used"}
    (init,) = body["init"]
    assert init["ranks"] == 2
    assert init["first_s"] > 0
    assert len(init["again_s"]) == 1


def test_segments_are_compared(runs: dict[str, Run]) -> None:
    (figures,) = runs["segments"].body()["sizes"]
    assert figures["bytes"] == 256 << 10
    rounds = {int(segment): len(times) for segment, times in figures["rounds_s"].items()}
    assert rounds == {kib << 10: 2 for kib in (64, 128, 256, 512)}


def test_threads_are_compared(runs: dict[str, Run]) -> None:
    run = runs["cores"]
    (figures,) = run.body()["figures"]
    ways = ["ringcomm 1", "ringcomm 2", "copy 1", "copy 2", "gloo"]
    assert list(figures["rounds_s"]) == ways
    assert all(len(times) == 2 and min(times) > 0 for times in figures["rounds_s"].values())
    assert "ringcomm 2: " in run.report.with_name("cores.svg").read_text()


def test_peers_are_compared_while_others_compute(runs: dict[str, Run]) -> None:
    run = runs["peers"]
    quiet, busy = run.body()["figures"]
    assert [quiet["busy"], busy["busy"]] == [0, 1]
    for figures in (quiet, busy):
        assert list(figures["peers"]) == ["ringcomm", "gloo"]
        assert all(peer["median_s"] > 0 for peer in figures["peers"].values())
        assert all(len(peer["rounds_s"]) == 2 for peer in figures["peers"].values())
    assert all(peer["share"] is None for peer in quiet["peers"].values())
    assert all(peer["share"] >= 0 for peer in busy["peers"].values())


def test_peers_train(runs: dict[str, Run]) -> None:
    (figures,) = runs["peers_of_training"].body()["figures"]
    assert (figures["collective"], figures["in_a_row"]) == ("ddp", 2)
    assert all(figures["peers"][name]["mean_s"] > 0 for name in ("ringcomm", "gloo"))


def test_shared_buffers_take_turns(runs: dict[str, Run]) -> None:
    figures = runs["shared_buffers"].body()["figures"]
    keys = [(figure["ranks"], figure["collective"], figure["bytes"]) for figure in figures]
    names = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather")
    assert keys == [(ranks, name, 1 << 20) for ranks in (2, 4) for name in names]
    assert all(len(turns) == 2 for figure in figures for turns in figure["turns_s"].values())
    assert all(figure["ratio"] > 0 for figure in figures)


def test_tail_has_every_quantile(runs: dict[str, Run]) -> None:
    rows = runs["tail"].body()["rows"]
    assert [(row["backend"], row["calls"]) for row in rows] == [("ringcomm", 2000), ("gloo", 1000)]
    for row in rows:
        assert list(row["seconds"]) == ["median", "p99", "p99.9", "p99.99", "slowest"]
        assert 0 < row["seconds"]["median"] <= row["seconds"]["p99"] <= row["seconds"]["slowest"]


def test_soak_makes_calls_and_looks(runs: dict[str, Run]) -> None:
    body = runs["soak"].body()
    assert body["calls"] > 0
    assert len(body["looks"]) >= 6
    assert body["growth"].keys() >= {"rss_bytes", "descriptors", "threads"}


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_nothing_grows_in_half_an_hour(tmp_path: Path) -> None:
    run = Run(tmp_path, "soak.py", "--minutes", "30")
    assert run.finish(seconds=2300)[0] == 0
