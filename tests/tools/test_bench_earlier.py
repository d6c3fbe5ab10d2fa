"""`ringcomm bench --from`: files of every age are drawn, and others are refused in one sentence."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from ringcomm.__main__ import main
from ringcomm.tools.bench import earlier

RESULTS = ROOT / "benchmarks" / "results"
PLAIN = RESULTS / "2-cores-all-collectives.json"
OURS = ("collectives", "ddp", "ddp_step")


def kind(path: Path) -> str:
    body = json.loads(path.read_text())
    return str(body["benchmark"]) if isinstance(body, dict) else ""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_committed_is_drawn_or_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    page, csv = tmp_path / "out.html", tmp_path / "out.csv"
    status = main(["bench", "--from", str(path), "--report", str(page), "--csv", str(csv)])
    said = capsys.readouterr()
    assert (status, said.out) == (0 if kind(path) in OURS else 2, "")
    assert page.exists() == csv.exists() == (status == 0)
    if status:
        assert said.err.startswith(f"ringcomm bench: {path} is ")
        assert said.err.count("\n") == 1


def test_old_samples_get_what_was_always_so() -> None:
    body = earlier.read([PLAIN])
    whole = {sample["collective"]: sample for sample in body["samples"]}
    assert (whole["all_reduce"]["redop"], whole["all_reduce"]["in_place"]) == ("sum", True)
    assert (whole["all_gather"]["redop"], whole["all_gather"]["in_place"]) == ("none", False)
    assert (whole["broadcast"]["type"], whole["broadcast"]["wrong"]) == ("float32", None)
    assert body["options"]["rounds"] == 3


def test_old_steps_are_one_run() -> None:
    body = earlier.read([RESULTS / "ddp.json"])
    assert body["benchmark"] == "ddp"
    (run,) = body["runs"]
    assert run["ranks"] == 2
    assert run["backends"]["gloo"]["exposed_median_s"] > 0


def changed(**changes: Any) -> str:
    """Return the text of a small result whose first sample has other values; None: no such key."""
    body = json.loads(PLAIN.read_text())
    body["samples"] = body["samples"][:2]
    for key, value in changes.items():
        place = body if key in body else body["samples"][0]
        place[key] = value
        if value is None:
            del place[key]
    return json.dumps(body)


ONE = changed()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no whole JSON: line 1: Expecting value"),
        (ONE[: len(ONE) // 2], "is no whole JSON: line 1: "),
        (ONE + "\n" + ONE, "holds several results"),
        (f"[{ONE}, {ONE}]", "holds several results"),
        ("[1, 2]", "is not what `ringcomm bench --json` writes"),
        ('{"losses": [1]}', "is not what `ringcomm bench --json` writes"),
        ("7", "is not what `ringcomm bench --json` writes"),
        (changed(benchmark="soak"), "is of another benchmark, 'soak'"),
        (changed(benchmark=["soak"]), "is of another benchmark, ['soak']"),
        (changed(median_s=None), "sample 1 lacks 'median_s'"),
        (changed(median_s="soon"), "'median_s' of sample 1 is 'soon'"),
        (changed(median_s=0), "'median_s' of sample 1 is 0"),
        (changed(low_s=float("nan")), "'low_s' of sample 1 is nan"),
        (changed(collective="gossip"), "sample 1 is of an unknown collective, 'gossip'"),
        (changed(samples=[]), "it has no samples"),
        (changed(samples=[3]), "sample 1 is not what"),
        (changed(machine=None), "the file lacks 'machine'"),
        (changed(options={}), "the object 'options' lacks 'rounds'"),
        (json.dumps({"benchmark": "ddp_step", "machine": {}}), "the file lacks 'options'"),
    ],
)
def test_other_files_are_refused_in_one_sentence(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.json"
    source.write_text(text)
    assert main(["bench", "--from", str(source)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ringcomm bench: {source}")
    assert words in said
    assert said.count("\n") == 1


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    names = [tmp_path, tmp_path / "nothing", tmp_path / "picture"]
    for name, words in zip(names, ["directory", "No such file", "is no JSON"], strict=True):
        assert main(["bench", "--from", str(name)]) == 2
        assert words in capsys.readouterr().err


def test_two_files_do_not_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--from", str(PLAIN), "--from", str(PLAIN)]) == 2
    assert "those of two runs or machines do not compare" in capsys.readouterr().err


def test_the_picture_is_that_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plot = importlib.import_module("plot")
    drawn = tmp_path / "out.png"
    assert plot.main([str(PLAIN), str(drawn)]) == 0
    one, other = image.imread(drawn), image.imread(ROOT / "docs" / "collectives.png")
    assert one.shape == other.shape
    assert abs(one - other).mean() < 0.01  # another matplotlib draws letters elsewhere
    assert plot.main([str(RESULTS / "soak.json"), str(drawn)]) == 2
    assert "is of another benchmark" in capsys.readouterr().err
