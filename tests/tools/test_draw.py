"""`ringcomm plan draw`: who has what after each round, in the picture and on the page."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT, browser
from lab.devtools import Browser
from ringcomm.__main__ import main
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.steps import GroupPlans, Operand, Step
from ringcomm.options import ALGORITHMS
from ringcomm.tools.plan.draw import frames, looks
from ringcomm.tools.plan.draw.story import Story, story_of
from ringcomm.tools.plan.source import plans_of

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
SVG = "{http://www.w3.org/2000/svg}"
MOVING = [name for name in frames.GOALS if name != "barrier"]


def story(collective: str, ranks: int, algorithm: str | None, hosts: int = 0) -> Story:
    return story_of(plans_of(call_of(collective, ranks, 1024 * ranks, hosts or ranks), algorithm))


def stories() -> Iterator[tuple[str, Story]]:
    for name in MOVING:
        for algorithm in (None, *ALGORITHMS):
            for ranks, hosts in ((2, 2), (4, 1), (5, 5), (8, 8), (8, 2)):
                try:
                    call = call_of(name, ranks, 1024 * ranks, hosts, root=ranks - 1)
                    made = plans_of(call, algorithm)
                except ValueError:
                    continue
                yield f"{name} {algorithm} {ranks} on {hosts}", story_of(made)


def test_all_have_what_they_want_in_the_end() -> None:
    """With every algorithm; and before the last round somebody still lacks something."""
    count = 0
    for case, drawn in stories():
        cells = [(r, c) for r in range(drawn.call.ranks) for c in range(len(drawn.chunks))]
        wanted = [cell for cell in cells if drawn.wanted(*cell)]
        assert wanted, case
        assert all(drawn.done(r, drawn.rounds[-1], c) for r, c in wanted), case
        before = drawn.rounds[-2] if len(drawn.rounds) > 1 else 0
        assert not all(drawn.done(r, before, c) for r, c in wanted), case
        count += 1
    assert count > 60


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_ring_adds_up_as_its_paper_says(ranks: int) -> None:
    """In round k each rank passes on a sum of k inputs (Patarasuk and Yuan 2009)."""
    ring = story("reduce_scatter", ranks, "ring")
    assert ring.rounds == list(range(1, ranks))
    assert len(ring.chunks) == ranks
    for transfer in ring.transfers:
        assert transfer.receiver == (transfer.sender + 1) % ranks
        own = {(transfer.sender - k) % ranks for k in range(transfer.round)}
        assert transfer.ranks == own
    for rank in range(ranks):
        assert ring.pieces(rank, ranks - 1, rank) == [frozenset(range(ranks))]


def test_sums_and_what_is_not_added_up_stand_apart() -> None:
    ring = story("reduce_scatter", 4, "ring")
    assert ring.pieces(3, 2, 0) == [frozenset([1, 2]), frozenset([3])]
    drawn = frames.Frames(ring)
    assert drawn.inside(ring.pieces(3, 2, 0)) == "1+2 | 3"
    assert drawn.describe(ring.pieces(3, 2, 0)) == "the sum of ranks 1 and 2, and of rank 3"


def test_doubling_doubles() -> None:
    doubling = story("all_reduce", 8, "doubling")
    for number in range(4):
        sizes = {sum(map(len, doubling.pieces(rank, number, 0))) for rank in range(8)}
        assert sizes == {2**number}


def group_with(steps: list[Step]) -> GroupPlans:
    """Return an all_reduce of 8 bytes in which rank 0 does this, and rank 1 sends its input."""
    inbox = Operand("inbox", 0, 1, 0)
    other = [Step("copy", -1, "", 8, [inbox], [Operand("input", 1, 1, 0)])]
    other.append(Step("signal", 0, "data", 0, [], []))
    return GroupPlans(call_of("all_reduce", 2, 8, 2), "wrong", [steps, other])


def test_mistakes_of_a_plan_are_told() -> None:
    mine, theirs = Operand("input", 0, 0, 0), Operand("inbox", 0, 1, 0)
    to = [Operand("output", 0, 0, 0)]
    wait = Step("wait", 1, "data", 0, [], [])
    cases = {
        "rank 0, step 1, copy: it reads bytes that nobody has written": [
            Step("copy", -1, "", 8, to, [theirs])
        ],
        "rank 0, step 2, reduce: it adds the input of rank 0 twice": [
            wait,
            Step("reduce", -1, "", 8, to, [mine, theirs, mine]),
        ],
        "rank 0, step 2, reduce: it adds up different parts": [
            wait,
            Step("reduce", -1, "", 4, to, [mine, theirs._replace(offset=4)]),
        ],
        "rank 0 waits for a data signal of 1 that never comes": [wait, wait],
    }
    for sentence, steps in cases.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            story_of(group_with(steps))


# ---- the picture


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_frame_a_round_and_a_cell_a_chunk(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "story.svg"
    words = ["plan", "draw", "reduce_scatter", "--algorithm", "ring", "--ranks", str(ranks)]
    assert main([*words, "--svg", str(path)]) == 0
    root = ElementTree.parse(path).getroot()
    by_class: dict[str, list[ElementTree.Element]] = {}
    for element in root.iter():
        by_class.setdefault(element.get("class", ""), []).append(element)
    assert len(by_class["panel"]) == ranks  # the start, and ranks - 1 rounds
    assert len(by_class["cell"]) == ranks**3
    assert len(by_class["arrow"]) == ranks * (ranks - 1)
    assert len(by_class["done"]) == ranks + 1  # and the key
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert width <= 1200
    for label in root.iter(f"{SVG}text"):
        assert 0 <= float(label.get("x", "")) < width
        assert 0 <= float(label.get("y", "")) < height


def test_the_picture_of_the_docs_is_drawn_so(tmp_path: Path) -> None:
    """Draw it again with the command on its page."""
    path = tmp_path / "story.svg"
    words = ["plan", "draw", "reduce_scatter", "--algorithm", "ring", "--ranks", "4"]
    assert main([*words, "--svg", str(path)]) == 0
    assert path.read_text() == (ROOT / "docs" / "draw.svg").read_text()


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "story.html"
    assert main(["plan", "draw", "all_reduce", "--algorithm", "ring", "--html", str(path)]) == 0
    text = path.read_text()
    assert text.count('<div class="frame"') == 7
    assert "rank 0 to rank 1: chunk 3, of rank 0" in text
    assert "The messages over time" in text
    links = re.findall(r'(?:src|href)="([^"]+)"|url\(([^)]+)\)', text)
    assert all("://" not in "".join(link) for link in links)
    assert main(["plan", "draw", "broadcast", "--algorithm", "tree", "--html", str(path)]) == 0


def test_colors_are_told_from_the_ground() -> None:
    for ranks in (4, 8, 16, 32):
        pairs = looks.colors(ranks)
        assert len({pale for pair in pairs for pale in pair[:1]}) == ranks
        for light, dark in pairs:
            assert browser.contrast(light, "#ffffff") > 1.4
            assert browser.contrast(dark, "#14171a") > 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("barrier --svg x.svg", "a barrier moves no bytes"),
        ("all_reduce --ranks 33 --svg x.svg", "a picture takes 32 ranks at most"),
        ("all_gather --ranks 3 --hosts 2 --svg x.svg", "3 ranks cannot be spread evenly"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["plan", "draw", *words.split()]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ringcomm plan draw: ")
    assert sentence in error
    assert error.count("\n") == 1


@needs_chromium
def test_the_page_opens_at_the_first_round(tmp_path: Path) -> None:
    path = tmp_path / "story.html"
    assert main(["plan", "draw", "reduce_scatter", "--algorithm", "ring", "--html", str(path)]) == 0
    shown = browser.document(path)
    assert shown.count('<div class="frame"') == 4
    assert len(re.findall(r'<div class="frame" hidden=""', shown)) == 3
    assert '<div class="frame"><svg class="story"' in shown.partition("at the start")[2]
    told = re.sub(r"<script.*?</script>", "", shown, flags=re.S)
    assert "round 1 of 3</output>" in told
    assert "<li>rank 0 to rank 1: chunk 3, of rank 0</li>" in told


@needs_chromium
@pytest.mark.parametrize("ranks", [4, 8])
def test_nothing_is_wider_than_its_page(tmp_path: Path, ranks: int) -> None:
    """Nor are keys cut off: they break into lines."""
    words = ["plan", "draw", "all_reduce", "--algorithm", "ring", "--ranks", str(ranks)]
    files = [tmp_path / "story.html", tmp_path / "story.svg"]
    assert main([*words, "--html", str(files[0]), "--svg", str(files[1])]) == 0
    with Browser() as chromium:
        for path, width in itertools.product(files, (400, 1200)):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            chromium.ask("Emulation.setDeviceMetricsOverride", **size)
            chromium.open(path.as_uri())
            assert chromium.run("document.documentElement.scrollWidth") <= width
            texts = ".keys text" if path.suffix == ".html" else ":scope > text"
            right = f"document.documentElement.querySelectorAll('{texts}')"
            ends = chromium.run(f"[...{right}].map(one => one.getBoundingClientRect().right)")
            assert len(ends) > 5
            assert max(ends) <= width
