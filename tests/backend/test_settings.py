"""Ranks with different settings agree when they meet, or all of them are told."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, error_of, join
from lab.simulated_device import SIMULATED

Settings = tuple[dict[str, str], "str | None"]  # variables, and Options.algorithm
ALGORITHMS = ["direct", "ring", "doubling", "tree", "pairwise", "bruck", "hierarchical"]


def wrong_results(chance: random.Random, rank: Rank) -> int:
    """Some collectives, the same on all ranks; how many of their results are not exact."""
    size, wrong = rank.size, 0
    for _ in range(8):
        n = chance.choice([1, 7, 28, 1000, 40_000, 200_000])
        mine = torch.full((n,), float(rank.index + 1))
        total = torch.full((n,), size * (size + 1) / 2)
        everybody = torch.arange(1, size + 1, dtype=torch.float32).repeat_interleave(n)
        kind = chance.randrange(6)
        root = chance.randrange(size)
        if kind == 0:
            dist.all_reduce(mine)
            wrong += not torch.equal(mine, total)
        elif kind == 1:
            dist.broadcast(mine, root)
            wrong += not torch.equal(mine, torch.full((n,), float(root + 1)))
        elif kind == 2:
            out = torch.zeros(size * n)
            dist.all_gather_into_tensor(out, mine)
            wrong += not torch.equal(out, everybody)
        elif kind == 3:
            dist.reduce_scatter_tensor(out := torch.zeros(n), mine.repeat(size))
            wrong += not torch.equal(out, total)
        elif kind == 4:
            dist.all_to_all_single(out := torch.zeros(size * n), mine.repeat(size))
            wrong += not torch.equal(out, everybody)
        else:
            dist.reduce(mine, root)
            wrong += rank.index == root and not torch.equal(mine, total)
    return wrong


def run_with(rank: Rank, life: str, by_rank: list[Settings], seed: int = 3) -> Outcome:
    environment, algorithm = by_rank[rank.index]

    def body() -> Outcome:
        os.environ.update(environment)
        options = ringcomm.Options()
        options.algorithm = algorithm
        answer: dict[str, Any] = {}

        def work() -> None:
            join(rank_of(rank, life), seconds=10, pg_options=options)
            answer["wrong"] = wrong_results(random.Random(seed), rank)

        answer["kind"], answer["text"] = error_of(work)
        if dist.is_initialized():
            dist.destroy_process_group()
        return answer

    return in_child(body)


def settings_of(chance: random.Random, costs: Path) -> Settings:
    """Draw the settings of a rank: mostly few."""
    drawn = {
        "RINGCOMM_ALGORITHM": chance.choice(ALGORITHMS),
        "RINGCOMM_TRANSPORT": "tcp",
        "RINGCOMM_FLOWS": str(chance.randint(1, 3)),
        "RINGCOMM_COSTS": str(costs),
        "RINGCOMM_SPIN_US": chance.choice(["0", "100"]),
        "RINGCOMM_RESUME_SECONDS": str(chance.randint(2, 40)),
        "RINGCOMM_CUDA_LIBRARY": str(SIMULATED),
        "RINGCOMM_CUDA_MODE": "host",
        "RINGCOMM_CUDA_MEMORY": chance.choice(["1000000", "3000000"]),
    }
    chosen = {name: value for name, value in drawn.items() if chance.random() < 0.25}
    return chosen, chance.choice(ALGORITHMS) if chance.random() < 0.15 else None


@pytest.mark.parametrize(
    "seed", [*range(25), *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 400)]]
)
def test_no_settings_give_a_wrong_number(three: Ranks, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    costs = tmp_path / "costs"
    costs.write_text("alpha 1e-3 beta 1e-9 gamma 1e-11")
    common = settings_of(chance, costs)
    settings = []
    for _ in range(3):
        own = settings_of(chance, costs) if chance.random() < 0.4 else ({}, None)
        settings.append(({**common[0], **own[0]}, own[1] or common[1]))
    outcomes = three(run_with, f"settings{seed}", settings, seed)
    failed = [outcome["kind"] != "" for outcome in outcomes]
    assert all(outcome.get("wrong", 0) == 0 for outcome in outcomes), (settings, outcomes)
    assert all(failed) or not any(failed), (settings, outcomes)


@pytest.mark.parametrize("way", ["variable", "options"])
@pytest.mark.parametrize("odd", [1, 2])
def test_a_differing_request_is_named(three: Ranks, way: str, odd: int) -> None:
    settings: list[Settings] = []
    for index in range(3):
        asked = "doubling" if index == odd else "ring" if index == 0 else None
        environment = {"RINGCOMM_ALGORITHM": asked} if asked and way == "variable" else {}
        settings.append((environment, asked if way == "options" else None))
    for outcome in three(run_with, f"asked{way}{odd}", settings):
        assert (
            f"rank 0 asks for the algorithm ring, and rank {odd} for the algorithm doubling"
            in outcome["text"]
        ), outcome


def test_an_algorithm_that_is_none_is_told_to_all(three: Ranks) -> None:
    """A rank that cannot join says why, and the others do not wait for their timeout."""
    settings: list[Settings] = [({}, None), ({}, None), ({"RINGCOMM_ALGORITHM": "sing"}, None)]
    for outcome in three(run_with, "unknown", settings):
        assert "sing" in outcome["text"], outcome


def test_device_memory_is_the_smallest_request(three: Ranks) -> None:
    """The pieces in which devices send follow from it, and both sides must have the same."""
    settings = [
        ({"RINGCOMM_CUDA_LIBRARY": str(SIMULATED), "RINGCOMM_CUDA_MEMORY": size}, None)
        for size in ("1000000", "700000", "5000000")
    ]
    for outcome in three(run_with, "memory", settings):
        assert outcome == {"kind": "", "text": "", "wrong": 0}, outcome


def test_one_rank_without_mapped_devices(three: Ranks) -> None:
    settings: list[Settings] = []
    for index in range(3):
        mode = {"RINGCOMM_CUDA_MODE": "host"} if index == 1 else {}
        settings.append(({"RINGCOMM_CUDA_LIBRARY": str(SIMULATED), **mode}, None))
    for outcome in three(run_with, "mode", settings):
        assert outcome == {"kind": "", "text": "", "wrong": 0}, outcome
