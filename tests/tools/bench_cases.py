"""Figures that `ringcomm bench` could have measured, by formulas: for the tests of its pages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ringcomm.tools.bench import cases, collectives, ddp, traits
from ringcomm.tools.bench.sample import Sample, Workload

SIZES = [8 << (2 * i) for i in range(12)]  # 8 B to 32 MiB
# Seconds a call, and seconds a byte.
COSTS = {"ringcomm": (3e-6, 6e-11), "gloo": (180e-6, 7e-10), "nccl": (9e-6, 1.5e-10)}
MACHINE = {
    "cpu": "made up, with a name as long as those of Intel(R) Xeon(R) Platinum 8481C",
    "cores": 64,
    "kernel": "6.1.0",
    "architecture": "x86_64",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "ringcomm": "0.1.0",
    "load_average_before": 0.25,
    "date": "2026-01-01T00:00:00+00:00",
    "made_up": "yes: no figure of this page was measured",
}


def of_collectives(
    ranks: Sequence[int],
    names: Sequence[str] = ("all_reduce", "all_gather"),
    backends: Sequence[str] = ("ringcomm", "gloo", "nccl"),
    loads: Sequence[bool] = (False,),
) -> dict[str, Any]:
    """Return the body of such a file; gloo refuses one size."""
    samples = []
    for count, name, size in itertools.product(ranks, names, SIZES):
        for in_place in traits.IN_PLACE[name]:
            form = cases.Form(in_place=in_place)
            workload = Workload(name, cases.elements(name, size, count), count, form)
            for loaded, backend in itertools.product(loads, backends):
                samples.append(sample(workload, backend, loaded).facts())
    options = {"ranks": list(ranks), "rounds": 3, "seconds": 0.2, "device": "cpu",
               "backends": list(backends), "check": True}  # fmt: skip
    return {"benchmark": collectives.NAME, "machine": MACHINE, "options": options,
            "samples": samples}  # fmt: skip


def sample(workload: Workload, backend: str, loaded: bool) -> Sample:
    alpha, beta = COSTS[backend]
    made = Sample(workload, backend, loaded, wrong=0, calls=5)
    seconds = (alpha + beta * workload.size) * workload.ranks**0.5 * (4 if loaded else 1)
    for noise in (1.0, 0.9, 1.3):
        made.add([seconds * noise] * 5)
    if backend == "ringcomm":
        ways = ["direct"] * 5 + ["doubling"] * 3 + ["ring"] * 4
        made.algorithm = ways[min(11, max(0, (workload.size // 8).bit_length() // 2))]
        if workload.size >= collectives.FEWEST_COPIED and not loaded:
            made.copies = [seconds * 0.7] * 3
    return made


def of_steps(ranks: Sequence[int]) -> dict[str, Any]:
    """Return the body of a file of `--ddp`."""
    runs = []
    for count in ranks:
        backends = {}
        for number, backend in enumerate(COSTS):
            step = 0.05 * count**0.5
            exposed = (0.002, 0.03, 0.01)[number] * count**0.5
            rounds = [((step + exposed) * noise, step) for noise in (1.0, 0.98, 1.04)]
            backends[backend] = ddp.facts(rounds)
        runs.append(
            {"ranks": count, "parameters": 25178112, "backends": backends,
             "exposed_vs_gloo": ddp.ratios(backends), "parameters_equal": count == 2}
        )  # fmt: skip
    options = {"ranks": list(ranks), "batch": 64, "width": 2048, "layers": 6, "rounds": 3,
               "steps": 10, "device": "cpu"}  # fmt: skip
    return {"benchmark": ddp.NAME, "machine": MACHINE, "options": options, "runs": runs}
