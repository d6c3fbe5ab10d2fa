"""examples/elastic_job.yaml without a cluster: its pods are network namespaces.

They run the commands of the file, with its environment, under the names that a cluster gives pods
and services. The test replaces pods that fail, as the controller of Indexed Jobs does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing, processes
from lab.output import Output

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
FILE = ROOT / "examples" / "elastic_job.yaml"
PARSE = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
POD = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # the command is process 1
RANKS = 2
Started = subprocess.Popen[bytes]


@pytest.fixture
def parts(environment: Path) -> dict[str, Any]:
    """The objects of the file, by kind, for fewer ranks."""
    text = FILE.read_text().replace('"4"', f'"{RANKS}"')
    words = [str(environment), "-c", PARSE]
    parsed = subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout
    return {part["kind"]: part for part in json.loads(parsed)}


class Pods:
    """Pods of one container each, on hosts that have their names."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def start(self, place: int, container: dict[str, Any]) -> Started:
        """Start a pod, and add its output to the file `out`."""
        variables = {entry["name"]: entry.get("value", "of a secret") for entry in container["env"]}
        settings = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        settings |= {"RES_OPTIONS": "timeout:1 attempts:1", **variables}
        words = [*container["command"], *container.get("args", [])]
        words = [word.replace("/checkpoints", str(self.folder)) for word in words]
        with (self.folder / "out").open("ab") as stream:
            return self.hosts.start(place, [*POD, *words], settings, stream.fileno(), cwd=ROOT)

    def send(self, place: int, word: str, number: signal.Signals) -> None:
        """Send a signal to the process of a pod whose command line begins with a word."""
        pids = processes(self.hosts.namespaces[place], word)
        for pid in pids:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if line.startswith(word.encode() + b"\0"):
                os.kill(pid, number)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    hosts = Hosts(1 + RANKS)
    hosts.names = ["elastic-store", *(f"elastic-{index}" for index in range(RANKS))]
    with hosts:
        yield Pods(hosts, tmp_path)


def test_an_indexed_job(parts: dict[str, Any], pods: Pods, tmp_path: Path) -> None:
    """A rank is killed, and a pod is told to end: both fail, and their replacements join."""
    job, service = parts["Job"]["spec"], parts["Service"]
    (store,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    (rank,) = job["template"]["spec"]["containers"]
    assert service["metadata"]["name"] == pods.hosts.names[0]
    assert service["spec"]["selector"] == parts["Deployment"]["spec"]["selector"]["matchLabels"]
    assert (job["completionMode"], job["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")
    assert job["backoffLimitPerIndex"] > 2
    rank["args"] += ["--pause", "0.02", "--epochs", "1000000"]

    pods.start(0, {"env": [], **store})
    running = [pods.start(1 + index, rank) for index in range(RANKS)]
    output = Output(tmp_path / "out")
    output.wait(r"epoch=\d+ ranks=2", 60)

    pods.send(1, "python", signal.SIGKILL)
    assert running[0].wait(limit(10)) not in (0, None)
    output.wait("going on without elastic-0")
    running[0] = pods.start(1, rank)
    output.wait("going on with elastic-0", 60)
    output.wait(r"epoch=\d+ ranks=2")

    pods.send(2, "bash", signal.SIGTERM)
    assert running[1].wait(limit(20)) == 143, "else the index is completed, and not replaced"
    output.wait(r"epoch=\d+ ranks=1")
    running[1] = pods.start(2, rank)
    output.wait("going on with elastic-1", 60)
    output.wait(r"epoch=\d+ ranks=2")


def test_a_rank_that_has_finished_completes_its_index(
    parts: dict[str, Any], pods: Pods, tmp_path: Path
) -> None:
    (store,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    (rank,) = parts["Job"]["spec"]["template"]["spec"]["containers"]
    pods.start(0, {"env": [], **store})
    running = [pods.start(1 + index, rank) for index in range(RANKS)]
    assert [pod.wait(limit(90)) for pod in running] == [0] * RANKS
    Output(tmp_path / "out").wait(r"accuracy=(0\.9\d|1\.00) ranks=2", 1)
