"""`ringcomm plan verify`: prove an algorithm by hand, or tell how it goes wrong."""

from __future__ import annotations

import argparse
import sys

from ringcomm.algorithms.program import AlgorithmError
from ringcomm.algorithms.proof import verify
from ringcomm.tools import arguments
from ringcomm.tools.plan.source import load

EXAMPLES = ("ringcomm plan verify ring.py:ring all_reduce --ranks 8",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "the function, as ringcomm.algorithms wants it"
    add("algorithm", metavar="FILE.py:FUNCTION", help=text)
    collective = arguments.add_collective(parser, several=True, optional=True)
    arguments.former(parser, collective, "--collective")
    arguments.add_ranks(parser, 8, "of the group")
    arguments.add_hosts(parser, None, "the ranks are spread over them evenly (each its own)")
    arguments.former_local(parser)
    size = arguments.add_size(parser, "1M", "the whole message: all shards together")
    arguments.former(parser, size, "--bytes")
    add("--root", type=int, default=0, help="of broadcast, reduce, scatter and gather (0)")
    arguments.add_dtype(parser)
    add("--mutants", action="store_true", help="leave out each signal in turn: who needs it?")


def run(options: argparse.Namespace) -> int:
    function = load(options.algorithm)
    hosts = options.hosts or options.ranks or 1
    if options.ranks % hosts:
        raise ValueError(f"{options.ranks} ranks cannot be spread evenly over {hosts} hosts")
    status = 0
    for collective in options.collectives or ["all_reduce"]:
        for size in options.sizes:
            try:
                proof = verify(
                    function,
                    options.ranks,
                    size,
                    collective,
                    root=options.root,
                    local=options.local or options.ranks // hosts,
                    element=arguments.DTYPES[options.dtype],
                    mutants=options.mutants,
                )
            except AlgorithmError as error:
                print(error.counterexample or error)
                print(f"wrong: {error}", file=sys.stderr)
                status = 1
                continue
            print(proof)
            for spare in proof.spare:
                print(f"nobody needs  {spare}")
    return status
