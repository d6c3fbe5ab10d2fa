"""`ringcomm plan show`: what each rank of a collective does, step by step, and why so."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringcomm import _planner
from ringcomm._network import costs
from ringcomm._network.costs import Network
from ringcomm._text import counted, show_seconds, show_size
from ringcomm.algorithms.call import SHARDED, Call, call_of
from ringcomm.algorithms.steps import (
    DEFAULT_NETWORK,
    GroupPlans,
    Operand,
    Plan,
    Step,
    plan_of,
)
from ringcomm.tools import arguments
from ringcomm.tools.plan import lanes, source
from ringcomm.tools.plan.simulate import topology
from ringcomm.tools.plan.simulate.engine import simulate

if TYPE_CHECKING:
    from ringcomm._planner import SelectionRow

COLUMNS = ("#", "step", "to", "from", "bytes", "lane")
MOST_OPERANDS = 4  # for a step in the table
SHOWN = 40
EVERY = "all"
EXAMPLES = (
    "ringcomm plan show all_reduce --ranks 4 --hosts 2 --size 1M --why",
    "ringcomm plan show all_reduce --ranks 4 --rank 0 --svg plan.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_collective(parser, several=True)
    arguments.add_ranks(parser, 4, "of the group")
    text = "the ranks are spread over them evenly (1)"
    arguments.add_hosts(parser, 1, text)
    size = arguments.add_size(parser, "1M", "the whole message: all shards together")
    arguments.former(parser, size, "--bytes")
    source.add_plan(parser)
    arguments.add_dtype(parser)
    add("--rank", type=which, help="print the steps of this rank, or of all (0)")
    add("--steps", type=int, default=SHOWN, help=f"print so many of each rank; 0: all ({SHOWN})")
    add("--why", action="store_true", help="print only why the algorithm was chosen")
    arguments.add_costs(parser)
    files = arguments.add_files(
        parser,
        svg="draw all ranks, their messages and times",
        json="the plans of all ranks",
    )
    arguments.former(parser, files["json"], "--export")


def which(text: str) -> int | str:
    """Return the number of a rank, or "all"."""
    return text if text == EVERY else int(text)


def run(options: argparse.Namespace) -> int:
    network = costs.read(options.costs)
    cases = [(name, size) for name in options.collectives for size in options.sizes]
    if len(cases) > 1 and (options.svg or options.json):
        raise ValueError("--svg and --json take one collective of one size")
    for number, (name, size) in enumerate(cases):
        if number:
            print()
        root = source.check_root(options, name)
        dtype = arguments.DTYPES[options.dtype]
        call = call_of(name, options.ranks, size, options.hosts, dtype, root)
        show(options, call, network)
    return 0


def show(options: argparse.Namespace, call: Call, network: Network) -> None:
    """Print, draw and write the plans of a call. Raises ValueError, and OSError."""
    check_shown(options, call)
    function = source.function_of(options.algorithm)
    if function and options.why:
        raise ValueError(f"{options.algorithm} was asked for, so no table chose: leave out --why")
    whole = function or options.svg or options.json
    group = source.plans_of(call, function or options.algorithm, network) if whole else None
    if function and group:
        print(title := source.title_of(call, group.algorithm, options.dtype))
    else:
        first = plan_of(call, 0, options.algorithm, network)
        source.check_reach(call, first, options.algorithm, network)
        print(title := source.title_of(call, first.algorithm, options.dtype))
        for line in why(call, first, options.algorithm is not None, network):
            print(line)
    ranks = range(call.ranks) if options.rank == EVERY else [options.rank or 0]
    for rank in [] if options.why else ranks:
        own = group.steps[rank] if group else plan_of(call, rank, options.algorithm, network).steps
        print_plan(rank, own, options.steps)
    if options.rank is None and not options.why and call.ranks > 1:
        print("\nthe other ranks: --rank 1 prints one of them, and --rank all every one")
    if group and options.svg:
        draw(options.svg, title, group, network)
    if group and options.json:
        options.json.write_text(source.json_of(group), encoding="utf-8")
        print(f"\n{options.json}: the plans of {counted(call.ranks, 'rank')}")


def draw(path: Path, title: str, group: GroupPlans, network: Network) -> None:
    """Draw the plans over time, on a switch. Raises ValueError, and OSError."""
    lanes.check(sum(step.verb == "signal" for steps in group.steps for step in steps))
    call, fabrics = group.call, network.fabrics
    run = simulate(group, topology.named("switch", call.hosts, network), fabrics)
    used = [("memory", call.local > 1), ("network", call.hosts > 1)]
    costs_text = [f"{name}: {getattr(fabrics, name).text}." for name, there in used if there]
    seconds = show_seconds(run.seconds)
    told = [f"{seconds} by a model with the costs of {network.source}, not measured.", *costs_text]
    path.write_text(lanes.draw(title, told, run), encoding="utf-8")
    print(f"\n{path}: drawn, with times by a model")


def check_shown(options: argparse.Namespace, call: Call) -> None:
    if options.rank not in (None, EVERY, *range(call.ranks)):
        raise ValueError(f"--rank {options.rank}: the group has ranks 0 to {call.ranks - 1}")
    if options.steps < 0:
        raise ValueError(f"--steps {options.steps}: write how many, or 0 for all")


# ---- why


def rows_of(call: Call, network: Network) -> list[SelectionRow]:
    """Return the rows for the collective, in order: the first that fits decides."""
    costs_text, names = network.word(call.hosts)
    rows = _planner.selection(call.ranks, costs_text, call.local, names)
    return [row for row in rows if row["collective"] == call.name]


def refusal(row: SelectionRow, call: Call, network: Network) -> str:
    """Say why the row does not fit; "" where it does."""
    if row["fits"]:
        return f"{call.compared:,} B are more" if call.compared > row["limit"] else ""
    needs, ranks = row["needs"], counted(call.ranks, "rank")
    if needs == "mapped":
        return f"there are {call.hosts} hosts"
    if needs in ("hosts", "few_hosts"):
        return source.no_hosts(call) or f"there are {ranks} on {counted(call.hosts, 'host')}"
    if needs == "sites":
        return source.no_sites(call, network)
    return f"there {'is' if call.ranks == 1 else 'are'} {ranks}"


def limits_of(call: Call, network: Network) -> list[tuple[str, int]]:
    """Return the algorithms by size in a group like this, each with the most bytes it is for."""
    any_size = call._replace(shards=[0], bytes=0)
    limits: list[tuple[str, int]] = []
    for row in rows_of(call, network):
        below = limits[-1][1] if limits else -1
        if not refusal(row, any_size, network) and row["limit"] > below:
            if limits and limits[-1][0] == row["algorithm"]:
                limits.pop()
            limits.append((row["algorithm"], row["limit"]))
    return limits


def why(call: Call, plan: Plan, asked: bool, network: Network = DEFAULT_NETWORK) -> list[str]:
    """Say which row of the table chose the algorithm, and where the next limits lie."""
    shard = call.name in SHARDED
    counts = call.name not in ("all_to_all", "barrier")
    what = f", for {'a shard' if shard else 'a message'} of {call.compared:,} B" if counts else ""
    lines = [f"why: the first row of the table that fits decides{what}"]
    chosen = False
    for row in rows_of(call, network):
        no = refusal(row, call, network)
        taken = not no and not chosen
        verdict = "<- this one" if taken else f"no: {no}" if no else "would fit"
        chosen = chosen or taken
        mark = ">" if taken else " "
        lines.append(f"{mark} {row['text']}: {row['algorithm']}   {verdict}")
    if asked:
        lines.append(f"{plan.algorithm} was asked for: --algorithm takes precedence over the table")
    *below, (last, _) = limits_of(call, network)
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
    words = [place(operand, rank) for operand in operands[:MOST_OPERANDS]]
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
