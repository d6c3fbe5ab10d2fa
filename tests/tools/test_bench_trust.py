"""The CPU time of other processes, by made-up counters; figures in doubt, and the average."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import bench_cases
import pytest

from ringcomm.tools import load
from ringcomm.tools.bench import cases, trust
from ringcomm.tools.bench.report import Spread
from ringcomm.tools.bench.sample import Table, Workload
from ringcomm.tools.load import Counters, Span

#        user nice system idle iowait irq softirq steal guest guest_nice
CORE_0 = "cpu0 100 10 40 800 50 7 9 20 30 5"
CORE_1 = "cpu1 300 0 0 700 0 0 0 0 0 0"
STAT = f"cpu  400 10 40 1500 50 7 9 20 30 5\n{CORE_0}\n{CORE_1}\nintr 5 1\nctxt 9\n"
TICK = os.sysconf("SC_CLK_TCK")


def test_busy_is_what_is_neither_idle_nor_an_interrupt() -> None:
    assert load.parse(STAT) == (470 / TICK, 2036 / TICK)
    assert load.parse(STAT, [0]) == (170 / TICK, 1036 / TICK)
    assert load.parse(STAT, [1]) == (300 / TICK, 1000 / TICK)
    assert load.parse(STAT, [0, 1]) == load.parse(STAT)


def test_cores_that_are_not_listed_stand_for_all() -> None:
    """Containers may number their cores anew."""
    assert load.parse(STAT, [1, 17]) == load.parse(STAT)


ODD = [
    *("", "\0", "cpu\n", "cpu  1 2\n", "cpu a b c d e\n"),
    *("cpu -5 0 0 7 0\n", "cpu  0 0 0 0 0 0 0 0\n"),
]


@pytest.mark.parametrize("stat", ODD)
def test_an_odd_file_tells_nothing(stat: str, tmp_path: Path) -> None:
    assert load.parse(stat) is None
    file = tmp_path / "stat"
    file.write_text(stat)
    counted = load.count([os.getpid()], stat=file)
    assert (counted.busy, counted.every) == (None, None)
    assert counted.own > 0


def test_a_missing_file_tells_nothing(tmp_path: Path) -> None:
    before, after = (load.count([], stat=tmp_path / "none") for _ in range(2))
    assert load.between(before, after).others is None


def test_old_kernels_have_fewer_columns() -> None:
    assert load.parse("cpu 10 0 5 85 0\n") == (15 / TICK, 100 / TICK)


def test_others_are_what_is_not_our_own() -> None:
    before, after = Counters(10, 100, 1000, 7), Counters(12, 103.5, 1004, 10)
    span = load.between(before, after)
    assert span.others == pytest.approx(0.25)  # half a second in two
    assert span.share(2) == pytest.approx(0.125)
    assert span.share(1) == pytest.approx(0.25)
    assert load.in_doubt(span.share(2))
    assert not load.in_doubt(span.share(4))


def test_our_own_may_be_counted_finer_than_the_whole() -> None:
    assert load.between(Counters(0, 5, 50, 0), Counters(1, 5.98, 52, 1)).others == 0


@pytest.mark.parametrize(
    "after",
    [
        Counters(2, None, None, 0),
        Counters(2, 10, 100, 0),  # they stand still, as where a container makes them up
        Counters(2, 9, 104, 0),  # they fall back: a core went
        Counters(1.05, 10.1, 100.2, 0),  # a few steps of the counter
    ],
)
def test_what_cannot_be_known_is_unknown(after: Counters) -> None:
    span = load.between(Counters(1, 10, 100, 0), after)
    assert span.others is None
    assert span.share(2) is None
    assert not load.in_doubt(span.share(2))
    assert "unknown" in load.says(span.others, 2)


def test_short_spans_tell_something_together() -> None:
    spans = [Span(0.06, 0.1, 0.04), Span(0.06, 0.02, 0.02)]
    assert spans[0].others is None
    assert load.together(spans).others == pytest.approx(0.5)
    assert load.together([*spans, Span(1, None, 0)]).others is None


def test_this_machine_tells() -> None:
    """Our own computing is ours; taken for another's, it shows."""
    before, began = load.count([os.getpid()]), time.process_time()
    foreign = load.count([])
    while time.process_time() - began < 0.3:
        pass
    own = load.between(before, load.count([os.getpid()]))
    span = load.between(foreign, load.count([]))
    if span.busy is None:
        pytest.skip("/proc/stat tells nothing here")
    assert own.own == pytest.approx(0.3, abs=0.1)
    assert span.busy > 0.2
    assert load.cpu_seconds(1 << 22) == 0  # above all pids


# ---- rounds


class Moments:
    """Gives the samples of a host on which others use so many cores in each round."""

    def __init__(self, others: list[float]) -> None:
        self.others, self.at = others, 0

    def now(self) -> Counters:
        whole = sum(self.others[: (self.at + 1) // 2])
        self.at += 1
        when = float(self.at // 2)
        return Counters(when, whole, 2 * when + 1, 0.0)


def kept(count: int, others: list[float]) -> tuple[list[int], int]:
    """Return the rounds that count, and how many were measured."""
    moments = Moments(others)
    asked: list[int] = []

    def once(number: int) -> int:
        asked.append(number)
        return number

    rounds = trust.rounds_of(count, 2, cast(trust.Watch, moments), once)
    assert asked == list(range(len(asked)))
    return [some.figures for some in rounds], len(asked)


@pytest.mark.parametrize(
    ("others", "rounds", "measured"),
    [
        ([0, 0.1, 0, 9, 9], [0, 1, 2], 3),
        ([0, 1, 0, 0, 9], [0, 2, 3], 4),
        ([1, 0, 1, 0, 0], [1, 3, 4], 5),
        ([1.5, 1, 1, 0, 2], [1, 2, 3], 5),  # there is an end
    ],
)
def test_rounds_in_which_others_were_busy_are_repeated(
    others: list[float], rounds: list[int], measured: int
) -> None:
    assert kept(3, others) == (rounds, measured)


# ---- doubts


@pytest.mark.parametrize(
    ("share", "spread", "told"),
    [
        (None, (1, 0.9, 1.2), []),
        (0.1, (1, 0.8, 1.3), []),
        (0.34, (1, 0.9, 1.2), ["others 34%"]),
        (None, (2, 1.9, 3.1), ["spread 60%"]),
        (0.2, (1, 0.5, 1.5), ["others 20%", "spread 100%"]),
    ],
)
def test_doubts(share: float | None, spread: tuple[float, float, float], told: list[str]) -> None:
    assert trust.doubts(share, Spread(*spread)) == told


def sample(backend: str, size: int, others: float | None = None) -> dict[str, Any]:
    form = cases.Form(in_place=True)
    made = bench_cases.sample(Workload("all_reduce", size // 4, 2, form), backend, False)
    made.others = others
    return made.facts()


def test_a_line_of_the_table_says_that_it_is_in_doubt() -> None:
    some = [sample("ringcomm", 1024, 0.34), sample("gloo", 1024)]
    table = Table(Workload("all_reduce", 256, 2, cases.Form()), ["ringcomm", "gloo"], False, False)
    ours, theirs = table.rows(some)
    assert table.head()[1].split()[-1] == "doubt"
    assert ours.endswith("  others 34%")
    assert theirs.endswith("  -")


def test_the_whole_run_says_how_busy_others_were() -> None:
    body = trust.summary([Span(1, 1.6, 1.0), Span(1, 1.2, 1.0)])
    body["cores"] = 2
    assert trust.load_says(body, 0, 6) == "Other processes used 0.4 of 2 cores meanwhile."
    assert " 1 of 6 figures is in doubt: others took more than 10%" in trust.load_says(body, 1, 6)


# ---- the average


def test_the_average_is_over_the_sizes_and_ratios_over_those_of_both() -> None:
    samples = [{**sample("ringcomm", size), "busbw_gb_per_s": rate}
               for size, rate in ((8, 1.0), (64, 2.0), (512, 6.0))]  # fmt: skip
    samples += [{**sample("gloo", size), "busbw_gb_per_s": rate}
                for size, rate in ((8, 0.5), (64, 0.25))]  # fmt: skip
    samples.append({**sample("gloo", 512), "refused": "not that"})
    samples.append({**sample("gloo", 512), "loaded": True, "busbw_gb_per_s": 99.0})
    told = trust.averages(samples, ["ringcomm", "gloo"])
    assert told["busbw_gb_per_s"] == {"ringcomm": 3.0, "gloo": 0.375}
    assert told["ratio_to"] == {"gloo": 4.0}  # of 3 and 0.75, at two sizes
    line = "# Avg bus bandwidth: ringcomm 3.00 GB/s, 4.00 times gloo's 0.375 GB/s"
    assert trust.averages_say(told) == line


def test_there_may_be_no_peer_and_nothing_that_moves() -> None:
    alone = trust.averages([sample("gloo", 1024)], ["gloo"])
    assert alone["ratio_to"] == {}
    assert trust.averages_say(alone).startswith("# Avg bus bandwidth: gloo ")
    barrier = {**sample("ringcomm", 1024), "bytes": 0}
    assert trust.averages_say(trust.averages([barrier], ["ringcomm"])) == ""
