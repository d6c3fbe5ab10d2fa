"""The report: as text, as JSON and as a page with heat maps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringcomm._text import ranks_text, show_rate, show_seconds, spans
from ringcomm.tools import load
from ringcomm.tools.doctor import turns
from ringcomm.tools.doctor.evidence import (
    BUSY,
    TOO_FEW,
    Evidence,
    asker,
    doubt,
    machines,
    share_of,
    shares_memory,
    span_of,
)
from ringcomm.tools.doctor.facts import Facts
from ringcomm.tools.doctor.findings import NOTE, Finding, status_of, upper_first
from ringcomm.tools.doctor.measure import Pair
from ringcomm.tools.page import COLORS, GREY, Page, heat_height, heat_map

MEMORY, TCP, SELF, NONE = "shared memory", "TCP", "self", "none"
KINDS = {NONE: COLORS[1], SELF: GREY, MEMORY: COLORS[0], TCP: COLORS[4]}
MOST_COLUMNS = 16  # ranks of a matrix in a terminal
MOST_LINES = 24  # pairs that are listed
VERDICTS = ["fine", "it works, but something is bad", "it cannot work"]
ABOUT = (
    "Figures are this program's own, over the memory and network that ringcomm uses: "
    "they compare pairs, and ringcomm is faster."
)

CROWDED = "There was no time for one pair after the other: several of a host were measured at once."
FAST = "Yellow is fast, and dark is slow."
# Above the map, so that a narrow window leaves the map its width.
BAR = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "thickness": 12, "len": 1.0}
BAR |= {"ticklabeloverflow": "allow"}
Matrix = list[list[float | None]]


def transport(evidence: Evidence, rank: int, peer: int) -> tuple[str, str]:
    """Return how two ranks talk, and why; `way` says over which addresses."""
    if rank == peer:
        return SELF, "one process"
    low, high = min(rank, peer), max(rank, peer)
    asks, answers = asker(evidence.links, low, high)
    if asks < 0:
        return NONE, "no address answers, in either direction"
    link = evidence.links[asks, answers]
    if link.memory == "shared":
        return MEMORY, "one boot id, network namespace and user; memory was mapped"
    return TCP, shares_memory(evidence.ranks[low], evidence.ranks[high]) or link.memory


def way(evidence: Evidence, rank: int, peer: int) -> str:
    """Return which rank connects to which address, where two ranks use TCP."""
    asks, answers = asker(evidence.links, min(rank, peer), max(rank, peer))
    link = evidence.links.get((asks, answers))
    if link is None or not link.reaches:
        return ""
    return f"rank {asks} connects to {evidence.ranks[answers].addresses[link.chosen]}"


def matrices(evidence: Evidence) -> dict[str, Matrix]:
    """Return latency (seconds) and bandwidth (bytes a second) from each rank to each.

    None: not measured, or on too few cores to mean anything. Rows send, columns receive; they are
    in the order of the ranks found.
    """
    ranks = sorted(evidence.ranks)
    place = {rank: index for index, rank in enumerate(ranks)}
    empty: list[Matrix] = [[[None] * len(ranks) for _ in ranks] for _ in range(2)]
    latency, bandwidth = empty
    for pair in evidence.pairs.values():
        row, column = (place.get(rank, -1) for rank in pair.ranks)
        if min(row, column) < 0 or doubt(evidence, pair.ranks) == TOO_FEW:
            continue
        latency[row][column] = latency[column][row] = pair.latency or None
        bandwidth[row][column] = pair.forth or None
        bandwidth[column][row] = pair.back or None
    return {"latency": latency, "bandwidth": bandwidth}


# ---- text


def text(evidence: Evidence, findings: list[Finding]) -> str:
    lines = [headline(evidence, findings), ""]
    for finding in findings:
        lines += wrapped(f"{finding.severity}: {finding.sentence}", "", "  ")
        lines += wrapped(finding.remedy, "  -> ", "     ") if finding.remedy else []
    lines += [""] if findings else []
    for ranks in machines(evidence).values():
        lines += host_lines(evidence.ranks[ranks[0]], ranks)
        lines += wrapped(others_say(evidence, ranks), "  others      ", " " * 14)
    lines += store_lines(evidence)
    if len(evidence.ranks) > 1:
        lines += ["", *pair_lines(evidence), "", *matrix_lines(evidence)]
    return "\n".join(lines)


def headline(evidence: Evidence, findings: list[Finding]) -> str:
    hosts, count = len(machines(evidence)), len(evidence.ranks)
    there = f"{count} of {evidence.world} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    if evidence.alone:
        there = "this host alone (start it as the job is, to examine the network)"
    return f"ringcomm doctor: {there}: {VERDICTS[status_of(findings)]}"


def wrapped(words: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        words, 100, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )


def gibibytes(count: int) -> str:
    return "unknown" if count < 0 else f"{count / (1 << 30):.1f} GiB"


def facts_of(facts: Facts) -> list[tuple[str, str]]:
    """Return what a host is like, as names and values."""
    limit = f", cgroup {gibibytes(facts.memory_used)} of {gibibytes(facts.memory_limit)}"
    told = facts.cuda
    gpus = ", ".join(told.get("gpus", [])) or "no GPU"
    cuda = f"{gpus}; torch has {'CUDA ' + told['torch'] if told.get('torch') else 'no CUDA'}"
    interfaces = ", ".join(
        f"{interface['name']} {interface['address']} (MTU {interface['mtu']} bytes)"
        for interface in facts.interfaces
        if interface["up"] and not interface["loopback"]
    )
    return [
        ("cores", f"{facts.cores:g}"),
        ("memory", f"{gibibytes(facts.memory_available)} free"
         + (limit if facts.memory_limit >= 0 else "")),
        ("memfd", facts.memfd_error or "works"),
        ("ulimit -n", f"{facts.descriptors_limit} ({facts.descriptors_open} in use)"),
        ("interfaces", interfaces or "loopback alone"),
        ("CUDA", cuda),
        ("versions", f"ringcomm {facts.ringcomm} build {facts.build}, torch {facts.torch}, "
         f"Python {facts.python}, Linux {facts.kernel}"),
        ("settings", " ".join(f"{name}={value}" for name, value in facts.settings.items())
         or "defaults"),
    ]  # fmt: skip


def others_say(evidence: Evidence, ranks: list[int]) -> str:
    """Say what other processes of a host did meanwhile; nothing where nothing was measured."""
    if len(evidence.ranks) < 2:
        return ""
    others, cores = span_of(evidence, ranks).others, evidence.ranks[ranks[0]].cores
    return "unknown" if others is None else f"used {others:.2g} of {cores:g} cores meanwhile"


def host_lines(facts: Facts, ranks: list[int]) -> list[str]:
    lines = [f"{facts.host}: {ranks_text(ranks)}"]
    for name, value in facts_of(facts):
        lines += wrapped(value, f"  {name:<12}", " " * 14)
    return lines


def store_lines(evidence: Evidence) -> list[str]:
    if evidence.alone:
        return []
    reached = evidence.reached
    told = ", ".join(f"{address} {answer}" for address, answer in reached.answers.items())
    return [f"store {reached.name}:{reached.port}: {told or reached.error or 'not tried'}"]


def pair_lines(evidence: Evidence) -> list[str]:
    """Say how pairs talk, those with the same reason together."""
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for rank in sorted(evidence.ranks):
        for peer in sorted(evidence.ranks):
            if rank < peer:
                kind, why = transport(evidence, rank, peer)
                groups.setdefault((kind, why), []).append((rank, peer))
    lines = ["pairs:"]
    for (kind, why), pairs in list(groups.items())[:MOST_LINES]:
        some = " ".join(f"{rank}-{peer}" for rank, peer in pairs[:8])
        more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
        lines += wrapped(f"{kind}: {some}{more} ({why})", "  ", "    ")
    if len(groups) > MOST_LINES:
        lines.append(f"  and {len(groups) - MOST_LINES} more kinds: --json has them all")
    for (rank, peer), link in sorted(evidence.links.items())[: MOST_LINES * 4]:
        failed = {at: answer for at, answer in link.answers.items() if answer != "connected"}
        for address, answer in failed.items():
            lines.append(f"  rank {rank} to rank {peer} at {address}: {answer}")
    return lines


def matrix_lines(evidence: Evidence) -> list[str]:
    ranks = sorted(evidence.ranks)
    tables = matrices(evidence)
    if len(ranks) > MOST_COLUMNS:
        return [*summary(evidence), "--html draws all pairs, --json lists them"]
    lines = []
    for name, unit, scale, digits in (
        ("latency", "µs, half of a round trip", 1e6, 1),
        ("bandwidth", "MB/s, rows send", 1e-6, 0),
    ):
        lines.append(f"{name} ({unit})")
        lines.append("  rank" + "".join(f"{rank:>8}" for rank in ranks))
        for rank, row in zip(ranks, tables[name], strict=True):
            cells = ["-" if cell is None else f"{cell * scale:.{digits}f}" for cell in row]
            marks = [doubt(evidence, (rank, other)) if rank != other else "" for other in ranks]
            cells = [
                "few" if mark == TOO_FEW else cell + "?" * (mark == BUSY and cell != "-")
                for cell, mark in zip(cells, marks, strict=True)
            ]
            cells[ranks.index(rank)] = "."
            lines.append(f"  {rank:>4}" + "".join(f"{cell:>8}" for cell in cells))
    return [*lines, *marks_say(evidence), *wrapped(ABOUT, "", "")]


def marks_say(evidence: Evidence) -> list[str]:
    """Say what the marks in cells mean, where there are any, and how pairs were measured."""
    marks = {doubt(evidence, pair.ranks) for pair in evidence.pairs.values()}
    lines = []
    if TOO_FEW in marks:
        lines.append("few: too few cores, as the host has less than one for each rank measured")
    if BUSY in marks:
        lines.append("?: in doubt, because other processes were busy meanwhile")
    if not turns.take_turns([*machines(evidence).values()]):
        lines.append(CROWDED)
    return lines


def summary(evidence: Evidence) -> list[str]:
    lines = []
    for kind in (MEMORY, TCP):
        pairs = [
            pair for pair in evidence.pairs.values()
            if transport(evidence, *pair.ranks)[0] == kind
            and doubt(evidence, pair.ranks) != TOO_FEW
        ]  # fmt: skip
        times = sorted(pair.latency for pair in pairs if pair.latency)
        rates = sorted(min(pair.forth, pair.back) for pair in pairs if pair.forth and pair.back)
        if times and rates:
            lines.append(
                f"{kind}: {len(pairs)} pairs, latency {show_seconds(times[0])} to "
                f"{show_seconds(times[-1])}, bandwidth {show_rate(rates[0])} to "
                f"{show_rate(rates[-1])}"
            )
    return [*lines, *marks_say(evidence), *wrapped(ABOUT, "", "")]


# ---- JSON


def as_json(evidence: Evidence, findings: list[Finding]) -> dict[str, Any]:
    """Return all that is known. Times are in seconds, rates in bytes a second, sizes in bytes."""
    return {
        "status": status_of(findings),
        "world": evidence.world,
        "seconds": evidence.seconds,
        "findings": [asdict(finding) for finding in findings],
        "hosts": [
            {"host": evidence.ranks[ranks[0]].host, "ranks": ranks,
             "cores": evidence.ranks[ranks[0]].cores,
             "others_cores": span_of(evidence, ranks).others,
             "others_share": share_of(evidence, ranks)}
            for ranks in machines(evidence).values()
        ],
        "limit_share": load.MOST,
        "absent": sorted(set(range(evidence.world)) - set(evidence.ranks)),
        "store": asdict(evidence.reached),
        "ranks": [facts.as_dict() for _, facts in sorted(evidence.ranks.items())],
        "links": [
            {"from": rank, "to": other, **asdict(link)}
            for (rank, other), link in sorted(evidence.links.items())
        ],
        "pairs": [pair_json(evidence, rank, other) for rank in sorted(evidence.ranks)
                  for other in sorted(evidence.ranks) if rank <= other],
    }  # fmt: skip


def pair_json(evidence: Evidence, rank: int, peer: int) -> dict[str, Any]:
    kind, why = transport(evidence, rank, peer)
    pair = (
        evidence.pairs.get((rank, peer)) or evidence.pairs.get((peer, rank)) or Pair((rank, peer))
    )
    told = {**pair.as_dict(), "transport": kind, "why": why, "way": way(evidence, rank, peer)}
    told["doubt"] = doubt(evidence, (rank, peer)) if rank != peer and pair.latency else ""
    if told["doubt"] == TOO_FEW:
        told |= {"latency": 0.0, "forth": 0.0, "back": 0.0}
    return told


# ---- the page


def page(evidence: Evidence, findings: list[Finding], path: Path) -> None:
    """Write the page. Raises ValueError where `ringcomm[tools]` is missing, and OSError."""
    made = Page("ringcomm doctor", upper_first(headline(evidence, findings).partition(": ")[2]))
    made.heading("Findings")
    serious = [finding for finding in findings if finding.severity != NOTE]
    if not serious:
        made.text("Nothing is wrong.")
    for finding in findings:
        made.text(f"{finding.severity.capitalize()}: {finding.sentence} {remedy(finding)}")
    if len(evidence.ranks) > 1:
        made.heading("Every pair of ranks")
        made.text(ABOUT)
        marks = {doubt(evidence, pair.ranks) for pair in evidence.pairs.values()}
        if BUSY in marks:
            words = "A question mark at a figure says that other processes were busy meanwhile."
            made.text(words + " Point at a cell to see its figure." * (len(evidence.ranks) > 4))
        if not turns.take_turns([*machines(evidence).values()]):
            made.text(CROWDED)
        for figure, caption, height in figures(evidence):
            made.figure(figure, caption, height)
        rows = [
            [
                f"ranks {min(pair['ranks'])} and {max(pair['ranks'])}",
                *(pair[name] for name in ("transport", "why", "way")),
            ]
            for pair in as_json(evidence, findings)["pairs"]
            if pair["transport"] != SELF
        ]
        made.table(["pair", "transport", "why", "way"], rows[:200])
        if len(rows) > 200:
            made.text(f"{len(rows) - 200} more pairs: --json lists them all.")
    made.heading("Hosts")
    hosts = [(evidence.ranks[ranks[0]], ranks) for ranks in machines(evidence).values()]
    columns = [
        [("ranks", spans(ranks)), *facts_of(facts), ("others", others_say(evidence, ranks) or "-")]
        for facts, ranks in hosts
    ]
    rows = [[cells[0][0], *(value for _, value in cells)] for cells in zip(*columns, strict=True)]
    made.table(["", *(facts.host for facts, _ in hosts)], rows)
    made.write(path)


def remedy(finding: Finding) -> str:
    """Return what to do; with a note, what it means."""
    if finding.severity == NOTE:
        return f"{upper_first(finding.remedy)}." if finding.remedy else ""
    return f"Remedy: {finding.remedy}." if finding.remedy else ""


def figures(evidence: Evidence) -> list[tuple[dict[str, Any], str, int]]:
    """Return the heat maps: transport, latency and bandwidth, with captions and heights."""
    ranks = sorted(evidence.ranks)
    height = heat_height(ranks)
    cells = [[transport(evidence, rank, other)[0] for other in ranks] for rank in ranks]
    numbers = [[[*KINDS].index(kind) for kind in row] for row in cells]
    caption = "Transport of each pair. 'none': the ranks do not reach one another."
    drawn = [(heat(ranks, numbers, steps(), cells), caption, height)]
    for name, show, what in (
        ("latency", show_seconds, "Half of a round trip of a small message, median"),
        ("bandwidth", show_rate, "The fastest burst; rows send, columns receive"),
    ):
        table = matrices(evidence)[name]
        words = [
            [
                cell_says(evidence, (rank, other), None if cell is None else show(cell))
                for other, cell in zip(ranks, row, strict=True)
            ]
            for rank, row in zip(ranks, table, strict=True)
        ]
        scaled = [[None if cell is None else math.log10(cell) for cell in row] for row in table]
        known = [cell for row in scaled for cell in row if cell is not None]
        # Yellow is fast in both: a short latency, and a high bandwidth.
        bar = ticks(known, show) | {"reversescale": name == "latency"}
        caption = f"{name.capitalize()}. {what}. {FAST} Empty cells were not measured"
        few = TOO_FEW in {doubt(evidence, pair.ranks) for pair in evidence.pairs.values()}
        caption += ", or on too few cores." if few else "."
        drawn.append((heat(ranks, scaled, bar, words), caption, height))
    return drawn


def cell_says(evidence: Evidence, pair: tuple[int, int], figure: str | None) -> str:
    if figure is None:
        return ""
    return f"{figure}?" if doubt(evidence, pair) else figure


def heat(ranks: list[int], values: Any, scale: dict[str, Any], words: list[list[str]]) -> Any:
    """Return a heat map; cells of few ranks are labelled."""
    look = {"text": words, "hovertemplate": "rank %{y} to rank %{x}: %{text}<extra></extra>"}
    if len(ranks) <= 4:
        look["texttemplate"] = "%{text}"
    return heat_map(ranks, values, ("from rank", "to rank"), look | scale)


def steps() -> dict[str, Any]:
    """Return a scale of separate colors, whose lightness differs too."""
    colors, count = list(KINDS.values()), len(KINDS)
    scale = [[edge / count, colors[i]] for i in range(count) for edge in (i, i + 1)]
    bar = {**BAR, "tickvals": list(range(count)), "ticktext": list(KINDS)}
    return {"colorscale": scale, "zmin": -0.5, "zmax": count - 0.5, "colorbar": bar}


def ticks(logarithms: list[float], show: Callable[[float], str]) -> dict[str, Any]:
    """Return a scale for values of which these are the logarithms, with ticks at 1, 2 and 5."""
    low, high = min(logarithms, default=0.0), max(logarithms, default=1.0)
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)
    values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(value for value in values if math.log10(value) <= low)
    last = min(value for value in values if math.log10(value) >= high and value > first)
    shown = [value for value in values if first <= value <= last]
    if len(shown) > 5:  # by tens, so that they have room
        shown = [value for value in shown if f"{value:e}".startswith("1.0")]
    bar = {
        **BAR,
        "tickvals": [math.log10(value) for value in shown],
        "ticktext": [show(value) for value in shown],
    }
    ends = {"zmin": math.log10(first) - 1e-6, "zmax": math.log10(last) + 1e-6}
    return {"colorbar": bar, **ends}
