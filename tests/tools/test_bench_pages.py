"""Pages of made-up measurements and examinations of 2, 8 and 64 ranks: all is drawn, with room."""

from __future__ import annotations

import re
from pathlib import Path

import bench_cases
import pytest
from doctor_cases import healthy

from lab import browser
from ringcomm.tools.bench import figures
from ringcomm.tools.doctor import report

pytestmark = [
    pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON),
]
HEIGHT = 420  # pixels of a figure without a legend

SIZES = [*(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8)), 64]


def drawn(page: Path) -> list[tuple[float, str]]:
    """Return the height in pixels and the HTML of each figure, as Chromium has drawn it."""
    boxes = browser.document(page).partition("<main>")[2].split("<figure>")[1:]
    heights = [re.search(r'style="[^"]*height: ([0-9.]+)px', figure) for figure in boxes]
    return [(float(h[1]), f) for h, f in zip(heights, boxes, strict=True) if h]


@pytest.mark.parametrize("ranks", SIZES)
def test_the_legend_has_room_below_the_axis(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    body = bench_cases.of_collectives([ranks], ["all_gather"], loads=(False, True))
    page = tmp_path / "out.html"
    figures.write(page, "collectives", body)
    drawings = drawn(page)
    assert len(drawings) == 4  # time, bandwidth, and the ratios to gloo and to nccl
    for height, figure in drawings:
        entries = figure.count('class="legendtoggle"')
        assert entries >= 8
        assert height > HEIGHT + 20  # it grew by the legend's lines
        assert 'class="legend"' in figure
    text = page.read_text()
    assert f"with {ranks} ranks" in text
    assert "of 32M bytes with" in text


def test_steps_of_many_ranks(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "out.html"
    figures.write(page, "ddp", bench_cases.of_steps([2, 8, 64]))
    drawings = drawn(page)
    assert len(drawings) == 3
    assert all(">ms<" in figure for _, figure in drawings)


@pytest.mark.parametrize("ranks", SIZES)
def test_heat_maps_name_as_many_ranks_as_fit(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "out.html"
    report.page(healthy(ranks, max(1, ranks // 4)), [], page)
    drawings = drawn(page)
    assert len(drawings) == 3
    for _, figure in drawings:
        named = re.findall(r'class="xtick"><text[^>]*>([0-9]+)<', figure)
        assert len(named) == min(ranks, 8)
