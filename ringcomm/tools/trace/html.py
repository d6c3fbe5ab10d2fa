"""A job's records as a page: the findings, a timeline, and who waited for whom."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ringcomm._flight.records import GroupRecord, Operation
from ringcomm._text import counted
from ringcomm.tools.page import Page
from ringcomm.tools.trace.findings import Finding, nothing_wrong, summary
from ringcomm.tools.trace.job import Group, Job, local
from ringcomm.tools.trace.perfetto import Slice, lasted, slices_of
from ringcomm.tools.trace.waiting import stops

BARS = 20_000  # in a timeline: a browser draws no more in a moment
# The kinds of things that a rank does, with the name of the color; see svg.MEANINGS.
KINDS = {
    "queued": "queued",
    "waits for other ranks": "waits",
    "moves bytes": "moves",
    "not ended, or failed": "wrong",
}
SHOWN = 20  # the newest operations of a rank, before the reader zooms out
FEW = 2  # hosts that a title names


def write_page(job: Job, findings: list[Finding], path: Path, last: int = 100) -> None:
    """Write the page. Raises OSError, and ValueError where `ringcomm[tools]` is missing."""
    page = Page(title_of(job), findings[0].sentence if findings else nothing_wrong(job))
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
        page.drawing("timeline", timeline(job, drawn), TIMELINE)
    else:
        page.text("No operation was recorded.")
    waits = heat(job)
    if waits["most"]:
        page.heading("Waits")
        page.drawing("heat", waits, WAITS)
    page.heading("Records")
    for text in [summary(job), *job.remarks]:
        page.text(text)
    page.write(path)


TIMELINE = (
    "The newest operations of each rank. The time of a bar is exact; its waits stand at its "
    "beginning, for only their sum is recorded. Drag to zoom, double click to see all."
)
WAITS = (
    "How long each rank waited for each other one in all collectives, in total. What had not "
    "ended counts until the process was last seen, as a wait for the ranks that had not called."
)


def title_of(job: Job) -> str:
    """Return "train.py, 8 ranks on node0 and node1, 2026-11-23 12:03 UTC"."""
    lines = (operation.line for record in job.records for operation in record.operations)
    files = Counter(line.partition(":")[0].rpartition("/")[2] for line in lines if line)
    program = files.most_common(1)[0][0] if files else "A job"
    hosts = sorted({*job.hosts().values()})
    where = " and ".join(hosts) if len(hosts) <= FEW else f"{len(hosts)} hosts"
    begun = min((job.at(record, record.steady_ns) for record in job.records), default=0)
    when = f", {local(begun):%Y-%m-%d %H:%M %Z}" if begun else ""
    return f"{program}, {counted(len(job.ranks), 'rank')} on {where}{when}"


# ---- the timeline


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


def timeline(job: Job, drawn: dict[int, list[Slice]]) -> dict[str, Any]:
    """Return the bars of each kind: the row of the rank, begin and length in ns, and the call."""
    rows = {rank: row for row, rank in enumerate(job.ranks)}
    end = max(piece.ended for slices in drawn.values() for piece in slices)
    begin = min(slices[-SHOWN:][0].called for slices in drawn.values() if slices)
    # Operations that have not ended go on after all that is known.
    beyond = max((end - begin) // 20, 1)
    calls: dict[str, int] = {}
    bars: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for rank, slices in drawn.items():
        for piece in slices:
            name = f"{piece.operation} of group {piece.group.name}"
            call = calls.setdefault(name, len(calls))
            longer = beyond if piece.operation.ended_ns is None else 0
            for kind, start, stop in parts(piece):
                bars[kind].append([rows[rank], start, stop + longer - start, call])
    kinds = [
        {"name": kind, "color": color, "hatched": color == "wrong", "bars": bars[kind]}
        for kind, color in KINDS.items()
        if bars[kind]
    ]
    view, whole = [begin, end + beyond], [0, end + beyond]
    notes = [[rows[rank], words] for rank, words in notes_of(job).items()]
    return {
        "ranks": job.ranks, "kinds": kinds, "calls": list(calls), "view": view, "whole": whole,
        "notes": notes,
    }  # fmt: skip


def notes_of(job: Job) -> dict[int, str]:
    """Say in the row of a rank that others wait for why it is empty."""
    notes = dict.fromkeys(job.silent, "left no record")
    inside = {
        group.ranks[rank]
        for group in job.groups
        for calls in group.calls.values()
        for rank, operation in calls.items()
        if not operation.is_done
    }
    for stop in stops(job):
        for rank in stop.missing:
            last = stop.group.last.get(rank)
            since = f" since {last.name}" if last else " so far"
            if stop.group.ranks[rank] not in inside:
                notes.setdefault(stop.group.ranks[rank], f"no call{since}")
    return notes


# ---- the heat map


def heat(job: Job) -> dict[str, Any]:
    """Return the waits of each rank (down) for each peer (across), in ns."""
    ranks = job.ranks
    place = {rank: i for i, rank in enumerate(ranks)}
    waits: list[list[int | None]] = [[None] * len(ranks) for _ in ranks]

    def add(rank: int, peer: int, ns: int) -> None:
        own = waits[place[rank]]
        own[place[peer]] = (own[place[peer]] or 0) + ns

    for record in job.records:
        for peer, ns in enumerate(record.waits_ns):
            if peer != record.rank:
                add(record.global_rank, record.global_ranks[peer], ns)
    for group, record, operation, peers in unfinished(job):
        called = job.called(record, operation)
        ns = max(lasted(job, record, operation) - called - operation.waited_ns, 0)
        for peer in peers:
            add(record.global_rank, group.ranks[peer], ns)
    most = max((ns or 0 for own in waits for ns in own), default=0)
    cells = [[None if ns is None else int(float(f"{ns:.3g}")) for ns in own] for own in waits]
    return {"ranks": ranks, "cells": cells, "most": int(float(f"{most:.3g}"))}


def unfinished(job: Job) -> list[tuple[Group, GroupRecord, Operation, list[int]]]:
    """Return the waits that have not ended: whose, in what, and for which ranks of the group."""
    some = []
    for stop in stops(job):
        for rank in stop.waiting:
            call = stop.group.calls[stop.sequence][rank]
            if stop.missing and call.ended_ns is None:
                some.append((stop.group, stop.group.records[rank], call, stop.missing))
    return some
