"""Measures what the command's options ask for, prints the figures and writes the files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringcomm.tools import progress
from ringcomm.tools.bench import collectives, ddp, figures, traits, trust
from ringcomm.tools.bench.machine import gpus, machine
from ringcomm.tools.bench.measured import BenchmarkError
from ringcomm.tools.bench.ranks import RankError
from ringcomm.tools.bench.report import write_json
from ringcomm.tools.bench.sample import Facts, write_csv

USUAL = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
ENDED = 130  # by Ctrl-C, as shells have it


def run(options: argparse.Namespace) -> int:
    """Measure, write the files and tell. Returns the exit status."""
    try:
        body = measure(options)
    except (BenchmarkError, RankError) as error:
        raise ValueError(str(error)) from error
    except KeyboardInterrupt:
        return ENDED
    kind = body.pop("benchmark")
    write_json(options.json, kind, body)
    if options.csv:
        ddp.write_csv(options.csv, body) if kind == ddp.NAME else write_csv(
            options.csv, body["samples"]
        )
    if options.html:
        figures.write(options.html, kind, body)
    if kind == ddp.NAME:
        return 0
    status = said(body["samples"])
    doubtful = sum(bool(sample.get("doubts")) for sample in body["samples"])
    print(trust.load_says(body["load"], doubtful, len(body["samples"])))
    if line := trust.averages_say(body["average"]):
        print(line)
    return status


def said(samples: Sequence[Facts]) -> int:
    """Tell what is not as it should be; returns the exit status."""
    refusals = [(sample["backend"], sample["refused"]) for sample in samples if sample["refused"]]
    for backend, why in dict.fromkeys(refusals):
        print(f"{backend} refuses some: {why}")
    wrong = [sample for sample in samples if sample["wrong"]]
    for sample in wrong:
        print(
            f"WRONG: {sample['backend']}: {sample['collective']} of {sample['bytes']} bytes, "
            f"{sample['type']} {sample['redop']}, {sample['ranks']} ranks: "
            f"{sample['wrong']} elements"
        )
    return 1 if wrong else 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what JSON gets."""
    complete(options)
    facts = machine() | ({"gpus": gpus()} if options.device == "cuda" else {})
    if options.ddp:
        return {"benchmark": ddp.NAME, "machine": facts, **ddp.measure(options)}
    with progress.shown(collectives.parts(options)) as lines:
        samples, spans = collectives.measure(options, lines)
    names = ("ranks", "rounds", "seconds", "device", "backends", "check")
    chosen = {name: getattr(options, name) for name in names}
    return {
        "benchmark": collectives.NAME,
        "machine": facts,
        "options": chosen,
        "load": trust.summary(spans),
        "average": trust.averages(samples, options.backends),
        "samples": samples,
    }


def complete(options: argparse.Namespace) -> None:
    """Fill in the usual collectives, and the number of ranks that "all" is on this machine.

    Raises ValueError where something that is asked for is not here.
    """
    options.collectives = options.collectives or USUAL
    for name in options.collectives:
        if name not in traits.FACTORS:
            raise ValueError(f"{name!r} is none of {', '.join(traits.FACTORS)}")
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    for backend in options.backends:
        if not there.get(backend, True):
            raise ValueError(f"--backends {backend}: this torch is built without it")
        if backend == "nccl" and options.device != "cuda":
            raise ValueError("--backends nccl: it needs --device cuda")
    if options.device == "cuda" and not torch.cuda.device_count():
        raise ValueError("--device cuda: torch finds no GPU here")
    cores = len(os.sched_getaffinity(0))
    every = torch.cuda.device_count() if options.device == "cuda" else cores
    options.ranks = list(dict.fromkeys(count or every for count in options.ranks))
