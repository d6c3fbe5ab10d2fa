"""`ringcomm verify`: prove an algorithm by hand, or tell how it goes wrong."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import cast

from ringcomm._program import AlgorithmError
from ringcomm._verify import Proof, verify
from ringcomm.plan import Algorithm
from ringcomm.tools.plan import DTYPES
from ringcomm.tools.plan_steps import COLLECTIVES
from ringcomm.tools.words import show_size, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("algorithm", metavar="FILE.py:FUNCTION", help="the function, as ringcomm.plan wants it")
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
    print(told(proof))
    for spare in proof.spare:
        print(f"nobody needs  {spare}")
    return 0


def load(text: str) -> Algorithm:
    """Return the function that "FILE.py:FUNCTION" names. Raises ValueError."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(f"{text}: write FILE.py:FUNCTION, with a file that is there")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{text}: {path.name} has no function {name!r}")
    return cast(Algorithm, getattr(module, name))


def told(proof: Proof) -> str:
    most, messages = max(proof.sent), max(proof.messages)
    calls = f", {proof.calls} of them a roll call" if proof.calls else ""
    lines = [
        f"proved in {proof.seconds:.2f} s: {proof.collective} of {show_size(proof.bytes)} bytes, "
        f"{proof.ranks} ranks, on one host and between hosts",
        f"a rank sends {most:,} bytes at most, in {messages} messages{calls}",
    ]
    if proof.dropped:
        lines.append(
            f"of {proof.dropped} plans without one signal, {proof.dropped - len(proof.spare)} are "
            "wrong"
        )
    return "\n".join(lines)
