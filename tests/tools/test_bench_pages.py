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


def test_measured_values_rule_the_axis_of_bandwidth() -> None:
    body = bench_cases.of_collectives([2], ["all_reduce"])
    shown = figures.drawn(body["samples"])
    most = max(figures.busbw_of(s, "low") for s in shown)
    copies = [(1024, 1e6), (4096, 1.4 * most), (8192, 0.9 * most)]  # GB/s of copies alone
    for some, top in ((copies, 1.4), (copies[:1], 1.0), (copies[2:], 1.0), ([], 1.0)):
        bound = figures.near(some, shown)
        drawn_ = figures.figure(shown, ["ringcomm"], figures.busbw_of, "GB/s", bound)
        assert drawn_["layout"]["yaxis"]["range"] == pytest.approx([0, 1.05 * top * most])
        far = figures.far_says(some, shown)
        assert ("far above at one size" in far) == (copies[0] in some)


def test_figures_in_doubt_have_hollow_markers() -> None:
    body = bench_cases.of_collectives([2], ["all_reduce"], ["gloo"])
    shown = sorted(figures.drawn(body["samples"]), key=lambda s: int(s["bytes"]))
    for sample in shown:
        sample["doubts"] = ["spread 60%"] if sample["bytes"] == 128 else []
    (_, line) = figures.figure(shown, ["gloo"], figures.time_of, "time", [])["data"]
    assert line["marker"]["symbol"] == [100 * (sample["bytes"] == 128) for sample in shown]
    columns, rows = figures.table(shown, ["gloo"])
    assert columns[-1] == "doubt"
    assert [row[-1] for row in rows if row[0] == "128"] == ["spread 60%"]
    for sample in shown:
        del sample["doubts"]  # as in files of before
    assert figures.table(shown, ["gloo"])[0][-1] != "doubt"


def test_a_page_of_a_healthy_job_says_so(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "out.html"
    report.page(healthy(2, 1), [], page)
    assert re.search(r"<h2[^>]*>Findings</h2>\s*<p>Nothing is wrong\.</p>", page.read_text())


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
    evidence = healthy(ranks, max(1, ranks // 4))
    report.page(evidence, [], page)
    drawings = drawn(page)
    assert len(drawings) == 3
    for _, figure in drawings:
        named = re.findall(r'class="xtick"><text[^>]*>([0-9]+)<', figure)
        assert len(named) == min(ranks, 8)
    for (made, _, _), (_, figure) in zip(report.figures(evidence), drawings, strict=True):
        for label in made["data"][0]["colorbar"]["ticktext"]:
            assert f">{label}</text>" in figure  # those at the ends, too
