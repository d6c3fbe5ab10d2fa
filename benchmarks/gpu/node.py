"""`ringcomm bench` and `ringcomm tune` as stages of gpu_check.py.

With --node each rank has a GPU. Without a GPU tensors are the CPU's, and there is no NCCL.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import gpu.table
from gpu.ranks import LIBRARY
from gpu.rivals import OURS
from gpu.stages import Settings, of_a_rival, parts
from gpu.table import Row
from lab import report
from lab.ranks import Rank
from ringcomm.tools.bench.machine import gpus
from ringcomm.tools.tune import kernels

SECONDS = 80  # that one call of `ringcomm bench` may take


def backends(settings: Settings) -> list[str]:
    """Return what is measured: NCCL needs a torch that is built with it."""
    nccl = not settings.simulated and dist.is_nccl_available()
    return [OURS, *(["nccl"] if nccl else []), "gloo"]


def run_bench(settings: Settings, name: str, size: int, *words: str) -> dict[str, Any]:
    """Run it; what it prints is a table of the archive. Returns its JSON."""
    out = Path(settings.folder) / f"{name}_{size}.json"
    command = [sys.executable, "-m", "ringcomm", "bench", "--ranks", str(size)]
    command += ["--device", "cpu" if settings.simulated else "cuda", "--deadline", f"{SECONDS}"]
    kept = {key: value for key, value in os.environ.items() if key != LIBRARY}
    done = subprocess.run(
        [*command, "--json", str(out), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS + 10,
        env=kept,
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, flush=True)
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
    (settings.tables / f"{name}_{size}.txt").write_text(done.stdout, encoding="utf-8")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def collectives(settings: Settings, size: int, rivals: list[str], sizes: str) -> Iterator[Row]:
    name = "_".join(["bench", *(rivals or [OURS])])
    how = settings.pick(("3", "0.05"), ("2", "0.005"), ("2", "0.005"))
    words = ["--backends", ",".join([OURS, *rivals]), "--size", sizes, "--columns", "nccl-tests"]
    body = run_bench(settings, name, size, *words, "--rounds", how[0], "--seconds", how[1])
    samples = [sample for sample in body["samples"] if not sample["refused"]]
    for ours in (sample for sample in samples if sample["backend"] == OURS):
        keys = ("collective", "in_place", "count")
        notes = [f"{ours['busbw_gb_per_s']:.2f} GB/s busbw"]
        notes += [
            f"{other['backend']} {report.show_time(other['median_s'])} µs, "
            f"{other['median_s'] / ours['median_s']:.2f} times as long"
            for other in samples
            if other["backend"] != OURS and all(other[key] == ours[key] for key in keys)
        ]
        place = "in place" if ours["in_place"] else "out of place"
        what = f"{size} ranks: {ours['collective']} {report.show_size(ours['bytes'])}, {place}"
        if ours["wrong"]:
            yield gpu.table.failed(what, f"{ours['wrong']} elements are wrong")
        yield gpu.table.info(what, 1e6 * ours["median_s"], "µs", "; ".join(notes))


def bench(settings: Settings, size: int) -> Iterator[Row]:
    """Measure each rival in a call of its own: one that fails or hangs leaves the others."""
    ours = functools.partial(
        collectives, settings, size, [], settings.pick("1K,1M,16M,256M", "1K,64K", "1K")
    )
    yield from parts(ours)
    for rival in backends(settings)[1:]:
        large = "1K,1M,16M,256M" if rival == "nccl" else "64K,1M"  # Gloo's would take minutes
        sizes = settings.pick(large, "64K", "1K")
        function = functools.partial(collectives, settings, size, [rival], sizes)
        yield from of_a_rival(f"{size} ranks: {rival}", function)


def use_simulated(rank: Rank, library: str) -> str:
    """Give this rank a simulated device of its own."""
    os.environ[LIBRARY] = library
    os.environ["RINGCOMM_SIM_DEVICES"] = str(rank.size)
    os.environ["RINGCOMM_SIM_ROTATE"] = str(rank.index)
    return "cpu"


def tune(settings: Settings, size: int) -> Iterator[Row]:
    """Time each kernel; what is measured, and the rules, are a table of the archive."""
    use = functools.partial(use_simulated, library=settings.library)
    names = ["a simulated device"] * size if settings.simulated else gpus()[:size]
    sizes = settings.pick("1K,32K,128K,512K,2M,16M,64M", "1K,64K", "1K")
    table = kernels.measure(
        size,
        report.list_of(report.size)(sizes),
        1,  # turn: that is seconds, and the order of all kernels is the same
        use if settings.simulated else kernels.use_gpu,
    )
    lines = []
    for name, some in table.items():
        lines += [name, *kernels.shown(some), ""]
        fastest = [
            f"{report.show_size(one.size)} {min(one.seconds, key=lambda k: one.seconds[k])}"
            for one in some
            if one.seconds
        ]
        note = ", ".join(fastest)
        yield gpu.table.info(f"{size} ranks: the fastest kernels of {name}", note=note)
    rules = kernels.text(table, kernels.about(names))
    file = settings.tables / f"kernels_{size}.txt"
    file.write_text("\n".join(f"# {line}" for line in lines) + "\n" + rules, encoding="utf-8")


def fsdp2(settings: Settings, size: int) -> Iterator[Row]:
    """Measure a step of FSDP2 with a small transformer."""
    model = settings.pick(("1024", "6", "8"), ("64", "2", "2"), ("64", "2", "2"))
    words = ["--ddp", "--wrapper", "fsdp2", "--model", "transformer"]
    for name, value in zip(("--width", "--layers", "--batch"), model, strict=True):
        words += [name, value]
    words += ["--rounds", "2", "--steps", settings.pick("5", "2", "2")]

    def measured(backend: str) -> Iterator[Row]:
        body = run_bench(settings, f"fsdp2_{backend}", size, *words, "--backends", backend)
        (run,) = body["runs"]
        figures = run["backends"][backend]
        step, millions = 1e3 * figures["step_median_s"], run["parameters"] / 1e6
        note = f"of a step of {step:.2f} ms, {millions:.1f} M parameters"
        what = f"{size} ranks: {backend}: communication of FSDP2"
        yield gpu.table.info(what, 1e3 * figures["exposed_median_s"], "ms", note)

    yield from parts(functools.partial(measured, OURS))
    for rival in backends(settings)[1:]:
        yield from of_a_rival(f"{size} ranks: {rival}", functools.partial(measured, rival))
