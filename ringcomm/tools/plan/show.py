"""`ringcomm plan`: what each rank of a collective does, step by step, and why by that algorithm."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ringcomm import _C
from ringcomm._network import costs, costs_file
from ringcomm._text import show_size, size
from ringcomm.algorithms.steps import (
    COLLECTIVES,
    ROOTED,
    SHARDED,
    Operand,
    Plan,
    Shape,
    Step,
    plan_of,
    plans_of,
    shape_of,
)
from ringcomm.tools.plan import drawing, file, mscclpp
from ringcomm.tools.plan.by_hand import function_of, of_hand
from ringcomm.tools.plan.tables import GroupPlans, of_library

# Of what tensors hold, in bytes.
DTYPES = {
    "bfloat16": 2,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}
COLUMNS = ("#", "step", "to", "from", "bytes", "lane")
MOST_OPERANDS = 4  # of a step in the table
SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"one of {', '.join(COLLECTIVES)}; or a file that --export wrote"
    add("collective", metavar="COLLECTIVE | FILE.json", help=text)
    add("--ranks", type=int, default=4)
    add("--bytes", type=size, default="1M", help="the whole message: all shards together (1M)")
    add("--hosts", type=int, default=1, help="the ranks are spread over them evenly (1)")
    add("--algorithm", metavar="NAME", help="another than the table's; or FILE.py:FUNCTION")
    add("--dtype", choices=list(DTYPES), default="float32", metavar="NAME", help="as in torch")
    add("--root", type=int, help="of broadcast, reduce, scatter and gather (0)")
    add("--rank", type=int, help="print the steps of this rank only")
    add("--steps", type=int, default=SHOWN, help=f"print so many of each rank; 0: all ({SHOWN})")
    add("--why", action="store_true", help="print only why the algorithm was chosen")
    add("--svg", type=Path, metavar="FILE", help="draw all ranks, their messages and times")
    add("--export", type=Path, metavar="FILE", help="write the plans of all ranks as JSON")
    text = "of that file: ringcomm's own (json), or execution plans of MSCCL++"
    add("--format", choices=["json", "mscclpp"], default="json", help=text)
    add("--costs", type=Path, metavar="FILE", help="what `ringcomm tune` has written")


def run(options: argparse.Namespace) -> int:
    if options.collective.endswith(".json"):
        return run_file(options)
    fabrics, measured = (
        costs_file.read_file(options.costs) if options.costs else (costs.DEFAULT, None)
    )
    shape = shape_of(
        options.collective,
        options.ranks,
        options.bytes,
        options.hosts,
        DTYPES[options.dtype],
        options.root or 0,
        fabrics,
        measured,
    )
    if options.root is not None and shape.name not in ROOTED:
        raise ValueError(f"{shape.name} has no root: --root is for {', '.join(ROOTED)}")
    check_shown(options, shape)
    if function := function_of(options.algorithm):
        return run_by_hand(options, of_hand(shape, function), fabrics)
    first = plan_of(shape, options.rank or 0, options.algorithm)
    check_reach(shape, first, options.algorithm)
    title = title_of(shape, options, first.algorithm)
    print(title)
    for line in why(shape, first, options.algorithm is not None):
        print(line)
    if not options.why:
        ranks = range(shape.size) if options.rank is None else [options.rank]
        for rank in ranks:
            print_plan(rank, plan_of(shape, rank, options.algorithm).steps, options.steps)
    if options.svg:
        plans = plans_of(shape, options.algorithm)
        source = str(options.costs or "ringcomm's defaults")
        text = drawing.draw(title, [plan.steps for plan in plans], shape, fabrics, source)
        options.svg.write_text(text, encoding="utf-8")
        print(f"\n{options.svg}: drawn, with times by a model")
    if options.export:
        export(of_library(shape, options.algorithm), options)
    return 0


def run_by_hand(options: argparse.Namespace, group: GroupPlans, fabrics: costs.Fabrics) -> int:
    """Print, draw and export plans that no table has chosen. Raises ValueError, OSError."""
    if options.why:
        raise ValueError(f"{options.algorithm} was asked for, so no table chose: leave out --why")
    show_group(options, group, title_of(group.shape, options, group.algorithm), fabrics)
    if options.export:
        export(group, options)
    return 0


def export(group: GroupPlans, options: argparse.Namespace) -> None:
    """Write the file. Raises ValueError where the format cannot say the plans, and OSError."""
    path, more = options.export, ""
    if options.format == "mscclpp":
        text = mscclpp.text_of(group)
        path.write_text(text, encoding="utf-8")
        if (most := mscclpp.longest(text)) > mscclpp.MOST_OPERATIONS:
            more = f": {most} operations in a threadblock, and MSCCL++ takes 64"
    else:
        file.write(group, path)
    print(f"\n{path}: the plans of {counted(group.shape.size, 'rank')}{more}")


def run_file(options: argparse.Namespace) -> int:
    """Print and draw the plans of a file, which has its own shape. Raises ValueError, OSError."""
    for name in ("algorithm", "root", "export"):
        if getattr(options, name) is not None:
            raise ValueError(f"{options.collective} has its own plans: leave out --{name}")
    group = file.read(Path(options.collective))
    shape = group.shape
    check_shown(options, shape)
    title = f"{shape.name}, {spread(shape)}: {group.algorithm}, of {options.collective}"
    fabrics = costs_file.read_costs(options.costs) if options.costs else costs.DEFAULT
    show_group(options, group, title, fabrics)
    return 0


def show_group(
    options: argparse.Namespace, group: GroupPlans, title: str, fabrics: costs.Fabrics
) -> None:
    """Print the plans, and draw them where that is asked for. Raises OSError."""
    shape, programs = group.shape, group.steps()
    print(title)
    for rank in range(shape.size) if options.rank is None else [options.rank]:
        print_plan(rank, programs[rank], options.steps)
    if options.svg:
        source = str(options.costs or "ringcomm's defaults")
        text = drawing.draw(title, programs, shape, fabrics, source)
        options.svg.write_text(text, encoding="utf-8")
        print(f"\n{options.svg}: drawn, with times by a model")


def check_shown(options: argparse.Namespace, shape: Shape) -> None:
    if options.rank is not None and not 0 <= options.rank < shape.size:
        raise ValueError(f"--rank {options.rank}: the group has ranks 0 to {shape.size - 1}")
    if options.steps < 0:
        raise ValueError(f"--steps {options.steps}: write how many, or 0 for all")


def check_reach(shape: Shape, plan: Plan, asked: str | None) -> None:
    """Refuse an algorithm that a group like this would not run. Raises ValueError."""
    if asked == "hierarchical" and no_hosts(shape) and no_sites(shape):
        raise ValueError(
            "hierarchical plans need several ranks on each of several hosts: "
            f"--hosts {shape.hosts} leaves {shape.local} on each"
        )
    reads = any(one.space == "window" for step in plan.steps for one in step.targets + step.sources)
    if asked == "direct" and shape.hosts > 1 and reads:
        raise ValueError(
            f"direct plans of {shape.name} read the memory of other ranks, which only ranks of "
            "one host can: write --hosts 1"
        )


def title_of(shape: Shape, options: argparse.Namespace, algorithm: str) -> str:
    what = (
        "" if shape.name == "barrier" else f" of {show_size(options.bytes)} bytes, {options.dtype}"
    )
    root = f", root {shape.root}" if shape.name in ROOTED else ""
    return f"{shape.name}{what}{root}, {spread(shape)}: {algorithm}"


def spread(shape: Shape) -> str:
    ranks = counted(shape.size, "rank")
    if shape.hosts == 1:
        return f"{ranks} on one host"
    return f"{ranks} on {shape.hosts} hosts"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# ---- why


class Row(NamedTuple):
    """Of the selection table; `limit` is the most bytes that it is for."""

    text: str
    limit: int
    needs: str
    algorithm: str


def rows_of(shape: Shape) -> list[Row]:
    """Return the rows for the collective, in order: the first that fits decides."""
    local = shape.local if shape.hosts > 1 else 1
    rows = _C.selection(shape.size, shape.costs, local)
    return [
        Row(row["text"], row["limit"], row["needs"], row["algorithm"])
        for row in rows
        if row["collective"] == shape.name
    ]


def refusal(row: Row, shape: Shape) -> str:
    """Say why the row does not fit; "" where it does."""
    if row.needs == "mapped" and shape.hosts > 1:
        return f"there are {shape.hosts} hosts"
    if row.needs in ("hosts", "few_hosts"):
        if no := no_hosts(shape):
            return no
        if row.needs == "few_hosts" and (shape.hosts > costs.FEW or shape.size > costs.FEW_RANKS):
            return f"there are {counted(shape.size, 'rank')} on {counted(shape.hosts, 'host')}"
    if row.needs == "sites" and (no := no_sites(shape)):
        return no
    few = shape.size <= costs.FEW
    if {"pair": shape.size != 2, "few": not few, "many": few}.get(row.needs, False):
        return f"there {'is' if shape.size == 1 else 'are'} {counted(shape.size, 'rank')}"
    return f"{shape.compared:,} B are more" if shape.compared > row.limit else ""


def no_hosts(shape: Shape) -> str:
    """Say why there is no level of hosts; "" where there is one."""
    return "there is one host" if shape.hosts == 1 else "a host has one rank" * (shape.local == 1)


def no_sites(shape: Shape) -> str:
    if not shape.names:
        return "sites are not known"
    if len(shape.sites) == 1:
        return "there is one site"
    if len(set(shape.sites)) > 1:
        return "sites have different numbers of hosts"
    return "a site has one host" * (shape.sites[0] == 1)


def limits_of(shape: Shape) -> list[tuple[str, int]]:
    """Return the algorithms by size in a group like this, each with the most bytes it is for."""
    any_size = shape._replace(shards=[0], bytes=0)
    found: list[tuple[str, int]] = []
    for row in rows_of(shape):
        below = found[-1][1] if found else -1
        if not refusal(row, any_size) and row.limit > below:
            if found and found[-1][0] == row.algorithm:
                found.pop()
            found.append((row.algorithm, row.limit))
    return found


def why(shape: Shape, plan: Plan, asked: bool) -> list[str]:
    """Say which row of the table chose the algorithm, and where the next limits lie."""
    shard = shape.name in SHARDED
    counts = shape.name not in ("all_to_all", "barrier")
    what = f", for {'a shard' if shard else 'a message'} of {shape.compared:,} B" if counts else ""
    lines = [f"why: the first row of the table that fits decides{what}"]
    chosen = False
    for row in rows_of(shape):
        no = refusal(row, shape)
        taken = not no and not chosen
        verdict = "<- this one" if taken else f"no: {no}" if no else "would fit"
        chosen = chosen or taken
        mark = ">" if taken else " "
        lines.append(f"{mark} {row.text}: {row.algorithm}   {verdict}")
    if asked:
        lines.append(f"{plan.algorithm} was asked for: --algorithm takes precedence over the table")
    limits = limits_of(shape)
    *below, (last, _) = limits
    words = [f"{name} up to {limit:,} B" for name, limit in below]
    words.append(f"{last} {'beyond' if below else 'for any size'}")
    return [*lines, f"limits in this group{' (of a shard)' if shard else ''}: {', '.join(words)}"]


# ---- steps


def print_plan(rank: int, steps: Sequence[Step], most: int) -> None:
    """Print the steps as a table, `most` at most; 0: all."""
    print(f"\nrank {rank}: {summary(rank, steps)}")
    shown = steps[:most] if most else steps
    rows = [COLUMNS, *(row_of(number, rank, step) for number, step in enumerate(shown, 1))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        cells = [
            cell.rjust(width) if name in ("#", "bytes") else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip())
    if len(shown) < len(steps):
        more = counted(len(steps) - len(shown), "more step")
        print(f"  and {more}: --steps 0 prints all")


def summary(rank: int, steps: Sequence[Step]) -> str:
    sent = [step for step in steps if step.verb == "signal"]
    put = sum(step.bytes for step in steps if step.receiver(rank) >= 0)
    loaded = sum(step.bytes for step in steps for _ in step.loaded(rank))
    credits = sum(step.lane == "credit" for step in sent)
    words = [counted(len(steps), "step"), counted(len(sent) - credits, "message") + " sent"]
    words += [counted(credits, "credit") + " given"] if credits else []
    words += [f"{show_size(put)} bytes put into others' memory"] if put else []
    words += [f"{show_size(loaded)} bytes loaded from others' windows"] if loaded else []
    return ", ".join(words)


def row_of(number: int, rank: int, step: Step) -> tuple[str, ...]:
    if step.lane:
        peer = f"rank {step.peer}"
        to, source = (peer, "") if step.verb == "signal" else ("", peer)
        return str(number), step.verb, to, source, "", step.lane
    places = [places_of(some, rank) for some in (step.targets, step.sources)]
    return str(number), step.verb, *places, show_size(step.bytes), ""


def places_of(operands: Sequence[Operand], rank: int) -> str:
    words = [place(one, rank) for one in operands[:MOST_OPERANDS]]
    if len(operands) > MOST_OPERANDS:
        words.append(f"{len(operands) - MOST_OPERANDS} more")
    return ", ".join(words)


def place(operand: Operand, rank: int) -> str:
    """Name memory as `rank` sees it: "inbox of 1 +128K" to write to, "inbox from 3" to read."""
    words = operand.space
    if operand.space == "window":
        words = "my window" if operand.rank == rank else f"window of {operand.rank}"
    elif operand.space in ("inbox", "line"):
        mine = operand.rank == rank
        words += f" from {operand.writer}" if mine else f" of {operand.rank}"
    return words + (f" +{show_size(operand.offset)}" if operand.offset else "")
