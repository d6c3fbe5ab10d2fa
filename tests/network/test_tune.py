"""The choices by costs beside the plans, and `ringcomm tune`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Run

from lab import ROOT
from lab.ranks import Rank, error_of, join, ranks
from lab.simulated_plans import seconds
from ringcomm import _planner
from ringcomm.__main__ import main
from ringcomm._network import costs
from ringcomm._network.costs import Costs

LAN = Costs(20e-6, 1e-9, 0.05e-9)
ANY_SIZE = _planner.LIMITS["any_size"]
# The collective whose limit is the algorithm's, and whether that is the limit of a shard.
LIMITED = {
    "doubling": ("all_reduce", False),
    "pairwise": ("reduce_scatter", True),
    "tree": ("broadcast", False),
}


# ---- what is chosen


def table(count: int, text: str = "", local: int = 1) -> dict[tuple[str, str], int]:
    """The limits of rows that need no hosts, in bytes, by collective and algorithm."""
    return {
        (row["collective"], row["algorithm"]): row["limit"]
        for row in _planner.selection(count, text, local)
        if row["limit"] != _planner.LIMITS["any_size"] and row["needs"] in ("", "few", "many")
    }


def limit_of(name: str, network: Costs, count: int) -> int:
    return table(count, str(network)).get((LIMITED[name][0], name), ANY_SIZE)


def test_tune_tells_the_limits_of_the_table() -> None:
    for count in (4, 16, 17):
        rows, told = table(count, str(LAN)), costs.limits(LAN, count)
        assert told["doubling"] == rows["all_reduce", "doubling"]
        assert told["bruck"] == rows["all_reduce", "bruck"]
        assert told["tree"] == rows["broadcast", "tree"]
        assert ("pairwise" in told) == (count <= 16)


@pytest.mark.parametrize("name", LIMITED)
def test_limits_follow_the_costs(name: str) -> None:
    for count in (3, 4, 6, 8, 13, 16, *((64, 200) if name != "pairwise" else ())):
        slow = [
            limit_of(name, LAN._replace(alpha=alpha), count) for alpha in (1e-9, 1e-6, 1e-5, 1e-4)
        ]
        wide = [limit_of(name, LAN._replace(beta=beta), count) for beta in (1e-8, 1e-9, 1e-10)]
        assert slow == sorted(slow), count
        assert wide == sorted(wide), count
        if name == "tree":  # a chain has a segment in each rank before its last one has any
            slot = _planner.LIMITS["slot_bytes"]
            assert slow[0] >= slot * (count - 2) // (count - 1).bit_length()
        else:
            assert slow[0] < 1024, count
            free = limit_of(name, Costs(1e-5, 1e-300, 1e-300), count)
            # Doubling copies more than a ring, which no network does.
            assert (50_000 < free < ANY_SIZE) if name == "doubling" else free == ANY_SIZE, count


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_plans_cross_at_the_limit(name: str, count: int) -> None:
    """By the simulation: below the limit the algorithm is faster than the next one, beyond slower.

    The table assumes that bytes from all ranks at once lose a tenth, and links lose none. A tree's
    root sends at once over its link here, and in turns by the table: that is slower.
    """
    collective, shard = LIMITED[name]
    limit, whole = limit_of(name, LAN, count), count if shard else 1
    rows = [row for row in _planner.selection(count, str(LAN)) if row["collective"] == collective]
    beyond = next(
        row["algorithm"]
        for row in rows
        if row["needs"] in ("", "few") and row["limit"] > 1.1 * limit
    )
    assert beyond != name
    for factor in (0.5 if name == "tree" else 0.6, 2.2):
        size = int(limit * factor) // 64 * 64 * whole
        crowd = 1 + _planner.INCAST if name == "pairwise" else 1
        mine = seconds(
            collective, name, size, count, count, LAN._replace(beta=LAN.beta * crowd)
        )  # fmt: skip
        other = seconds(collective, beyond, size, count, count, LAN)
        assert (mine < other) == (factor < 1), size


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nothing", "alpha"),
        ("alpha 1e-5 beta 1e-9", "gamma"),
        ("alpha 1e-5 beta 0 gamma 1e-10", "beta"),
        ("alpha -1e-5 beta 1e-9 gamma 1e-10", "alpha"),
        ("alpha nan beta 1e-9 gamma 1e-10", "alpha"),
        ("alpha 1e-5 beta inf gamma 1e-10", "beta"),
        ("alpha 1e-5 beta 1e-9 gamma 1e-10s", "alpha"),  # a site's
        ("alpha 1e-5 beta 1e-9 gamma 1e-10 alpha 1e-5 beta 1e-9 gamma 1e-10", "alpha"),
    ],
)
def test_costs_that_are_none(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^costs need a positive number of seconds after {name}$"):
        _planner.selection(4, text)


# ---- a job


def choose(rank: Rank, size: int, folder: Path, file: Path) -> tuple[str, str, str]:
    """Sum up in the whole group and in two of three ranks; the error, and what the log says."""
    os.environ |= {"RINGCOMM_TRANSPORT": "tcp", "RINGCOMM_LOG": "info"}
    if rank.index == 0:
        os.environ["RINGCOMM_COSTS"] = str(file)
    log = folder / f"log{rank.index}"
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    error = error_of(lambda: join(rank))
    if error == ("", ""):
        data = torch.ones(size // 4)
        dist.all_reduce(data)
        for some in ([0, 1, 2], [1, 2, 3]):
            group = dist.new_group(some)
            if rank.index in some:
                dist.all_reduce(data, group=group)
    return *error, log.read_text()


def test_all_ranks_choose_by_the_file_of_rank_0(tmp_path: Path) -> None:
    told = Costs(1e-3, 1e-8, 1e-11)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"memory": None, "network": told._asdict()}))
    size = 1 << 15
    with ranks(4, backend=None) as four:
        answers = four(choose, size, tmp_path, file)
    for count, groups in ((4, [1, 1, 1, 1]), (3, [1, 2, 2, 1])):
        limit = limit_of("doubling", told, count)
        assert limit_of("doubling", costs.DEFAULT.network, count) < size < limit
        line = f"doubling (all_reduce, up to {limit} B)"
        assert [log.count(line) for _, _, log in answers] == groups, answers


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "the file cannot be read (No such file or directory)"),
        ("{}", "is not a file of `ringcomm tune`: KeyError('memory')"),
    ],
)
def test_all_ranks_fail_with_a_file_that_is_none(
    tmp_path: Path, content: str | None, why: str
) -> None:
    file = tmp_path / "costs.json"
    if content:
        file.write_text(content)
    with ranks(2, backend=None) as two:
        answers = two(choose, 64, tmp_path, file)
    told = f"RINGCOMM_COSTS (rank 0): {file}{' ' if content else ': '}{why}"
    assert [text for _, text, _ in answers] == [told, told]


def test_tune_writes_what_a_job_chooses_by(torchrun: Run, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    words = ["-m", "ringcomm", "tune", "--output", file]
    ended = torchrun(2, *words, PYTHONPATH=str(ROOT), RINGCOMM_TRANSPORT="tcp")
    assert ended.returncode == 0, ended.stderr
    body = json.loads(file.read_text())
    assert body["hosts"] == body["ranks"] == 2
    assert body["memory"] is None
    assert body["date"].startswith("20")
    network = costs.read(file).fabrics.network
    assert 1e-7 < network.alpha < 0.1
    assert 1e-12 < network.gamma < 1e-8
    assert 1e-11 < network.beta < 1e-6
    assert ended.stdout.count("2 hosts, 2 ranks") == 1
    assert (
        limit_of("doubling", network, 8)
        == table(8, costs.word(str(file)))["all_reduce", "doubling"]
    )
    assert "hosts have the same name" in ended.stdout
    assert "names" not in body


# ---- the command


def test_tune_needs_a_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["tune", "--device", "cpu"]) == 1
    assert "torchrun ... -m ringcomm tune" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["[]", "{", '{"memory": null, "network": {"alpha": 1}}'])
def test_other_files_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(body)
    assert main(["plan", "simulate", "all_reduce", "--costs", str(file)]) == 1
    assert f"{file} is not a file of `ringcomm tune`" in capsys.readouterr().err
