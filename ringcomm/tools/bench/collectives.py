"""Times collectives through torch.distributed, on several backends in turn.

What disturbs the machine for a while disturbs all backends alike, because they take turns round by
round. A call takes as long as on its slowest rank. A round's figure is the median of its calls, and
the figure shown the median of the rounds, with the lowest and highest of them. Results are compared
with the exact ones before a size is timed, and after it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from ringcomm._text import show_size
from ringcomm.tools import load
from ringcomm.tools.bench import cases, measured, nccl, traits, trust
from ringcomm.tools.bench.cases import Case, Form
from ringcomm.tools.bench.measured import BenchmarkError, BusyCores, Measured
from ringcomm.tools.bench.ranks import Rank
from ringcomm.tools.bench.sample import Facts, Sample, Table, Workload
from ringcomm.tools.load import Span
from ringcomm.tools.progress import Lines

NAME = "collectives"  # the key in JSON
FEWEST, MOST = 5, 20_000  # calls a round
FEWEST_COPIED = 256 << 10  # bytes from which on a call is compared with its copies
COPY_PASSES = 3
ON_STREAM = 20  # calls on a stream that are timed together, as nccl-tests do


def enter(rank: Rank, device: str) -> None:
    """Join the others. On CUDA the ranks share out the GPUs, which NCCL has to be told."""
    measured.prepare(rank)
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank.index % gpus)
        if rank.backend == "nccl":
            os.environ.update(nccl.apart(rank.index, rank.size, gpus))
    measured.join(rank)


def make(rank: Rank, workload: Workload) -> Case:
    """Return the workload ready to be called."""
    return cases.make(workload.collective, workload.count, rank.index, rank.size, workload.form)


def count_wrong(rank: Rank, workload: Workload) -> int | str:
    """Return how many elements of this rank's result are wrong, or why the backend refuses."""
    try:
        return make(rank, workload).wrong()
    except dist.DistError:  # a rank or its connection failed
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return (str(error) or type(error).__name__).partition("\n")[0]


def in_stream(call: Callable[[], object]) -> None:
    """Call it as often as is timed together, and wait for the device."""
    for _ in range(ON_STREAM):
        call()
    torch.cuda.synchronize()


def time_calls(rank: Rank, workload: Workload, calls: int) -> list[float]:
    """Return the seconds of each of `calls` calls on this rank, after some that do not count.

    On CUDA a time is the ON_STREAM-th part of that of so many calls in a row.
    """
    key = str(workload)
    if key not in rank.kept:
        rank.kept.clear()
        case = make(rank, workload)
        for tensor in (case.given, case.result):
            tensor.zero_()  # sums of zeros stay in range however often they are summed
        rank.kept[key] = case.call
    call, clock = rank.kept[key], time.perf_counter
    cuda = workload.form.device == "cuda"
    once = functools.partial(in_stream, call) if cuda else call
    times = [0.0] * calls
    gc.disable()
    dist.barrier()
    measured.spread(rank)
    for _ in range(min(10, calls // 5 + 1)):
        once()
    for i in range(calls):
        start = clock()
        once()
        times[i] = clock() - start
    gc.enable()
    return [seconds / ON_STREAM for seconds in times] if cuda else times


def last_algorithm(rank: Rank) -> str:
    """Return the algorithm of the last call in the default group; "" if it has none."""
    del rank
    import ringcomm

    last = ringcomm.backend_of(device="cpu").flight_record()[-1]
    return str(last["algorithm"] or "")


def time_copies(rank: Rank, size: int) -> list[list[float]]:
    """Return the seconds of copies of `size` bytes, plain ones and ones past the caches."""
    from ringcomm import _C

    kinds, clock = [], time.perf_counter
    source = torch.ones(size, dtype=torch.uint8)
    to = torch.zeros_like(source)
    for past_caches in (False, True):
        dist.barrier()
        measured.spread(rank)
        times = []
        for _ in range(COPY_PASSES + 1):
            start = clock()
            _C.copy(to, source, past_caches)
            times.append(clock() - start)
        kinds.append(times[1:])
    return kinds


class Bench:
    """The ranks of every backend, and the busy cores when there are any."""

    def __init__(
        self, options: argparse.Namespace, ranks: int, lines: Lines, stack: contextlib.ExitStack
    ) -> None:
        self.options, self.ranks, self.lines = options, ranks, lines
        self.busy: BusyCores | None = None
        if options.loaded:
            self.busy = stack.enter_context(BusyCores(options.deadline))
        self.sets = {
            backend: stack.enter_context(Measured(ranks, backend, options.deadline))
            for backend in options.backends
        }
        for some in self.sets.values():
            some(enter, options.device, seconds=options.limit)
        busy = [process.pid for process in self.busy.processes] if self.busy else []
        self.watch = trust.Watch(self.sets.values(), busy)
        self.cores = trust.cores_of(ranks)
        self.spans: list[Span] = []  # of the rounds that count

    def samples(self, workload: Workload) -> list[Sample]:
        """Check, time every backend in turn for some rounds, and check again."""
        loads = [False, True] if self.busy else [False]
        samples = [Sample(workload, backend, loaded) for loaded in loads for backend in self.sets]
        refused = self.check(workload, samples)
        timed = [sample for sample in samples if not sample.refused]
        for sample in timed:
            sample.calls = self.fitting_calls(sample)
            if sample.backend == "ringcomm" and workload.form.device == "cpu":
                ranks = self.sets["ringcomm"]
                sample.algorithm = ranks(last_algorithm, seconds=self.options.limit)[0]
        once = functools.partial(self.once, timed)
        rounds = trust.rounds_of(self.options.rounds, self.cores, self.watch, once)
        self.spans += [some.span for some in rounds]
        share = load.together(some.span for some in rounds).share(self.cores)
        for some in rounds:
            for sample, times, copies in some.figures:
                sample.add(times)
                sample.others = share
                sample.copies += copies
        if self.check(workload, samples) != refused:
            raise BenchmarkError(f"{self.name(workload)}: a backend refused it after some calls")
        return samples

    def once(
        self, timed: list[Sample], number: int
    ) -> list[tuple[Sample, list[float], list[float]]]:
        """Return what a round measures: the calls' times of each sample, and that of its copies."""
        figures = []
        # Each round begins with another one: none always follows the same.
        at = number % max(1, len(timed))
        for sample in timed[at:] + timed[:at]:
            again = " again" * (number >= self.options.rounds)
            what = f"{self.name(sample.workload)}, {sample.backend}, round {number + 1}{again}"
            self.lines.step(what, advance=int(sample is timed[at] and not again))
            times = self.seconds(sample, sample.calls)
            copied = self.is_copied(sample)
            copies = [self.time_of_copies(sample.workload)] if copied else []
            figures.append((sample, times, copies))
        return figures

    @staticmethod
    def name(workload: Workload) -> str:
        what = f"{workload.collective} {show_size(workload.size)} {workload.form.type}"
        return f"{what}, {workload.ranks} ranks"

    def check(self, workload: Workload, samples: list[Sample]) -> dict[str, str]:
        """Tell the samples what is wrong; returns why backends refuse, by backend.

        Without `--check` a call is made, too: it tells whether the backend refuses.
        """
        refused = {}
        for backend, ranks in self.sets.items():
            answers = ranks(count_wrong, workload, seconds=self.options.limit)
            texts = [answer for answer in answers if isinstance(answer, str)]
            if texts and len(texts) < len(answers):
                raise BenchmarkError(f"{backend}: {self.name(workload)}: {texts[0]}")
            if texts:
                refused[backend] = texts[0]
            for sample in samples:
                if sample.backend == backend and texts:
                    sample.refused = texts[0]
                elif sample.backend == backend and self.options.check and workload.count:
                    numbers = [answer for answer in answers if isinstance(answer, int)]
                    sample.wrong = max(sample.wrong or 0, sum(numbers))
        return refused

    def fitting_calls(self, sample: Sample) -> int:
        """Return how many calls take about `--seconds`."""
        typical = statistics.median(self.seconds(sample, FEWEST))
        typical *= ON_STREAM if sample.workload.form.device == "cuda" else 1
        return max(FEWEST, min(MOST, int(self.options.seconds / typical)))

    def is_copied(self, sample: Sample) -> bool:
        """Tell whether its copies are timed: for plans in memory, called as plans are counted."""
        form, usual_place = sample.workload.form, traits.IN_PLACE[sample.workload.collective][0]
        usual = form.device == "cpu" and form.in_place == usual_place
        ours = sample.backend == "ringcomm" and not sample.loaded
        return ours and usual and sample.workload.size >= FEWEST_COPIED

    def time_of_copies(self, workload: Workload) -> float:
        """Return what the copies of a call take with the faster kind, all ranks at once."""
        by_rank = self.sets["ringcomm"](time_copies, workload.size, seconds=self.options.limit)
        kinds = zip(*by_rank, strict=True)
        fastest = min(statistics.median(measured.slowest(list(kind))) for kind in kinds)
        return traits.COPIES[workload.collective](workload.ranks) * fastest

    def seconds(self, sample: Sample, calls: int) -> list[float]:
        """Return the seconds of each call, on its slowest rank."""
        ranks = self.sets[sample.backend]
        if sample.loaded and self.busy:
            self.busy.run()
        times = ranks(time_calls, sample.workload, calls, seconds=self.options.limit)
        if self.busy:
            self.busy.pause()
        return measured.slowest(times)


def workloads(options: argparse.Namespace, ranks: int) -> Iterator[list[list[Workload]]]:
    """Yield the tables: for each size a list, with a workload for in place and out of place."""
    for collective in options.collectives:
        moves = collective != "barrier"
        for type_ in options.types if moves else ["float32"]:
            for op in options.ops if collective in traits.REDUCING else ["sum"]:
                form = Form(type_, op, device=options.device)
                size = form.dtype.itemsize
                counts = [cases.elements(collective, s, ranks, size) for s in options.sizes]
                yield [
                    [
                        Workload(collective, count, ranks, replace(form, in_place=in_place))
                        for in_place in traits.IN_PLACE[collective]
                    ]
                    for count in dict.fromkeys(counts)  # sizes that come to the same, once
                ]


def parts(options: argparse.Namespace) -> int:
    """Return how many rounds all of it has: what the bar counts."""
    every = (workloads(options, ranks) for ranks in options.ranks)
    return options.rounds * sum(len(row) for some in every for table in some for row in table)


def measure(options: argparse.Namespace, lines: Lines) -> tuple[list[Facts], list[Span]]:
    """Measure all that the options ask for, and say the figures as they come.

    Returns them, and what other processes did meanwhile.
    """
    facts: list[Facts] = []
    spans: list[Span] = []
    for ranks in options.ranks:
        with contextlib.ExitStack() as stack:
            bench = Bench(options, ranks, lines, stack)
            for rows in workloads(options, ranks):
                facts += measure_table(bench, rows)
            spans += bench.spans
    return facts, spans


def measure_table(bench: Bench, rows: list[list[Workload]]) -> list[Facts]:
    options, workload, all_facts = bench.options, rows[0][0], list[Facts]()
    table = Table(workload, options.backends, options.loaded, options.markdown)
    form = workload.form
    what = f"{workload.collective}, {workload.ranks} ranks, {form.type}, {form.device}"
    bench.lines.say(
        f"{'### ' if options.markdown else ''}{what}: "
        f"median and lowest..highest of {options.rounds} rounds\n"
    )
    ours = options.columns == "ringcomm"
    for line in table.head() if ours else []:
        bench.lines.say(line)
    for row in rows:
        facts = [sample.facts() for workload in row for sample in bench.samples(workload)]
        for line in table.rows(facts) if ours else []:
            bench.lines.say(line)
        all_facts += facts
    for line in [""] if ours else nccl.lines_of(all_facts):
        bench.lines.say(line)
    return all_facts
