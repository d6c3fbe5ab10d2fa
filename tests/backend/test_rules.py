"""Groups choose algorithms by rules, for collectives and sizes: of a text, or of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab.by_hand import example, go
from lab.ranks import Rank, error_of, join, ranks
from ringcomm import _C
from ringcomm._flight import records

SIZED = """
all_reduce: 0-4095 = ring   # the library's own
all_reduce:4K-1M=mine
broadcast=tree
"""


def by_rules(rank: Rank, way: str, rules: str) -> list[str]:
    go(way)
    ringcomm.algorithms.register_algorithm("mine", example("swing"), ["all_reduce"])
    asked = ringcomm.Options(algorithm=rules) if rank.index == 0 else None
    join(rank, pg_options=asked)
    for count in (1000, 1024, 250_000, 300_000):
        dist.all_reduce(data := torch.ones(count))
        assert (data == 2).all()
    dist.broadcast(torch.ones(1000), 0)
    dist.barrier()
    host = records.read_ring(_C.flight_rings()[0])
    return [f"{operation.collective} {operation.algorithm}" for operation in host.operations]


@pytest.mark.parametrize("way", ["tcp", "device"])
def test_rules_choose_by_collective_and_size(tmp_path: Path, way: str) -> None:
    """Rank 0's file counts. Work of a kernel is in the record of the device."""
    file = tmp_path / "rules.txt"
    file.write_text(SIZED)
    with ranks(2, backend=None) as two:
        told = two(by_rules, way, f"@{file}")
    mine = ["all_reduce mine"] * 2
    by_table = ["all_reduce ring", *mine, "all_reduce ring", "broadcast tree"]
    for lines in told:
        assert lines[: 2 if way == "device" else 5] == (mine if way == "device" else by_table)


WRONG_RULES = {
    "all_reduce=pairwise": "all_reduce has no algorithm 'pairwise'",
    "all_sum=ring": "there is no collective 'all_sum'",
    "all_reduce:64K=ring": "'64K' is no range of bytes, such as 64K-1M",
    "all_reduce:64Q-=ring": "'64Q' is no number of bytes",
    "all_reduce:-99999999999999999999=ring": "is no number of bytes",
    "all_to_all:1K-=pairwise": "an all_to_all is chosen without a range of bytes",
    "ring,": "",
    ",ring": "there is no algorithm ''",
    "ring,bruk": "there is no algorithm 'bruk'",
    "@/nowhere/rules": "algorithm=@/nowhere/rules cannot be read",
    "@/dev/null": "has no rule",
    "ring," * 500 + "ring": "at most 2000",
}


@pytest.mark.parametrize(("rules", "told"), WRONG_RULES.items())
def test_wrong_rules_are_refused(rules: str, told: str) -> None:
    kind, text = error_of(lambda: ringcomm.Options(algorithm=rules))
    assert (kind, told in text) == ("ValueError" if told else "", True)
