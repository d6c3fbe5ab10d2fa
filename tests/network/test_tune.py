"""The model of the costs beside the plans, the choices made by it, and `ringcomm tune`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Run

from lab import ROOT
from lab.ranks import Rank, error_of, join, ranks
from lab.simulated_plans import NOTHING, Shape, busiest_link, seconds
from ringcomm import _C
from ringcomm.__main__ import main
from ringcomm._network import costs, costs_file
from ringcomm._network.costs import Costs, Fabrics

CASES = [
    (collective, algorithm)
    for collective, names in costs.ALGORITHMS.items()
    for algorithm in names
    if any(
        (row["collective"], row["algorithm"]) == (collective, algorithm) for row in _C.selection(2)
    )
    and algorithm not in ("direct", "hierarchical")
]
LAN = Costs(20e-6, 1e-9, 0.05e-9)
Limit = Callable[[Costs, int], int]
# What is chosen up to the limit, and beyond; the message that the limit is for, as n shards.
LIMITS: dict[str, tuple[Limit, str, str]] = {
    "doubling": (costs.doubling_limit, "all_reduce", "doubling"),
    "pairwise": (costs.pairwise_limit, "reduce_scatter", "pairwise"),
    "tree": (costs.tree_limit, "broadcast", "tree"),
}


# ---- the model and the plans


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_the_model_counts_what_the_plans_do(collective: str, algorithm: str) -> None:
    for count in range(2, 17):
        size = count * 1024
        shape, work = (
            Shape(collective, size, count),
            costs.work(collective, algorithm, size, count),
        )
        assert seconds(shape, algorithm, Costs(1, 0, 0)) == work.rounds, count
        assert seconds(shape, algorithm, Costs(0, 0, 1)) == work.reduced, count
        # Some latency, or ranks that send at the very same moment are in no order.
        sent = seconds(shape, algorithm, Costs(0.1, 1, 0))
        assert sent == pytest.approx(work.sent, abs=0.2 * work.rounds), count
        if algorithm == "ring" or count in (2, 4, 8, 16):
            busiest = busiest_link(shape, algorithm)
            chain = algorithm == "ring" and work.rounds == count
            passed_on = count - 1 if chain else 1  # a chain's ranks take turns
            assert busiest * passed_on == work.sent, count


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
@pytest.mark.parametrize("count", [2, 4, 8, 13])
def test_the_model_tells_the_time_of_long_messages(
    collective: str, algorithm: str, count: int
) -> None:
    size = count << 18
    told = costs.seconds(collective, algorithm, size, count, 1, Fabrics(NOTHING, LAN))
    if algorithm == "pairwise":
        told = costs.work(collective, algorithm, size, count).seconds(LAN)  # no crowd in there
    assert seconds(Shape(collective, size, count), algorithm, LAN) == pytest.approx(told, rel=0.15)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (4, 2), (3, 4), (4, 4)])
def test_a_hierarchy_is_the_sum_of_its_parts(collective: str, hosts: int, local: int) -> None:
    for size in (hosts * local * 1024, hosts * local << 16):
        told = costs.seconds(collective, "hierarchical", size, hosts, local, costs.DEFAULT)
        shape = Shape(collective, size, hosts * local, local)
        found = seconds(shape, "hierarchical", costs.DEFAULT.network, costs.DEFAULT.memory)
        # Latencies of one rank pass while others of its host send.
        assert 0.7 * told < found < 1.1 * told, size


# ---- what is chosen


def table(count: int, text: str = "", local: int = 1) -> dict[tuple[str, str], int]:
    """The limits of rows that need no hosts, in bytes, by collective and algorithm."""
    return {
        (row["collective"], row["algorithm"]): row["limit"]
        for row in _C.selection(count, text, local)
        if row["limit"] != _C.LIMITS["any_size"] and row["needs"] in ("", "few", "many")
    }


@pytest.mark.parametrize("network", [costs.DEFAULT.network, LAN, Costs(1e-3, 1e-10, 3e-11)])
def test_the_library_has_the_same_limits(network: Costs) -> None:
    for count in (*range(2, 201), 255, 256, 257, 1000, 1024, 4095, 4096):
        rows = table(count, "" if network is costs.DEFAULT.network else str(network))
        for limit, collective, algorithm in LIMITS.values():
            expected = limit(network, count)
            found = rows.get((collective, algorithm), costs.ANY_SIZE)
            assert found == expected, (count, algorithm)
        shard = costs.bruck_limit(count)
        for collective, expected in (("all_reduce", shard * count), ("all_gather", shard)):
            assert rows[collective, "bruck"] == expected, count


def test_where_ranks_share_a_link_bruck_is_for_short_messages_alone() -> None:
    for local, limit in ((1, 16384), (8, 37), (64, 0)):
        rows = table(4096, local=local)
        assert rows["reduce_scatter", "bruck"] == limit


@pytest.mark.parametrize("name", LIMITS)
def test_limits_follow_the_costs(name: str) -> None:
    limit = LIMITS[name][0]
    for count in (3, 4, 6, 8, 13, 16, 64, 200):
        slow = [limit(LAN._replace(alpha=alpha), count) for alpha in (1e-9, 1e-6, 1e-5, 1e-4)]
        wide = [limit(LAN._replace(beta=beta), count) for beta in (1e-8, 1e-9, 1e-10)]
        assert slow == sorted(slow), count
        assert wide == sorted(wide), count
        if name == "tree":  # a chain has a segment in each rank before its last one has any
            assert slow[0] >= costs.SLOT * (count - 2) // (count - 1).bit_length()
        else:
            assert slow[0] < 1024, count
            assert limit(Costs(1e-5, 1e-300, 1e-300), count) == costs.ANY_SIZE


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_plans_cross_at_the_limit(name: str, count: int) -> None:
    limit, collective, algorithm = LIMITS[name]
    shards = count if name == "pairwise" else 1
    beyond = costs.selected(collective, 1.1 * limit(LAN, count) * shards, count, LAN)
    assert beyond != algorithm
    for factor in (0.6, 2.2):
        size = int(limit(LAN, count) * factor) // 64 * 64
        crowd = 1 + costs.INCAST if name == "pairwise" else 1
        shape = Shape(collective, size * shards, count)
        mine = seconds(shape, algorithm, LAN._replace(beta=LAN.beta * crowd))
        assert (mine < seconds(shape, beyond, LAN)) == (factor < 1), size


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nothing", "alpha"),
        ("alpha 1e-5 beta 1e-9", "gamma"),
        ("alpha 1e-5 beta 0 gamma 1e-10", "beta"),
        ("alpha -1e-5 beta 1e-9 gamma 1e-10", "alpha"),
        ("alpha nan beta 1e-9 gamma 1e-10", "alpha"),
        ("alpha 1e-5 beta inf gamma 1e-10", "beta"),
        ("alpha 1e-5 beta 1e-9 gamma 1e-10s", "alpha"),  # of a site
        ("alpha 1e-5 beta 1e-9 gamma 1e-10 alpha 1e-5 beta 1e-9 gamma 1e-10", "alpha"),
    ],
)
def test_costs_that_are_none(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^costs need a positive number of seconds after {name}$"):
        _C.selection(4, text)


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
        limit = costs.doubling_limit(told, count)
        assert costs.doubling_limit(costs.DEFAULT.network, count) < size < limit
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
    network = costs_file.read_costs(file).network
    assert 1e-7 < network.alpha < 0.1
    assert 1e-12 < network.gamma < 1e-8
    assert 1e-11 < network.beta < 1e-6
    assert ended.stdout.count("2 hosts, 2 ranks") == 1
    assert table(8, costs_file.word(str(file)))["all_reduce", "doubling"] == costs.doubling_limit(
        network, 8
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


def test_the_model_as_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "model.png"
    words = ["model", "--bytes", "1K,64M", "--ranks", "2..4096", "--plot", str(picture)]
    if not has_matplotlib():
        del words[-2:]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.strip() and line.split()[0].isdigit()]
    assert [int(row[0]) for row in rows] == [2**power for power in range(1, 13)] * 2
    assert picture.exists() == has_matplotlib()
    assert main(["model", "--local", "8", "--ranks", "3,24", "--bytes", "1M"]) == 0
    assert "hierarchical" in capsys.readouterr().out


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("body", ["[]", "{", '{"memory": null, "network": {"alpha": 1}}'])
def test_the_model_refuses_other_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(body)
    assert main(["model", "--costs", str(file)]) == 1
    assert f"{file} is not a file of `ringcomm tune`" in capsys.readouterr().err
