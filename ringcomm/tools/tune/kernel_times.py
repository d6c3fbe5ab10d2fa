"""Times the kernels of ranks that have a GPU each, and writes a table of the fastest.

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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import ringcomm
from ringcomm import _C
from ringcomm._text import show_size
from ringcomm.tools.bench import cases, measured
from ringcomm.tools.bench.measured import Measured
from ringcomm.tools.bench.ranks import Rank, RankError
from ringcomm.tools.tune import kernel_rules

KERNELS = tuple(name for name in _C.KERNELS if name != "graph")  # which runs what it has
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SIZES = [1 << power for power in range(10, 27)]  # 1 KiB to 64 MiB
TURNS = 5
CALLS = 20  # that are timed together
WARM = 4
HEAD_START = 4_000_000  # cycles of the GPU, 2 ms: the host enqueues all calls meanwhile
MOST_FAILURES = 2  # in a row: then a kernel is broken, and each would take PATIENCE
PATIENCE = 30.0  # seconds of a call: then its kernel has failed


class Job(NamedTuple):
    """What is called: a collective of float32, with so many in the larger buffer."""

    collective: str
    elements: int

    def message(self, ranks: int) -> int:
        """Return its bytes as rules count them."""
        parts = ranks if self.collective in cases.IN_PARTS else 1
        return self.elements * cases.ELEMENT // parts

    def __str__(self) -> str:
        return f"{self.collective} of {show_size(self.elements * cases.ELEMENT)}"


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


def call_of(job: Job, ranks: int, device: str) -> Callable[[], object]:
    """Return the call, on zeros."""
    whole = torch.zeros(job.elements, device=device)
    part = torch.zeros(job.elements // ranks, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: cases.reduce_scatter_single(part, whole),
        "all_gather": lambda: cases.all_gather_single(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[job.collective]


def kernel_of(rank: Rank, job: Job) -> str:
    """Call it once; returns the kernel that did it."""
    device = rank.kept["device"]
    call_of(job, rank.size, device)()
    last = ringcomm.backend_of(device=device).flight_record()[-1]
    dist.barrier()  # what has gone wrong is raised here
    return str(last["algorithm"])


def time_calls(rank: Rank, job: Job) -> float:
    """Return the seconds of a call, by some in a row."""
    device = rank.kept["device"]
    call = call_of(job, rank.size, device)
    for _ in range(WARM):
        call()
        dist.barrier()  # ranks map one another's tensors while nothing is under way
    seconds = on_stream(call) if device == "cuda" else on_host(call)
    dist.barrier()
    return seconds


def on_stream(call: Callable[[], object]) -> float:
    """Time what the GPU does alone: it sleeps while the host enqueues the calls.

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
    """The same where calls end when they return: on the simulated device of tests."""
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


# ---- the command


class Turns:
    """The ranks, and what they have measured so far."""

    def __init__(self, ranks: Measured, jobs: Sequence[Job], use: Callable[[Rank], str]) -> None:
        self.ranks, self.jobs, self.use = ranks, jobs, use
        self.model: dict[Job, str] = {}
        self.times: dict[tuple[Job, str], list[float]] = {}
        self.groups = 0
        self.failures = dict.fromkeys(("", *KERNELS), 0)  # in a row

    def open(self, kernel: str) -> None:
        self.groups += 1
        self.ranks(open_group, self.use, kernel, f"group {self.groups}")

    def look(self) -> None:
        """Find what the model chooses, and which kernels have room for which job."""
        for kernel in ("", *KERNELS):
            self.open(kernel)
            for job in self.jobs:
                if self.failures[kernel] == MOST_FAILURES:
                    continue
                try:
                    (used,) = set(self.ranks(kernel_of, job))
                except RankError as error:
                    self.leave_out(kernel, job, error)
                    continue
                self.failures[kernel] = 0
                if not kernel:
                    self.model[job] = used
                elif used == kernel:
                    self.times[job, kernel] = []

    def turn(self, number: int) -> None:
        at = number % len(KERNELS)
        for kernel in KERNELS[at:] + KERNELS[:at]:
            timed = [job for job in self.jobs if (job, kernel) in self.times]
            if timed:
                self.open(kernel)
            for job in timed:
                if self.failures[kernel] == MOST_FAILURES:
                    self.times.pop((job, kernel), None)
                    continue
                try:
                    by_rank = self.ranks(time_calls, job)
                except RankError as error:
                    self.leave_out(kernel, job, error)
                else:
                    self.times[job, kernel].append(max(by_rank))  # the slowest rank counts

    def leave_out(self, kernel: str, job: Job, error: RankError) -> None:
        """Say so, and go on: with new ranks, since those are over."""
        why = str(error).strip().rpartition("\n")[2]
        print(f"{kernel or 'the model'} is left out for {job}: {why}", file=sys.stderr)
        self.times.pop((job, kernel), None)
        self.failures[kernel] += 1
        if self.failures[kernel] == MOST_FAILURES:
            print(f"{kernel or 'the model'} is tried no more", file=sys.stderr)
        self.open(kernel)

    def table(self) -> dict[str, list[kernel_rules.Measured]]:
        """Return the medians by collective."""
        table: dict[str, list[kernel_rules.Measured]] = {name: [] for name in COLLECTIVES}
        for job in self.jobs:
            message, size = job.message(self.ranks.size), job.elements * cases.ELEMENT
            one = kernel_rules.Measured(message, self.model.get(job, ""), size)
            for kernel in KERNELS:
                if times := self.times.get((job, kernel)):
                    one.seconds[kernel] = statistics.median(times)
            table[job.collective].append(one)
        return table


def gpus() -> list[str]:
    """Return the names of the GPUs here."""
    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]


def measure(
    ranks: int, sizes: Sequence[int], turns: int, use: Callable[[Rank], str]
) -> dict[str, list[kernel_rules.Measured]]:
    """Time all kernels, in turns."""
    jobs = [
        Job(name, count)
        for name in COLLECTIVES
        for count in dict.fromkeys(cases.elements(name, size, ranks) for size in sorted(sizes))
    ]
    with Measured(ranks, "ringcomm") as some:
        all_turns = Turns(some, jobs, use)
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
        raise ValueError(str(error).strip().rpartition("\n")[2]) from error
    if not any(one.seconds for some in table.values() for one in some):
        raise ValueError(
            "no kernel ran on the GPUs, so there is nothing to choose from: "
            "RINGCOMM_LOG=warning says why tensors go through memory of the host"
        )
    margin = kernel_rules.fitting_margin(table)
    for name, some in table.items():
        print(f"{name}, {ranks} ranks, float32: us, medians of turns; * runs\n")
        print("\n".join(kernel_rules.shown(some, KERNELS, margin)) + "\n")
    write(options, table, about(names[:ranks]))
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


def write(options: argparse.Namespace, table: kernel_rules.Table, comments: Sequence[str]) -> None:
    text = kernel_rules.text(table, comments)
    if not kernel_rules.has_rules(text):
        print("the model's choices stand everywhere: the file has no rule")
    if options.output:
        options.output.write_text(text, encoding="utf-8")
        print(f"written to {options.output}: RINGCOMM_ALGORITHM=@{options.output} takes it")
    else:
        print(text, end="")
