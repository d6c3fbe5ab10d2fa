"""Algorithms by hand: a collective as a function in Python.

An algorithm is a function of a `Shape`. It says what all ranks do, in any order in which it could
happen: `send` takes a chunk to another rank, `reduce` adds up chunks, and `copy` puts one into the
output. This is an all-gather along a ring:

    def ring(shape):
        n = shape.ranks
        held = [copy(shape.input(r, r), shape.output(r, r)) for r in range(n)]
        for step in range(1, n):
            held = [send(held[r - 1], to=r) for r in range(n)]
            held = [copy(held[r], shape.output(r, (r - step) % n)) for r in range(n)]

The library makes each rank's plan of it. It adds the waits, the credits by which slots are used
again, the cuts of long messages, and a roll call where one is needed. `verify` proves the
plans, and `register_algorithm` has groups use them. docs/by_hand.md tells more.
"""

from ringcomm.algorithms.language import Algorithm, Chunk, Shape, Sum, Value, copy, reduce, send
from ringcomm.algorithms.program import AlgorithmError
from ringcomm.algorithms.proof import Counterexample, Proof, verify
from ringcomm.algorithms.registry import register_algorithm

__all__ = [
    "Algorithm",
    "AlgorithmError",
    "Chunk",
    "Counterexample",
    "Proof",
    "Shape",
    "Sum",
    "Value",
    "copy",
    "reduce",
    "register_algorithm",
    "send",
    "verify",
]
