"""quantized_all_reduce between hosts: exact inside them, and a byte crosses the network once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab import ROOT
from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

COUNT = 1 << 20
CALL = f"""
import datetime, hashlib, json, torch, torch.distributed as dist, ringcomm
dist.init_process_group("ringcomm", timeout=datetime.timedelta(seconds=30))
every = [
    torch.randn({COUNT}, generator=torch.Generator().manual_seed(i))
    for i in range(dist.get_world_size())
]
tensor, exact = every[dist.get_rank()].clone(), sum(every)
ringcomm.compression.quantized_all_reduce(tensor)
digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
error = float((tensor - exact).norm() / exact.norm())
print(json.dumps(["done", digest, error]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("local", [1, 3])
def test_between_hosts(local: int) -> None:
    with Hosts(2) as hosts:
        ranks = hosts.run_ranks([sys.executable, "-c", CALL], local, timeout=limit(60))
        sent = [hosts.bytes_sent(host) for host in range(2)]
    answers = [
        json.loads(line) for rank in ranks for line in re.findall(r"\[\"done.*", rank.output)
    ]
    assert len(answers) == 2 * local, [rank.output for rank in ranks]
    assert len({digest for _, digest, _ in answers}) == 1
    assert all(1e-4 < error < 0.02 for _, _, error in answers)
    # Half of the codes in each of two steps: a byte a number, whatever ranks a host has.
    assert all(COUNT < some < 1.4 * COUNT for some in sent), sent


def test_how_much_sites_compute(tmp_path: Path) -> None:
    """The benchmark runs examples/sites.py, and requires that both sites end with the same."""
    report = tmp_path / "c.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "diloco_sites.py"), "--what", "computing"]
    command += ["--json", str(report), "--rounds", "1", "--wan", "100,5", "--every", "10"]
    command += ["--width", "32", "--seconds", "0.5", "--delay", "0"]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(200), check=False, cwd=ROOT
    )
    assert told.returncode == 0, told.stderr
    for row in json.loads(report.read_text())["results"]:
        assert all(0 < share <= 1 for share in row["shares"])


def test_diloco_between_two_sites(tmp_path: Path) -> None:
    report = tmp_path / "d.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "diloco_sites.py"), "--rounds", "1"]
    command += ["--json", str(report), "--steps", "2", "--inner", "2", "--width", "128"]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=limit(200), check=False, cwd=ROOT
    )
    assert told.returncode == 0, told.stderr
    results = {row["way"]: row for row in json.loads(report.read_text())["results"]}
    int8, fp32 = results["ringcomm, int8"], results["ringcomm, fp32"]
    assert min(int8["seconds"] + fp32["seconds"]) > 0  # a busy machine decides who is faster
    assert abs(int8["losses"][0] - fp32["losses"][0]) < 0.05
    assert results["Gloo, fp32"]["losses"] == fp32["losses"]
