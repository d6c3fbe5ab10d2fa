"""`ringcomm bench`: measures collectives, or a step of training, next to other backends.

It starts its own ranks on this host. Results are compared with the exact ones. Exit status 1 says
that one was wrong, or that it could not measure.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringcomm._text import list_of, positive
from ringcomm.tools import arguments, progress
from ringcomm.tools.bench import cases, collectives, ddp, figures, nccl, trust
from ringcomm.tools.bench.machine import gpus, machine
from ringcomm.tools.bench.measured import BenchmarkError
from ringcomm.tools.bench.ranks import RankError
from ringcomm.tools.bench.report import write_json
from ringcomm.tools.bench.sample import Facts, write_csv
from ringcomm.tools.page import needed

USUAL = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
SIZES = "8,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"
ENDED = 130  # by Ctrl-C, as shells have it
EXAMPLES = (
    "ringcomm bench all_reduce                                 next to Gloo",
    "ringcomm bench all_reduce,all_gather --size 1K..64M --ranks 2,4",
    "ringcomm bench --ddp --model transformer                  steps of a training",
    "ringcomm bench all_reduce --html bench.html               with figures",
)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Says defaults, and leaves the lines of examples as they are."""


def some_of(names: Sequence[str]) -> Any:
    """Return an argparse type for some of these names, separated by commas."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return list_of(parse)


def ranks(text: str) -> list[int]:
    """Parse "2,4,8" for argparse. "all" is as many as there are GPUs; 0 stands for it."""
    parsed: list[int] = [0] if text == "all" else list_of(positive)(text)
    return parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = Help
    add = parser.add_argument
    what = arguments.add_collective(parser, tuple(cases.FACTORS), several=True, optional=True)
    size = arguments.add_size(parser, SIZES, "bytes of the larger buffer")
    types = add("--dtype", dest="types", type=some_of(list(cases.EXACT)), default="float32",
                help="float32,bfloat16,…")  # fmt: skip
    ops = add("--op", dest="ops", type=some_of(list(cases.OPS)), default="sum",
              help="sum,prod,min,max")  # fmt: skip
    add(
        "--ranks",
        type=ranks,
        default="2",
        help="2,4,8, one after the other; all: a GPU or core each",
    )
    add("--backends", type=list_of(str), default="ringcomm,gloo", help="ringcomm,gloo,nccl")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are")
    add("--rounds", type=positive, default=5, help="in each, every backend has its turn")
    add("--seconds", type=float, default=0.2, help="how long a backend's round takes, about")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="count wrong elements")
    add("--loaded", action="store_true", help="also with every core busy computing")
    add("--columns", choices=["ringcomm", nccl.COLUMNS], default="ringcomm", help="of the tables")
    add("--markdown", action="store_true", help="print Markdown tables")
    files = arguments.add_files(
        parser,
        json="write all figures here",
        csv="write a line a measured size here",
        html="write a page with figures here",
    )
    add("--limit", type=float, default=300, help="seconds after which a round is given up")
    add("--deadline", type=float, default=3600, help="seconds after which ranks are ended")
    ddp.add_arguments(parser)
    arguments.former(parser, what, "--collectives")
    arguments.former(parser, size, "--sizes")
    arguments.former(parser, types, "--types")
    arguments.former(parser, ops, "--ops")
    arguments.former(parser, files["html"], "--report")


def run(options: argparse.Namespace) -> int:
    if options.html:
        needed()  # now, not after an hour of measuring
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
        if name not in cases.FACTORS:
            raise ValueError(f"{name!r} is none of {', '.join(cases.FACTORS)}")
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
