"""Writes steps down as a Python file: an algorithm by hand, which docs/by_hand.md explains.

A file has the steps as a table, and a function that goes through it. The search reads its steps
from the same text, so the written file is the one that was proved and simulated.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple, cast

from ringcomm.algorithms import Algorithm
from ringcomm.tools.plan.search.matching import Step

SPREAD = ("all_gather", "broadcast")  # these add nothing up


class Form(NamedTuple):
    """A collective among `ranks`, of whose message each rank's part is cut into `parts`."""

    collective: str
    ranks: int
    parts: int
    root: int

    @property
    def owners(self) -> list[int]:
        """The rank of each chunk: that gives it, or gets its sum; the root of a broadcast."""
        ranks = [self.root] * self.ranks if self.collective == "broadcast" else range(self.ranks)
        return [rank for rank in ranks for _ in range(self.parts)]


SEND = """
        {word} verb == "send":
            sent[chunk, target] = send(shape.output(source, chunk), to=target)
        elif verb == "take":
            copy(sent[chunk, target], shape.output(target, chunk))
"""
ADD = """
        if verb == "add":
            sums.setdefault((target, chunk), []).append(send(summed(source, chunk), to=target))
        elif verb == "whole":
            copy(summed(target, chunk), shape.output(target, chunk))
"""
SENT = "    sent: dict[tuple[int, int], Chunk] = {}\n"
SUMMED = """
    sums: dict[tuple[int, int], list[Chunk]] = {}

    def summed(rank: int, chunk: int) -> Value:
        return reduce(shape.input(rank, chunk), *sums.get((rank, chunk), []))

"""
WORDS = {
    "add": "send a partial sum of the chunk to the rank that adds it to its own",
    "whole": "copy the sum of all into the output",
    "send": "send the chunk",
    "take": "copy the chunk that was sent into the output",
}
USED = {
    "all_gather": "Chunk, Shape, copy, send",
    "broadcast": "Chunk, Shape, copy, send",
    "reduce_scatter": "Chunk, Shape, Value, copy, reduce, send",
    "all_reduce": "Chunk, Shape, Value, copy, reduce, send",
}


def text_of(form: Form, steps: Sequence[Step], head: str) -> str:
    """Return the text of a file, whose docstring is `head`, whatever that has in it."""
    head = head.replace("\\", "\\\\").replace('"', '\\"')
    rows = "".join(f'    ("{verb}", {c}, {a}, {b}),\n' for verb, c, a, b in steps)
    used = [verb for verb in WORDS if any(step.verb == verb for step in steps)]
    meaning = "".join(f"# {verb + ':':6} {WORDS[verb]}\n" for verb in used)
    return (
        f'"""{head}"""\n\nfrom ringcomm.algorithms import {USED[form.collective]}\n\n'
        f"RANKS = {form.ranks}\nPARTS = {form.parts}  # chunks in each rank's part of the message\n"
        f"{meaning}# Each step: the verb, the chunk, from which rank, to which rank.\n"
        f"STEPS = (\n{rows})\n\n\n{function_of(form)}"
    )


def function_of(form: Form) -> str:
    """Return the text of the function, which has the name of the collective."""
    whole = form.collective in ("all_reduce", "broadcast")
    adds = form.collective not in SPREAD
    parts = [
        f"def {form.collective}(shape: Shape) -> None:\n",
        check(form),
        f"    shape.cut({'RANKS * PARTS' if whole else 'PARTS'})\n",
        own(form),
        SENT if form.collective != "reduce_scatter" else "",
        SUMMED.lstrip("\n") if adds else "",
        "    for verb, chunk, source, target in STEPS:\n",
        ADD.lstrip("\n") if adds else "",
    ]
    if form.collective != "reduce_scatter":
        parts.append(SEND.lstrip("\n").format(word="elif" if adds else "if"))
    return "".join(parts)


def check(form: Form) -> str:
    """Write the check that the call is the one of the plan."""
    what = f'"{form.collective}", {form.ranks}, {form.root}'
    return textwrap.indent(
        f"if (shape.collective, shape.ranks, shape.root) != ({what}):\n"
        f'    raise ValueError("this plan is for {described(form)}")\n',
        "    ",
    )


def described(form: Form) -> str:
    """Return "an all_gather of 4 ranks"."""
    article = "an" if form.collective.startswith("a") else "a"
    root = f" from rank {form.root}" if form.collective == "broadcast" else ""
    return f"{article} {form.collective} of {form.ranks} ranks{root}"


def own(form: Form) -> str:
    """Write the lines for chunks that a rank has from the start, where nothing is added."""
    if form.collective == "all_gather":
        ranks, chunks = "range(RANKS)", "range(rank * PARTS, (rank + 1) * PARTS)"
    elif form.collective == "broadcast":
        ranks, chunks = f"[{form.root}]", "range(RANKS * PARTS)"
    else:
        return ""
    return (
        f"    for rank in {ranks}:\n"
        f"        for chunk in {chunks}:\n"
        "            copy(shape.input(rank, chunk), shape.output(rank, chunk))\n"
    )


def load(text: str, form: Form) -> Algorithm:
    """Return the function that the text defines."""
    names: dict[str, object] = {"__name__": "searched"}
    exec(compile(text, f"{form.collective}.py", "exec"), names)
    return cast(Algorithm, names[form.collective])
