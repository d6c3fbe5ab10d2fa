"""`ringcomm plan` prints what the planners say, why they were asked, and draws it."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT, browser
from ringcomm import _C
from ringcomm.__main__ import main
from ringcomm._network import costs
from ringcomm._text import size as size_of
from ringcomm.algorithms.steps import COLLECTIVES, VERBS, Plan, Shape, plan_of, plans_of, shape_of
from ringcomm.tools.plan import drawing, show
from ringcomm.tools.plan.times import Simulation

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
SVG = "{http://www.w3.org/2000/svg}"
GROUPS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (8, 2), (8, 8), (12, 3)]  # ranks, hosts


def shapes() -> Iterator[Shape]:
    for name in COLLECTIVES:
        for ranks, hosts in GROUPS:
            for size in (4, 4096, 1 << 20):
                yield shape_of(name, ranks, size, hosts, root=ranks - 1)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


# ---- the steps


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_what_its_paper_says(ranks: int) -> None:
    """2 (n - 1) messages, of 1/n of the bytes each (Patarasuk and Yuan 2009)."""
    size = ranks * 1024
    for rank, made in enumerate(plans_of(shape_of("all_reduce", ranks, size, ranks), "ring")):
        sent = [step for step in made.steps if step.verb == "signal" and step.lane == "data"]
        assert [step.peer for step in sent] == [(rank + 1) % ranks] * 2 * (ranks - 1)
        put = sum(step.bytes for step in made.steps if step.receiver(rank) >= 0)
        assert put == 2 * (ranks - 1) * size // ranks
        assert sum(step.verb == "reduce" for step in made.steps) == ranks - 1


def test_every_signal_has_its_wait() -> None:
    for shape in shapes():
        signals: Counter[tuple[int, int, str]] = Counter()
        waits: Counter[tuple[int, int, str]] = Counter()
        for rank, made in enumerate(plans_of(shape)):
            for step in made.steps:
                signals[rank, step.peer, step.lane] += step.verb == "signal"
                waits[step.peer, rank, step.lane] += step.verb == "wait"
        assert +signals == +waits, shape
        assert signals.total() + waits.total() == counted(shape), shape


def counted(shape: Shape) -> int:
    """Signals and waits of all ranks, as the library gives them."""
    if shape.send:
        shape = shape._replace(recv=shape.send)
    plans = [_C.plan(shape, rank, None)[2] for rank in range(shape.size)]
    return sum(step[0] >= VERBS.index("signal") for steps in plans for step in steps)


def test_rooted_collectives_have_their_root() -> None:
    for root in (0, 2):
        made = plans_of(shape_of("gather", 3, 3 << 10, 3, root=root))
        writers = [rank for rank, one in enumerate(made) if has_output(one)]
        assert writers == [root]


def has_output(made: Plan) -> bool:
    return any(one.space == "output" for step in made.steps for one in step.targets)


def test_the_table_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "all_reduce", "--ranks", "3", "--bytes", "64", "--rank", "1")
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


def test_long_tables_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("all_reduce", "--hosts", "4", "--bytes", "64M", "--rank", "0")
    out, whole = printed(capsys, *words, "--steps", "5"), printed(capsys, *words, "--steps", "0")
    count = len(plan_of(shape_of("all_reduce", 4, 64 << 20, 4), 0).steps)
    assert f"and {count - 5:,} more steps" in out
    assert "more step" not in whole
    assert len(whole.splitlines()) == len(out.splitlines()) - 1 + count - 5


# ---- why


def test_the_row_is_the_one_that_the_library_took() -> None:
    for shape in shapes():
        made = plan_of(shape, 0)
        (taken,) = [line for line in show.why(shape, made, False) if line.startswith(">")]
        assert taken.startswith(f"> {made.reason}: {made.algorithm} "), shape


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast", "reduce"])
def test_limits_are_where_the_library_changes(name: str) -> None:
    for ranks, hosts in [(4, 4), (7, 7), (16, 4)]:
        shape = shape_of(name, ranks, ranks * 4, hosts, 1)
        limits = show.limits_of(shape)
        table = [(row["collective"], row["limit"]) for row in _C.selection(hosts)]
        assert limits[-1][1] == costs.ANY_SIZE
        for (algorithm, limit), (after, _) in itertools.pairwise(limits):
            assert (name, limit) in table
            for size, expected in ((limit, algorithm), (limit + 1, after)):
                shards = [size] * ranks if shape.shards else []
                at_limit = shape._replace(bytes=0 if shards else size, shards=shards)
                assert plan_of(at_limit, 0).algorithm == expected, (ranks, limit)


def test_why_says_the_row_and_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "all_reduce", "--hosts", "4", "--bytes", "8K", "--why")
    assert "> all_reduce, up to 8520 B: doubling   <- this one\n" in out
    assert out.endswith("doubling up to 8,520 B, bruck up to 65,536 B, ring beyond\n")
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
        ("all_reduce --bytes 6", "6 bytes are no whole number of elements of 4 bytes"),
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
    assert main(["plan", *words.split()]) == 1
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("ringcomm plan: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_a_picture_of_too_much_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["all_reduce", "--ranks", "64", "--hosts", "64", "--bytes", "64M", "--why"]
    assert main(["plan", *words, "--svg", str(tmp_path / "plan.svg")]) == 1
    assert "messages are too many for a picture" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- the picture


def drawn(tmp_path: Path, *words: str) -> Path:
    path = tmp_path / "plan.svg"
    assert main(["plan", *words, "--rank", "0", "--svg", str(path)]) == 0
    return path


CASES = [(2, 1, "1M"), (8, 2, "64K"), (8, 8, "1M"), (16, 16, "16K"), (64, 64, "256K")]


@pytest.mark.parametrize(("ranks", "hosts", "size"), CASES)
def test_a_lane_a_rank_and_an_arrow_a_message(
    tmp_path: Path, ranks: int, hosts: int, size: str
) -> None:
    words = ("all_reduce", "--ranks", str(ranks), "--hosts", str(hosts), "--bytes", size)
    root = ElementTree.parse(drawn(tmp_path, *words)).getroot()
    assert root.tag == f"{SVG}svg"
    names = [one for one in root.iter(f"{SVG}text") if one.get("class") == "name"]
    assert [one.text for one in names] == [f"rank {rank}" for rank in range(ranks)]
    heights = sorted(float(one.get("y", "")) for one in root.iter(f"{SVG}text"))
    lanes = [float(one.get("y", "")) for one in names]
    assert all(below - above >= 14 for above, below in itertools.pairwise(lanes))
    assert heights[-1] < float(root.get("height", ""))
    paths = [one for one in root.iter(f"{SVG}path") if one.get("class") in ("data", "credit")]
    messages = [one for one in paths if one.find(f"{SVG}title") is not None]
    number = size_of(size)
    steps = [one.steps for one in plans_of(shape_of("all_reduce", ranks, number, hosts))]
    assert len(messages) == sum(step.verb == "signal" for some in steps for step in some)
    assert "by a model" in " ".join(root.itertext())


@pytest.mark.parametrize(("ranks", "hosts", "size"), CASES)
def test_labels_are_apart(tmp_path: Path, ranks: int, hosts: int, size: str) -> None:
    words = ("all_reduce", "--ranks", str(ranks), "--hosts", str(hosts), "--bytes", size)
    root = ElementTree.parse(drawn(tmp_path, *words)).getroot()
    labels = [one for one in root.iter(f"{SVG}text") if one.get("class") == "bytes"]
    boxes = [
        (float(one.get("x", "")), float(one.get("y", "")), len(one.text or "") * 6)
        for one in labels
    ]
    for i, (x, y, width) in enumerate(boxes):
        assert x > drawing.LEFT
        for other_x, other_y, other in boxes[:i]:
            apart = abs(y - other_y) >= 10 or x >= other_x + other or other_x >= x + width
            assert apart, (labels[i].text, x, y)
    assert bool(labels) == (ranks <= 16)


def test_the_picture_of_the_docs_is_drawn_so(tmp_path: Path) -> None:
    """Draw it again with the command on its page."""
    words = ("all_reduce", "--ranks", "4", "--hosts", "2", "--bytes", "64K")
    assert drawn(tmp_path, *words).read_text() == (ROOT / "docs" / "plan.svg").read_text()


def test_times_are_those_of_the_model() -> None:
    """Of a ring: costs.work() counts the same rounds and bytes."""
    shape = shape_of("all_reduce", 4, 4096, 4)
    run = Simulation([one.steps for one in plans_of(shape, "ring")], 1, costs.DEFAULT)
    work = costs.work("all_reduce", "ring", 4096, 4)
    assert run.seconds() == pytest.approx(work.seconds(costs.DEFAULT.network))
    data = [one for one in run.messages if one.lane == "data"]
    assert sum(one.bytes for one in data) == 4 * work.sent
    for one in run.messages:
        assert 0 <= one.sent < one.arrived <= one.taken
    for rank in range(4):
        own = [span for span in run.spans if span.rank == rank]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(own))


def test_bytes_of_windows_are_those_that_are_loaded() -> None:
    shape = shape_of("all_gather", 2, 2 << 20)
    run = Simulation([one.steps for one in plans_of(shape)], 2, costs.DEFAULT)
    run.seconds()
    assert sum(one.bytes for one in run.messages if one.receiver == 0) == 1 << 20


def test_a_wait_without_a_signal_is_noticed() -> None:
    programs = [one.steps for one in plans_of(shape_of("barrier", 2, 4, 2))]
    programs[1] = [step for step in programs[1] if step.verb != "signal"]
    with pytest.raises(ValueError, match="rank 0 waits for a data signal of 1 that never comes"):
        Simulation(programs, 1, costs.DEFAULT).seconds()


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_is_light_or_dark(tmp_path: Path, dark: bool) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    path = drawn(tmp_path, "all_reduce", "--ranks", "2", "--bytes", "1M")
    browser.picture(path, tmp_path / "plan.png", 1200, 500, dark)
    pixels = pyplot.imread(tmp_path / "plan.png")[:, :, :3]
    ground = float(pixels[490, 1190].mean())
    assert ground < 0.2 if dark else ground > 0.95
    colours = (
        [(0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00)] if dark else [(0, 0x72, 0xB2), (0xD5, 0x5E, 0)]
    )
    for colour in colours:
        assert (abs(pixels * 255 - colour).sum(axis=2) < 20).sum() > 500
