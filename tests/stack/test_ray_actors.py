"""examples/elastic_ray.py: Ray starts actors that were killed again, and they join the others.

Ray's daemons run on a host that is a network namespace, and end with it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
BY_RAY = (
    "import ray; ray.init('auto', namespace='elastic', log_to_driver=False); "
    "ray.kill(ray.get_actor('rank1'), no_restart=False)"
)


@pytest.fixture
def settings(environment: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Settings for Ray; the names of its sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield {
            "HOME": str(tmp_path),
            "PATH": f"{environment.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RES_OPTIONS": "timeout:1 attempts:1",
        }


def test_actors_that_are_killed_join_again(
    environment: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    """One by its number, one by Ray; then all are told to leave, and the training ends."""
    words = ["--ranks", "2", "--pause", "0.02", "--epochs", "1000000"]
    command = [str(environment), str(ROOT / "examples" / "elastic_ray.py"), *words]
    output = Output(tmp_path / "out")
    with Hosts(1) as hosts, output.path.open("wb") as stream:
        training = hosts.start(0, command, settings, stream.fileno())
        output.wait(r"epoch=\d+ ranks=2", 60)
        actors = processes(hosts.namespaces[0], "ray::Trainer.train")
        assert len(actors) == 2
        os.kill(actors[0], signal.SIGKILL)
        output.wait("going on without")
        output.wait(r"epoch=\d+ ranks=1")
        output.wait(r"epoch=\d+ ranks=2", 60)
        killer = hosts.start(0, [environment, "-c", BY_RAY], settings)
        output.wait("going on without", 60)
        assert killer.wait(limit(30)) == 0
        output.wait(r"epoch=\d+ ranks=2", 60)
        for pid in processes(hosts.namespaces[0], "ray::Trainer.train"):
            os.kill(pid, signal.SIGTERM)
        assert training.wait(limit(60)) == 1, "none has come to the end of the training"
        assert output.text().count("has gone for good") == 2, "Ray starts none again that left"
