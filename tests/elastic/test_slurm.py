"""The example under a Slurm that the tests start: examples/elastic.sbatch, as it stands.

Its cluster is one that stops all ranks when one dies, unless a job says otherwise.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT
from lab.limits import limit
from lab.output import Output
from lab.slurm import Slurm, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
STRICT = {"KillOnBadExit": 1, "WaitTime": 2}
UNTIL_TOLD = ["--pause", "0.02", "--epochs", "1000000"]
RANK = """
import os, pathlib, time
from ringcomm.elastic.joining import advice

print("advice:", advice(), flush=True)
other = pathlib.Path(__file__).with_name("spoke-" + os.environ["SLURM_JOB_ID"])
if os.environ["SLURM_PROCID"] == "1":
    while not other.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
other.touch()
time.sleep(6)
print("went on", flush=True)
"""
LENIENT = {"SLURM_KILL_BAD_EXIT": "0", "SLURM_WAIT": "0"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Three nodes, on which commands are found as by a user with an activated environment."""
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    with Slurm(3, tmp_path, SlurmdTimeout=5, **STRICT) as cluster:
        yield cluster


def test_the_example_goes_on_without_a_rank_and_without_a_node(
    slurm: Slurm, tmp_path: Path
) -> None:
    output, joiner = Output(tmp_path / "job.out"), tmp_path / "joiner.out"
    words = ["--nodes=3", "--ntasks-per-node=1", "--export=ALL,RINGCOMM_RESUME_SECONDS=3"]
    words += [f"--chdir={tmp_path}", f"--output={output.path}"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = slurm.submit(*words, ROOT / "examples" / "elastic.sbatch", *UNTIL_TOLD)
    output.wait(r"epoch=\d+ ranks=3", 20)
    assert "srun stops" not in output.text()

    os.kill(slurm.tasks(1, "examples/elastic.py")[0], signal.SIGKILL)
    output.wait(r"epoch=\d+ ranks=2")

    there = f". {tmp_path}/.ringcomm-{job}; exec srun --jobid={job} --overlap --ntasks=1"
    there += f" --nodelist=host1 python {ROOT}/examples/elastic.py {' '.join(UNTIL_TOLD)}"
    joined = slurm.start("bash", "-c", there, output=joiner)
    output.wait(r"epoch=\d+ ranks=3", 20)

    slurm.lose(2)
    output.wait(r"epoch=\d+ ranks=2", 20)
    output.wait("Node failure on host2", 20)
    output.wait(r"epoch=\d+ ranks=2")
    assert slurm.state(job) == "RUNNING"

    slurm.run("scancel", "--signal=TERM", job)
    joined.wait(limit(20))  # with 0, or ended by Slurm: its step goes with the batch script
    slurm.run("srun", f"--dependency=afterany:{job}", "true")
    assert slurm.state(job) == "FAILED", "a rank of it was killed"
    assert not (tmp_path / f".ringcomm-{job}").exists()


def test_join_says_what_srun_would_do(slurm: Slurm, tmp_path: Path) -> None:
    """It warns where the others are stopped, and is silent where they are not."""
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    start = ["srun", "--no-kill", "--nodes=2", "python", rank]
    told = slurm.run(*start)
    assert told.count("as the cluster's KillOnBadExit=1 says") == 2
    assert "went on" not in told
    told = slurm.run(*start, SLURM_KILL_BAD_EXIT="0")
    assert told.count("as the cluster's WaitTime=2 says") == 2
    assert "went on" not in told
    told = slurm.run(*start, **LENIENT)
    assert "srun stops" not in told
    assert told.count("went on") == 1
    told = slurm.run(*start[:1], "--mpi=pmi2", *start[1:], **LENIENT)
    assert "stops" not in told
    assert told.count("went on") == 1
