"""What a step of DDP waits for, by backend; and ranks on the CPU beside Gloo."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpu.table
from gpu.ranks import LIBRARY, DeviceRanks, Entry, meet, place_of, preload_training
from gpu.rivals import OURS, nccl_entry
from gpu.stages import Settings, last_line, of_a_rival, parts
from gpu.table import Row
from lab.benchmark import slowest
from lab.ranks import Rank

T = TypeVar("T")

FASTER = 3.0  # communication than Gloo's, at two ranks
STEPS, ROUNDS = 4, 3
NCCL_SECONDS = 40.0  # ranks of NCCL that share a GPU may crawl


# ---- the DDP step


def build(rank: Rank, width: int, layers: int, batch: int) -> int:
    """Make a perceptron and warm it up; returns its number of parameters."""
    place = place_of(rank)
    torch.manual_seed(1)
    modules = [nn.Linear(width, width) for _ in range(layers)]
    network = nn.Sequential(*(part for layer in modules for part in (layer, nn.ReLU())))
    model = DistributedDataParallel(network.to(place.device), gradient_as_bucket_view=True)
    torch.manual_seed(100 + rank.index)
    rank.kept["model"] = model
    rank.kept["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01)
    rank.kept["batch"] = torch.randn(batch, width, device=place.device)
    for _ in range(3):  # DDP sorts its buckets anew after the first
        step(rank, exchanging=True)
    return sum(parameter.numel() for parameter in model.parameters())


def step(rank: Rank, *, exchanging: bool) -> float:
    """Train once; returns the seconds until all gradients are there, without the optimizer's."""
    model = rank.kept["model"]
    meet(rank)
    start = time.perf_counter()
    rank.kept["optimizer"].zero_grad()
    with contextlib.nullcontext() if exchanging else model.no_sync():
        model(rank.kept["batch"]).square().mean().backward()
    place_of(rank).synchronize()
    seconds = time.perf_counter() - start
    if exchanging:  # else the ranks would part
        rank.kept["optimizer"].step()
    return seconds


def time_steps(rank: Rank, steps: int) -> dict[str, list[float]]:
    """Return the seconds of steps of each kind, by turns."""
    times: dict[str, list[float]] = {"exchanging": [], "silent": []}
    for _ in range(steps):
        times["exchanging"].append(step(rank, exchanging=True))
        times["silent"].append(step(rank, exchanging=False))
    return times


def checksums(rank: Rank) -> list[int]:
    """Return a sum over the bits of each parameter: equal models give equal lists."""
    return [
        int(parameter.detach().view(torch.int32).sum(dtype=torch.int64))
        for parameter in rank.kept["model"].parameters()
    ]


def round_of(ranks: DeviceRanks, steps: int, limit: float) -> tuple[float, float]:
    """Return a round's median step, and what of it is communication, in seconds."""
    times = ranks(time_steps, steps, seconds=limit)
    exchanging, silent = (
        statistics.median(slowest([of_rank[kind] for of_rank in times]))
        for kind in ("exchanging", "silent")
    )
    return exchanging, exchanging - silent


class Trainers:
    """The ranks of each backend, alive side by side. A rival that fails is out, and tells why."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.sets: dict[str, DeviceRanks] = {}
        self.failed: dict[str, str] = {}
        self._stack = stack

    def enter(self, backend: str, size: int, settings: Settings) -> None:
        def made() -> None:
            ranks = DeviceRanks(size, _entry(backend, settings), backend)
            self.sets[backend] = self._stack.enter_context(ranks)

        self._attempt(backend, made)

    def each(self, task: Callable[[DeviceRanks], T]) -> dict[str, T]:
        """Do it with each backend's ranks in turn."""
        done: dict[str, T] = {}
        for backend, ranks in list(self.sets.items()):
            self._attempt(backend, lambda: done.update({backend: task(ranks)}))  # noqa: B023
        return done

    def _attempt(self, backend: str, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            if backend == OURS:
                raise
            print(f"{backend}: {error}", flush=True)
            self.failed[backend] = last_line(error)
            if ranks := self.sets.pop(backend, None):
                ranks.abandon()


def compared(size: int, backends: list[str], settings: Settings) -> Iterator[Row]:
    """Let the backends take turns, so that what disturbs the machine disturbs all."""
    real = (4096 if size == 2 else 2048, 6, 64)  # Gloo takes a second for the larger one
    model: tuple[int, int, int] = settings.pick(real, (64, 3, 8), (32, 2, 4))
    rounds, steps = settings.pick((ROUNDS, STEPS), (2, 2), (1, 2))
    found: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        trainers = Trainers(stack)
        for backend in backends:
            trainers.enter(backend, size, settings)
        parameters = trainers.each(lambda ranks: ranks(build, *model, seconds=60)[0])[OURS]
        for _ in range(rounds):
            for backend, one in trainers.each(lambda ranks: round_of(ranks, steps, 60)).items():
                found.setdefault(backend, []).append(one)
        checked = trainers.sets[OURS](checksums)
    exposed = {b: statistics.median(figure for _, figure in found[b]) for b in found}
    for backend, figures in found.items():
        whole = statistics.median(figure for figure, _ in figures)
        note = f"of a step of {1e3 * whole:.2f} ms, {parameters / 1e6:.1f} M parameters"
        what = f"{size} ranks: {backend}: communication"
        yield gpu.table.info(what, 1e3 * exposed[backend], "ms", note)
    for backend, said in trainers.failed.items():
        yield gpu.table.info(f"{size} ranks: {backend}", note=f"it fails: {said}")
    what = f"{size} ranks: parameters are equal on all"
    equal = len(set(map(tuple, checked))) == 1
    yield gpu.table.passed(what) if equal else gpu.table.failed(what, "they differ")
    if "gloo" in exposed:
        ratio = exposed["gloo"] / max(exposed[OURS], 1e-6)
        what = f"{size} ranks: communication faster than Gloo's"
        yield (
            gpu.table.at_least(FASTER, what, ratio, "x")
            if size == 2
            else gpu.table.info(what, ratio, "x")
        )


def _entry(backend: str, settings: Settings) -> Entry:
    kind = settings.kind if backend == OURS or not settings.simulated else "cpu"
    return Entry(kind, settings.library)


def nccl(size: int, settings: Settings) -> Iterator[Row]:
    """NCCL: one rank has the GPU to itself; several are taken for hosts of their own."""
    what = f"{size} rank{'s' if size > 1 else ''}: nccl: communication"
    if settings.simulated:
        yield gpu.table.info(what, note="not run: it needs a GPU")
        return
    entry = Entry(settings.kind, environment=nccl_entry(size))
    with DeviceRanks(size, entry, "nccl") as ranks:
        ranks(build, 4096 if size < 4 else 2048, 6, 64, seconds=NCCL_SECONDS)
        whole, exposed = round_of(ranks, STEPS, NCCL_SECONDS)
    note = f"of a step of {1e3 * whole:.2f} ms" + (", over sockets" if nccl_entry(size) else "")
    yield gpu.table.info(what, 1e3 * exposed, "ms", note)


def ddp(settings: Settings, size: int) -> Iterator[Row]:
    """Compare backends."""
    preload_training()
    function = functools.partial(compared, size, [OURS, "gloo"], settings)
    function.__name__ = f"{size} ranks"  # type: ignore[attr-defined]
    yield from parts(function)
    for count in (1, size) if size == 2 else (size,):
        what = f"{count} ranks: nccl: communication"
        yield from of_a_rival(what, functools.partial(nccl, count, settings))


# ---- the CPU


def measured(backends: str, transport: str, size: int, settings: Settings) -> dict[Any, float]:
    """Run `ringcomm bench`; returns medians in seconds by (bytes, backend)."""
    sizes = settings.pick("8,16K,1M,64M", "8,64K", "64K")
    rounds, seconds = settings.pick(("3", "0.15"), ("2", "0.005"), ("2", "0.005"))
    report = Path(settings.folder) / f"cpu_{transport}_{size}.json"
    command = [sys.executable, "-m", "ringcomm", "bench", "--backends", backends]
    command += ["--ranks", str(size), "--collectives", "all_reduce", "--sizes", sizes]
    command += ["--rounds", rounds, "--seconds", seconds, "--deadline", "60"]
    variables = {"RINGCOMM_TRANSPORT": "tcp"} if transport == "tcp" else {}
    kept = {name: value for name, value in os.environ.items() if name != LIBRARY}
    done = subprocess.run(
        [*command, "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=70,
        env={**kept, **variables},
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, flush=True)
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
    samples = json.loads(report.read_text(encoding="utf-8"))["samples"]
    return {(s["bytes"], s["backend"]): s["median_s"] for s in samples}


def on_cpu(transport: str, size: int, settings: Settings) -> Iterator[Row]:
    """Measure ringcomm and Gloo in one run; where that fails, ringcomm alone."""
    over = "loopback TCP" if transport == "tcp" else "shared memory"
    try:
        times = measured(f"{OURS},gloo", transport, size, settings)
    except RuntimeError as error:
        times = measured(OURS, transport, size, settings)
        yield gpu.table.info(f"{size} ranks, {over}: gloo", note=f"it fails: {last_line(error)}")
    for each in sorted({length for length, _ in times}):
        ours, gloos = times[each, OURS], times.get((each, "gloo"))
        what = f"{size} ranks, {over}: all_reduce {each} bytes"
        note = f"Gloo {1e6 * gloos:.1f} µs, {gloos / ours:.2f} times as long" if gloos else ""
        yield gpu.table.info(what, 1e6 * ours, "µs", note)


def cpu(settings: Settings, size: int) -> Iterator[Row]:
    """Compare with Gloo on this machine's cores."""
    steps = []
    for transport in settings.pick(("shm", "tcp"), ("shm", "tcp"), ("shm",)):
        function = functools.partial(on_cpu, transport, size, settings)
        function.__name__ = f"{size} ranks over {transport}"  # type: ignore[attr-defined]
        steps.append(function)
    yield from parts(*steps)
