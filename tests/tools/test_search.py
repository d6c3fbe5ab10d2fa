"""`ringcomm plan search`: its plans are right, faster than the ring where links differ, and run."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab import ROOT
from lab.ranks import Rank, Ranks, join, ranks
from ringcomm.__main__ import main
from ringcomm._network.costs import DEFAULT, Network
from ringcomm.tools.plan.search import matching, tries, writing
from ringcomm.tools.plan.search.tries import Found, Task
from ringcomm.tools.plan.simulate import files, topology
from ringcomm.tools.plan.simulate.bounds import bounds
from ringcomm.tools.plan.source import load

TOPOLOGIES = ROOT / "examples" / "topologies"
MIB = 1 << 20


def task_of(collective: str, network: str, hosts: int = 0, size: int = MIB, root: int = 0) -> Task:
    if hosts:
        where = topology.named(network, hosts, Network())
        return Task(collective, size, root, where, Network())
    where = files.read(TOPOLOGIES / f"{network}.json", DEFAULT.network.alpha)
    return Task(collective, size, root, where, Network())


def written(result: Found) -> str:
    return writing.text_of(result.form, result.steps, "A test.")


def prove(task: Task, result: Found, size: int) -> None:
    function = writing.load(written(result), result.form)
    ringcomm.algorithms.verify(function, task.ranks, size, task.collective, root=task.root)


# ---- the matching


def test_a_walk_brings_every_chunk_to_every_rank_once_and_fills_no_link_twice() -> None:
    """Whatever the rates: a rank sends what it has, and bytes on a link follow one another."""
    chance = random.Random(3)
    for _ in range(20):
        count = chance.randint(2, 5)
        links = [
            topology.Link(f"h{a}", f"h{b}", chance.choice((1.0, 2.0, 7.0)), chance.random() / 10)
            for a, b in topology.pairs(count)
        ]
        routes = {pair: (number,) for number, pair in enumerate(topology.pairs(count))}
        names = tuple(f"h{host}" for host in range(count))
        where = topology.Topology("mesh", names, tuple(links), routes, 0.01)
        owners = [chance.randrange(count) for _ in range(4)]
        walk = matching.Matching(where, 1.0, chance)
        walk.run(matching.Start(owners, [0.0] * 4, [0.0] * len(links)))
        since = dict.fromkeys(enumerate(owners), 0.0)
        busy: dict[tuple[int, int], float] = {}
        for hop in walk.hops:
            assert hop.sent >= since[hop.chunk, hop.source] - 1e-9
            assert (hop.chunk, hop.target) not in since
            since[hop.chunk, hop.target] = hop.taken
            pair = hop.source, hop.target
            assert hop.sent >= busy.get(pair, 0.0) - 1e-9
            busy[pair] = hop.sent + 1.0 / where.rate(pair)
            assert hop.taken == pytest.approx(busy[pair] + where.latency(pair))
        assert len(since) == 4 * count


def test_sums_go_the_ways_of_a_gather_back() -> None:
    """Each rank adds all that comes before it sends its sum, and sends it once."""
    task = task_of("reduce_scatter", "uplink")
    steps = matching.collect(task.topology, [0, 1, 2, 3], 1000.0, random.Random(0))
    sent: set[tuple[int, int]] = set()
    for verb, chunk, source, target in steps:
        if verb == "add":
            assert (chunk, source) not in sent
            assert (chunk, target) not in sent
            sent.add((chunk, source))
    assert len(sent) == 12


# ---- plans

NETWORKS = [("uplink", 0), ("fat-tree:2:4", 4), ("ring", 5)]


@pytest.mark.parametrize("collective", tries.WAYS)
@pytest.mark.parametrize(("network", "hosts"), NETWORKS)
def test_what_is_found_is_right(collective: str, network: str, hosts: int) -> None:
    """It is right for any length: a message may be shorter than its chunks are many."""
    root = 2 if collective == "broadcast" else 0
    task = task_of(collective, network, hosts, 240_000, root)
    result = tries.search(task, [1, 3], 1, 0)
    for size in (4, 240_000):
        prove(task, result, size)
    least = bounds(task.call, task.topology, DEFAULT)
    assert result.seconds >= max(least.bandwidth, least.addition) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("collective", "network", "times"),
    [("all_gather", "uplink", 2.3), ("all_reduce", "uplink", 1.35)]
    + [(name, "sites", 1.25) for name in ("all_gather", "reduce_scatter", "all_reduce")],
)
def test_it_is_faster_than_the_library_where_links_differ(
    collective: str, network: str, times: float
) -> None:
    task = task_of(collective, network)
    result = tries.search(task, [2], 3, 0)
    assert result.seconds * times < tries.library(task)[0].seconds


def test_a_slow_link_carries_each_chunk_once() -> None:
    task = task_of("all_gather", "uplink")
    result = tries.search(task, [2], 1, 0)
    slow = next(i for i, link in enumerate(task.topology.links) if link.source == "host3")
    assert result.engine.carried[slow] == MIB // 4


def test_the_same_seed_finds_the_same() -> None:
    task = task_of("all_reduce", "uplink")
    first, again = (written(tries.search(task, [1, 2], 2, 5)) for _ in range(2))
    assert first == again
    assert first != written(tries.search(task, [1, 2], 2, 6))


def test_more_chunks_must_be_worth_it() -> None:
    """On a switch a rank's part in one piece is as good as any cut."""
    assert tries.search(task_of("all_gather", "switch", 3), [2, 1], 2, 0).form.parts == 1


# ---- the command


def command(*words: str) -> int:
    return main(["plan", "search", *words])


def test_the_file_is_an_algorithm_like_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network, file = str(TOPOLOGIES / "uplink.json"), tmp_path / "found.py"
    call = ("all_gather", "--topology", network, "--chunks", "2", "--tries", "2")
    assert command(*call, "--output", str(file)) == 0
    printed = capsys.readouterr().out
    for part in ("found", "ring", "lower bound", "proved", "host3 > switch"):
        assert part in printed
    text = file.read_text()
    time = printed.split("found ")[1].splitlines()[0].strip()
    assert f"By simulation 1M bytes take {time}" in text
    assert "--chunks 2 --tries 2 --seed 0" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    name = f"{file}:all_gather"
    assert main(["plan", "verify", name, "all_gather", "--ranks", "4"]) == 0
    group = ["all_gather", "--algorithm", name, "--ranks", "4"]
    assert main(["plan", "simulate", *group, "--topology", network]) == 0
    assert f"time         {time}" in capsys.readouterr().out
    assert main(["plan", "draw", *group, "--svg", str(tmp_path / "found.svg")]) == 0
    assert (tmp_path / "found.svg").read_text().startswith("<svg")
    assert main(["plan", "verify", name, "all_gather", "--ranks", "5"]) == 1
    assert "this plan is for an all_gather of 4 ranks" in capsys.readouterr().err


def test_the_example_is_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, by the command in its head."""
    example, file = TOPOLOGIES / "uplink_all_gather.py", tmp_path / "found.py"
    head = " ".join(example.read_text().split())
    words = head.split("ringcomm plan search ")[1].split(" By simulation")[0].split()
    monkeypatch.chdir(ROOT)
    assert command(*words, "--output", str(file)) == 0
    assert file.read_text() == example.read_text()


def test_nothing_is_written_that_is_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither where no plan can be made, nor where the proof fails."""
    spread = tries.WAYS["all_gather"]
    file = tmp_path / "found.py"
    words = ["all_gather", "--topology", "switch", "--ranks", "3"]

    def told(steps_of: Any) -> str:
        monkeypatch.setitem(tries.WAYS, "all_gather", lambda *given: steps_of(spread(*given)))
        assert command(*words, "--output", str(file)) == 1
        assert not file.exists()
        return capsys.readouterr().err

    without_a_copy = told(lambda steps: steps[:-1])
    assert re.search(r"no try of all_gather has a plan: all_gather.py:\d+", without_a_copy)
    without_a_message = told(lambda steps: [step for step in steps if step[1:] != steps[-1][1:]])
    assert "was never written: no line copies it there" in without_a_message


def test_a_sweep_has_algorithms_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{TOPOLOGIES / 'uplink_all_gather.py'}:all_gather"
    words = ["plan", "simulate", "all_gather", "--algorithm", f"ring,{name}", "--size", "64K,1M"]
    words += ["--topology", str(TOPOLOGIES / "uplink.json")]
    assert main(words) == 0
    assert "all_gather" in capsys.readouterr().out
    assert main([*words, "--svg", str(tmp_path / "sweep.svg")]) == 0
    assert (tmp_path / "sweep.svg").read_text().startswith("<svg")


def test_a_head_may_have_any_text() -> None:
    form = writing.Form("all_gather", 2, 1, 0)
    steps = [matching.Step("send", 0, 0, 1), matching.Step("take", 0, 0, 1)]
    assert callable(writing.load(writing.text_of(form, steps, 'a "quote""" and \\ back\\'), form))


def test_named_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--tries", "1", "--chunks", "1", "--size", "64K")
    assert command("broadcast", "--topology", "torus:2x2", *short, "--root", "3") == 0
    assert "found" in capsys.readouterr().out
    assert command("broadcast", "--topology", "switch", "--ranks", "3", *short) == 0


def links(*ends: str) -> dict[str, Any]:
    names = [dict(zip(("from", "to"), ends_.split(), strict=True), rate=1e6) for ends_ in ends]
    return {"hosts": ["a", "b", "c"], "links": names}


@pytest.mark.parametrize(
    ("body", "words", "told"),
    [
        (links("a b"), (), "mine.json: links: none lead from a to c"),
        (links("a b", "b b"), (), "mine.json: links[1]: it leads from b to itself"),
        ({**links("a b"), "link": []}, (), "mine.json: link: there is no such key"),
        ("{", (), "mine.json is no JSON"),
        (links("a b", "b c"), ("--ranks", "4"), "mine.json has 3 hosts, and the group 4"),
        (links("a b", "b c"), ("--collective", "scan"), "scan is not searched: use one of all_g"),
        (links("a b", "b c"), ("--size", "10"), "10 bytes are no whole number of elements"),
        (links("a b", "b c"), ("--root", "1"), "all_gather takes no --root"),
        (links("a b", "b c"), ("--chunks", "9999"), "use fewer --chunks"),
        (links("a b", "b c"), ("--output", "found.txt"), "use a name that ends in .py"),
    ],
)
def test_bad_input_is_told_with_its_place(
    body: Any, words: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(body if isinstance(body, str) else json.dumps(body))
    assert command("all_gather", "--topology", str(file), *words) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ringcomm plan search: ")
    assert told in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["switch"], "switch fits any number of hosts: write --ranks"),
        (["hosts:2x4"], "a search is for one rank on each host"),
        (["cube"], "cube fits any number of hosts: write --ranks"),
        (["cube", "--ranks", "8"], "there is no topology 'cube'"),
        (["switch", "--ranks", "1"], "a group of 1 ranks"),
    ],
)
def test_bad_names(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("all_reduce", "--topology", *words) == 1
    assert told in capsys.readouterr().err


# ---- ranks


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each collective, for the four hosts of which one sends slowly."""
    folder = tmp_path_factory.mktemp("plans")
    for collective in tries.WAYS:
        result = tries.search(task_of(collective, "uplink", root=0), [2], 2, 0)
        (folder / f"{collective}.py").write_text(written(result))
    return folder


@pytest.fixture
def four() -> Iterator[Ranks]:
    with ranks(4, backend=None) as some:
        yield some


def run_found(rank: Rank, transport: str, folder: str) -> list[bool]:
    """Each collective by its plan; messages of one chunk's length, and longer than slots are."""
    os.environ["RINGCOMM_TRANSPORT"] = transport
    for collective in tries.WAYS:
        function = load(f"{folder}/{collective}.py:{collective}")
        ringcomm.algorithms.register_algorithm(f"found_{collective}", function, [collective])
    join(rank)
    groups = {
        name: dist.new_group(pg_options=ringcomm.Options(algorithm=f"found_{name}"))
        for name in tries.WAYS
    }
    n, right = rank.size, []
    for count in (1, 1000, 300_000):
        ramp = torch.arange(n * count, dtype=torch.float32) % 1000
        total = n * ramp + sum(range(n))
        mine = slice(rank.index * count, (rank.index + 1) * count)
        dist.all_reduce(out := ramp + rank.index, group=groups["all_reduce"])
        right.append(torch.equal(out, total))
        out = torch.zeros(count)
        dist.reduce_scatter_tensor(out, ramp + rank.index, group=groups["reduce_scatter"])
        right.append(torch.equal(out, total[mine]))
        out = torch.zeros(n * count)
        dist.all_gather_into_tensor(out, ramp[mine].clone(), group=groups["all_gather"])
        right.append(torch.equal(out, ramp))
        dist.broadcast(out := ramp * (rank.index == 0), 0, group=groups["broadcast"])
        right.append(torch.equal(out, ramp))
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_run_what_was_found(four: Ranks, transport: str, plans: Path) -> None:
    for right in four(run_found, transport, str(plans)):
        assert right == [True] * 12
