"""Makes dist/ for a release: `make release`.

An sdist, a wheel for each Python (scripts/wheels.py) with all torches that are supported, one of
ringcomm-cuda, an SBOM, and SHA256SUMS. The tree has to be clean, and CHANGELOG.md has to have the
version. Two runs of one commit in one folder give equal bytes. PYTHONS names the interpreters,
"python3.10 python3.11"; without it those on PATH are taken. TORCHES chooses other torches, and
ARCHES names processors, "x86_64 aarch64".

ringcomm-cuda is made if nvcc is on PATH, for this machine's processor alone. CUDA=off leaves it
out, and with CUDA=on a missing nvcc is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TORCHES = "2.11,2.12,2.13,2.14,2.15"
NVCC = shutil.which(os.environ.get("CUDACXX") or "nvcc")
PYTHONS = tuple(f"python3.{minor}" for minor in range(10, 15))
INCLUDE = """import sys, sysconfig
print("{}.{}={}".format(*sys.version_info[:2], sysconfig.get_path("include")))"""


def told(*words: str | Path) -> str:
    return subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def version() -> str:
    text = (ROOT / "ringcomm" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None
    return match[1]


def check(number: str) -> None:
    """Stop unless what is released is what was committed, and is described."""
    if dirt := told("git", "status", "--porcelain"):
        sys.exit(f"ringcomm: commit or remove these first:\n{dirt}")
    if f"## [{number}]" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"ringcomm: CHANGELOG.md says nothing of {number}")


def pythons() -> list[str]:
    """Return the Pythons to build for, as VERSION=INCLUDE_FOLDER."""
    wanted = os.environ.get("PYTHONS", "").split()
    found = [
        told(name, "-c", INCLUDE) for name in wanted or PYTHONS if wanted or shutil.which(name)
    ]
    return [python for python in found if Path(python.partition("=")[2], "Python.h").exists()]


def make_sdist(number: str, moment: int) -> None:
    """Have setuptools make it, and pack that again: in one order, and all of one moment."""
    work = ROOT / "build" / "sdist"
    shutil.rmtree(work, ignore_errors=True)
    told(sys.executable, "setup.py", "-q", "sdist", "--formats=tar", "-d", work)
    shutil.rmtree(ROOT / "ringcomm.egg-info", ignore_errors=True)
    packed = io.BytesIO()
    with (
        tarfile.open(work / f"ringcomm-{number}.tar") as made,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in sorted(made.getmembers(), key=lambda entry: entry.name):
            if f"{entry.name}/".startswith(f"ringcomm-{number}/tests/"):
                continue  # a few, which setuptools takes by their names
            clean = tarfile.TarInfo(entry.name)
            clean.size, clean.type, clean.mtime = entry.size, entry.type, moment
            clean.mode = 0o755 if entry.isdir() else 0o644
            archive.addfile(clean, made.extractfile(entry))
    with (
        (DIST / f"ringcomm-{number}.tar.gz").open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=moment) as zipped,
    ):
        zipped.write(packed.getvalue())


def wants_cuda() -> bool:
    """Whether to make ringcomm-cuda. Stops if that was asked for, and there is no nvcc."""
    wanted = os.environ.get("CUDA", "on" if NVCC else "off") != "off"
    if wanted and not NVCC:
        sys.exit("ringcomm: CUDA=on needs the nvcc of CUDA 13 on PATH")
    return wanted


def write_sbom(number: str, with_cuda: bool) -> None:
    """Say what is inside the wheels besides ringcomm: a CycloneDX document."""
    openssl = told("openssl", "version").split()[1]
    parts = [{"type": "library", "name": "openssl", "version": openssl, "scope": "required"}]
    if with_cuda and NVCC:  # in ringcomm-cuda; nvcc links the runtime of its own release
        (release,) = re.findall(r"release ([\d.]+)", told(NVCC, "--version"))
        parts += [
            {"type": "library", "name": "cuda-runtime", "version": release, "scope": "optional"}
        ]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": "ringcomm", "version": number}},
        "components": parts,
    }
    (DIST / f"ringcomm-{number}.cdx.json").write_text(json.dumps(document, indent=1) + "\n")


def write_sums() -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(DIST.iterdir())
    ]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    number = version()
    check(number)
    with_cuda = wants_cuda()
    moment = int(told("git", "log", "-1", "--format=%ct"))
    os.environ["SOURCE_DATE_EPOCH"] = str(moment)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    make_sdist(number, moment)
    wheels = [sys.executable, str(ROOT / "scripts" / "wheels.py")]
    wheels += ["--torches", os.environ.get("TORCHES", TORCHES)]
    for python in pythons():
        wheels += ["--python", python]
    for arch in os.environ.get("ARCHES", platform.machine()).split():
        subprocess.run([*wheels, "--arch", arch], cwd=ROOT, check=True)
    if with_cuda:
        subprocess.run([*wheels, "--cuda"], cwd=ROOT, check=True)
    tools = ROOT / "build" / "wheel" / "tools" / "bin" / "python"
    files = [path for path in DIST.iterdir() if path.suffix in {".whl", ".gz"}]
    print(told(tools, "-m", "twine", "check", "--strict", *files))
    write_sbom(number, with_cuda)
    write_sums()
    print((DIST / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()
