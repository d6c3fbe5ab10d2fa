"""The wheel: made, installed where no compiler is, run, and refused beside another torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import Run

from lab import ROOT
from lab.limits import limit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MINOR = ".".join(torch.__version__.split(".")[:2])
ONE_RANK = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
ones = torch.ones(3)
dist.all_reduce(ones)
dist.destroy_process_group()
print(ones.tolist(), sys.modules["ringcomm"].__file__)
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    done = subprocess.run(
        [ROOT / "scripts" / "wheel.sh"],
        capture_output=True,
        text=True,
        timeout=limit(300),
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    return ROOT / done.stdout.split()[-1]


@pytest.fixture
def environment(wheel: Path, run: Run, tmp_path: Path) -> Path:
    """A virtual environment with the wheel and, by a path, the torch that is installed here."""
    folder = tmp_path / "environment"
    assert run(sys.executable, "-m", "venv", folder).returncode == 0
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    (Path(site) / "torch_of_another.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--no-deps", "--ignore-installed"]
    # With nothing on the path, a compiler neither.
    done = run(*pip, wheel, cwd=tmp_path, PATH=str(folder / "bin"))
    assert done.returncode == 0, done.stderr
    return folder


def test_it_says_what_it_is_for(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    form = rf"ringcomm-[\d.]+\+torch{re.escape(MINOR)}-{python}-{python}-manylinux_.*\.whl"
    assert re.fullmatch(form, wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
        assert not [name for name in archive.namelist() if "libtorch" in name or "libc10" in name]
    major, minor = MINOR.split(".")
    assert len(needs) == 1
    assert set(needs[0].removeprefix("torch").split(",")) == {
        f">={MINOR}",
        f"<{major}.{int(minor) + 1}",
    }


def test_it_runs_where_no_compiler_is(environment: Path, run: Run, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    done = run(python, "-c", ONE_RANK, cwd=tmp_path, PATH=str(environment / "bin"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"[1.0, 1.0, 1.0] {environment}"), done.stdout
    libraries = environment.glob("lib/python*/site-packages/ringcomm/_C*.so")
    linked = run("ldd", next(libraries)).stdout
    assert "libcrypto" not in linked, linked


def test_pip_objects_to_another_torch(environment: Path, run: Run, tmp_path: Path) -> None:
    site = next(environment.glob("lib/python*/site-packages"))
    other = site / "torch-2.99.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    (other / "RECORD").write_text("")
    done = run(environment / "bin" / "python", "-m", "pip", "check", cwd=tmp_path)
    assert done.returncode != 0
    assert re.search(r"^ringcomm .*requirement torch.*2\.99\.0", done.stdout, re.MULTILINE), (
        done.stdout
    )
