"""`ringcomm plan show` prints what the planners say, why they were asked, and draws it."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT, browser
from ringcomm import _planner
from ringcomm.__main__ import main
from ringcomm._network.costs import Network
from ringcomm._text import size as size_of
from ringcomm.algorithms.call import COLLECTIVES, Call, call_of
from ringcomm.algorithms.steps import VERBS, Step, plan_of
from ringcomm.tools import svg
from ringcomm.tools.plan import lanes, show
from ringcomm.tools.plan.simulate import topology
from ringcomm.tools.plan.simulate.engine import simulate
from ringcomm.tools.plan.source import plans_of

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
SVG = "{http://www.w3.org/2000/svg}"
GROUPS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (8, 2), (8, 8), (12, 3)]  # ranks, hosts


def calls() -> Iterator[Call]:
    for name in COLLECTIVES:
        for ranks, hosts in GROUPS:
            for size in (4, 4096, 1 << 20):
                yield call_of(name, ranks, size, hosts, root=ranks - 1)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "show", *words]) == 0
    return capsys.readouterr().out


# ---- the steps


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_what_its_paper_says(ranks: int) -> None:
    """2 (n - 1) messages, of 1/n of the bytes each (Patarasuk and Yuan 2009)."""
    size = ranks * 1024
    for rank, steps in enumerate(plans_of(call_of("all_reduce", ranks, size, ranks), "ring").steps):
        sent = [step for step in steps if step.verb == "signal" and step.lane == "data"]
        assert [step.peer for step in sent] == [(rank + 1) % ranks] * 2 * (ranks - 1)
        put = sum(step.bytes for step in steps if step.receiver(rank) >= 0)
        assert put == 2 * (ranks - 1) * size // ranks
        assert sum(step.verb == "reduce" for step in steps) == ranks - 1


def test_every_signal_has_its_wait() -> None:
    for call in calls():
        signals: Counter[tuple[int, int, str]] = Counter()
        waits: Counter[tuple[int, int, str]] = Counter()
        for rank, steps in enumerate(plans_of(call).steps):
            for step in steps:
                signals[rank, step.peer, step.lane] += step.verb == "signal"
                waits[step.peer, rank, step.lane] += step.verb == "wait"
        assert +signals == +waits, call
        assert signals.total() + waits.total() == counted(call), call


def counted(call: Call) -> int:
    """Signals and waits of all ranks, as the library gives them."""
    word = Network().word(call.hosts)
    plans = [_planner.plan(call, *word, rank, None)[2] for rank in range(call.ranks)]
    return sum(step[0] >= VERBS.index("signal") for steps in plans for step in steps)


def test_rooted_collectives_have_their_root() -> None:
    for root in (0, 2):
        made = plans_of(call_of("gather", 3, 3 << 10, 3, root=root))
        writers = [rank for rank, steps in enumerate(made.steps) if has_output(steps)]
        assert writers == [root]


def has_output(steps: list[Step]) -> bool:
    return any(target.space == "output" for step in steps for target in step.targets)


def test_the_table_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "all_reduce", "--ranks", "3", "--size", "64", "--rank", "1")
    table = [re.split(r" {2,}", line.strip()) for line in out.partition("rank 1: ")[2].splitlines()]
    assert table == [
        ["7 steps, 2 messages sent, 128 bytes put into others' memory"],
        ["#", "step", "to", "from", "bytes", "lane"],
        ["1", "copy", "line of 2", "input", "64"],
        ["2", "signal", "rank 2", "data"],
        ["3", "copy", "line of 0", "input", "64"],
        ["4", "signal", "rank 0", "data"],
        ["5", "wait", "rank 2", "data"],
        ["6", "wait", "rank 0", "data"],
        ["7", "reduce", "output", "line from 0, input, line from 2", "64"],
    ]


def test_rank_0_stands_for_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "all_reduce", "--ranks", "3")
    assert re.findall(r"^rank (\d):", out, re.M) == ["0"]
    assert out.endswith("the other ranks: --rank 1 prints one of them, and --rank all every one\n")
    out = printed(capsys, "all_reduce", "--ranks", "3", "--rank", "all")
    assert re.findall(r"^rank (\d):", out, re.M) == ["0", "1", "2"]
    assert main(["plan", "show", "all_reduce", "--ranks", "3", "--rank", "3"]) == 1
    assert "--rank 3: the group has ranks 0 to 2" in capsys.readouterr().err


def test_long_tables_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("all_reduce", "--hosts", "4", "--size", "64M", "--rank", "0")
    out, whole = printed(capsys, *words, "--steps", "5"), printed(capsys, *words, "--steps", "0")
    count = len(plan_of(call_of("all_reduce", 4, 64 << 20, 4), 0).steps)
    assert f"and {count - 5:,} more steps" in out
    assert "more step" not in whole
    assert len(whole.splitlines()) == len(out.splitlines()) - 1 + count - 5


# ---- why


def test_the_row_is_the_one_that_the_library_took() -> None:
    for call in calls():
        made = plan_of(call, 0)
        (taken,) = [line for line in show.why(call, made, False) if line.startswith(">")]
        assert taken.startswith(f"> {made.reason}: {made.algorithm} "), call


def test_a_row_that_does_not_fit_has_a_reason() -> None:
    any_size = _planner.LIMITS["any_size"]
    for ranks, hosts in [(1, 1), (2, 1), (2, 2), (8, 4), (17, 17), (34, 17), (512, 16)]:
        for name in COLLECTIVES:
            call = call_of(name, ranks, ranks * 4, hosts, 1)
            for row in show.rows_of(call, Network()):
                no = show.refusal({**row, "limit": any_size}, call, Network())
                assert bool(no) == (not row["fits"]), (row, ranks, hosts)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast", "reduce"])
def test_limits_are_where_the_library_changes(name: str) -> None:
    for ranks, hosts in [(4, 4), (7, 7), (16, 4)]:
        call = call_of(name, ranks, ranks * 4, hosts, 1)
        limits = show.limits_of(call, Network())
        table = [(row["collective"], row["limit"]) for row in _planner.selection(hosts)]
        assert limits[-1][1] == _planner.LIMITS["any_size"]
        for (algorithm, limit), (after, _) in itertools.pairwise(limits):
            assert (name, limit) in table
            for size, expected in ((limit, algorithm), (limit + 1, after)):
                shards = [size] * ranks if call.shards else []
                at_limit = call._replace(bytes=0 if shards else size, shards=shards)
                assert plan_of(at_limit, 0).algorithm == expected, (ranks, limit)


def test_why_says_the_row_and_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "all_reduce", "--hosts", "4", "--size", "8K", "--why")
    assert "> all_reduce, up to 8275 B: doubling   <- this one\n" in out
    assert out.endswith("doubling up to 8,275 B, bruck up to 65,536 B, ring beyond\n")
    out = printed(capsys, "all_reduce", "--hosts", "4", "--algorithm", "ring", "--why")
    assert "ring was asked for" in out


def test_costs_of_a_file_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"memory": null, "network": {"alpha": 1e-3, "beta": 1e-9, "gamma": 1e-12}}')
    out = printed(capsys, "all_reduce", "--hosts", "4", "--why", "--costs", str(path))
    assert ", 4 ranks on 4 hosts: doubling\n" in out


# ---- mistakes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("all_sum", "there is no collective 'all_sum': use one of all_reduce, "),
        ("all_reduce --ranks 0", "a group of 0 ranks: ringcomm takes 1 to 4096"),
        ("all_reduce --ranks 4 --hosts 3", "4 ranks cannot be spread evenly over 3 hosts"),
        ("barrier --algorithm ring", 'barrier has no algorithm "ring"; it has '),
        ("all_reduce --algorithm best", "there is no algorithm 'best': use one of direct, "),
        ("all_reduce --algorithm hierarchical", "hierarchical plans need several ranks on each"),
        ("all_reduce --hosts 4 --algorithm direct", "direct plans of all_reduce read the memory"),
        ("all_reduce --size 6", "6 bytes are no whole number of elements of 4 bytes"),
        ("all_reduce --root 1", "all_reduce has no root: --root is for broadcast, "),
        ("broadcast --root 4", "rank 4 is not in a group of 4"),
        ("all_reduce --rank 4", "--rank 4: the group has ranks 0 to 3"),
        ("all_reduce --steps -1", "--steps -1: write how many, or 0 for all"),
        ("all_reduce --costs nowhere.json", "No such file"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["plan", "show", *words.split()]) == 1
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("ringcomm plan show: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_a_picture_of_too_much_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["all_reduce", "--ranks", "64", "--hosts", "64", "--size", "64M", "--why"]
    assert main(["plan", "show", *words, "--svg", str(tmp_path / "plan.svg")]) == 1
    assert "messages are too many for a picture" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- the picture


def drawn(tmp_path: Path, *words: str) -> Path:
    path = tmp_path / "plan.svg"
    assert main(["plan", "show", *words, "--rank", "0", "--svg", str(path)]) == 0
    return path


CASES = [(2, 1, "1M"), (8, 2, "64K"), (8, 8, "1M"), (16, 16, "16K"), (64, 64, "256K")]


@pytest.mark.parametrize(("ranks", "hosts", "size"), CASES)
def test_a_lane_a_rank_and_an_arrow_a_message(
    tmp_path: Path, ranks: int, hosts: int, size: str
) -> None:
    words = ("all_reduce", "--ranks", str(ranks), "--hosts", str(hosts), "--size", size)
    root = ElementTree.parse(drawn(tmp_path, *words)).getroot()
    assert root.tag == f"{SVG}svg"
    names = [text for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    assert [text.text for text in names] == [f"rank {rank}" for rank in range(ranks)]
    heights = sorted(float(text.get("y", "")) for text in root.iter(f"{SVG}text"))
    lanes = [float(text.get("y", "")) for text in names]
    assert all(below - above >= 14 for above, below in itertools.pairwise(lanes))
    assert heights[-1] < float(root.get("height", ""))
    paths = [
        path
        for path in root.iter(f"{SVG}path")
        if {"data", "credit"}.intersection(path.get("class", "").split())
    ]
    messages = [path for path in paths if path.find(f"{SVG}title") is not None]
    number = size_of(size)
    steps = plans_of(call_of("all_reduce", ranks, number, hosts)).steps
    assert len(messages) == sum(step.verb == "signal" for some in steps for step in some)
    assert "by a model" in " ".join(root.itertext())


@pytest.mark.parametrize(("ranks", "hosts", "size"), CASES)
def test_labels_are_apart(tmp_path: Path, ranks: int, hosts: int, size: str) -> None:
    words = ("all_reduce", "--ranks", str(ranks), "--hosts", str(hosts), "--size", size)
    root = ElementTree.parse(drawn(tmp_path, *words)).getroot()
    labels = [text for text in root.iter(f"{SVG}text") if text.get("class") == "bytes outlined"]
    boxes = [
        (float(text.get("x", "")), float(text.get("y", "")), len(text.text or "") * 6)
        for text in labels
    ]
    for i, (x, y, width) in enumerate(boxes):
        assert x > lanes.LEFT
        for other_x, other_y, other in boxes[:i]:
            apart = abs(y - other_y) >= 10 or x >= other_x + other or other_x >= x + width
            assert apart, (labels[i].text, x, y)
    assert bool(labels) == (ranks <= 16)
    assert len(labels) <= lanes.FEW


def test_most_of_a_picture_is_the_plan(tmp_path: Path) -> None:
    """Not its head; and it is no wider than a page."""
    path = drawn(tmp_path, "all_reduce", "--ranks", "4", "--hosts", "2", "--size", "64K")
    root = ElementTree.parse(path).getroot()
    first = next(text for text in root.iter(f"{SVG}text") if text.get("class") == "name")
    assert float(first.get("y", "")) < 0.5 * float(root.get("height", ""))
    axis = next(text for text in root.iter(f"{SVG}text") if text.text == "0 ms")
    assert float(axis.get("y", "")) < 0.33 * float(root.get("height", ""))
    wide = drawn(tmp_path, "all_reduce", "--ranks", "8", "--hosts", "8", "--size", "1M")
    assert float(ElementTree.parse(wide).getroot().get("width", "")) <= 1200


def test_plans_as_json(tmp_path: Path) -> None:
    """Each step stands there with its names."""
    path = tmp_path / "plans.json"
    words = ["all_reduce", "--hosts", "4", "--size", "4K", "--algorithm", "ring"]
    assert main(["plan", "show", *words, "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    assert (body["format"], body["version"], body["algorithm"]) == ("ringcomm plans", 2, "ring")
    assert body["shape"]["collective"] == "all_reduce"
    assert body["shape"]["ranks"] == len(body["plans"]) == 4
    group = plans_of(call_of("all_reduce", 4, 4096, 4), "ring")
    for told, steps in zip(body["plans"], group.steps, strict=True):
        assert [entry["verb"] for entry in told] == [step.verb for step in steps]
        for row, step in zip(told, steps, strict=True):
            if step.lane:
                assert (row["peer"], row["lane"]) == (step.peer, step.lane)
            else:
                assert row["bytes"] == step.bytes
                places = [*row["targets"], *row["sources"]]
                operands = [*step.targets, *step.sources]
                assert places == [operand._asdict() for operand in operands]


def test_several_collectives_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "allreduce,broadcast", "--size", "1K,1MiB", "--steps", "1")
    titles = [line for line in out.splitlines() if ", 4 ranks on one host: " in line]
    assert [line.split(",")[0] for line in titles] == [
        "all_reduce of 1K bytes",
        "all_reduce of 1M bytes",
        "broadcast of 1K bytes",
        "broadcast of 1M bytes",
    ]
    assert main(["plan", "show", "all_reduce,reduce", "--svg", "x.svg"]) == 1
    assert "one collective of one size" in capsys.readouterr().err


def test_the_picture_of_the_docs_is_drawn_so(tmp_path: Path) -> None:
    """Draw it again with the command on its page."""
    words = ("all_reduce", "--ranks", "4", "--hosts", "2", "--size", "64K")
    assert drawn(tmp_path, *words).read_text() == (ROOT / "docs" / "plan.svg").read_text()


def test_bytes_of_windows_are_those_that_are_loaded() -> None:
    group = plans_of(call_of("all_gather", 2, 2 << 20))
    network = Network()
    run = simulate(group, topology.named("switch", 1, network), network.fabrics)
    assert sum(message.bytes for message in run.messages if message.receiver == 0) == 1 << 20


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_is_light_or_dark(tmp_path: Path, dark: bool) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = drawn(tmp_path, "all_reduce", "--ranks", "2", "--size", "1M")
    browser.picture(path, tmp_path / "plan.png", 1200, 500, dark)
    pixels = pyplot.imread(tmp_path / "plan.png")[:, :, :3]
    ground = float(pixels[490, 1190].mean())
    assert ground < 0.2 if dark else ground > 0.95
    for name in ("moves", "adds"):
        pair = svg.MEANINGS[name][dark]
        color = [int(pair[at : at + 2], 16) for at in (1, 3, 5)]
        assert (abs(pixels * 255 - color).sum(axis=2) < 20).sum() > 500
