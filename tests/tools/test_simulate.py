"""`ringcomm plan simulate`: shares, events, bounds, topologies and the sweep."""

from __future__ import annotations

import itertools
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from ringcomm.__main__ import main
from ringcomm._network import costs
from ringcomm._network.costs import DEFAULT, Costs, Fabrics, Hosts, Network
from ringcomm.algorithms.call import COLLECTIVES, call_of
from ringcomm.algorithms.steps import GroupPlans, Step
from ringcomm.tools.plan.simulate import files, topology
from ringcomm.tools.plan.simulate.bounds import bounds
from ringcomm.tools.plan.simulate.engine import Engine, simulate
from ringcomm.tools.plan.simulate.flows import Flows, Transfer
from ringcomm.tools.plan.simulate.path import critical_path, hops, message_count
from ringcomm.tools.plan.simulate.topology import Link, Topology
from ringcomm.tools.plan.source import plans_of

NAMES = ("switch", "mesh", "ring", "torus:2x4", "fat-tree:4:2")


def named(name: str, hosts: int) -> Topology:
    return topology.named(name, hosts, Network())


def plans(collective: str, ranks: int, size: int, algorithm: str | None = None) -> GroupPlans:
    return plans_of(call_of(collective, ranks, size, ranks), algorithm)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "simulate", *words]) == 0
    return capsys.readouterr().out


# ---- shares


def test_shares_are_max_min_fair() -> None:
    """No link carries too much, and each transfer has a full link where nobody has more."""
    chance = random.Random(1)
    for _ in range(200):
        links = [Link(f"a{i}", f"b{i}", chance.choice((1.0, 2.0, 5.0))) for i in range(6)]
        flows = Flows(links)
        some = [
            Transfer(i, tuple(sorted(chance.sample(range(6), chance.randint(1, 3)))), 1.0, 0.0)
            for i in range(chance.randint(1, 9))
        ]
        for transfer in some:
            flows.add(transfer)
        rates = flows.rates({transfer.number: transfer for transfer in some}, set(range(6)))
        used = [sum(rates[n] for n in flows.on[link]) for link in range(6)]
        assert all(sum_ <= links[i].rate * (1 + 1e-9) for i, sum_ in enumerate(used))
        for transfer in some:
            assert any(
                used[link] >= links[link].rate * (1 - 1e-9)
                and rates[transfer.number] >= max(rates[n] for n in flows.on[link]) * (1 - 1e-9)
                for link in transfer.route
            )


def test_others_keep_their_share() -> None:
    """Computing only the transfers that a change reaches gives the same as computing all."""
    chance = random.Random(2)
    flows = Flows([Link(f"a{i}", f"b{i}", 1.0 + i) for i in range(8)])
    every: dict[int, Transfer] = {}
    for number in range(300):
        if every and chance.random() < 0.45:
            transfer = every.pop(chance.choice(sorted(every)))
            flows.remove(transfer)
        else:
            route = tuple(chance.sample(range(8), 2))
            transfer = every[number] = Transfer(number, route, 1e9, 0.0)
            flows.add(transfer)
        flows.share(set(transfer.route), 0.0)
        assert {n: t.rate for n, t in every.items()} == flows.rates(every, set(range(8)))


# ---- times


def test_a_message_takes_alpha_and_its_bytes() -> None:
    seconds = simulate(plans("all_gather", 2, 8192, "ring"), named("switch", 2), DEFAULT).seconds
    network = DEFAULT.network
    assert seconds == pytest.approx(network.alpha + 4096 * network.beta)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("algorithm", "collective", "messages", "shares"),
    [("ring", "all_gather", 1, 1), ("ring", "all_reduce", 2, 2), ("tree", "broadcast", 0, 0)],
)
def test_without_sharing_it_is_the_closed_form(
    ranks: int, algorithm: str, collective: str, messages: int, shares: int
) -> None:
    """On a switch, where no two messages meet: rounds of alpha and an n-th of the bytes.

    A ring: Thakur, Rabenseifner, Gropp, 2005. A tree's root sends log2 n messages at once, and
    the last of them share its link.
    """
    network, size, others = DEFAULT.network, 4096 * ranks, ranks - 1
    run = simulate(plans(collective, ranks, size, algorithm), named("switch", ranks), DEFAULT)
    sent, added = size / ranks * others * network.beta, size / ranks * others * network.gamma
    if algorithm == "ring":
        least = messages * (others * network.alpha + sent)
        assert run.seconds == pytest.approx(least + added * (collective == "all_reduce"))
        data = [message for message in run.messages if message.lane == "data"]
        assert sum(message.bytes for message in data) == shares * ranks * others * size // ranks
        for message in run.messages:
            assert 0 <= message.sent < message.arrived <= message.taken
    else:
        rounds = ranks.bit_length() - 1
        assert run.seconds >= rounds * size * network.beta + network.alpha


def test_a_full_link_is_shared() -> None:
    """Four hosts of a leaf send upwards at once: a quarter of the rate takes four times as long."""
    free = Fabrics(DEFAULT.memory, Costs(1e-9, 1e-8, 1e-15))
    group = plans("all_gather", 8, 8 << 16, "pairwise")
    alone, shared = (
        simulate(group, topology.named(name, 8, Network(free)), free).seconds
        for name in ("fat-tree:4:1", "fat-tree:4:4")
    )
    # 4 of the 7 messages of each host cross, and 4 hosts share what had been the rate of one.
    assert alone == pytest.approx(7 * (1 << 16) * 1e-8, rel=0.01)
    assert shared == pytest.approx(4 * 4 * (1 << 16) * 1e-8, rel=0.01)


def cases() -> Iterator[tuple[GroupPlans, Topology]]:
    for collective in COLLECTIVES:
        for name in NAMES:
            for size in (1024, 1 << 18):
                yield plans(collective, 8, size), named(name, 8)
    for local in ("hosts:2x4", "hosts:4x2"):
        hosts = int(local[6])
        for collective in COLLECTIVES:
            yield plans_of(call_of(collective, 8, 1 << 18, hosts)), named(local, hosts)


def test_every_case_holds_its_bounds() -> None:
    """Never faster than what must cross a cut; bytes by link are those of the messages."""
    for group, where in cases():
        engine = simulate(group, where, DEFAULT)
        seconds = engine.seconds
        least = bounds(group.call, where, DEFAULT)
        case = group.call.name, where.name
        assert seconds >= max(least.bandwidth, least.addition) * (1 - 1e-9), case
        local = group.call.local
        far = [(m.sender // local, m.receiver // local, m.bytes) for m in engine.messages]
        carried = sum(size * len(where.routes[a, b]) for a, b, size in far if a != b)
        assert sum(engine.carried) == carried, case
        busiest = max(c / link.rate for c, link in zip(engine.carried, where.links, strict=True))
        assert seconds >= busiest * (1 - 1e-9), case
        parts = critical_path(engine)
        ends = [0.0, *(part.end for part in parts)]
        begins = [*(part.begin for part in parts), seconds]
        assert ends == pytest.approx(begins, abs=1e-12), case


def test_bounds_of_the_textbook() -> None:
    for collective, parts in (("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("broadcast", 1)):
        group = plans(collective, 8, 1 << 20)
        least = bounds(group.call, named("switch", 8), DEFAULT)
        assert least.bandwidth == pytest.approx(parts * (1 << 20) * DEFAULT.network.beta)
        assert least.latency == pytest.approx(3 * DEFAULT.network.alpha)
    least = bounds(plans("all_reduce", 8, 1 << 20).call, named("fat-tree:4:8", 8), DEFAULT)
    assert least.bandwidth == pytest.approx((1 << 20) * DEFAULT.network.beta * 2)
    assert "host0 to host3" in least.cut


def test_the_same_again() -> None:
    first, again = (
        simulate(plans("all_reduce", 8, 1 << 16), named("torus:2x4", 8), DEFAULT) for _ in range(2)
    )
    assert [vars(m) | {"before": 0} for m in first.messages] == [
        vars(m) | {"before": 0} for m in again.messages
    ]


def test_the_path_of_a_chain() -> None:
    engine = simulate(plans("all_gather", 4, 4096, "ring"), named("ring", 4), DEFAULT)
    parts = critical_path(engine)
    assert message_count(parts) == 3
    assert all((a + 1) % 4 == b for a, b in hops(parts))


def test_a_wait_without_a_signal_is_noticed() -> None:
    program = [Step("wait", 1, "data", 0, [], [])]
    with pytest.raises(ValueError, match="rank 0 waits for a data signal of 1 that never comes"):
        Engine([program, []], 1, DEFAULT, named("switch", 2)).run()


def test_many_signals_behind_a_message() -> None:
    """A thousand credits wait for their turn on one connection, and come in order."""
    signals = [Step("signal", 1, "credit", 0, [], [])] * 2000
    waits = [Step("wait", 0, "credit", 0, [], [])] * 2000
    first = plans("all_gather", 2, 1 << 20, "ring").steps
    programs = [first[0] + signals, first[1] + waits]
    engine = Engine(programs, 1, DEFAULT, named("switch", 2))
    engine.run()
    assert engine.seconds > (1 << 19) * DEFAULT.network.beta


# ---- topologies


def test_routes_are_ways() -> None:
    for name in NAMES:
        where = named(name, 8)
        for a, b in topology.pairs(8):
            links = [where.links[number] for number in where.routes[a, b]]
            assert links[0].source == where.hosts[a]
            assert links[-1].target == where.hosts[b]
            assert all(x.target == y.source for x, y in itertools.pairwise(links))
    for name, most in (("ring", 4), ("torus:2x4", 3)):
        where = named(name, 8)
        assert max(len(where.routes[pair]) for pair in topology.pairs(8)) == most


def test_what_was_measured() -> None:
    rate = [[0, 1e8, 5e7], [1e8, 0, 5e7], [5e7, 5e7, 0]]
    latency = [[0, 1e-4, 1e-4], [1e-4, 0, 1e-4], [1e-4, 1e-4, 0]]
    cost = Costs(1e-4, 1e-8, 1e-11)
    where = topology.measured(Hosts(["a", "b", "c"], latency, rate, cost, cost))
    assert where.rate((0, 1)) == 1e8
    assert where.rate((0, 2)) == 5e7
    assert where.latency((1, 2)) == pytest.approx(1e-4)


FILE: dict[str, Any] = {
    "hosts": ["a", "b", "c"],
    "links": [
        {"from": "a", "to": "s", "rate": 1e8},
        {"from": "b", "to": "s", "rate": 1e8},
        {"from": "c", "to": "s", "rate": 2e8, "latency": 1e-5},
        {"from": "a", "to": "b", "rate": 1e7, "one_way": True},
    ],
    "alpha": 2e-5,
    "routes": [["a", "s", "b"]],
    "groups": [["a", "b"]],
}


def test_a_topology_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = files.parse(FILE, "mine", 1.0)
    assert where.rate((0, 1)) == 1e8  # by the switch, as its route says
    assert where.latency((0, 2)) == pytest.approx(3e-5)
    direct = files.parse({**FILE, "routes": []}, "mine", 1.0)
    assert direct.rate((0, 1)) == 1e7
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FILE))
    out = printed(capsys, "all_reduce", "--ranks", "3", "--topology", str(path))
    assert "\nmine, by a model" in out
    assert "a > s" in out
    assert main(["plan", "simulate", "all_reduce", "--ranks", "4", "--topology", str(path)]) == 1
    assert "has 3 hosts, and the group 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hosts": []}, "hosts: it must have 1 to 512 names"),
        ({"hosts": ["a", "a"]}, "hosts: a name is there twice"),
        ({"hosts": ["a", 1]}, "hosts[1]: 1 is no name"),
        ({"hosts": ["a", "x"], "routes": []}, "links: none lead from a to x"),
        ({"links": 3}, "links: it must be a list"),
        ({"links": [{"from": "a", "to": "b"}]}, "links[0].rate: None is no positive number"),
        ({"links": [{"from": "a", "to": "a", "rate": 1}]}, "links[0]: it leads from a to itself"),
        ({"links": [*FILE["links"], FILE["links"][0]]}, "links[4]: there is a link from a to s"),
        ({"links": [{"from": "a", "rat": 1}]}, "links[0]: there is no key 'rat'"),
        ({"routes": [["a", "c"]]}, "routes[0]: there is no link from a to c"),
        ({"groups": [["q"]]}, "groups[0]: there is no node 'q'"),
        ({"alpha": -1}, "alpha: -1 is no number of seconds"),
        ({"speed": 1}, "speed: there is no such key"),
    ],
)
def test_mistakes_in_a_file_name_the_place(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        files.parse({**FILE, **change}, "mine", 1.0)


# ---- the command


def test_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "lanes.svg"
    words = ("--algorithm", "ring", "--topology", "torus:2x4", "--size", "64K")
    out = printed(capsys, "all_reduce", *words, "--svg", str(picture))
    assert "all_reduce of 64K bytes, 8 ranks on 8 hosts: ring\ntorus:2x4, by a model" in out
    for text in ("time ", "lower bound ", "critical path: 14 messages", "14 links carry nothing"):
        assert text in out
    ElementTree.parse(picture)


def test_only_the_critical_path_is_labeled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A ring of 8 ranks has hundreds of messages."""
    picture = tmp_path / "lanes.svg"
    words = ("--ranks", "8", "--algorithm", "ring", "--size", "1M", "--svg", str(picture))
    out = printed(capsys, "all_reduce", *words)
    elements = list(ElementTree.parse(picture).getroot().iter())
    drawn = [element for element in elements if element.get("class") == "data critical"]
    (count,) = re.findall(r"critical path: (\d+) messages", out)
    assert len(drawn) == int(count) + 1  # and the key
    labels = [element for element in elements if element.get("class") == "bytes outlined"]
    assert 0 < len(labels) <= 8


def test_a_sweep_is_as_wide_as_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    words = ("--ranks", "2,4,8,16", "--size", "1K,1M", "--algorithm", "ring")
    printed(capsys, "all_reduce", *words, "--svg", str(picture))
    assert float(ElementTree.parse(picture).getroot().get("width", "")) <= 1200


def test_a_sweep_finds_where_algorithms_cross(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "sweep.svg"
    words = ("--ranks", "4,8", "--size", "1K..1M", "--algorithm", "ring,doubling")
    out = printed(capsys, "all_reduce", *words, "--svg", str(picture))
    assert out.count("the fastest: doubling from 1K on\n  ring from about ") == 2
    root = ElementTree.parse(picture).getroot()
    texts = list(root.itertext())
    assert "4 ranks" in texts
    assert "lower bound" in texts
    dots = [element for element in root.iter() if element.get("class") == "crossing"]
    assert len(dots) == 2
    # Where the library changes, between the same two sizes.
    limit = costs.limits(DEFAULT.network, 4)["doubling"]
    low, high = (1 << 12, 1 << 14), (1 << 14, 1 << 16)
    rows = {row.split()[0]: row for row in out.split("8 ranks")[0].splitlines() if "µs" in row}
    assert low[0] < limit < high[1]
    assert rows["4K"].index("*") > rows["64K"].index("*")


def test_the_former_option_for_ranks_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Names from before 1.0 work, with a line that says how to write it now."""
    assert main(["simulate", "all_reduce", "--ranks", "8", "--local", "2"]) == 0
    out, told = capsys.readouterr()
    assert "8 ranks on 4 hosts" in out
    assert "ringcomm plan simulate: --local is now --hosts" in told
    for words in ("--topology hosts:2x4 --local 2", "--ranks 5 --local 2"):
        assert main(["plan", "simulate", "all_reduce", *words.split()]) == 1
    told = capsys.readouterr().err
    assert "hosts:2x4 has 4 on each host" in told
    assert "--ranks 5: they do not fill hosts of 2" in told


def test_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """As far as plans are short: a ring of hundreds has too many steps, a hierarchy has not."""
    words = ("--ranks", "16,600", "--hosts", "4,150", "--size", "1K")
    out = printed(capsys, "all_reduce", *words, "--algorithm", "ring,hierarchical")
    few, many = out.split("\n16 ranks\n")[1].split("\n600 ranks\n")
    assert few.split("\n")[0].split() == ["bytes", "ring", "hierarchical", "lower", "bound"]
    assert "ring" not in many.split("\n")[0]
    assert "hierarchical" in many.split("\n")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("all_sum", "there is no collective 'all_sum'"),
        ("all_reduce --topology cube", "there is no topology 'cube': use one of mesh, "),
        ("all_reduce --topology torus:3x3 --ranks 8", "torus:3x3 has 9 hosts, and the group 8"),
        ("all_reduce --topology hosts:2x4 --hosts 4", "hosts:2x4 has 2 hosts, and the group 4"),
        ("all_reduce --topology measured", "--costs has none measured pair by pair"),
        ("all_reduce --ranks 5 --hosts 2", "5 ranks cannot be spread evenly over 2 hosts"),
        ("all_reduce --algorithm best", "there is no algorithm 'best'"),
        ("all_reduce --ranks 1024 --algorithm ring", "steps, and this takes at most 2,000,000"),
        ("all_reduce --ranks 512 --topology mesh", "a topology has at most 100,000 links"),
        ("all_reduce --ranks 4,8 --hosts 2,2,4", "--hosts: write one number, or as many as"),
        ("all_reduce --root 1", "all_reduce has no root"),
        ("all_reduce --links -1", "--links -1: write how many"),
        ("all_reduce --topology nowhere.json", "No such file"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert main(["plan", "simulate", *words.split()]) == 1
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("ringcomm plan simulate: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_the_picture_of_the_docs_is_true(tmp_path: Path) -> None:
    """Its first panel crosses where the command on its page crosses; all of it takes seconds."""
    words = ["--topology", "fat-tree:4:4", "--ranks", "4", "--size", "1K..4M"]
    words += ["--algorithm", "ring,doubling,bruck", "--svg", str(tmp_path / "one.svg")]
    assert main(["plan", "simulate", "all_reduce", *words]) == 0
    mark = re.compile(r'<text class="mark outlined".*>(.+)</text>')
    first = mark.findall((tmp_path / "one.svg").read_text())
    assert first
    assert mark.findall((ROOT / "docs" / "simulate.svg").read_text())[: len(first)] == first
