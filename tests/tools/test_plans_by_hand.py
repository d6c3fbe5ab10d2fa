"""Algorithms by hand in `simulate`, `draw` and `plan`, and the functions for notebooks."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lab import ROOT
from ringcomm.__main__ import main
from ringcomm.algorithms import Shape, copy, reduce, send
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.steps import GroupPlans
from ringcomm.tools.plan.draw.story import story_of
from ringcomm.tools.plan.notebook import draw, simulate, sweep
from ringcomm.tools.plan.source import load, name_of, plans_of

EXAMPLES = ROOT / "examples" / "algorithms"
SWING = f"{EXAMPLES}/swing.py:swing"
RING = f"{EXAMPLES}/ring.py:ring"


def by_hand(name: str, collective: str = "all_reduce", ranks: int = 8, root: int = 0) -> GroupPlans:
    file, _, function = name.partition(":")
    path = f"{EXAMPLES}/{file}.py:{function or file}"
    return plans_of(call_of(collective, ranks, 1024 * ranks, ranks, root=root), path)


@pytest.mark.parametrize(
    ("name", "collective", "rounds"),
    [
        ("ring", "reduce_scatter", 7),
        ("halving_doubling", "all_gather", 3),
        ("swing", "all_reduce", 6),
        ("torus_2d", "all_reduce", 8),
        ("binomial_tree", "broadcast", 3),
        ("binomial_tree", "reduce", 3),
        ("bruck:all_to_all", "all_to_all", 3),
    ],
)
def test_the_result_is_where_it_belongs(name: str, collective: str, rounds: int) -> None:
    """In as many rounds as the paper says."""
    story = story_of(by_hand(name, collective, root=5 if name == "binomial_tree" else 0))
    cells = [(rank, chunk) for rank in range(8) for chunk in range(len(story.chunks))]
    wanted = [cell for cell in cells if story.wanted(*cell)]
    assert wanted
    assert all(story.done(rank, story.rounds[-1], chunk) for rank, chunk in wanted)
    assert len(story.rounds) == rounds


def test_ranks_of_hosts() -> None:
    hierarchical = load(f"{EXAMPLES}/hierarchical.py:hierarchical")
    group = plans_of(call_of("all_reduce", 8, 8192, 4), hierarchical)
    assert (group.call.local, group.algorithm) == (2, "hierarchical by hand")


def test_a_ring_takes_the_time_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    """They send the same bytes in the same rounds; of one segment, as these."""
    ours = simulate(load(RING), 8, 64 << 10, "reduce_scatter", topology="ring")
    theirs = simulate("ring", 8, 64 << 10, "reduce_scatter", topology="ring")
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.01)
    assert ours.bound == theirs.bound <= ours.seconds


def test_the_commands_take_a_function(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, page, plans = tmp_path / "a.svg", tmp_path / "a.html", tmp_path / "a.json"
    words = ["all_reduce", "--algorithm", SWING, "--ranks", "8"]
    assert main(["plan", "simulate", *words, "--topology", "torus:2x4"]) == 0
    assert capsys.readouterr().out.startswith(
        "all_reduce of 1M bytes, 8 ranks on 8 hosts: swing\ntorus:2x4"
    )
    assert main(["plan", "draw", *words, "--svg", str(picture), "--html", str(page)]) == 0
    assert "hosts: swing\n6 rounds, 8 chunks" in capsys.readouterr().out
    ElementTree.parse(picture)
    assert main(["plan", "show", *words, "--hosts", "8", "--steps", "1", "--json", str(plans)]) == 0
    assert "8 ranks on 8 hosts: swing\n" in capsys.readouterr().out
    # The file has the plans that were simulated.
    made = plans_of(call_of("all_reduce", 8, 1 << 20, 8), SWING)
    told = json.loads(plans.read_text())["plans"]
    assert [len(plan) for plan in told] == [len(steps) for steps in made.steps]


def test_a_sweep_has_names_of_both_kinds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "a.svg"
    words = ["--ranks", "4,6", "--size", "1K,64K", "--algorithm", f"ring,{RING},{SWING}"]
    assert main(["plan", "simulate", "all_reduce", *words, "--svg", str(picture)]) == 0
    four, six = capsys.readouterr().out.split(" ranks\n")[1:]
    assert re.search(r"bytes +ring +ring by hand +swing +lower bound", four)
    assert "swing" not in six  # it is for powers of two
    drawn = picture.read_text()
    ElementTree.fromstring(drawn)
    lines = re.findall(r'"line" d="[^"]+" style="stroke: var\((--[\w-]+)\)"><title>', drawn)
    assert set(lines) == {"--ring", "--ring-by-hand", "--swing"}
    colors = re.findall(r"(--(?:ring|ring-by-hand|swing)): (#\w+);", drawn)
    assert len({color for _, color in colors}) == len(colors) == 6  # for light, and for dark


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def wrong(shape):\n    shape.input(0, shape.ranks)\n")
    sweep = ["plan", "simulate", "all_reduce", "--size", "1K,4K", "--algorithm"]
    for words, sentence in (
        (["plan", "simulate", "all_reduce", "--algorithm", "none.py:f"], "write FILE.py:FUNCTION"),
        (
            ["plan", "draw", "all_reduce", "--svg", "x", "--algorithm", f"{wrong}:f"],
            "no function 'f'",
        ),
        (
            ["plan", "simulate", "all_reduce", "--algorithm", f"{wrong}:wrong"],
            "wrong.py:2: there is no",
        ),
        ([*sweep, f"ring,{wrong}:wrong"], "wrong.py:2: there is no chunk"),
        ([*sweep, f"{RING},{EXAMPLES}/../algorithms/ring.py:ring"], "two algorithms ring by hand"),
        (["plan", "show", "all_reduce", "--why", "--algorithm", SWING], "leave out --why"),
        (
            ["plan", "simulate", "all_reduce", "--ranks", "6", "--algorithm", SWING],
            "a power of two",
        ),
        (
            ["plan", "show", "all_reduce", "--ranks", "1", "--algorithm", RING],
            "plans are for 2 to 4096",
        ),
    ):
        assert main(words) != 0
        error = capsys.readouterr().err
        assert sentence in error, error
        assert error.count("\n") == 1


def test_names() -> None:
    def größe(shape: Shape) -> None: ...

    assert name_of(load(SWING)) == "swing"
    assert name_of(load(RING)) == "ring by hand"
    assert name_of(größe) == "gr__e"


# ---- for notebooks


def naive(shape: Shape) -> None:
    """Everything through rank 0, which forgets the last rank."""
    shape.cut(1)
    total = reduce(
        shape.input(0), *(send(shape.input(rank), to=0) for rank in range(1, shape.ranks))
    )
    for rank in range(1, shape.ranks - 1):
        copy(send(total, to=rank), shape.output(rank))
    copy(total, shape.output(0))


def test_a_wrong_algorithm_is_drawn_as_far_as_it_comes() -> None:
    drawing = draw(naive, 4)
    assert drawing.rounds == 2
    assert str(drawing) == "all_reduce of 4K bytes, 4 ranks on 4 hosts: naive, 2 rounds"
    last = drawing.svg.rpartition("<title>rank 3, chunk 0: ")[2]
    assert last.startswith("of rank 3")
    assert "rank 2, chunk 0: the sum of " in drawing.svg


def test_what_a_notebook_shows() -> None:
    """A page in a frame of its own, and images: nothing of theirs changes the notebook."""
    drawing = draw(load(SWING), 8)
    shown = drawing._repr_html_()
    frame = ElementTree.fromstring(shown)
    assert frame.tag == "iframe"
    assert frame.attrib["srcdoc"].replace("\n", " ") == drawing.html.replace("\n", " ")
    simulation = simulate(load(SWING), 8, topology="torus:2x4")
    swept = sweep(["ring", load(SWING)], 8, [1024, 4096], topology="torus:2x4")
    for result in (simulation, swept):
        assert "<svg" not in result._repr_html_()
        assert "data:image/svg+xml;base64," in result._repr_html_()
        ElementTree.fromstring(result.svg)
        assert repr(result) == result.text
    assert swept.fastest(1024) == "swing"
    assert swept.times["swing"][1024] >= swept.bounds[1024] > 0


def test_what_has_no_plans() -> None:
    def waits(shape: Shape) -> None:
        shape.wait(0, from_=1)

    for call, sentence in (
        (lambda: draw(naive, 64), "32 ranks at most"),
        (lambda: simulate(naive, 6, local=4), "do not fill hosts of 4"),
        (
            lambda: simulate(naive, 6, topology="torus:2x4"),
            "8 hosts, and the group 6",
        ),
        (lambda: draw(naive, bytes=0), "write 1 or more"),
        (lambda: sweep([naive], bytes=[1024, 0]), "write 1 or more"),
        (lambda: sweep([naive], local=0), "do not fill hosts of 0"),
        (lambda: simulate(waits, 2, collective="barrier"), "never comes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
