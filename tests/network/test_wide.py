"""Many ranks without torch, on hosts as namespaces and on one: results, failures, bad input.

The short form has 4 hosts of 4 ranks, and 32 ranks on this one; the long form 32 hosts of 8 ranks,
and 128 here.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import wide
from lab.hosts import Hosts
from lab.limits import claim, seed
from lab.namespaces import missing

Program = Callable[..., Path]
pytestmark = [pytest.mark.timeout(900)]
MIB = 1 << 20
ARENA = 64 << 30


EVERY = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather",
         "barrier", "messages"]  # fmt: skip


class Place:
    """Where the ranks are; `hosts` is None for this host."""

    def __init__(self, program: Path, hosts: Hosts | None, count: int) -> None:
        self.program, self.hosts, self.count = program, hosts, count
        self.middle = count // 3  # the rank that does what it should not, or nothing

    def run(self, *words: object, seconds: float = 60, **options: Any) -> wide.Answer:
        local = self.count // self.hosts.count if self.hosts else 1
        answer = wide.run(
            self.program,
            *words,
            hosts=self.hosts,
            local=local,
            ranks=self.count,
            seconds=seconds,
            **options,
        )
        print(answer.brief())
        return answer

    def works(self, *words: object, **options: Any) -> wide.Answer:
        answer = self.run(*words, **options)
        assert answer.ok, answer.brief()
        return answer


needs_hosts = pytest.mark.skipif(missing() is not None, reason=str(missing()))
BETWEEN = [  # hosts, and ranks of each
    pytest.param((4, 4), marks=needs_hosts, id="4x4"),
    pytest.param((32, 8), marks=[needs_hosts, pytest.mark.slow], id="32x8"),
]
HERE = [
    pytest.param((0, 32), id="32"),
    pytest.param((0, 128), marks=pytest.mark.slow, id="128"),
]
between_hosts = pytest.mark.parametrize("place", BETWEEN, indirect=True, scope="module")
anywhere = pytest.mark.parametrize("place", BETWEEN + HERE, indirect=True, scope="module")


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, Hosts | None]]:
    """The hosts, and the ranks of each; 0 hosts: this one."""
    count, local = request.param
    if count == 0:
        yield count, local, None
        return
    with Hosts(count) as hosts:
        yield count, local, hosts


@pytest.fixture
def ranks(place: tuple[int, int, Hosts | None], cpp_program: Program) -> Place:
    count, local, hosts = place
    return Place(cpp_program("wide"), hosts, max(count, 1) * local)


def accused(text: str) -> set[int]:
    """The ranks for which an error says that it waited."""
    match = re.search(r"waiting for ranks? ([\d, ]+)", text)
    return set(map(int, match[1].rstrip(", ").split(", "))) if match else set()


# ---- results


@anywhere
def test_every_collective(ranks: Place) -> None:
    some = ["--only", ",".join(EVERY), "--random", 0] if ranks.count > 128 else ["--random", 20]
    answer = ranks.works(*some, "--seed", seed(), seconds=200)
    named = {name.partition("/")[0] for name in answer.stages}
    assert named >= ({*EVERY} if ranks.count > 128 else {*EVERY, "all_to_all", "random"})


@anywhere
def test_all_to_all(ranks: Place) -> None:
    """Where processes share cores, most of its connections are parked and made again."""
    answer = ranks.works("--only", "all_to_all", "--sizes", 8, "--calls", 1, seconds=200)
    assert answer.most("connections", "all_to_all/8") <= 128


@between_hosts
def test_a_rank_costs_what_its_plans_use(ranks: Place) -> None:
    """Meeting and sums: O(log n) connections, no square of the ranks in memory, O(n) requests."""
    answer = ranks.works("--only", "all_reduce,barrier")
    count, last = ranks.count, answer.stages[-1]
    logarithm = math.ceil(math.log2(count))
    assert answer.most("connections", last) <= 4 * logarithm
    vm = answer.most("vm_bytes", last) - answer.most("vm_bytes", "start")
    assert vm % ARENA <= 512 * MIB  # each process of the host has mapped an arena, all addresses
    assert vm // ARENA <= count
    assert answer.most("pss_bytes", last) - answer.most("pss_bytes", "start") <= 16 * MIB
    meeting = answer.stage("meeting")
    waits = 100 + 10 * meeting["seconds"]  # a rank that waits asks again, in pauses that grow
    assert meeting["requests"]["median"] <= waits
    assert meeting["requests"]["most"] <= 10 * count + waits
    assert meeting["seconds"] <= claim(5 + 0.002 * count)


@between_hosts
def test_connections_are_cut_meanwhile(ranks: Place) -> None:
    hosts = ranks.hosts
    assert hosts is not None
    cut: list[int] = []

    def reset() -> None:
        cut.append(hosts.kill_connections(len(cut) % hosts.count, count=3))
        time.sleep(0.05)

    # 256 processes on a few cores make the connections of an all_to_all for 14 s.
    some = ["--only", ",".join(EVERY)] if ranks.count > 128 else []
    answer = ranks.works("--no-checks", *some, "--loop", 5, seconds=120, meanwhile=reset)
    assert sum(cut) > min(hosts.count, 12)
    assert answer.body["loops"]["median"] == answer.most("loops") > 1


@anywhere
def test_groups_of_some_ranks(ranks: Place) -> None:
    """Each costs what 16 ranks cost, however many there are; a mesh has three of each rank."""
    answer = ranks.works("--no-checks", "--groups", 3)
    assert answer.most("longest") < claim(1)
    assert answer.most("total") <= 150 * answer.most("count")
    assert answer.stage("mesh")["seconds"] < claim(2)


@anywhere
def test_idle_groups_wake_nobody(ranks: Place) -> None:
    answer = ranks.works("--no-checks", "--idle", 8)
    assert answer.most("total") < 150  # per process: the network thread looks 100 times a second


# ---- failures


@pytest.mark.parametrize("who", ["first", "middle", "last"])
@anywhere
def test_a_killed_rank_is_named_by_all(ranks: Place, who: str) -> None:
    victim = {"first": 0, "middle": ranks.middle, "last": ranks.count - 1}[who]
    answer = ranks.works("--no-checks", "--kill", victim)
    assert sum(len(error["ranks"]) for error in answer.heard) == ranks.count - 1
    assert answer.most("heard_after") < claim(1)
    assert answer.most("left_after") < claim(2)


@anywhere
def test_a_mismatch_is_told_to_all(ranks: Place) -> None:
    answer = ranks.works("--no-checks", "--mismatch", ranks.middle)
    assert sum(len(error["ranks"]) for error in answer.heard) == ranks.count
    assert answer.most("heard_after") < claim(1)


@anywhere
def test_a_rank_that_calls_nothing_is_named_by_all(ranks: Place) -> None:
    answer = ranks.works("--no-checks", "--missing", ranks.middle)
    assert answer.most("heard_after") < claim(1)  # after the timeout
    for error in answer.heard:
        assert accused(error["text"]) == {ranks.middle}, error


@anywhere
def test_a_rank_that_never_starts_is_named_by_all(ranks: Place) -> None:
    answer = ranks.works("--absent", ranks.middle, "--timeout", 3)
    assert answer.most("heard_after") < claim(1)
    assert sum(len(told["ranks"]) for told in answer.heard) == ranks.count - 1
    words = f"waiting for rank {ranks.middle} of {ranks.count}, which has not joined"
    assert all(words in told["text"] for told in answer.heard)


# ---- bad input


def refused(answer: wide.Answer) -> str:
    """All ranks end, in the same words or with those of the first one."""
    assert not answer.ok
    assert answer.errors, answer.brief()
    texts = [error["text"] for error in answer.errors]
    assert not any("did not end" in text or "ended with" in text for text in texts), texts
    return texts[0] if len(texts) == 1 else "; ".join(texts)


@anywhere
def test_too_many_ranks(ranks: Place) -> None:
    assert "4097 ranks: ringcomm takes 1 to 4096" in refused(ranks.run("--told", 4097))


@pytest.mark.parametrize("who", [0, 1, -1])
@anywhere
def test_ranks_that_differ_on_the_world_size(ranks: Place, who: int) -> None:
    answer = ranks.run("--differ", who % ranks.count, "--timeout", 4)
    text = refused(answer)
    assert f"{ranks.count + 1}" in text
    assert "size" in text


@between_hosts
def test_few_descriptors(ranks: Place) -> None:
    """As many as plans between hosts need, and not one for every rank."""
    ranks.works("--only", "all_reduce,reduce_scatter,all_gather,broadcast,reduce,barrier",
                  "--nofile", 256)  # fmt: skip


@anywhere
def test_no_descriptors(ranks: Place) -> None:
    answer = ranks.run("--only", "all_reduce", "--nofile", 10)
    assert "Too many open files" in refused(answer)
    assert "`ulimit -n`" in refused(answer)


@between_hosts
def test_little_address_space(ranks: Place) -> None:
    ranks.works("--only", "all_reduce,reduce_scatter,all_gather,broadcast,reduce,barrier",
                  "--room", 512)  # fmt: skip


@anywhere
def test_a_store_that_answers_slowly(ranks: Place) -> None:
    answer = ranks.works("--only", "all_reduce", "--store-delay", 100, seconds=120)
    assert answer.stage("meeting")["seconds"] < claim(15)


@anywhere
def test_a_store_that_loses_its_connection(ranks: Place) -> None:
    """It is refused by all in the words of the rank concerned, or nothing is lost by it."""
    answer = ranks.run("--only", "all_reduce", "--store-loss", ranks.middle)
    if not answer.ok:
        assert "the connection to the store was lost" in refused(answer)
        others = [error for error in answer.errors if error["ranks"] != [ranks.middle]]
        for error in others:
            wanted = f"rank {ranks.middle} failed: the connection to the store"
            assert wanted in error["text"], error
