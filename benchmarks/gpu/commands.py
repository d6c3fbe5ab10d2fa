"""`ringcomm bench` and `ringcomm tune` as stages of gpu_check.py.

Without a GPU tensors are the CPU's, and there is no NCCL. NCCL refuses ranks that share a GPU. So
bench has it take each rank for a host of its own, and it goes over sockets. How fast that is, is no
question of NCCL's making. A rival that fails is information.
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
from gpu.stages import Settings, last_line, of_a_rival, parts
from gpu.table import Row
from lab import report
from lab.ranks import Rank
from ringcomm.tools.bench.machine import gpus
from ringcomm.tools.tune import kernels

OURS = "ringcomm"
SECONDS = 80  # that one call of `ringcomm bench` may take
FASTER = 3.0  # communication of a step of DDP than Gloo's, at two ranks


def rivals(settings: Settings) -> list[str]:
    """Return the other backends that are measured: NCCL needs a torch that is built with it."""
    nccl = not settings.simulated and dist.is_nccl_available()
    return [*(["nccl"] if nccl else []), "gloo"]


def run_bench(
    settings: Settings, name: str, size: int, *words: str, device: str = "", **variables: str
) -> dict[str, Any]:
    """Run it, with its output as a table of the archive. Returns its JSON."""
    out = Path(settings.folder) / f"{name}_{size}.json"
    device = device or ("cpu" if settings.simulated else "cuda")
    command = [sys.executable, "-m", "ringcomm", "bench", "--ranks", str(size)]
    seconds = settings.pick(SECONDS, 3 * SECONDS, 3 * SECONDS)  # tests run beside one another
    command += ["--device", device, "--deadline", f"{seconds}"]
    kept = {key: value for key, value in os.environ.items() if key != LIBRARY}
    done = subprocess.run(
        [*command, "--json", str(out), *words],
        capture_output=True,
        text=True,
        timeout=seconds + 10,
        env=kept | variables,
    )
    if done.returncode != 0:
        print(done.stdout, done.stderr, flush=True)
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
    (settings.tables / f"{name}_{size}.txt").write_text(done.stdout, encoding="utf-8")
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def rows_of(body: dict[str, Any], where: str) -> Iterator[Row]:
    """Yield a row for each of ringcomm's figures, with the others' as its note."""
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
        what = f"{where}: {ours['collective']} {report.show_size(ours['bytes'])}, {place}"
        if ours["wrong"]:
            yield gpu.table.failed(what, f"{ours['wrong']} elements are wrong")
        yield gpu.table.info(what, 1e6 * ours["median_s"], "µs", "; ".join(notes))


def collectives(settings: Settings, size: int, others: list[str], sizes: str) -> Iterator[Row]:
    name = "_".join(["bench", *(others or [OURS])])
    how = settings.pick(("3", "0.05"), ("2", "0.005"), ("2", "0.005"))
    words = ["--backends", ",".join([OURS, *others]), "--size", sizes, "--columns", "nccl-tests"]
    body = run_bench(settings, name, size, *words, "--rounds", how[0], "--seconds", how[1])
    yield from rows_of(body, f"{size} ranks")


def bench(settings: Settings, size: int) -> Iterator[Row]:
    """Measure each rival in a call of its own: one that fails or hangs leaves the others."""
    ours = functools.partial(
        collectives, settings, size, [], settings.pick("1K,1M,16M,256M", "1K,64K", "1K")
    )
    yield from parts(ours)
    for rival in rivals(settings):
        # Gloo's would take minutes, and NCCL's between ranks that share a GPU.
        alone = rival == "nccl" and size <= len(gpus())
        large = "1K,1M,16M,256M" if alone else "64K,1M"
        sizes = settings.pick(large, "64K", "1K")
        function = functools.partial(collectives, settings, size, [rival], sizes)
        yield from of_a_rival(f"{size} ranks: {rival}", function)


def steps(
    settings: Settings, size: int, name: str, backends: list[str], words: list[str]
) -> Iterator[Row]:
    """Measure steps of training with these backends, which take turns."""
    words = [*words, "--ddp", "--rounds", settings.pick("3", "2", "1")]
    words += ["--steps", settings.pick("4", "2", "2"), "--backends", ",".join(backends)]
    body = run_bench(settings, "_".join([name, *backends]), size, *words)
    (run,) = body["runs"]
    for backend, figures in run["backends"].items():
        step, millions = 1e3 * figures["step_median_s"], run["parameters"] / 1e6
        note = f"of a step of {step:.2f} ms, {millions:.1f} M parameters"
        what = f"{size} ranks: {backend}: communication of {name}"
        yield gpu.table.info(what, 1e3 * figures["exposed_median_s"], "ms", note)
    if (share := run["exposed_vs_gloo"].get(OURS)) is not None:
        what, ratio = f"{size} ranks: communication faster than Gloo's", 1 / max(share, 1e-6)
        judged = size == 2
        yield (
            gpu.table.at_least(FASTER, what, ratio, "x")
            if judged
            else gpu.table.info(what, ratio, "x")
        )


def ddp(settings: Settings, size: int) -> Iterator[Row]:
    """Measure a step of DDP with a perceptron, Gloo beside it, and then NCCL."""
    real = ("4096" if size == 2 else "2048", "6", "64")  # Gloo takes a second for the larger one
    words = model(settings.pick(real, ("64", "3", "8"), ("32", "2", "4")))
    yield from parts(functools.partial(steps, settings, size, "ddp", [OURS, "gloo"], words))
    if "nccl" in rivals(settings):
        function = functools.partial(steps, settings, size, "ddp", ["nccl"], words)
        yield from of_a_rival(f"{size} ranks: nccl", function)


def fsdp2(settings: Settings, size: int) -> Iterator[Row]:
    """Measure a step of FSDP2 with a small transformer, each backend by itself."""
    words = model(settings.pick(("1024", "6", "8"), ("64", "2", "2"), ("64", "2", "2")))
    words += ["--wrapper", "fsdp2", "--model", "transformer"]
    yield from parts(functools.partial(steps, settings, size, "fsdp2", [OURS], words))
    for rival in rivals(settings):
        function = functools.partial(steps, settings, size, "fsdp2", [rival], words)
        yield from of_a_rival(f"{size} ranks: {rival}", function)


def model(shape: tuple[str, str, str]) -> list[str]:
    names = ("--width", "--layers", "--batch")
    return [word for pair in zip(names, shape, strict=True) for word in pair]


def on_cpu(transport: str, size: int, settings: Settings) -> Iterator[Row]:
    """Measure ringcomm and Gloo in one run; where that fails, ringcomm alone."""
    over = "loopback TCP" if transport == "tcp" else "shared memory"
    sizes = settings.pick("8,16K,1M,64M", "8,64K", "64K")
    rounds, seconds = settings.pick(("3", "0.15"), ("2", "0.005"), ("2", "0.005"))
    words = ["all_reduce", "--size", sizes, "--rounds", rounds, "--seconds", seconds]
    variables = {"RINGCOMM_TRANSPORT": "tcp"} if transport == "tcp" else {}

    def measured(backends: str) -> dict[str, Any]:
        name, asked = f"cpu_{transport}", [*words, "--backends", backends]
        return run_bench(settings, name, size, *asked, device="cpu", **variables)

    try:
        body = measured(f"{OURS},gloo")
    except RuntimeError as error:
        body = measured(OURS)
        yield gpu.table.info(f"{size} ranks, {over}: gloo", note=f"it fails: {last_line(error)}")
    yield from rows_of(body, f"{size} ranks, {over}")


def cpu(settings: Settings, size: int) -> Iterator[Row]:
    """Compare with Gloo on this machine's cores."""
    transports = settings.pick(("shm", "tcp"), ("shm", "tcp"), ("shm",))
    yield from parts(*(functools.partial(on_cpu, way, size, settings) for way in transports))


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
            f"{report.show_size(row.size)} {min(row.seconds, key=lambda k: row.seconds[k])}"
            for row in some
            if row.seconds
        ]
        note = ", ".join(fastest)
        yield gpu.table.info(f"{size} ranks: the fastest kernels of {name}", note=note)
    rules = kernels.text(table, kernels.about(names))
    file = settings.tables / f"kernels_{size}.txt"
    file.write_text("\n".join(f"# {line}" for line in lines) + "\n" + rules, encoding="utf-8")
