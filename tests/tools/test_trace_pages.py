"""The page of `--html` is read in wide and narrow windows, light and dark, with few ranks and many.

A real browser says where each text stands: none may cover another or leave the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import browser
from lab.devtools import Browser
from lab.flights import MS, Flight, training, write
from ringcomm._flight.records import read_folder
from ringcomm.tools.trace import job_of
from ringcomm.tools.trace.analysis import analyse
from ringcomm.tools.trace.html import KINDS, write_page

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
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
    [...plot.querySelectorAll("svg text")]
      .filter((element) => element.textContent.trim() && element.getBoundingClientRect().width)
      .map((element) => [element.textContent, ...box(element), getComputedStyle(element).fill]));
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
    pytest.importorskip("plotly")
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
        assert {"ms", "µs"} & {text[0] for text in heat}
        if kind == "hang":
            assert "not ended, or failed" in {text[0] for text in timeline}


@pytest.mark.parametrize("ground", ["#ffffff", "#14171a"])
def test_what_costs_time_stands_out(ground: str) -> None:
    """Waits and moves are 3 to 1 against both grounds, as WCAG asks of graphics."""
    for kind in ("waits for other ranks", "moves bytes"):
        assert browser.contrast(KINDS[kind][0], ground) > 3
