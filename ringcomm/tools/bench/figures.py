"""The page of a report: what was measured, drawn by size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ringcomm._text import show_seconds, show_size
from ringcomm.tools.bench import ddp, traits, trust
from ringcomm.tools.bench.sample import Facts, peer_of
from ringcomm.tools.page import COLORS, DASHES, GREY, Page

Trace = dict[str, Any]
Value = Callable[[Facts, str], float]  # a sample's, at its "median", "low" or "high"

MOST_TICKS = 6
METHOD = (
    "Lines are medians of {rounds} rounds, in which the backends take turns; bands reach from the "
    "lowest round to the highest. A call takes as long as on its slowest rank. Bus bandwidth is "
    "that of nccl-tests, in 10⁹ bytes a second. Sizes are the bytes of the larger of a rank's two "
    "buffers; 1K is 1024 bytes."
)
TABLE = (
    "“place” says whether a call is in place or out of it, and “vs” how many times as fast it is. "
    "“copies” is the part of the time that the memory copies of ringcomm's plan take alone. "
    "“wrong” counts elements on all ranks."
)
ROOM = 1.5  # times the highest bandwidth, up to which that of copies is drawn
HOLLOW = 100  # is added to the number of a marker
DOUBTED = " Hollow markers are in doubt: the table says why."


def write(path: Path, kind: str, body: dict[str, Any]) -> None:
    """Write the page; `body` is what JSON has. Raises ValueError and OSError."""
    page = page_of_steps(body) if kind == ddp.NAME else page_of_collectives(body)
    page.heading("The machine")
    page.table(["what", "value"], [[key, text_of(value)] for key, value in body["machine"].items()])
    page.write(path)


def text_of(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value)))
    return "none" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- collectives


def page_of_collectives(body: dict[str, Any]) -> Page:
    samples: list[Facts] = body["samples"]
    names = ", ".join(dict.fromkeys(sample["collective"] for sample in samples))
    backends = list(dict.fromkeys(sample["backend"] for sample in samples))
    page = Page(f"{names}: {' and '.join(backends)}", lead(samples, backends))
    page.text(METHOD.format(rounds=body["options"]["rounds"]))
    if "load" in body:
        doubtful = sum(doubted(sample) for sample in samples)
        page.text(trust.load_says(body["load"], doubtful, len(samples)))
    if "average" in body and (line := trust.averages_say(body["average"])):
        page.text(f"{line.removeprefix('# ')}.".replace("Avg", "Average", 1))
    for some in groups(samples):
        add_group(page, some, backends)
    return page


def groups(samples: Iterable[Facts]) -> list[list[Facts]]:
    """Return the samples of one table each."""
    tables: dict[tuple[Any, ...], list[Facts]] = {}
    for sample in samples:
        key = tuple(sample[k] for k in ("collective", "type", "redop", "ranks", "device"))
        tables.setdefault(key, []).append(sample)
    return list(tables.values())


def lead(samples: Sequence[Facts], backends: Sequence[str]) -> str:
    """Say the one thing that matters most: wrong results, or how the first backend compares."""
    wrong = [sample for sample in samples if sample["wrong"]]
    if wrong:
        bad = wrong[0]
        return (
            f"{bad['backend']} gave {bad['wrong']} wrong elements in {bad['collective']} of "
            f"{in_bytes(bad)}; {len(wrong)} of {len(samples)} measurements are wrong."
        )
    peer = peer_of(backends)
    first = next((backend for backend in backends if backend != peer), None)
    ratios = [
        (ratio, sample)
        for some in groups(samples)
        for sample in drawn(some)
        if sample["backend"] == first and not sample["loaded"]
        if (ratio := ratio_to(peer, some, sample)) is not None
    ]
    if not ratios:
        looked = any(sample["wrong"] is not None for sample in samples)
        none = "none with a wrong element" if looked else "whose results are not compared"
        return f"{len(samples)} measurements, {none}."
    low, high = min(ratios, key=lambda f: f[0]), max(ratios, key=lambda f: f[0])
    middle = statistics.median(ratio for ratio, _ in ratios)
    return (
        f"{first} is {middle:.3g} times as fast as {peer} (median of {len(ratios)} figures): from "
        f"{low[0]:.3g} times at {where(low[1])} to {high[0]:.3g} times at {where(high[1])}."
    )


def where(sample: Facts) -> str:
    return f"{sample['collective']} of {in_bytes(sample)} with {sample['ranks']} ranks"


def in_bytes(sample: Facts) -> str:
    """Return "1K bytes"."""
    return f"{show_size(sample['bytes'])} bytes"


def drawn(samples: Iterable[Facts]) -> list[Facts]:
    """Return those that have figures."""
    return [sample for sample in samples if not sample["refused"]]


def add_group(page: Page, samples: list[Facts], backends: Sequence[str]) -> None:
    first = samples[0]
    op = "" if first["redop"] == "none" else f" {first['redop']}"
    what = f"{first['collective']}{op}, {first['type']}, {first['ranks']} ranks, {first['device']}"
    page.heading(what)
    shown = [sample for sample in drawn(samples) if sample["bytes"]]
    if len({sample["bytes"] for sample in shown}) > 1:
        bound = bound_of(shown)
        copies = bound_busbw(bound, shown)
        doubt = DOUBTED * any(map(doubted, shown))
        page.figure(
            figure(shown, backends, time_of, "time a call", bound),
            f"Time a call of {what}; both axes are logarithmic." + bound_says(bound) + doubt,
        )
        page.figure(
            figure(shown, backends, busbw_of, "bus bandwidth in GB/s", near(copies, shown)),
            f"Bus bandwidth of {what}." + algorithms_say(shown) + far_says(copies, shown) + doubt,
        )
        for peer in peers(backends):
            ratios = ratio_traces(shown, backends, peer)
            if ratios["data"]:
                page.figure(ratios, f"How many times as fast as {peer} they are: {what}.")
    page.table(*table(samples, backends))
    page.text(TABLE)


def peers(backends: Sequence[str]) -> list[str]:
    """Return those with which ringcomm is compared; without it, the usual one."""
    if "ringcomm" in backends:
        return [backend for backend in backends if backend != "ringcomm"]
    return [peer] if (peer := peer_of(backends)) else []


def curves(
    samples: Sequence[Facts], backends: Sequence[str]
) -> list[tuple[str, Trace, list[Facts]]]:
    """Return (name, look, samples by size) of each backend, place and load."""
    drawn_curves = []
    kinds = list(dict.fromkeys((s["loaded"], s["in_place"]) for s in samples))
    several = len({in_place for _, in_place in kinds}) > 1
    for number, backend in enumerate(backends):
        for dash, (loaded, in_place) in zip(DASHES, kinds, strict=False):
            some = [
                sample
                for sample in samples
                if (sample["backend"], sample["loaded"], sample["in_place"])
                == (backend, loaded, in_place)
            ]
            if not some:
                continue
            name = backend + (", in place" if in_place else ", out of place") * several
            line = {"color": COLORS[number % len(COLORS)], "dash": dash, "width": 2}
            marker = {"symbol": number % len(COLORS), "size": 7}
            look = {"line": line, "marker": marker, "mode": "lines+markers", "type": "scatter"}
            ordered = sorted(some, key=lambda s: int(s["bytes"]))
            drawn_curves.append((name + ", cores busy" * loaded, look, ordered))
    return drawn_curves


def figure(
    samples: Sequence[Facts], backends: Sequence[str], value: Value, title: str, bound: list[Any]
) -> dict[str, Any]:
    """Draw a value against size: a line a curve with its band, and the bound."""
    traces: list[Trace] = []
    for name, look, some in curves(samples, backends):
        sizes = [sample["bytes"] for sample in some]
        low, high = ([value(s, end) for s in some] for end in ("low", "high"))
        color = look["line"]["color"]
        x, y = sizes + sizes[::-1], high + low[::-1]
        band = {"type": "scatter", "x": x, "y": y, "fill": "toself", "fillcolor": f"{color}33"}
        traces.append(band | {"mode": "none", "hoverinfo": "skip", "showlegend": False})
        middle = [value(s, "median") for s in some]
        marks = [look["marker"]["symbol"] + HOLLOW * doubted(sample) for sample in some]
        look = look | {"marker": look["marker"] | {"symbol": marks}}
        said = [hover(sample) for sample in some]
        traces.append(look | {"x": sizes, "y": middle, "name": name} | hovering(said))
    if bound:
        line = {"color": GREY, "dash": "dot", "width": 3}
        traces.append({"type": "scatter", "mode": "lines", "line": line, "name": "copies alone",
                       "x": [size for size, _ in bound], "y": [y for _, y in bound]})  # fmt: skip
    axis: dict[str, Any] = {"title": {"text": title}}
    if value is time_of:
        axis |= time_axis([value(s, e) for s in samples for e in ("low", "high")])
    else:
        axis["range"] = [0, 1.05 * max(most_of(samples), *(y for _, y in bound), 0.0)]
    layout = {"xaxis": size_axis(samples), "yaxis": axis, "hovermode": "closest"}
    return {"data": traces, "layout": layout}


def hovering(texts: list[str]) -> Trace:
    """Return the part of a trace that shows a text at each point."""
    return {"text": texts, "hovertemplate": "%{text}<extra>%{fullData.name}</extra>"}


def hover(sample: Facts) -> str:
    by = f" by {sample['algorithm']}" if sample["algorithm"] else ""
    return (
        f"{in_bytes(sample)}{by}: {show_seconds(sample['median_s'])} "
        f"({show_seconds(sample['low_s'])} to {show_seconds(sample['high_s'])}), "
        f"{sample['busbw_gb_per_s']:.3g} GB/s"
    )


def doubted(sample: Facts) -> bool:
    return bool(sample.get("doubts"))


def time_of(sample: Facts, end: str) -> float:
    return float(sample[f"{end}_s"])


def busbw_of(sample: Facts, end: str) -> float:
    return float(sample["busbw_gb_per_s"] * sample["median_s"] / sample[f"{end}_s"])


def size_axis(samples: Sequence[Facts]) -> dict[str, Any]:
    """Return a logarithmic axis of bytes, with some of the sizes as its ticks."""
    sizes = sorted({int(sample["bytes"]) for sample in samples})
    shown = sizes[:: math.ceil(len(sizes) / MOST_TICKS)]
    labels = [show_size(size) for size in shown]
    return {"type": "log", "title": {"text": "bytes"}, "tickvals": shown, "ticktext": labels,
            "tickangle": 0}  # fmt: skip


def time_axis(seconds: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis of times: "10 µs", "1 ms"."""
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    ticks = [10.0**power for power in range(low, high + 1)]
    labels = [show_seconds(tick) for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": labels, "range": [low, high]}


def bound_of(samples: Sequence[Facts]) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of what a call's copies alone take, by size."""
    points = [(int(s["bytes"]), statistics.median(s["copies_s"])) for s in samples if s["copies_s"]]
    return sorted(points)


def bound_busbw(
    bound: list[tuple[int, float]], samples: Sequence[Facts]
) -> list[tuple[int, float]]:
    first = samples[0]
    return [
        (size, traits.bandwidths(first["collective"], size, seconds, first["ranks"])[1])
        for size, seconds in bound
        if seconds > 0
    ]


def most_of(samples: Sequence[Facts]) -> float:
    """Return the highest bandwidth of any round."""
    return max(busbw_of(sample, end) for sample in samples for end in ("low", "median"))


def near(copies: list[tuple[int, float]], samples: Sequence[Facts]) -> list[tuple[int, float]]:
    """Return the bandwidths of copies that leave the measured ones most of the figure."""
    most = ROOM * most_of(samples)
    return [(size, rate) for size, rate in copies if rate <= most]


def far_says(copies: list[tuple[int, float]], samples: Sequence[Facts]) -> str:
    far = len(copies) - len(near(copies, samples))
    sizes = "one size" if far == 1 else f"{far} sizes"
    return f" The copies alone are far above at {sizes}, and not drawn there." if far else ""


def bound_says(bound: list[tuple[int, float]]) -> str:
    if not bound:
        return ""
    return (
        " The dotted line is what the memory copies of ringcomm's plan take alone, measured in "
        "the same rounds. Calls whose data stays in caches may be faster."
    )


def algorithms_say(samples: Sequence[Facts]) -> str:
    """Say by which algorithm it runs which sizes: "by direct from 8 bytes on, by ring from 16K"."""
    by_size = {int(s["bytes"]): str(s["algorithm"]) for s in samples if s["algorithm"]}
    sizes = sorted(by_size)
    changes = [i for i in range(len(sizes)) if i == 0 or by_size[sizes[i]] != by_size[sizes[i - 1]]]
    if not sizes:
        return ""
    if len(changes) == 1:
        return f" ringcomm runs it by {by_size[sizes[0]]} at every size."
    parts = [f"{by_size[sizes[i]]} from {show_size(sizes[i])} bytes on" for i in changes]
    return f" ringcomm runs it by {', by '.join(parts)}."


def ratio_to(peer: str | None, samples: Sequence[Facts], sample: Facts) -> float | None:
    """Return how many times as fast the sample is as the peer's; None where there is none."""
    keys = ("bytes", "loaded", "in_place")
    for other in drawn(samples):
        if other["backend"] == peer and all(other[key] == sample[key] for key in keys):
            return float(other["median_s"] / sample["median_s"])
    return None


def ratio_traces(samples: Sequence[Facts], backends: Sequence[str], peer: str) -> dict[str, Any]:
    traces = []
    for name, look, some in curves(samples, backends):
        ratios = [(sample, ratio_to(peer, samples, sample)) for sample in some]
        points = [(s, ratio) for s, ratio in ratios if ratio is not None]
        if some[0]["backend"] == peer or not points:
            continue
        said = [f"{in_bytes(s)}: {ratio:.3g} times" for s, ratio in points]
        x, y = [s["bytes"] for s, _ in points], [ratio for _, ratio in points]
        traces.append(look | {"x": x, "y": y, "name": name, "showlegend": True} | hovering(said))
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    even = line | {"line": {"color": GREY, "dash": "dot", "width": 2}}
    axis = {"title": {"text": f"times as fast as {peer}"}, "rangemode": "tozero"}
    layout = {"xaxis": size_axis(samples), "yaxis": axis, "shapes": [even], "hovermode": "closest"}
    return {"data": traces, "layout": layout}


def table(samples: Sequence[Facts], backends: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the figures themselves."""
    peer = peer_of(backends)
    some_doubted = any(map(doubted, samples))
    columns = ["bytes", "backend", "algorithm", "place", "time", "lowest", "highest"]
    columns += ["algbw GB/s", "busbw GB/s", "wrong", "copies"] + [f"vs {peer}"] * (peer is not None)
    columns += ["doubt"] * some_doubted
    rows = []
    for sample in sorted(samples, key=lambda s: int(s["bytes"])):
        place = "in" if sample["in_place"] else "out"
        row = [show_size(sample["bytes"]), sample["backend"], sample["algorithm"] or "-"]
        row.append(place + ", busy" * sample["loaded"])
        if sample["refused"]:
            row[2] = f"refused: {sample['refused']}"
            rows.append(row + ["-"] * (len(columns) - len(row)))
            continue
        row += [show_seconds(sample[f"{end}_s"]) for end in ("median", "low", "high")]
        row += [f"{sample[f'{name}_gb_per_s']:.3g}" for name in ("algbw", "busbw")]
        row.append("-" if sample["wrong"] is None else str(sample["wrong"]))
        row.append(f"{sample['of_its_copies']:.0%}" if sample["of_its_copies"] else "-")
        if peer is not None:
            ratio = None if sample["backend"] == peer else ratio_to(peer, samples, sample)
            row.append("-" if ratio is None else f"{ratio:.3g}\N{MULTIPLICATION SIGN}")
        row += [", ".join(sample.get("doubts", [])) or "-"] * some_doubted
        rows.append(row)
    return columns, rows


# ---- steps of training


def page_of_steps(body: dict[str, Any]) -> Page:
    options = body["options"]
    wrapped = {"fsdp2": "fully_shard"}.get(options.get("wrapper"), "DistributedDataParallel")
    page = Page(f"A step of {wrapped}", steps_lead(body["runs"]))
    page.text(
        f"{body['runs'][0]['parameters']:,} float32 parameters, batch {options['batch']} "
        f"a rank, {options['device']}. Bars are medians of {options['rounds']} rounds of "
        f"{options['steps']} steps, whiskers the lowest and highest round. Exposed communication "
        "is the step minus the same step without communication."
    )
    for run in body["runs"]:
        page.heading(f"{run['ranks']} ranks")
        page.figure(steps_figure(run), f"Milliseconds a step, {run['ranks']} ranks.")
        columns = ["backend", *(f"{name}, ms" for name in ddp.STEPS.values())]
        rows = [
            [backend, *(f"{1e3 * figures[f'{what}_median_s']:.3g}" for what in ddp.STEPS)]
            for backend, figures in run["backends"].items()
        ]
        page.table(columns, rows)
        if "load" in run:
            told = [f"{name}: {', '.join(f['doubts'])}" for name, f in run["backends"].items()
                    if f["doubts"]]  # fmt: skip
            page.text(trust.load_says(run["load"], len(told), len(run["backends"])))
            for line in told:
                page.text(f"In doubt: {line}.")
    return page


def steps_lead(runs: Sequence[dict[str, Any]]) -> str:
    said = [
        f"with {run['ranks']} ranks {backend}'s exposed communication is {share:.2f} of Gloo's"
        for run in runs
        for backend, share in run["exposed_vs_gloo"].items()
    ]
    text = "; ".join(said) or "the time of a step, with communication and without"
    return f"{text[0].upper()}{text[1:]}."


def steps_figure(run: dict[str, Any]) -> dict[str, Any]:
    """Draw a group of bars a kind of step, a bar a backend."""
    names = [name.replace(" ", "<br>") for name in ddp.STEPS.values()]
    traces = []
    for number, (backend, figures) in enumerate(run["backends"].items()):
        low, middle, high = (
            [1e3 * figures[f"{what}_{end}_s"] for what in ddp.STEPS]
            for end in ("low", "median", "high")
        )
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [top - y for top, y in zip(high, middle, strict=True)],
            "arrayminus": [y - bottom for bottom, y in zip(low, middle, strict=True)],
            "color": GREY,
        }
        marker = {"color": COLORS[number % len(COLORS)]}
        bars = {"type": "bar", "name": backend, "x": names, "y": middle, "marker": marker}
        traces.append(bars | {"error_y": spread, "showlegend": True})
    axes = {"xaxis": {"tickangle": 0}, "yaxis": {"title": {"text": "ms"}}}
    return {"data": traces, "layout": axes | {"barmode": "group"}}
