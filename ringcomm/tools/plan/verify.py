"""`ringcomm verify`: prove an algorithm by hand, or tell how it goes wrong."""

from __future__ import annotations

import argparse
import sys

from ringcomm._text import size
from ringcomm.algorithms.program import AlgorithmError
from ringcomm.algorithms.proof import verify
from ringcomm.algorithms.steps import COLLECTIVES
from ringcomm.tools.plan.by_hand import load
from ringcomm.tools.plan.show import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "algorithm",
        metavar="FILE.py:FUNCTION",
        help="the function, as ringcomm.algorithms wants it",
    )
    add("--ranks", type=int, default=8, help="(8)")
    add("--bytes", type=size, default="1M", help="the whole message: all shards together (1M)")
    add("--collective", choices=COLLECTIVES, default="all_reduce", metavar="NAME")
    add("--root", type=int, default=0, help="of broadcast, reduce, scatter and gather (0)")
    add("--local", type=int, default=1, help="ranks of each host (1)")
    add("--dtype", choices=list(DTYPES), default="float32", metavar="NAME", help="as in torch")
    add("--mutants", action="store_true", help="leave out each signal in turn: who needs it?")


def run(options: argparse.Namespace) -> int:
    try:
        proof = verify(
            load(options.algorithm),
            options.ranks,
            options.bytes,
            options.collective,
            root=options.root,
            local=options.local,
            element=DTYPES[options.dtype],
            mutants=options.mutants,
        )
    except AlgorithmError as error:
        print(error.story or error)
        print(f"wrong: {error}", file=sys.stderr)
        return 1
    print(proof)
    for spare in proof.spare:
        print(f"nobody needs  {spare}")
    return 0
