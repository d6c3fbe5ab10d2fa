"""Pages are whole: their figures are drawn without a network, in light and in dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import browser
from ringcomm.tools import extra
from ringcomm.tools.page import COLORS, Page

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)


def example(folder: Path) -> Path:
    pytest.importorskip("plotly")
    page = Page("Times of <all> ranks", "rank 3 never called all_reduce #412")
    page.heading("Times")
    page.table(["name", "time"], [["</script>", "1.5 µs"], ["b & c", "2 µs"]])
    line: dict[str, Any] = {"type": "scatter", "x": [1, 2], "y": [1, 4], "name": "</script><b>"}
    line["line"] = {"color": COLORS[0]}
    axes = {"xaxis": {"title": {"text": "bytes"}}, "yaxis": {"title": {"text": "µs"}}}
    page.figure({"data": [line], "layout": {**axes, "showlegend": True}}, "Time by size.")
    path = folder / "page.html"
    page.write(path)
    return path


def test_a_page_needs_no_network(tmp_path: Path) -> None:
    text = example(tmp_path).read_text()
    head = text.partition("<script>")[0] + text.partition("</head>")[2]
    assert "http" not in head
    assert "Times of &lt;all&gt; ranks" in text


@needs_chromium
def test_figures_and_tables_are_there(tmp_path: Path) -> None:
    page = browser.document(example(tmp_path))
    for words in ("rank 3 never called all_reduce #412", "Time by size.", "b &amp; c"):
        assert words in page
    figure = page.partition('class="plot')[2]
    assert "main-svg" in figure
    assert ">bytes<" in figure
    assert ">µs<" in figure


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (400, False), (1200, True)])
def test_colors_and_width_are_the_readers(tmp_path: Path, width: int, dark: bool) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    browser.picture(example(tmp_path), tmp_path / "page.png", width, 800, dark)
    pixels = pyplot.imread(tmp_path / "page.png")[:800, : max(width, 500)]
    ground = float(pixels[790, 5, :3].mean())
    assert ground < 0.2 if dark else ground > 0.95
    blue = (abs(pixels[:, :, :3] * 255 - [0x00, 0x72, 0xB2]).sum(axis=2) < 30).any(axis=0)
    line = blue.nonzero()[0]
    assert 0.6 * width < line[-1] - line[0] < width


def test_a_missing_package_is_said() -> None:
    with pytest.raises(ValueError, match=r"pip install 'ringcomm\[tools\]'"):
        extra("ringcomm_has_no_such_package")
