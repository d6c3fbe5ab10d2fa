"""`ringcomm tune --device cuda`: times the kernels of ranks that have a GPU each.

It writes which is the fastest for each size, as rules that RINGCOMM_ALGORITHM=@FILE takes.

A group has one kernel, and each group that lives takes half of the multiprocessors that are left
(csrc/device/residency.h). So there is one group at a time. In each turn every kernel gets a new
one, in which all collectives and sizes are timed; a turn begins with another kernel than the last.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ringcomm
from ringcomm import _planner
from ringcomm._text import aligned, show_size
from ringcomm.tools.bench import cases, measured, traits
from ringcomm.tools.bench.machine import gpus
from ringcomm.tools.bench.measured import Measured
from ringcomm.tools.bench.ranks import Rank, RankError
from ringcomm.tools.bench.report import show_time
from ringcomm.tools.bench.sample import Workload

KERNELS = tuple(name for name in _planner.KERNELS if name != "graph")  # which runs what it has
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = [1 << power for power in range(10, 27)]  # 1 KiB to 64 MiB
TURNS = 5
CALLS = 20  # that are timed together
WARM = 4
HEAD_START = 4_000_000  # cycles of the GPU, 2 ms: the host enqueues all calls meanwhile
PATIENCE = 30.0  # seconds of a call: then its kernel has failed
# How much faster than the model's choice a kernel must be, as a part of its time. The first is
# what is meant. The others are for tables that would be too long: ranks tell theirs to one another.
MARGINS = (0.05, 0.1, 0.2, 0.4)
MOST_TEXT = 2000  # letters of all rules: csrc/plan/rules.cc


# ---- from times to rules


@dataclass
class Times:
    """For one size: bytes of the message as rules count them, and the median of each kernel."""

    bytes: int
    model: str  # what is chosen without a rule
    size: int = 0  # bytes of the larger buffer
    seconds: dict[str, float] = field(default_factory=dict)

    def rule(self, margin: float) -> str:
        """Return the kernel that a rule must name, or "" where the model's is as good."""
        if not self.seconds:
            return ""
        fastest = min(self.seconds, key=lambda kernel: self.seconds[kernel])
        as_good = self.seconds[fastest] * (1 + margin)
        return "" if self.seconds.get(self.model, float("inf")) <= as_good else fastest


class Segment(NamedTuple):
    """Messages of `first` to `last` bytes, None: any more; the kernel, "": the model chooses."""

    first: int
    last: int | None
    kernel: str

    def text(self, collective: str) -> str:
        last = "" if self.last is None else show_size(self.last)
        return f"{collective}:{show_size(self.first)}-{last}={self.kernel}"


Table = Mapping[str, Sequence[Times]]  # by collective


def segments(table: Sequence[Times], margin: float = MARGINS[0]) -> list[Segment]:
    """Cover all numbers of bytes: each size speaks for what is above the one before it.

    The last speaks for all that is longer, too. Neighbours that have the same kernel are one.
    """
    covered: list[Segment] = []
    first = 0
    for times in sorted(table, key=lambda times: times.bytes):
        if times.bytes < first:
            continue  # the same bytes again
        kernel = times.rule(margin)
        if covered and covered[-1].kernel == kernel:
            covered[-1] = covered[-1]._replace(last=times.bytes)
        else:
            covered.append(Segment(first, times.bytes, kernel))
        first = times.bytes + 1
    last = covered[-1] if covered else Segment(0, None, "")
    return [*covered[:-1], last._replace(last=None)]


def rules(table: Table) -> tuple[dict[str, list[str]], float]:
    """Return the rules of each collective, and the least margin with which they are short enough.

    There are none where the model's choices stand. Raises ValueError where none is short enough.
    """
    for margin in MARGINS:
        by_collective = {
            name: [segment.text(name) for segment in segments(some, margin) if segment.kernel]
            for name, some in table.items()
        }
        if len(",".join(rule for some in by_collective.values() for rule in some)) <= MOST_TEXT:
            return by_collective, margin
    raise ValueError(f"the rules have more than {MOST_TEXT} letters: measure fewer --size")


def text(table: Table, about: Sequence[str]) -> str:
    """Return the file; it may have comments alone."""
    by_collective, margin = rules(table)
    lines = [f"# {line}" for line in about]
    lines += [
        "# Bytes are the tensor's, or one rank's shard. Where no rule fits, the model chooses;",
        f"# so it does where its kernel took up to {margin:.0%} longer than the fastest.",
    ]
    for name, some in by_collective.items():
        lines += some or [f"# {name}: the model's choices stand"]
    return "\n".join(lines) + "\n"


def shown(table: Sequence[Times], margin: float = MARGINS[0]) -> list[str]:
    """Return the lines of a table of microseconds; `*` is what runs with the rules."""
    used = [kernel for kernel in KERNELS if any(kernel in times.seconds for times in table)]
    rows = [["size", "message", *(f"{name} " for name in used), "model"]]
    for times in table:
        cells = [
            show_time(times.seconds[kernel]) + "* "[kernel != (times.rule(margin) or times.model)]
            if kernel in times.seconds
            else "- "
            for kernel in used
        ]
        rows.append([show_size(times.size), show_size(times.bytes), *cells, times.model])
    return aligned(rows, right=True)


# ---- at the ranks


def use_gpu(rank: Rank) -> str:
    """Take the GPU of this rank; returns the device of its tensors."""
    torch.cuda.set_device(rank.index)
    return "cuda"


def open_group(rank: Rank, use: Callable[[Rank], str], kernel: str, name: str) -> None:
    """Make the default group anew, for that kernel; "": the model chooses."""
    if "device" not in rank.kept:
        measured.prepare(rank)
        rank.kept["device"] = use(rank)
        os.environ.pop("RINGCOMM_ALGORITHM", None)  # the user's table is not what is measured
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "ringcomm",
        store=dist.PrefixStore(name, rank.store),
        rank=rank.index,
        world_size=rank.size,
        timeout=datetime.timedelta(seconds=PATIENCE),
        pg_options=ringcomm.Options(algorithm=kernel or None),
    )


def call_of(workload: Workload, device: str) -> Callable[[], object]:
    """Return the call, on zeros."""
    whole = torch.zeros(workload.count, device=device)
    part = torch.zeros(workload.count // workload.ranks, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: cases.reduce_scatter_single(part, whole),
        "all_gather": lambda: cases.all_gather_single(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[workload.collective]


def kernel_of(rank: Rank, workload: Workload) -> str:
    """Call it once; returns the kernel that did it."""
    device = rank.kept["device"]
    call_of(workload, device)()
    last = ringcomm.backend_of(device=device).flight_record()[-1]
    dist.barrier()  # raises the error of an earlier call
    return str(last["algorithm"])


def time_calls(rank: Rank, workload: Workload) -> float:
    """Return the seconds of a call, by some in a row."""
    device = rank.kept["device"]
    call = call_of(workload, device)
    for _ in range(WARM):
        call()
        dist.barrier()  # ranks map one another's tensors while nothing is under way
    seconds = on_stream(call) if device == "cuda" else on_host(call)
    dist.barrier()
    return seconds


def on_stream(call: Callable[[], object]) -> float:
    """Time the GPU's work alone: it sleeps while the host enqueues the calls.

    The first call does not count, in which it waits for ranks that are late. Where the host takes
    longer than the sleep, the time is the host's. So the second sleep is longer, and it counts.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (HEAD_START, 8 * HEAD_START):
        torch.cuda._sleep(cycles)
        call()
        begin.record()
        for _ in range(CALLS):
            call()
        slept = not begin.query()
        end.record()
        end.synchronize()
    if not slept:
        raise ValueError(f"the host needs longer to enqueue {CALLS} calls than the GPU slept")
    return float(begin.elapsed_time(end)) * 1e-3 / CALLS


def on_host(call: Callable[[], object]) -> float:
    """Time the same where calls end when they return: on the simulated device of tests."""
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


# ---- the command


class Turns:
    """The ranks, and what they have measured so far."""

    def __init__(
        self, ranks: Measured, workloads: Sequence[Workload], use: Callable[[Rank], str]
    ) -> None:
        self.ranks, self.workloads, self.use = ranks, workloads, use
        self.model: dict[Workload, str] = {}
        self.times: dict[str, dict[Workload, list[float]]] = {kernel: {} for kernel in KERNELS}
        self.groups = 0

    def open(self, kernel: str) -> None:
        self.groups += 1
        self.ranks(open_group, self.use, kernel, f"group {self.groups}")

    def look(self) -> None:
        """Find what the model chooses, and which kernels have room for which workload."""
        self.open("")
        self.model = {w: str(self.ranks(kernel_of, w)[0]) for w in self.workloads}
        for kernel in KERNELS:
            used = self.ask(kernel, kernel_of, self.workloads)
            self.times[kernel] = {w: [] for w, names in used.items() if set(names) == {kernel}}

    def turn(self, number: int) -> None:
        at = number % len(KERNELS)
        for kernel in KERNELS[at:] + KERNELS[:at]:
            for workload, by_rank in self.ask(kernel, time_calls, [*self.times[kernel]]).items():
                self.times[kernel][workload].append(max(by_rank))  # the slowest rank counts

    def ask(
        self, kernel: str, task: Callable[[Rank, Workload], Any], workloads: Sequence[Workload]
    ) -> dict[Workload, list[Any]]:
        """Run a task for each workload in a group with that kernel; return the ranks' answers.

        A kernel that fails is left out from then on, and its ranks are replaced.
        """
        answers: dict[Workload, list[Any]] = {}
        if workloads:
            self.open(kernel)
        for workload in workloads:
            try:
                answers[workload] = self.ranks(task, workload)
            except RankError as error:
                name = f"{workload.collective} of {show_size(workload.size)}"
                print(f"{kernel} is left out: {name}: {last_line(error)}", file=sys.stderr)
                self.times[kernel] = {}
                return {}
        return answers

    def table(self) -> dict[str, list[Times]]:
        """Return the medians by collective."""
        table: dict[str, list[Times]] = {name: [] for name in COLLECTIVES}
        for workload in self.workloads:
            parts = workload.ranks if workload.collective in traits.IN_PARTS else 1
            times = Times(workload.size // parts, self.model[workload], workload.size)
            for kernel, some in self.times.items():
                if some.get(workload):
                    times.seconds[kernel] = statistics.median(some[workload])
            table[workload.collective].append(times)
        return table


def last_line(error: RankError) -> str:
    """Return what was raised, without the traceback."""
    return str(error).strip().rpartition("\n")[2]


def measure(
    ranks: int, sizes: Sequence[int], turns: int, use: Callable[[Rank], str]
) -> dict[str, list[Times]]:
    """Time all kernels, in turns."""
    workloads = [
        Workload(name, count, ranks, cases.PLAIN)
        for name in COLLECTIVES
        for count in dict.fromkeys(cases.elements(name, size, ranks) for size in sorted(sizes))
    ]
    with Measured(ranks, "ringcomm") as some:
        all_turns = Turns(some, workloads, use)
        all_turns.look()
        for number in range(turns):
            print(f"turn {number + 1} of {turns}", file=sys.stderr, flush=True)
            all_turns.turn(number)
        return all_turns.table()


def run(options: argparse.Namespace) -> int:
    """Measure, print the times and write the rules."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in os.environ or tasks > 1:
        raise ValueError("--device cuda starts a rank for each GPU itself: call it on one host")
    names = gpus()
    ranks = options.ranks or max(2, len(names))
    if ranks < 2:
        raise ValueError("--ranks: there are kernels for 2 ranks or more")
    if len(names) < ranks:
        raise ValueError(
            f"--device cuda: each rank needs a GPU of its own, and torch finds {len(names)} "
            f"here for {ranks} ranks"
        )
    try:
        table = measure(ranks, options.sizes or SIZES, options.turns or TURNS, use_gpu)
    except RankError as error:
        raise ValueError(last_line(error)) from error
    if not any(times.seconds for some in table.values() for times in some):
        raise ValueError(
            "no kernel ran on the GPUs, so there is nothing to choose from: "
            "RINGCOMM_LOG=warning says why tensors go through memory of the host"
        )
    by_collective, margin = rules(table)
    for name, some in table.items():
        print(f"{name}, {ranks} ranks, float32: us, medians of turns; * runs\n")
        print("\n".join(shown(some, margin)) + "\n")
    file = text(table, about(names[:ranks]))
    if not any(by_collective.values()):
        print("the model's choices stand everywhere: the file has no rule")
    if options.output:
        options.output.write_text(file, encoding="utf-8")
        print(f"written to {options.output}: RINGCOMM_ALGORITHM=@{options.output} takes it")
    else:
        print(file, end="")
    return 0


def about(names: Sequence[str]) -> list[str]:
    """Return what a reader must know of the machine."""
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return [
        "Kernels, for RINGCOMM_ALGORITHM=@FILE: by `ringcomm tune --device cuda`.",
        f"{kinds}: {len(names)} ranks, float32. torch {torch.__version__}, "
        f"ringcomm {ringcomm.__version__}, {today}.",
    ]
