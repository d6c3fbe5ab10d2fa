"""Ranks on several hosts: right results. The fault table has what may happen to them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from lab import ROOT
from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing
from lab.outcomes import DESTROYED

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(180),
]

Answers = list[dict[str, Any]]


def run(
    hosts: Hosts, kind: str, seconds: float, ranks_per_host: int = 1, **env: str | None
) -> Answers:
    """Return what every rank says."""
    command = [sys.executable, str(ROOT / "lab" / "faults" / "network_rank.py"), kind, str(seconds)]
    answers = []
    results = hosts.run_ranks(command, ranks_per_host, env, timeout=limit(100))
    for rank, result in enumerate(results):
        lines = [line for line in result.output.splitlines() if line.startswith("{")]
        assert lines, f"rank {rank}: {result.output}"
        answers.append(json.loads(lines[-1]))
    return answers


def good(answers: Answers, ranks: int) -> None:
    assert [answer["rank"] for answer in answers] == list(range(ranks))
    assert {answer["error"] for answer in answers} == {""}
    assert len({answer["operations"] for answer in answers}) == 1
    assert max(answer["destroyed"] for answer in answers) < DESTROYED


@pytest.mark.parametrize(("count", "local"), [(2, 1), (3, 1), (2, 2)])
def test_every_collective(count: int, local: int) -> None:
    with Hosts(count) as hosts:
        good(run(hosts, "everything", 1, ranks_per_host=local, OPERATIONS="16"), count * local)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_two_ranks_on_eight_hosts() -> None:
    with Hosts(8) as hosts:
        answers = run(hosts, "everything", 1, ranks_per_host=4)
        good(answers, 32)
        joined = max(answer["joined"] for answer in answers)
        print(f"32 ranks on 8 hosts have joined after {joined:.2f} s")
        assert joined < 10


def test_every_collective_over_ipv6_and_two_flows() -> None:
    with Hosts(2, ipv4=False, ipv6=True) as hosts:
        good(run(hosts, "everything", 1, RINGCOMM_FLOWS="2"), 2)


SLOW = """
import torch, torch.distributed as dist
dist.init_process_group("ringcomm")
tensor = torch.arange(90_000) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
assert torch.equal(tensor, 3 * torch.arange(90_000))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_slow_link_is_no_silence() -> None:
    """A piece that wakes the reader takes longer than a connection may be silent."""
    with Hosts(2, rate="200kbit") as hosts:
        results = hosts.run_ranks([sys.executable, "-c", SLOW], timeout=limit(60))
    assert [result.returncode for result in results] == [0, 0], results


LEAVES = """
import torch, torch.distributed as dist
dist.init_process_group("ringcomm")
tensor = torch.full((1 << 20,), float(dist.get_rank() == 0))
dist.broadcast(tensor, 0)
assert tensor.sum() == 1 << 20
print("good")
"""


def test_what_is_on_its_way_arrives_when_a_program_ends() -> None:
    """The root is through when all is under way; it does not destroy its group."""
    with Hosts(2, rate="50mbit") as hosts:
        for result in hosts.run_ranks([sys.executable, "-c", LEAVES]):
            assert (result.returncode, "good" in result.output) == (0, True), result.output
