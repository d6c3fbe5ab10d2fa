"""Every script in examples/ runs, says that it is right, and fails when it is not.

Most run here on ranks that are forked from a process which has imported torch already, as their
`__main__`: the fast form. The slow form starts them as examples/README.md says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import Run

from lab import ROOT
from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing
from lab.ports import free_port
from lab.ranks import HOST, Rank, ranks

EXAMPLES = ROOT / "examples"
ZERO = r"0\.0e\+00"
NUMBER = r"\d\.\de[-+]\d\d"


def end(words: str, ranks: int = 2) -> str:
    """The last line of a script over ringcomm, as a pattern."""
    return f"{words} backend=ringcomm ranks={ranks}"


# Scripts that run on ranks: name, number of ranks, arguments, last line.
CASES: dict[str, tuple[str, int, list[str], str]] = {
    "launch": ("launch", 2, [], end(r"error=0\.000\d\d alike=True")),
    "average_gradients": (
        "average_gradients",
        2,
        [],
        # Two numbers have one sum, so the bits are those of DDP.
        end(
            f"difference from DDP: one_by_one={ZERO} asynchronous={ZERO} coalesced={ZERO} "
            f"flat={ZERO}"
        ),
    ),
    "checkpoint": (
        "checkpoint",
        2,
        [],
        end(
            "{'unlike before': True, 'alike after': True, 'restored alike': True, 'resumed': True}"
        ),
    ),
    "ring": ("ring", 2, [], end("token=1 wrong=0")),
    "ring of 3": ("ring", 3, ["--elements", "1000"], end("token=3 wrong=0", 3)),
    "subgroups": ("subgroups", 4, [], end("right=9 of 9", 4)),
    "model_parallel": (
        "model_parallel",
        2,
        [],
        end(rf"loss=\d\.\d\d->0\.\d\d difference={NUMBER}"),
    ),
    "pipeline": ("pipeline", 2, [], end(f"schedule=gpipe difference={NUMBER}")),
    "pipeline 1f1b": (
        "pipeline",
        2,
        ["--schedule", "1f1b"],
        end(f"schedule=1f1b difference={NUMBER}"),
    ),
    "parameter_server": ("parameter_server", 2, [], end(f"alike=True difference={NUMBER}")),
    "diloco": (
        "diloco",
        2,
        ["--steps", "3", "--inner", "10", "--enough", "3.6"],
        end(r"loss=\d\.\d\d->\d\.\d{4} outer=int8 seconds=\d\.\d{4} alike=True"),
    ),
    "diloco fp8": (
        "diloco",
        2,
        ["--steps", "1", "--inner", "2", "--enough", "9", "--outer", "fp8"],
        end(r"loss=\d\.\d\d->\d\.\d{4} outer=fp8 seconds=\d\.\d{4} alike=True"),
    ),
    "rpc_ddp": ("rpc_ddp", 3, [], end(f"difference={NUMBER}", 3)),
}
# Tested otherwise.
OTHERS = {"train_digits", "spawn", "meet", "two_jobs", "elastic", "elastic_sharded", "sites"}
NOT_RUN = {"ray_train", "elastic_ray"}  # Ray is no requirement of ours
for_cases = pytest.mark.parametrize("case", CASES)


def test_every_example_is_named() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {name for name, *_ in CASES.values()} | OTHERS | NOT_RUN == scripts
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"examples/(\w+)\.py", page)) == scripts


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_an_example_says_that_it_needs_ray(run: Run) -> None:
    result = run(sys.executable, EXAMPLES / "ray_train.py")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("this example needs Ray Train: `pip install")


# ---- the fast form


@contextlib.contextmanager
def breaking(name: str | None) -> Iterator[None]:
    """Let `dist.NAME` end with other numbers on each rank, as a backend that is wrong might."""
    if name is None:
        yield
        return
    right = getattr(dist, name)

    def wrong(result: Any, *args: Any, **options: Any) -> Any:
        work = right(result, *args, **options)
        if isinstance(work, dist.Work):
            work.wait()
        for tensor in result if isinstance(result, list) else [result]:
            tensor += dist.get_rank() + 1
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, wrong)
        yield


def play(
    rank: Rank, script: Path, arguments: list[str], broken: str | None, meet: tuple[int, Path]
) -> int:
    """Run an example as this rank, its output into a file; return its exit code."""
    port, folder = meet
    os.environ.update(RANK=str(rank.index), LOCAL_RANK=str(rank.index), WORLD_SIZE=str(rank.size))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    sys.argv = [str(script), *arguments]
    output = (folder / f"{rank.index}.out").open("w")
    with output, contextlib.redirect_stdout(output), breaking(broken):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def play_on_ranks(
    folder: Path, size: int, name: str, arguments: list[str], broken: str | None = None
) -> tuple[list[int], list[str]]:
    """Run a script on new ranks; return their exit codes, and the lines that they printed."""
    port = free_port()
    with ranks(size, backend=None) as some:
        codes = some(play, EXAMPLES / f"{name}.py", arguments, broken, (port, folder))
    printed = [(folder / f"{index}.out").read_text() for index in range(size)]
    return codes, "".join(printed).splitlines()


@for_cases
def test_example(case: str, tmp_path: Path) -> None:
    name, size, arguments, last = CASES[case]
    codes, lines = play_on_ranks(tmp_path, size, name, arguments)
    assert codes == [0] * size, lines
    assert re.fullmatch(last, lines[-1]), lines


@pytest.mark.parametrize(
    ("name", "arguments", "broken"),
    [
        ("launch", ["--steps", "0"], None),
        ("launch", [], "all_gather"),
        ("average_gradients", [], "all_reduce"),
        ("checkpoint", [], "broadcast"),
        ("ring", [], "irecv"),
        ("ring", [], "recv"),
        ("subgroups", [], "all_reduce"),
        ("subgroups", [], "broadcast"),
        ("model_parallel", [], "recv"),
        ("parameter_server", [], "all_gather"),
    ],
)
def test_what_is_wrong_is_noticed(
    name: str, arguments: list[str], broken: str | None, tmp_path: Path
) -> None:
    codes, lines = play_on_ranks(tmp_path, 2, name, arguments, broken)
    assert any(codes), lines


# ---- as a user starts them


def succeeds(result: subprocess.CompletedProcess[str], last: str) -> None:
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(last, result.stdout.splitlines()[-1]), result.stdout


LINE = r"error=0\.000\d\d"


def test_torchrun(torchrun: Run) -> None:
    succeeds(torchrun(2, EXAMPLES / "launch.py"), end(f"{LINE} alike=True"))


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("meeting", ["static", "c10d"])
def test_torchrun_on_two_hosts(meeting: str) -> None:
    """As examples/README.md says it; a local rank is not a rank there."""
    with Hosts(2) as hosts:
        first, launchers = hosts.addresses[0], []
        for node, address in enumerate(hosts.addresses):
            words = ["--nnodes=2", "--nproc-per-node=2"]
            if meeting == "static":
                words += [f"--node-rank={node}", f"--master-addr={first}", "--master-port=29500"]
            else:
                words += ["--rdzv-backend=c10d", "--rdzv-id=fit", f"--rdzv-endpoint={first}:29400"]
                words += [f"--rdzv-conf=is_host={1 - node}", f"--local-addr={address}"]
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            command.append(str(EXAMPLES / "launch.py"))
            environment = {"OMP_NUM_THREADS": "1"}
            launchers.append(hosts.start(node, command, environment, subprocess.PIPE))
        outputs = [launcher.communicate(timeout=limit(100))[0].decode() for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert re.search(end(f"{LINE} alike=True", 4), "".join(outputs)), outputs


def test_the_older_launcher(run: Run, tmp_path: Path) -> None:
    """It has no --standalone and takes 29500 where nothing is said: a free port instead."""
    port = free_port()
    launcher = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    launcher += ["--master-addr", HOST, "--master-port", str(port)]
    result = run(*launcher, EXAMPLES / "launch.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    succeeds(result, end(f"{LINE} alike=True"))


def test_spawn(run: Run, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "spawn.py"]
    succeeds(run(*command, cwd=tmp_path, OMP_NUM_THREADS="1"), end(LINE))


@pytest.mark.slow
def test_spawn_raises_what_a_rank_raises(run: Run, tmp_path: Path) -> None:
    result = run(sys.executable, EXAMPLES / "spawn.py", "--steps", "0", cwd=tmp_path)
    assert result.returncode != 0
    assert "ArithmeticError: rank" in result.stderr


def test_every_way_to_meet(run: Run, tmp_path: Path) -> None:
    result = run(sys.executable, EXAMPLES / "meet.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    succeeds(result, end("met by env:// tcp:// file:// TCPStore FileStore HashStore"))


def test_two_jobs_at_once(run: Run, tmp_path: Path) -> None:
    result = run(sys.executable, EXAMPLES / "two_jobs.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    succeeds(result, end("both jobs are right"))


def test_an_unknown_way_to_meet_is_refused(run: Run) -> None:
    result = run(sys.executable, EXAMPLES / "meet.py", "--how", "telepathy")
    assert result.returncode == 2
    assert "invalid choice: 'telepathy'" in result.stderr


@pytest.mark.slow
@for_cases
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_example_by_torchrun(case: str, backend: str, torchrun: Run) -> None:
    name, size, arguments, last = CASES[case]
    result = torchrun(size, EXAMPLES / f"{name}.py", *arguments, "--backend", backend)
    succeeds(result, last.replace("ringcomm", backend))
