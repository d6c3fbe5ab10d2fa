"""`ringcomm tune`: measures what messages cost between the ranks of a job, for RINGCOMM_COSTS.

Start it as the job itself: `torchrun ... -m ringcomm tune --output FILE`. It measures latency and
rate between every two hosts, to put near ones side by side, and what a message costs. Without a
launcher, on a host with several GPUs, it times their kernels and writes a file for
RINGCOMM_ALGORITHM=@FILE.
"""
# The order of hosts is in _network/probes.py and order.py, the costs in messages.py and
# _network/costs.py, and the kernels in kernels.py.

from __future__ import annotations

import argparse
import os

from ringcomm._text import output, positive, sizes
from ringcomm.tools import arguments

EXAMPLES = (
    "torchrun --nnodes=2 ... -m ringcomm tune --output costs.txt",
    "RINGCOMM_COSTS=costs.txt torchrun --nnodes=2 ... train.py",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=output, metavar="FILE", help="what is written: of a job, by rank 0")
    add("--device", choices=["cpu", "cuda"], help="cuda: kernels of the GPUs of this host")
    add("--ranks", type=positive, metavar="N", help="with cuda: 2 or more, not as many as GPUs")
    text = "with cuda: a list, of the larger buffer"
    size = add("--size", dest="sizes", type=sizes, metavar="LIST", help=text)
    add("--turns", type=positive, help="with cuda: medians of so many")
    arguments.former(parser, size, "--sizes")


def run(options: argparse.Namespace) -> int:
    import torch  # without which --help does

    from ringcomm.tools.tune import kernels, messages

    several = "RANK" not in os.environ and torch.cuda.device_count() > 1
    if options.device == "cuda" or (several and not options.device):
        return kernels.run(options)
    if options.ranks or options.sizes or options.turns:
        raise ValueError("--ranks, --size and --turns are for --device cuda")
    return messages.run(options)
