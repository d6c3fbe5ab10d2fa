"""Rules of the doctor by a table: what was found, made up, and the one sentence that it causes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import doctor_cases
import pytest
import torch  # noqa: F401  the library needs it to be loaded

from lab import browser
from ringcomm import _C
from ringcomm._text import spans
from ringcomm.tools.doctor import facts, meeting, report, stages, turns
from ringcomm.tools.doctor.evidence import Evidence, shares_memory
from ringcomm.tools.doctor.findings import judge, status_of
from ringcomm.tools.load import Span

Change = Callable[[Evidence], object]


def fact(name: str, value: object, *ranks: int) -> Change:
    """Give these ranks another fact."""

    def change(evidence: Evidence) -> None:
        for rank in ranks:
            setattr(evidence.ranks[rank], name, value)

    return change


def fail(answer: str, *sources: int, closed: str = "timed out") -> Change:
    """Let all addresses of other hosts answer these ranks so."""

    def change(evidence: Evidence) -> None:
        for (rank, _), link in evidence.links.items():
            if rank in sources and link.answers:
                link.answers, link.chosen = dict.fromkeys(link.answers, answer), -1
                for address in link.answers:
                    evidence.closed[rank, address.partition(":")[0]] = closed

    return change


def both(*changes: Change) -> Change:
    return lambda evidence: [change(evidence) for change in changes]


def pair(name: str, value: object) -> Change:
    """Change what was measured between ranks 0 and 2, of two hosts."""
    return lambda evidence: setattr(evidence.pairs[0, 2], name, value)


def remove(*ranks: int) -> Change:
    def change(evidence: Evidence) -> None:
        evidence.pairs = {}
        for rank in ranks:
            del evidence.ranks[rank]

    return change


def refused_store(evidence: Evidence) -> None:
    evidence.met = False
    evidence.ranks = {1: evidence.ranks[1]}
    evidence.links, evidence.pairs = {}, {}
    evidence.reached.answers = {doctor_cases.STORE: "refused"}


def other_mtu(evidence: Evidence) -> None:
    for rank in (2, 3):
        evidence.ranks[rank].interfaces[0]["mtu"] = 9000


# The change of four healthy ranks on two hosts, the exit status, and words of the sentence.
CASES: list[tuple[Change, int, str]] = [
    (refused_store, 2, "The store at 10.0.0.1:29500 does not answer: 10.0.0.1:29500: refused."),
    (remove(2, 3), 2, "Ranks 2 and 3 never came."),
    (lambda e: e.lost.update({3: "measuring"}), 2, "Rank 3 fell silent while measuring."),
    (fact("library_error", "ImportError: x", 1), 2, "The library does not load on rank 1"),
    (fact("build", "other", 3), 2, "Ranks have different builds of ringcomm: fc2a07301553 on ra"),
    (fact("torch", "2.12.0", 3), 1, "Ranks have different versions of torch: 2.13.0 on ranks 0-2"),
    (fact("settings", {"RINGCOMM_FLOWS": "2"}, 3), 2, "RINGCOMM_FLOWS differs: (not set) on ranks"),
    (
        fact("settings", {"RINGCOMM_TLS": "on"}, 0),
        2,
        "RINGCOMM_TLS differs: on on rank 0, (not set",
    ),
    (
        fact("settings", {"RINGCOMM_SECRET_FILE": "(set)"}, 2, 3),
        2,
        "RINGCOMM_SECRET differs: (not set) on ranks 0 and 1, (set) on ranks 2 and 3.",
    ),
    (
        fact("settings", {"RINGCOMM_ALGORITHM": "ring"}, 3),
        2,
        "RINGCOMM_ALGORITHM differs: (not set) on rank 0, ring on rank 3.",
    ),
    (fact("settings", {"RINGCOMM_PORT": "1"}, 3), 1, "RINGCOMM_PORT is set on rank 3, and no such"),
    (fact("descriptors_limit", 20, 1), 2, "Rank 1 on host0 may open 20 descriptors, of which 10"),
    (fact("descriptors_limit", 64, 1), 1, "Rank 1 on host0 may open 64 descriptors"),
    (fact("memfd_error", "memfd_create: x", 0), 2, "host0 reserves no shared memory: memfd_cre"),
    (
        fact("memory_available", 100 << 20, 2, 3),
        1,
        "host1 has 100 MiB of memory left for ranks 2 and 3",
    ),
    (
        both(fact("memory_limit", 1 << 30, 2), fact("memory_used", 1000 << 20, 2)),
        1,
        "24 MiB of mem",
    ),
    (fact("oom_kills", 2, 2), 0, "The OOM killer has ended 2 processes"),
    (
        fact("host", "node", 0, 1, 2, 3),
        1,
        "2 hosts have one name, node: those of ranks 0 and 1 and",
    ),
    (fact("cores", 1, 0, 1), 0, "host0 has too few cores: 1 for ranks 0 and 1."),
    (
        lambda e: e.spans.update(dict.fromkeys((0, 1), Span(1.0, 1.5, 0.2))),
        0,
        "Other processes on host0 used 1.1 of 64 cores while the pairs were measured",
    ),
    (fact("cuda", {"error": "x"}, 0), 1, "host0: CUDA does not start: x."),
    (fact("cuda", {"driver": True}, 0), 0, "host0 has an NVIDIA driver, and a torch without CUDA."),
    (fact("user", 1000, 1), 1, "Ranks 0 and 1 are on one host and use TCP: users 0 and 1000."),
    (both(fact("addresses", [], 2), fact("listen_error", "ports", 2)), 2, "listens nowhere: ports"),
    (fact("addresses", ["127.0.0.1:4"], 2), 2, "Rank 2 on host1 listens at 127.0.0.1:4, where no"),
    (fail("timed out", 0, closed="refused"), 1, "A firewall drops packets of rank 0 on host0 to"),
    (
        fail("timed out", 0),
        1,
        "Connections of rank 0 on host0 to host1 at 10.0.0.2, ports 40002 and 4",
    ),
    (
        fail("timed out", 0, 1, 2, 3),
        2,
        "Ranks 0 and 1 on host0 and ranks 2 and 3 on host1 cannot reach",
    ),
    (fail("refused", 0), 1, "ports 40002 and 40003, are refused."),
    (fail("unreachable: No route to host", 0), 1, "fail: No route to host."),
    (fail("another process", 0), 1, "are answered by another process, or by none."),
    (
        fail("another secret", 0, 1, 2, 3),
        2,
        "Ranks 0 and 1 on host0 and host1 at 10.0.0.2 have diff",
    ),
    (fail("no descriptor", 0), 1, "no descriptor is left."),
    (pair("trouble", "stalled forth"), 1, "The connections between ranks 0 and 2 broke: stalled"),
    (
        both(pair("trouble", "stalled forth"), pair("retransmits", 3)),
        2,
        "From host0 to host1 small messages pass and large ones",
    ),
    (pair("trouble", "stalled back"), 2, "From host1 to host0 small messages pass and large ones"),
    (pair("trouble", "Connection reset by peer"), 1, "The connections between ranks 0 and 2 broke"),
    (pair("offset", -3.5), 1, "The clock of host1 is 3.5 s behind that of host0."),
    (other_mtu, 1, "Eth0 of host0 has an MTU of 1500 bytes, and eth0 of host1 has an MTU of 9000"),
]


@pytest.mark.parametrize(("change", "status", "words"), CASES, ids=[case[2] for case in CASES])
def test_a_rule(change: Change, status: int, words: str) -> None:
    evidence = doctor_cases.healthy()
    assert judge(evidence) == []
    change(evidence)
    findings = judge(evidence)
    assert [finding.sentence for finding in findings if words in finding.sentence], findings
    assert status_of(findings) == status
    assert words in " ".join(report.text(evidence, findings).split())


@pytest.mark.parametrize(
    ("variable", "text", "ranks"),
    [
        ("RINGCOMM_ALGORITHM", "ring", [0]),  # the others do as rank 0 asks
        ("RINGCOMM_FLOWS", "auto", [3]),  # which is the default
        ("RINGCOMM_SHARED_BUFFERS", "4096", [1]),
        ("RINGCOMM_SPIN_US", "5", [1]),
    ],
)
def test_settings_that_may_differ(variable: str, text: str, ranks: list[int]) -> None:
    evidence = doctor_cases.healthy()
    fact("settings", {variable: text}, *ranks)(evidence)
    assert judge(evidence) == []


def test_an_unknown_setting_has_the_nearest_beside_it() -> None:
    evidence = doctor_cases.healthy()
    fact("settings", {"RINGCOMM_PORT": "1", "RINGCOMM_SIM_X": "1"}, 3)(evidence)
    (finding,) = judge(evidence)
    assert finding.remedy == "did you mean RINGCOMM_PORTS? docs/options.md lists them all"


def test_settings_of_connections_may_differ_on_one_host() -> None:
    evidence = doctor_cases.healthy(4, 4)
    fact("settings", {"RINGCOMM_FLOWS": "2"}, 3)(evidence)
    assert judge(evidence) == []
    fact("settings", {"RINGCOMM_TRANSPORT": "tcp"}, 2)(evidence)
    assert "RINGCOMM_FLOWS differs: (not set) on ranks 0-2" in judge(evidence)[0].sentence


def test_who_shares_memory_is_the_rule_of_the_library() -> None:
    identities = [
        (boot, network, user)
        for boot in ("boot0", "boot1", facts.UNKNOWN)
        for network in ("4:1", facts.UNKNOWN)
        for user in (0, 1000)
    ]
    for mine, theirs in itertools.product(identities, repeat=2):
        ranks = [
            facts.Facts(rank=rank, boot_id=boot, network=network, user=user)
            for rank, (boot, network, user) in enumerate((mine, theirs))
        ]
        told = shares_memory(*ranks) == ""
        assert told == _C.same_host(("host", *mine), ("host", *theirs)), (mine, theirs)


def test_a_slow_link() -> None:
    evidence = doctor_cases.healthy(8, 2)
    assert judge(evidence) == []
    for (rank, other), measured in evidence.pairs.items():
        if rank // 2 == 0 and other // 2 == 3:
            measured.forth, measured.latency = 1e7, 1e-2
    told = [finding.sentence for finding in judge(evidence)]
    assert told[0].startswith("Between host0 and host3 pass 10 MB/s; the median is ")
    assert told[1].startswith("Between host0 and host3 a message takes 10 ms; the median is ")


def span(busy: float | None, *ranks: int) -> Change:
    """Say that all processes of their host used so many cores in a second, and these ranks 0.1."""
    return lambda evidence: evidence.spans.update(dict.fromkeys(ranks, Span(1.0, busy, 0.1)))


def test_figures_of_a_busy_host_are_marked() -> None:
    evidence = doctor_cases.healthy()
    both(span(0.39, 0, 1), span(0.25, 2, 3))(evidence)
    told = report.text(evidence, judge(evidence))
    assert "?" not in told
    assert told.count("used 0.19 of 64 cores meanwhile") == 1
    assert told.count("used 0.05 of 64 cores meanwhile") == 1
    span(0.2 + 0.21, 0, 1)(evidence)  # others: 0.21 of the 2 cores that 2 ranks need
    rows = report.text(evidence, judge(evidence)).partition("bandwidth (MB/s")[2].splitlines()[2:6]
    assert [row.count("?") for row in rows] == [3, 3, 2, 2]  # all but those between ranks 2 and 3
    made = report.as_json(evidence, judge(evidence))
    doubts = {tuple(pair["ranks"]): pair["doubt"] for pair in made["pairs"]}
    assert doubts[0, 1] == doubts[0, 2] == "others were busy"
    assert doubts[2, 3] == doubts[0, 0] == ""
    assert made["hosts"][0]["others_cores"] == pytest.approx(0.21)
    assert made["hosts"][0]["others_share"] == pytest.approx(0.105)


@pytest.mark.parametrize("change", [span(None, 0, 1), span(1.0, 0), lambda e: None])
def test_a_host_that_does_not_tell_is_not_marked(change: Change) -> None:
    evidence = doctor_cases.healthy()
    change(evidence)
    told = report.text(evidence, judge(evidence))
    assert "others      unknown" in told
    assert "?" not in told
    assert report.as_json(evidence, [])["hosts"][0]["others_share"] is None


def test_too_few_cores_are_said_in_place_of_figures() -> None:
    evidence = doctor_cases.healthy()
    fact("cores", 1, 0, 1)(evidence)
    told = report.text(evidence, judge(evidence))
    first, second, *others = told.partition("bandwidth (MB/s")[2].splitlines()[2:6]
    assert first.split()[2] == second.split()[1] == "few"
    assert "few" not in " ".join(others)  # a rank has that core alone, with one of another host
    assert "few: too few cores" in told
    assert report.figures(evidence)[1][1].endswith("were not measured, or on too few cores.")
    (pair_told,) = [p for p in report.as_json(evidence, [])["pairs"] if p["ranks"] == (0, 1)]
    assert (pair_told["doubt"], pair_told["forth"], pair_told["latency"]) == ("too few cores", 0, 0)


def test_with_many_ranks_those_of_a_host_need_a_core_each() -> None:
    evidence = doctor_cases.healthy(40, 20)
    for some in evidence.ranks.values():
        some.cores = 20
    assert report.matrices(evidence)["bandwidth"][0][1] is not None
    for some in evidence.ranks.values():
        some.cores = 19
    assert report.matrices(evidence)["bandwidth"][0][1] is None
    assert "several of a host were measured at once" in report.text(evidence, judge(evidence))


# ---- which pair is measured when


@pytest.mark.parametrize("hosts", [[1], [2], [5], [12], [1, 1, 1], [3, 2, 4], [16], [8, 8, 8]])
def test_every_pair_has_its_turn(hosts: list[int]) -> None:
    numbers = itertools.count()
    order, _ = turns.turns([list(itertools.islice(numbers, count)) for count in hosts])
    assert sorted(order) == list(itertools.combinations(range(sum(hosts)), 2))


@pytest.mark.parametrize(
    "counts", [[2], [3], [4], [7], [12], [1, 1, 1], [4, 4], [3, 2, 4], [2] * 5]
)
def test_one_pair_of_a_host_is_measured_at_a_time(counts: list[int]) -> None:
    """Each rank follows the order and waits for its peer alone, however long pairs take."""
    numbers, chance = itertools.count(), random.Random(1)
    hosts = [list(itertools.islice(numbers, count)) for count in counts]
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    order, _ = turns.turns(hosts)
    for _ in range(20):
        left = {rank: [pair for pair in order if rank in pair] for rank in host_of}
        done = 0
        while any(left.values()):
            ready = sorted({some[0] for some in left.values() if some and meet(left, some[0])})
            busy = [host for pair in ready for host in {host_of[rank] for rank in pair}]
            assert len(busy) == len(set(busy)), ready
            for rank in chance.choice(ready):
                left[rank].pop(0)
            done += 1
        assert done == len(order)


def meet(left: dict[int, list[tuple[int, int]]], pair: tuple[int, int]) -> bool:
    """Tell whether both ranks are at this pair."""
    return all(left[rank][:1] == [pair] for rank in pair)


def test_hosts_are_measured_side_by_side() -> None:
    _, steps = turns.turns([[0, 1], [2, 3], [4, 5]])
    assert steps == 1 + 2 * 4
    assert not turns.take_turns([list(range(17))])


# ---- the colors


def test_yellow_is_fast_in_both_maps() -> None:
    (_, _, _), latency, bandwidth = report.figures(doctor_cases.healthy())
    for (drawn, caption, _), reversed_ in ((latency, True), (bandwidth, False)):
        (trace,) = drawn["data"]
        assert trace["colorscale"] == "Viridis"  # from dark to yellow, by lightness
        assert trace["reversescale"] is reversed_
        assert report.FAST in caption


def test_spans() -> None:
    assert spans([7, 0, 1, 2, 3, 9]) == "0-3, 7 and 9"


# ---- what is told through the store


class SmallStore:
    """A store that takes small messages only."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert len(key) + len(desired) < 1000
        return self.values.setdefault(key, desired).encode()

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        assert sum(map(len, keys)) < 500
        return all(key in self.values for key in keys)


def test_messages_are_small_and_those_that_are_missing_are_left_out() -> None:
    store, clock = SmallStore(), meeting.Clock()
    long = [str(random.random()) for _ in range(1000)]
    for rank in (0, 2, 64):
        place = meeting.Place(rank, 200, "10.0.0.1", 1, False, "")
        meeting.Table(store, place, clock).put("facts", long)
    table = meeting.Table(store, meeting.Place(1, 200, "10.0.0.1", 1, False, ""), clock)
    told = table.gather("facts", range(200), clock.now() + 0.1)
    assert told == {0: long, 2: long, 64: long}
    assert [table.agree("roll", [r]) for r in (1, 2)] == [[1], [1]]


# ---- facts, from files


def test_the_file_of_the_secret_is_read_as_the_library_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "secret"
    file.write_text("bees\n")
    file.chmod(0o600)
    environment = {"RINGCOMM_SECRET_FILE": "~/secret"}
    assert facts.secret_error(environment) == ""
    assert stages.own_secret(environment) == b"bees"
    file.chmod(0o644)
    assert "RINGCOMM_SECRET_FILE=~/secret can be read by others" in facts.secret_error(environment)


def test_memory_and_cores_of_a_cgroup(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "sys" / "fs" / "cgroup" / "job"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (proc / "meminfo").write_text("MemAvailable:  1024 kB\n")
    (group / "memory.max").write_text("4096\n")
    (group / "memory.current").write_text("1024\n")
    (group / "memory.events").write_text("oom 3\noom_kill 2\n")
    (group / "cpu.max").write_text("50000 100000\n")
    told = facts.memory(proc, tmp_path / "sys")
    assert told == {
        "memory_available": 1 << 20,
        "memory_limit": 4096,
        "memory_used": 1024,
        "oom_kills": 2,
    }
    assert facts.cores(proc, tmp_path / "sys") == 0.5


def test_facts_of_another_version() -> None:
    told = {**facts.Facts(rank=3).as_dict(), "of_later": 1}
    del told["cores"]
    assert facts.Facts.of(told) == facts.Facts(rank=3)


# ---- the page


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.REASON)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 64])
def test_the_page_has_every_rank(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    evidence = doctor_cases.healthy(ranks, ranks // 2)
    evidence.ranks[0].memfd_error = "memfd_create: <refused>"
    report.page(evidence, judge(evidence), tmp_path / "page.html")
    shown = browser.document(tmp_path / "page.html")
    for words in ("memfd_create: &lt;refused&gt;", "B/s", "µs", "from rank", "shared memory"):
        assert words in shown
    assert shown.count("main-svg") >= 3
