"""Texts of an operation's record are those of the library for the operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from lab.ranks import Rank, error_of, ranks
from ringcomm._flight.records import read_folder

Call = Callable[[Any], Any]
CALLED = re.compile(r"rank 0 called (.+), rank 1 called barrier")


def calls() -> dict[str, Call]:
    """Map what the text must end with to a call of rank 0 in a group of two."""
    ones = torch.ones
    pair = [ones(3), ones(3)]
    largest = dist.ReduceOp.MAX
    return {
        "float32[10] SUM": lambda group: dist.all_reduce(ones(10), group=group),
        "int64[4] MAX": lambda group: dist.all_reduce(
            ones(4, dtype=torch.int64), largest, group=group
        ),
        "bfloat16[6] AVG": lambda group: dist.all_reduce(
            ones(6, dtype=torch.bfloat16), dist.ReduceOp.AVG, group=group
        ),
        "float32[5] root 1": lambda group: dist.broadcast(ones(5), 1, group=group),
        "float64[2] SUM root 0": lambda group: dist.reduce(
            ones(2, dtype=torch.float64), 0, group=group
        ),
        "float32[6]": lambda group: dist.all_gather(pair, ones(3), group=group),
        "float32[3] uneven": lambda group: dist.all_gather(
            [ones(1), ones(2)], ones(1), group=group
        ),
        "float32[6] SUM": lambda group: dist.reduce_scatter(ones(3), pair, group=group),
        "float32[6] root 0": lambda group: dist.gather(ones(3), pair, group=group),
        "uint8[6] root 0": lambda group: dist.scatter(
            ones(3, dtype=torch.uint8), [ones(3, dtype=torch.uint8)] * 2, group=group
        ),
        "int32": lambda group: dist.all_to_all_single(
            ones(4, dtype=torch.int32), ones(4, dtype=torch.int32), group=group
        ),
        "memory layout": lambda group: dist.all_reduce(ones(4, 6).t(), group=group),
        "float32 AVG of sparse tensors": lambda group: dist.all_reduce(
            torch.eye(4).to_sparse(), dist.ReduceOp.AVG, group=group
        ),
        "SUM in tensors of sizes #": lambda group: dist.all_reduce_coalesced(pair, group=group),
    }


def barrier(group: Any) -> None:
    dist.barrier(group=group)


def say(rank: Rank, folder: Path) -> dict[str, str]:
    """Let rank 1 call barrier instead; return the library's text of each call, by group."""
    groups = [dist.new_group() for _ in calls()]
    mine = calls().values() if rank.index == 0 else [barrier for _ in calls()]
    with ThreadPoolExecutor(len(groups)) as pool:  # each takes a moment to find the mismatch
        errors = list(pool.map(lambda call, group: error_of(lambda: call(group)), mine, groups))
    said = {}
    for group, (_, text) in zip(groups, errors, strict=True):
        match = CALLED.search(text)
        said[group.group_name] = match[1] if match else f"no mismatch: {text}"
    ringcomm.dump(folder)
    return said


def test_records_say_what_the_library_says(tmp_path: Path) -> None:
    with ranks(2) as two:
        said = two(say, tmp_path)[0]
    records = {r.group: r for r in read_folder(tmp_path).records if r.global_rank == 0}
    texts = []
    for group in said:
        (operation,) = records[group].operations
        texts.append(f"{operation.collective} {operation.arguments}")
    assert texts == list(said.values())
    for text, end in zip(texts, calls(), strict=True):
        assert end in text
