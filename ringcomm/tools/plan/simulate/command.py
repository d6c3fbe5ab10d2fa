"""The arguments of `ringcomm simulate`, and its report of one operation."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ringcomm._network import costs, costs_file
from ringcomm._text import list_of, ranks, show_rate, show_seconds, show_size, size
from ringcomm.algorithms.steps import ROOTED
from ringcomm.tools.plan import drawing, source
from ringcomm.tools.plan.model import describe
from ringcomm.tools.plan.simulate import sweep, topology
from ringcomm.tools.plan.simulate.bounds import Bounds, bounds
from ringcomm.tools.plan.simulate.engine import Engine
from ringcomm.tools.plan.simulate.path import Part, critical_path, hops, message_count, totals
from ringcomm.tools.plan.simulate.setting import Setting, check_hosts, simulate
from ringcomm.tools.plan.simulate.topology import Topology
from ringcomm.tools.plan.tables import GroupPlans

SHOWN_LINKS = 8


def size_list(text: str) -> list[int]:
    """Parse "1K,1M"; or "1K..64M", each four times the one before."""
    found = re.fullmatch(r"(\w+)\.\.(\w+)", text, re.ASCII)
    if not found:
        return [size(word) for word in text.split(",")]
    low, high = size(found[1]), size(found[2])
    count = 1 + sum(low * 4**power <= high for power in range(1, 31))
    if low > high:
        raise argparse.ArgumentTypeError(f"{text!r}: {found[1]} is more than {found[2]}")
    return [low * 4**power for power in range(count)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source.add_source(parser)
    add = parser.add_argument
    add("--ranks", type=ranks, metavar="LIST", help="8; or 2,4,8 or 2..16 for a sweep (4)")
    add("--bytes", type=size_list, default="1M", metavar="LIST", help="1M; or 1K..64M for a sweep")
    text = "names, or FILE.py:FUNCTION (the table's; of a sweep: all)"
    add("--algorithm", type=list_of(str), metavar="LIST", help=text)
    add("--root", type=int, help="of broadcast, reduce, scatter and gather (0)")
    names = ", ".join(topology.NAMES)
    add("--topology", default="switch", metavar="NAME", help=f"{names}; or a JSON file (switch)")
    add("--local", type=int, metavar="L", help="ranks on each host (1)")
    add("--costs", type=Path, metavar="FILE", help="what `ringcomm tune` has written")
    add("--links", type=int, default=SHOWN_LINKS, help=f"show so many; 0: all ({SHOWN_LINKS})")
    add("--svg", type=Path, metavar="FILE", help="draw the messages, or the sweep")


def run(options: argparse.Namespace) -> int:
    fabrics, known = costs_file.read_file(options.costs) if options.costs else (costs.DEFAULT, None)
    origin = str(options.costs or "ringcomm's defaults")
    setting = Setting(fabrics, known, origin, options.topology)
    if options.links < 0:
        raise ValueError(f"--links {options.links}: write how many, or 0 for all")
    if options.root is not None and options.collective not in ROOTED:
        raise ValueError(f"{options.collective} takes no --root: it is for {', '.join(ROOTED)}")
    numbers, local = group_of(options)
    if source.file_of(options.collective):
        given = [name for name in ("ranks", "local", "algorithm") if getattr(options, name)]
        if given:
            raise ValueError(f"{options.collective} has its own ranks: leave out --{given[0]}")
    elif len(numbers) > 1 or len(options.bytes) > 1 or len(options.algorithm or []) > 1:
        return sweep.run(options, setting, numbers, local)
    group = source.plans_of(
        options.collective,
        numbers[0],
        options.bytes[0],
        numbers[0] // local,
        options.algorithm[0] if options.algorithm else None,
        options.root or 0,
        fabrics,
        known,
    )
    return report(group, setting, options)


def group_of(options: argparse.Namespace) -> tuple[list[int], int]:
    """Return the numbers of ranks, and how many are on each host. Raises ValueError."""
    both = topology.local_of(options.topology)
    if both and options.local not in (None, both[1]):
        raise ValueError(f"--local {options.local}: {options.topology} has {both[1]} on each host")
    local = both[1] if both else options.local or 1
    if local < 1:
        raise ValueError(f"--local {local}: a host has at least one rank")
    hosts = topology.hosts_of(options.topology)
    numbers = options.ranks or [hosts * local if hosts else 4 * local]
    for number in numbers:
        if number % local:
            raise ValueError(f"--ranks {number}: they do not fill hosts of {local}")
        check_hosts(number // local)
    return numbers, local


def report(group: GroupPlans, setting: Setting, options: argparse.Namespace) -> int:
    found = Found.of(group, setting)
    for line in found.lines(options.links):
        print(line)
    if options.svg:
        options.svg.write_text(found.svg(), encoding="utf-8")
        print(f"\n{options.svg}: drawn")
    return 0


class Found(NamedTuple):
    """One simulation; a report and a picture tell it."""

    group: GroupPlans
    setting: Setting
    where: Topology
    seconds: float
    engine: Engine
    least: Bounds

    @classmethod
    def of(cls, group: GroupPlans, setting: Setting) -> Found:
        """Simulate the plans. Raises ValueError."""
        where = setting.of(group.shape.hosts)
        seconds, engine = simulate(group, where, setting.fabrics)
        least = bounds(group.shape, where, setting.fabrics)
        return cls(group, setting, where, seconds, engine, least)

    def lines(self, links: int = SHOWN_LINKS) -> Iterator[str]:
        """The report, with so many links; 0: all."""
        shape, setting = self.group.shape, self.setting
        yield source.title_of(self.group)
        yield f"{self.where.name}, by a model with the costs of: {setting.source}"
        if shape.local > 1:
            yield f"  memory: {describe(setting.fabrics.memory)}"
        if shape.hosts > 1:
            yield f"  network: {describe(setting.fabrics.network)}"
        yield from bound_lines(self.seconds, self.least, shape.size)
        yield from path_lines(critical_path(self.engine))
        yield from link_lines(self.engine, self.seconds, links)

    def svg(self) -> str:
        """The messages over time."""
        title = source.title_of(self.group)
        note = (
            f"{show_seconds(self.seconds)} by a model with the costs of {self.setting.source}, "
            f"on {self.where.name}, not measured."
        )
        lines = [*drawing.headline(title), *drawing.wrapped(note)]
        local = self.group.shape.local
        return drawing.lanes_of(title, lines, local, self.seconds, self.engine)


def bound_lines(seconds: float, least: Bounds, size: int) -> Iterator[str]:
    yield f"\ntime         {show_seconds(seconds)}"
    if size == 1 or least.seconds == 0:
        return
    share = f"{seconds / least.seconds:.2f} times the largest of these:"
    yield f"lower bound  {show_seconds(least.seconds)}; the time is {share}"
    rounds = (size - 1).bit_length()
    yield f"  latency    {show_seconds(least.latency)}   {rounds} messages one after another"
    yield (
        f"  bandwidth  {show_seconds(least.bandwidth)}   what must go {least.cut}"
        if least.cut
        else ("  bandwidth  0 ns   no link between hosts")
    )
    yield f"  addition   {show_seconds(least.addition)}"
    if seconds < least.latency:
        yield "  (less than the latency's: a rank here sends to several at once)"


def path_lines(parts: Sequence[Part]) -> Iterator[str]:
    found = totals(parts)
    through = shortened([f"{one} > {other}" for one, other in hops(parts)])
    count = message_count(parts)
    if count:
        yield f"\ncritical path: {count} message{'s' * (count > 1)}, {through}"
    else:
        yield "\ncritical path: no message"
    for kind in ("latency", "transfer", "reduce", "copy"):
        if found[kind]:
            shared = f"   {show_seconds(found['shared'])} of it by sharing links"
            more = shared if kind == "transfer" and found["shared"] else ""
            yield f"  {kind:9}  {show_seconds(found[kind])}{more}"


def shortened(words: Sequence[str], most: int = 10) -> str:
    if len(words) > most:
        words = [*words[: most // 2], "…", *words[-most // 2 :]]
    return ", ".join(words)


def link_lines(engine: Engine, seconds: float, most: int) -> Iterator[str]:
    """The busiest links first; those that carry nothing are counted."""
    links = engine.topology.links
    used = [number for number in range(len(links)) if engine.carried[number]]
    if not used:
        yield "\nno link between hosts carries bytes"
        return
    used.sort(key=lambda number: (-engine.carried[number] / links[number].rate, number))
    shown = used[:most] if most else used
    names = [f"{links[number].source} > {links[number].target}" for number in shown]
    wide = max(map(len, ["link", *names]))
    yield f"\n  {'link':{wide}}  {'bytes':>8}  {'rate':>9}  busy"
    for name, number in zip(names, shown, strict=True):
        carried, rate = engine.carried[number], links[number].rate
        busy = carried / rate / seconds
        text = f"{show_size(carried):>8}  {show_rate(rate):>9}  {busy:4.0%}"
        yield f"  {name:{wide}}  {text}"
    if rest := len(used) - len(shown):
        yield f"  and {rest} more: --links 0 prints all"
    if idle := len(links) - len(used):
        yield f"  {idle} links carry nothing"
