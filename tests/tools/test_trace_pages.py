"""The page of `--html` is read in wide and narrow windows, light and dark, with few ranks and many.

A real browser says where each text stands: none may cover another or leave the window.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import browser
from lab.devtools import Browser
from lab.flights import MS, Flight, training, write
from ringcomm._flight.processes import Process
from ringcomm._flight.records import read_folder
from ringcomm.tools import svg
from ringcomm.tools.trace import job_of
from ringcomm.tools.trace.analysis import analyse
from ringcomm.tools.trace.html import KINDS, write_page

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
HUNG = 37_000 * MS
HOSTS = {2: 1, 8: 2, 64: 8}
LATER = [("healthy", 2), ("mismatch", 2), ("straggler", 8), ("hang", 64)]
# The texts of each figure, and where they stand in the window; the texts of the page with colors.
LOOK = """
(() => {
  const box = (element) => {
    const at = element.getBoundingClientRect();
    return [at.left, at.top, at.right, at.bottom];
  };
  const figures = [...document.querySelectorAll(".plot")].map((plot) =>
    [...plot.querySelectorAll("svg text, .key")]
      .filter((element) => element.textContent.trim() && element.getBoundingClientRect().width)
      .map((element) => [element.textContent, ...box(element),
        getComputedStyle(element)[element.tagName === "text" ? "fill" : "color"]]));
  const texts = [...document.querySelectorAll("h1,h2,p,th,td,figcaption")]
    .map((element) => [element.textContent, getComputedStyle(element).color]);
  return {
    figures, texts, wide: document.documentElement.scrollWidth, window: innerWidth,
    plots: [...document.querySelectorAll(".plot")].map(box),
    ground: getComputedStyle(document.body).backgroundColor,
  };
})()
"""


def flights(kind: str, size: int) -> list[Flight]:
    slow = size - 1 if kind == "straggler" else None
    some, now = training(size, steps=25, hosts=HOSTS[size], slow=slow)
    if kind == "hang":
        for flight in some[:-1]:
            flight.call("barrier", now + MS)
    if kind == "mismatch":
        for flight in some:
            name = "all_gather" if flight.rank == 1 else "all_reduce"
            flight.call(name, now + MS, elements=8)
    return some


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def look(chromium: Browser, page: Path, width: int, dark: bool) -> dict[str, Any]:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    chromium.ask("Emulation.setEmulatedMedia", features=[scheme])
    chromium.ask(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    chromium.open(page.as_uri())
    chromium.wait_for("[...document.querySelectorAll('.plot')].every(plot => plot.data)")
    seen: dict[str, Any] = chromium.run(LOOK)
    return seen


def overlaps(texts: list[list[Any]]) -> list[tuple[str, str]]:
    """Return the pairs of texts that cover one another by more than a pixel."""
    return [
        (a[0], b[0])
        for i, a in enumerate(texts)
        for b in texts[:i]
        if min(a[3], b[3]) - max(a[1], b[1]) > 1 and min(a[4], b[4]) - max(a[2], b[2]) > 1
    ]


def rgb(text: str) -> str:
    """Return "#0072b2" of "rgb(0, 114, 178)"."""
    words = text.partition("(")[2].partition(")")[0].split(",")
    return "#" + "".join(f"{int(word):02x}" for word in words[:3])


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *[("hang", 8), ("straggler", 64)],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in LATER],
    ],
)
def test_nothing_overlaps(tmp_path: Path, chromium: Browser, kind: str, size: int) -> None:
    pytest.importorskip("jinja2")
    job = job_of(read_folder(write(tmp_path, flights(kind, size))))
    write_page(job, analyse(job), tmp_path / "page.html")
    for width, dark in ((1200, False), (1200, True), (400, False), (400, True)):
        seen = look(chromium, tmp_path / "page.html", width, dark)
        assert seen["wide"] <= seen["window"] == width
        timeline, heat = seen["figures"]
        for texts, plot in zip(seen["figures"], seen["plots"], strict=True):
            assert overlaps(texts) == []
            for text, left, top, right, bottom, color in texts:
                assert plot[0] - 1 <= left < right <= plot[2] + 1, text
                assert plot[1] - 1 <= top < bottom <= plot[3] + 1, text
                assert browser.contrast(rgb(color), rgb(seen["ground"])) > 4.5, text
        for text, color in seen["texts"]:
            assert browser.contrast(rgb(color), rgb(seen["ground"])) > 4.5, text
        assert "ms since the oldest operation here" in {text[0] for text in timeline}
        assert "down: rank that waited; across: waited for rank" in {text[0] for text in heat}
        if kind == "hang":
            assert "not ended, or failed" in {text[0] for text in timeline}


@pytest.mark.parametrize(("way", "ground"), [(0, "#ffffff"), (1, "#14171a")])
def test_what_costs_time_stands_out(way: int, ground: str) -> None:
    """Waits and moves are 3 to 1 against both grounds, as WCAG asks of graphics."""
    for kind in ("waits for other ranks", "moves bytes", "not ended, or failed"):
        assert browser.contrast(svg.MEANINGS[KINDS[kind]][way], ground) > 3


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_hang_is_drawn_as_long_as_it_was(tmp_path: Path, chromium: Browser, size: int) -> None:
    """The others hang for 37 s: their bars, and their waits for the rank that is missing."""
    pytest.importorskip("jinja2")
    missing = size // 4
    some, now = training(size, steps=25, hosts=HOSTS[size])
    for flight in some:
        flight.process = Process(1000 + flight.rank, "a boot", "pid:[1]", "1")
        flight.seen = now + HUNG
        if flight.rank != missing:
            flight.call("all_reduce", now, elements=8)
    job = job_of(read_folder(write(tmp_path, some)))
    write_page(job, analyse(job), tmp_path / "page.html")
    seen = look(chromium, tmp_path / "page.html", 1200, dark=False)
    timeline, waits = chromium.run("[...document.querySelectorAll('.plot')].map(one => one.data)")
    (open_bars,) = (kind["bars"] for kind in timeline["kinds"] if kind["hatched"])
    assert {bar[0] for bar in open_bars} == {*range(size)} - {missing}
    assert all(bar[2] >= HUNG - MS for bar in open_bars)
    begin, end = timeline["view"]
    assert all(begin <= bar[1] and bar[1] + bar[2] <= end for bar in open_bars)
    assert min(bar[2] for bar in open_bars) > 0.9 * (end - begin)
    assert waits["most"] == pytest.approx(HUNG, rel=0.01)
    for waiter, row in enumerate(waits["cells"]):
        brightest = [peer for peer, ns in enumerate(row) if ns == waits["most"]]
        assert brightest == ([] if waiter == missing else [missing])
    if size <= 8:
        assert "no call since all_reduce #25" in {text[0] for text in seen["figures"][0]}


def test_the_page_is_small_and_has_a_name(tmp_path: Path) -> None:
    """A page of 8 ranks is at most a megabyte; its title is no number of a job."""
    pytest.importorskip("jinja2")
    some, _ = training(8, steps=200, hosts=2, capacity=200)
    for flight in some:
        flight.job = "1f3c9a52-7a0e-4b6f-9d55-0d5b2f7b1c11/0"
        flight.call("barrier", 9000 * MS, 9001 * MS, line=1)
    write(tmp_path, some)
    for ring in tmp_path.glob("*.ring"):
        lines = ring.with_name(ring.stem.rpartition("-")[0] + ".lines")
        lines.write_text("/home/me/train.py:42 in step\n")
    job = job_of(read_folder(tmp_path))
    write_page(job, analyse(job), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert len(page.encode()) < 1 << 20
    title = page.partition("<title>")[2].partition("</title>")[0]
    assert re.fullmatch(r"train\.py, 8 ranks on node0 and node1, 2023-11-1\d \d\d:\d\d \S+", title)
    assert "1f3c9a52" in page.partition("Records</h2>")[2]


def test_buttons_and_drags_zoom(tmp_path: Path, chromium: Browser) -> None:
    pytest.importorskip("jinja2")
    job = job_of(read_folder(write(tmp_path, flights("healthy", 2))))
    write_page(job, analyse(job), tmp_path / "page.html")
    look(chromium, tmp_path / "page.html", 1200, dark=False)
    view = "document.querySelector('.plot').view"
    whole = chromium.run("document.querySelector('.plot').data.whole")
    low, high = chromium.run(view)
    chromium.run("document.querySelector('button[title=closer]').click()")
    closer = chromium.run(view)
    assert closer[1] - closer[0] == pytest.approx((high - low) / 2)
    area = chromium.run(
        "(({left, top}) => [left, top])(document.querySelector('.area').getBoundingClientRect())"
    )
    for kind, x in (("mousePressed", 200), ("mouseMoved", 250), ("mouseReleased", 300)):
        at = {"x": area[0] + x, "y": area[1] + 10, "button": "left", "clickCount": 1}
        chromium.ask("Input.dispatchMouseEvent", type=kind, **at)
    dragged = chromium.run(view)
    assert closer[0] < dragged[0] < dragged[1] < closer[1]
    chromium.run("document.querySelector('button[title=all]').click()")
    assert chromium.run(view) == whole
