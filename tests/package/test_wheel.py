"""The wheel: made, installed where no compiler is, run, refused by another torch, and removed."""

from __future__ import annotations

import os
import re
import shutil
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
from lab.linked import newest_versions, unversioned_functions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ONE_RANK = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
ones = torch.ones(3)
dist.all_reduce(ones)
dist.destroy_process_group()
print(ones.tolist(), sys.modules["ringcomm"].__file__)
"""
# The engine looks for the library beside its own. Its error passes through Python, which ends.
FIRST_CUDA_TENSOR = "import ctypes, sys; ctypes.CDLL(sys.argv[1])._ZN8ringcomm10device_apiEv()"


def made(*words: str, **environment: str) -> Path:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "wheels.py", *words],
        capture_output=True,
        text=True,
        timeout=limit(1500),
        env={**os.environ, "PATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def wheel() -> Path:
    return made()


@pytest.fixture(scope="module")
def cuda_wheel() -> Path:
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on the path: ringcomm-cuda is not made")
    return made("--cuda", RINGCOMM_CUDA_ARCHS="90")


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
    form = rf"ringcomm-[\d.]+-{python}-{python}-manylinux_2_2\d_.*\.whl"
    assert re.fullmatch(form, wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("/METADATA"))
        needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    assert not [name for name in names if "libtorch" in name or "libc10" in name]
    assert names.count("ringcomm/libringcomm.so") == 1
    always = [need for need in needs if "extra ==" not in need]
    assert len(always) == 1
    assert set(always[0].removeprefix("torch").split(",")) == {">=2.11", "<2.16"}


def test_it_runs_where_no_compiler_is(environment: Path, run: Run, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    done = run(python, "-c", ONE_RANK, cwd=tmp_path, PATH=str(environment / "bin"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"[1.0, 1.0, 1.0] {environment}"), done.stdout
    for library in environment.glob("lib/python*/site-packages/ringcomm/*.so"):
        linked = run("ldd", library).stdout
        assert "libcrypto" not in linked, linked
        versions = newest_versions(library)
        assert versions["GLIBC"] <= (2, 28), (library, versions)
        assert versions.get("GLIBCXX", (0,)) <= (3, 4, 25), (library, versions)
        functions = unversioned_functions(library)
        assert not {name for name in functions if not name.startswith(("Py", "_Py", "THP"))}, (
            library
        )


def test_it_leaves_nothing_behind(environment: Path, run: Run, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    assert run(python, "-c", ONE_RANK, cwd=tmp_path).returncode == 0
    done = run(python, "-m", "pip", "uninstall", "-y", "ringcomm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(environment.rglob("*ringcomm*"))


def test_the_library_for_cuda_is_a_wheel_of_its_own(
    environment: Path, cuda_wheel: Path, run: Run, tmp_path: Path
) -> None:
    assert re.fullmatch(r"ringcomm_cuda-[\d.]+-py3-none-manylinux_2_2\d_\w+\.whl", cuda_wheel.name)
    python = environment / "bin" / "python"
    engine = next(environment.glob("lib/python*/site-packages/ringcomm/libringcomm.so"))
    library = engine.with_name("libringcomm_cuda.so")

    def refusal() -> str:
        return run(python, "-c", FIRST_CUDA_TENSOR, engine, CUDA_VISIBLE_DEVICES="").stderr

    advice = "this build serves CPU tensors only (it was built with RINGCOMM_CUDA=off): run 'pip "
    assert f"{advice}install ringcomm-cuda'" in refusal()
    done = run(python, "-m", "pip", "install", "--no-deps", cuda_wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # They are of one build, although CMake was configured differently.
    assert "CUDA tensors cannot be served: " in refusal()
    versions = newest_versions(library)
    assert versions["GLIBC"] <= (2, 28), versions
    assert versions.get("GLIBCXX", (0,)) <= (3, 4, 25), versions
    assert not unversioned_functions(library)
    hashes = set(re.findall(rb"\0([0-9a-f]{64})\0", library.read_bytes()))
    (interface,) = [text for text in hashes if text in engine.read_bytes()]
    library.write_bytes(library.read_bytes().replace(interface, interface[::-1]))
    assert f"{library} belongs to another build of ringcomm: build it again" in refusal()
    done = run(python, "-m", "pip", "uninstall", "-y", "ringcomm", "ringcomm-cuda", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not list(environment.rglob("*ringcomm*"))


def test_another_torch_is_refused(environment: Path, run: Run, tmp_path: Path) -> None:
    program = "import torch; torch.__version__ = '2.99.0'; import ringcomm; ringcomm.Options()"
    done = run(environment / "bin" / "python", "-c", program, cwd=tmp_path)
    minor = ".".join(torch.__version__.split(".")[:2])
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: ringcomm was built for torch {minor} but torch 2.99 is running: rebuild it "
        "with `pip install --no-build-isolation --force-reinstall --no-deps --no-binary ringcomm "
        "ringcomm`"
    )


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
