"""Other people's trainers run over ringcomm, and get the bits that they get over Gloo.

Each script of examples/clients trains on two ranks and checks itself; docs/clients.md names it.
They run in an environment of their own, build/clients, which scripts/clients.sh makes.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import Run

from lab import ROOT
from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing

CLIENTS = ROOT / "examples" / "clients"
PAGE = ROOT / "docs" / "clients.md"
SECONDS = 500  # against a hang: DeepSpeed compiles something the first time
LINE = re.compile(
    r"client=(?P<client>\S+) steps=(?P<steps>\d+) difference=(?P<difference>\S+) "
    r"parameters=(?P<parameters>\w{16}) backend=(?P<backend>\w+) ranks=2"
)

# script: (words, variables) over ringcomm, then what runs the same over Gloo.
Way = tuple[list[str], dict[str, str]]
BY_NAME: Way = (["--backend", "ringcomm"], {})
GLOO: Way = (["--backend", "gloo"], {})
UNCHANGED: Way = ([], {})  # asks for Gloo
AS_GLOO: Way = ([], {"RINGCOMM_AS": "gloo"})
CASES: dict[str, tuple[str, Way, Way]] = {
    "lightning": ("with_lightning", BY_NAME, GLOO),
    "lightning as gloo": ("with_lightning", (GLOO[0], AS_GLOO[1]), GLOO),
    "fabric": ("with_fabric", BY_NAME, GLOO),
    "fabric as gloo": ("with_fabric", (GLOO[0], AS_GLOO[1]), GLOO),
    "accelerate": ("with_accelerate", BY_NAME, UNCHANGED),
    "accelerate as gloo": ("with_accelerate", AS_GLOO, UNCHANGED),
    "trainer": ("with_trainer", BY_NAME, UNCHANGED),
    "trainer as gloo": ("with_trainer", AS_GLOO, UNCHANGED),
    "deepspeed stage 1": ("with_deepspeed", BY_NAME, GLOO),
    "deepspeed stage 3": (
        "with_deepspeed",
        ([*BY_NAME[0], "--stage", "3"], {}),
        ([*GLOO[0], "--stage", "3"], {}),
    ),
    "deepspeed as gloo": ("with_deepspeed", (GLOO[0], AS_GLOO[1]), GLOO),
    "ray": ("with_ray", BY_NAME, GLOO),
    "ignite": ("with_ignite", BY_NAME, UNCHANGED),
    "ignite as gloo": ("with_ignite", AS_GLOO, UNCHANGED),
    "torchft": ("with_torchft", BY_NAME, GLOO),
    # Gloo has no PREMUL_SUM, which is what torchtitan reduces with unless it is told to use SUM.
    "torchtitan": ("with_torchtitan", ([], {"RINGCOMM_DEFAULT": "cpu"}), (["--sum"], {})),
    "torchtitan as gloo": ("with_torchtitan", AS_GLOO, (["--sum"], {})),
    "megatron": ("with_megatron", BY_NAME, GLOO),
    "megatron pipeline": (
        "with_megatron",
        ([*BY_NAME[0], "--tensor", "1", "--pipeline", "2"], {}),
        ([*GLOO[0], "--tensor", "1", "--pipeline", "2"], {}),
    ),
    "megatron as gloo": ("with_megatron", (GLOO[0], AS_GLOO[1]), GLOO),
    "weight sync": ("with_weight_sync", BY_NAME, GLOO),
    "weight sync as gloo": ("with_weight_sync", (GLOO[0], AS_GLOO[1]), GLOO),
}
ALONE = {"with_ray", "with_torchft", "with_weight_sync"}  # they start their ranks themselves

# It decodes, in an environment of its own, and takes its own shared memory if it is let.
VLLM = "with_vllm"
TOKENS = re.compile(
    r"client=vllm-\S+ tokens=(\w{16}) tokens_per_second=\d+ backend=(\w+) groups=\2 "
)


def test_every_client_is_named() -> None:
    scripts = {path.stem for path in CLIENTS.glob("with_*.py")}
    assert {script for script, *_ in CASES.values()} | {VLLM} == scripts
    assert set(re.findall(r"examples/clients/(with_\w+)\.py", PAGE.read_text())) == scripts


def test_the_page_names_the_versions_that_are_tried() -> None:
    wanted = (CLIENTS / "requirements.txt").read_text()
    pins = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", wanted, re.MULTILINE)
    assert len(pins) == 9
    page = PAGE.read_text()
    assert [f"{name} {version}" for name, version in pins if f"{name} {version}" not in page] == []


def play(run: Run, python: Path, folder: Path, script: str, way: Way) -> re.Match[str]:
    """Run a script to its end; return its last word."""
    result = start(run, python, folder, script, way)
    assert result.returncode == 0, result.stdout + result.stderr
    match = LINE.search(result.stdout)
    assert match, result.stdout
    return match


def start(
    run: Run, python: Path, folder: Path, script: str, way: Way
) -> subprocess.CompletedProcess[str]:
    words, variables = way
    command = [str(python)]
    if script not in ALONE:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "2"]
    unset = dict.fromkeys(("RINGCOMM_AS", "RINGCOMM_DEFAULT", "RINGCOMM_LOG"))
    return run(
        *command,
        CLIENTS / f"{script}.py",
        *words,
        seconds=SECONDS,
        cwd=folder,
        **{
            "OMP_NUM_THREADS": "1",
            "PATH": f"{python.parent}:{os.environ['PATH']}",  # DeepSpeed calls ninja
            "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "clients" / "extensions"),
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **unset,
            **variables,
        },
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_client(case: str, environment: Path, run: Run, tmp_path: Path) -> None:
    """Over both backends the same parameters to the last bit, and those of one process alone."""
    script, over_ringcomm, over_gloo = CASES[case]
    ours = play(run, environment, tmp_path, script, over_ringcomm)
    theirs = play(run, environment, tmp_path, script, over_gloo)
    assert (ours["backend"], theirs["backend"]) == ("ringcomm", "gloo")
    assert ours["parameters"] == theirs["parameters"], (ours[0], theirs[0])
    assert int(ours["steps"]) == 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ignite_does_not_average_for_a_name_it_does_not_know(
    environment: Path, run: Run, tmp_path: Path
) -> None:
    """The scripts' check notices the case that docs/clients.md warns of."""
    way: Way = (["--backend", "ringcomm", "--automatic"], {})
    result = start(run, environment, tmp_path, "with_ignite", way)
    assert result.returncode != 0
    assert "the ranks ended with different parameters" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_decodes_the_same_tokens(vllm_environment: Path, run: Run, tmp_path: Path) -> None:
    """All its additions go through the process group."""
    told = []
    for as_gloo in ("gloo", ""):
        done = run(
            *(vllm_environment, CLIENTS / f"{VLLM}.py", "--no-own-memory"),
            seconds=SECONDS,
            cwd=tmp_path,
            RINGCOMM_AS=as_gloo,
            PYTHONPYCACHEPREFIX=str(tmp_path / "compiled"),
            PYTHONDONTWRITEBYTECODE=None,
        )
        match = TOKENS.search(done.stdout)
        assert match, done.stdout + done.stderr
        told.append(match.groups())
    (ours, backend), (theirs, other) = told
    assert (backend, other) == ("ringcomm", "gloo")
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_vllm_decodes_the_same_tokens_on_two_hosts(vllm_environment: Path, tmp_path: Path) -> None:
    """A rank on each; vLLM never ends the second host's program, so the hosts' end does."""
    told = []
    for as_gloo in ("gloo", ""):
        with Hosts(2, rate="1gbit") as hosts:
            for host in (1, 0):
                words = [str(CLIENTS / f"{VLLM}.py"), "--first", hosts.addresses[0]]
                variables = {
                    "RINGCOMM_AS": as_gloo,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "VLLM_HOST_IP": hosts.addresses[host],
                    "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled"),
                    "PYTHONDONTWRITEBYTECODE": None,
                }
                output = (tmp_path / f"host{host}").open("w+b")
                started = hosts.start(
                    host,
                    [str(vllm_environment), *words, "--host", str(host)],
                    env=variables,
                    output=output.fileno(),
                    cwd=tmp_path,
                )
            assert started.wait(limit(100)) == 0, (tmp_path / "host0").read_text()
        match = TOKENS.search((tmp_path / "host0").read_text())
        assert match, (tmp_path / "host0").read_text()
        told.append(match.groups())
    (ours, backend), (theirs, other) = told
    assert (backend, other) == ("ringcomm", "gloo")
    assert ours == theirs
