"""A job's records as a page: the findings, a timeline, and who waited for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringcomm.tools.page import COLORS, Page, heat_height, heat_map
from ringcomm.tools.trace.findings import Finding, nothing_wrong, summary
from ringcomm.tools.trace.job import Job
from ringcomm.tools.trace.perfetto import Slice, slices_of

BARS = 20_000  # in a timeline: a browser draws no more in a moment
# The kinds of things that a rank does, with color and pattern.
KINDS = {
    "queued": (COLORS[5], ""),
    "waits for other ranks": (COLORS[1], ""),
    "moves bytes": (COLORS[0], ""),
    "not ended, or failed": (COLORS[3], "\\"),
}
UNITS = ((10**9, "s"), (10**6, "ms"), (1000, "µs"))
SHOWN = 20  # the newest operations of a rank, before the reader zooms out
FEW = 24  # ranks, of which each has its number on the axis


def unit_of(ns: int) -> tuple[int, str]:
    return next((pair for pair in UNITS if ns >= 2 * pair[0]), UNITS[-1])


def write_page(job: Job, findings: list[Finding], path: Path, last: int = 100) -> None:
    """Write the page. Raises OSError, and ValueError where `ringcomm[tools]` is missing."""
    page = Page(f"Job {job.name}", findings[0].sentence if findings else nothing_wrong(job))
    for i, finding in enumerate(findings):
        if i:
            page.heading(finding.kind.name.capitalize())
            page.text(finding.sentence)
        if finding.rows:
            page.table(finding.columns, finding.rows)
    page.heading("Timeline")
    drawn = slices_of(job, last)
    most = max(BARS // (3 * max(len(drawn), 1)), 1)
    if most < last:
        drawn = slices_of(job, most)
    if any(drawn.values()):
        page.figure(timeline(drawn), TIMELINE, height=160 + 22 * min(max(len(drawn), 6), 40))
    else:
        page.text("No operation was recorded.")
    if any(any(record.waits_ns) for record in job.records):
        page.heading("Waits")
        page.figure(heat(job), WAITS, heat_height(job.ranks))
    page.heading("Records")
    for text in [summary(job), *job.remarks]:
        page.text(text)
    page.write(path)


TIMELINE = (
    "The newest operations of each rank. The time of a bar is exact; its waits stand at its "
    "beginning, for only their sum is recorded. Drag to zoom, double click twice to see all."
)
WAITS = "How long each rank waited for each other one in all collectives, in total."


def parts(piece: Slice) -> list[tuple[str, int, int]]:
    """Return what an operation consists of: kind, begin and end in ns."""
    if piece.operation.state == "failed" or piece.operation.ended_ns is None:
        return [("not ended, or failed", piece.called, piece.ended)]
    moving = piece.began + piece.waited
    every = [
        ("queued", piece.called, piece.began),
        ("waits for other ranks", piece.began, moving),
        ("moves bytes", moving, piece.ended),
    ]
    return [part for part in every if part[2] > part[1]]


def timeline(drawn: dict[int, list[Slice]]) -> dict[str, Any]:
    end = max(piece.ended for slices in drawn.values() for piece in slices)
    newest = [slices[-SHOWN:][0].called for slices in drawn.values() if slices]
    begin = min(newest)
    # Operations that have not ended go on after the last thing that was recorded.
    beyond = max((end - begin) // 20, 1)
    scale, unit = unit_of(end - begin)
    traces: dict[str, dict[str, Any]] = {}
    for kind, (color, pattern) in KINDS.items():
        marker = {"color": color, "line": {"width": 0}}
        if pattern:
            marker["pattern"] = {"shape": pattern, "size": 5, "solidity": 0.35}
        traces[kind] = {
            "type": "bar", "orientation": "h", "name": kind, "marker": marker, "x": [], "y": [],
            "base": [], "text": [], "textposition": "none",
            "width": 0.8 if len(drawn) <= FEW else 1,
            "hovertemplate": "rank %{y}: %{text}<br>" + kind + " for %{x:.4g} " + unit
            + "<extra></extra>",
        }  # fmt: skip
    for rank, slices in drawn.items():
        for piece in slices:
            for kind, start, stop in parts(piece):
                trace = traces[kind]
                longer = beyond if piece.operation.ended_ns is None else 0
                trace["x"].append((stop + longer - start) / scale)
                trace["base"].append(start / scale)
                trace["y"].append(rank)
                trace["text"].append(f"{piece.operation} of group {piece.group.name}")
    layout = {
        "barmode": "overlay", "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {
            "title": {"text": f"{unit} since the oldest operation here"},
            "range": [begin / scale, (end + beyond) / scale],
        },
        "yaxis": {
            "title": {"text": "rank"}, "tick0": 0, "dtick": 1 if len(drawn) <= FEW else 8,
            "zeroline": False, "showgrid": False, "range": [max(drawn) + 0.5, min(drawn) - 0.5],
        },
    }  # fmt: skip
    return {"data": [trace for trace in traces.values() if trace["x"]], "layout": layout}


def heat(job: Job) -> dict[str, Any]:
    """Return the waits of each rank (down) for each peer (across)."""
    ranks = job.ranks
    place = {rank: i for i, rank in enumerate(ranks)}
    waits: list[list[float | None]] = [[None] * len(ranks) for _ in ranks]
    for record in job.records:
        own = waits[place[record.global_rank]]
        for peer, ns in enumerate(record.waits_ns):
            if peer != record.rank:
                at = place[record.global_ranks[peer]]
                own[at] = (own[at] or 0) + ns
    most = max(ns or 0 for own in waits for ns in own)
    scale, unit = unit_of(int(most))
    look = {
        "zmin": 0, "zmax": most / scale or 1,
        "colorbar": {"title": {"text": unit}, "thickness": 14},
        "hovertemplate": "rank %{y} waited %{z:.4g} " + unit + " for rank %{x}<extra></extra>",
    }  # fmt: skip
    z = [[None if ns is None else ns / scale for ns in own] for own in waits]
    made: dict[str, Any] = heat_map(ranks, z, ("rank that waited", "waited for rank"), look)
    return made
