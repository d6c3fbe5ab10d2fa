"""`ringcomm bench`: measures collectives, or a step of training, next to other backends.

It starts its own ranks on this host. Results are compared with the exact ones. Exit status 1 says
that one was wrong, or that it could not measure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ringcomm._text import list_of, positive
from ringcomm.tools import arguments
from ringcomm.tools.bench import traits
from ringcomm.tools.page import needed

SIZES = "8,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"
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
    what = arguments.add_collective(parser, tuple(traits.FACTORS), several=True, optional=True)
    size = arguments.add_size(parser, SIZES, "bytes of the larger buffer")
    types = add("--dtype", dest="types", type=some_of(list(traits.EXACT)), default="float32",
                help="float32,bfloat16,…")  # fmt: skip
    ops = add("--op", dest="ops", type=some_of(list(traits.OPS)), default="sum",
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
    add("--columns", choices=["ringcomm", "nccl-tests"], default="ringcomm", help="of the tables")
    add("--markdown", action="store_true", help="print Markdown tables")
    files = arguments.add_files(
        parser,
        json="write all figures here",
        csv="write a line a measured size here",
        html="write a page with figures here",
    )
    add("--limit", type=float, default=300, help="seconds after which a round is given up")
    add("--deadline", type=float, default=3600, help="seconds after which ranks are ended")
    add_training(parser)
    arguments.former(parser, what, "--collectives")
    arguments.former(parser, size, "--sizes")
    arguments.former(parser, types, "--types")
    arguments.former(parser, ops, "--ops")
    arguments.former(parser, files["html"], "--report")


def add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a step of training")
    add = group.add_argument
    add("--ddp", action="store_true", help="measure steps of training instead")
    add("--wrapper", choices=["ddp", "fsdp2"], default="ddp", help="what shares the model")
    add("--model", choices=["mlp", "transformer"], default="mlp")
    add("--batch", type=positive, default=64, help="examples a rank and step")
    add("--width", type=positive, default=2048, help="of each layer")
    add("--layers", type=positive, default=6)
    add("--steps", type=positive, default=10, help="a round, of each kind")


def run(options: argparse.Namespace) -> int:
    if options.html:
        needed()  # now, not after an hour of measuring
    from ringcomm.tools.bench import measurement  # with torch, without which --help does

    return measurement.run(options)
