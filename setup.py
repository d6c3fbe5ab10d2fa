"""Builds ringcomm: setuptools does the package, CMake and Ninja the library, ringcomm/_C.

Settings: MAX_JOBS (compile jobs at once), CXX, CMAKE_ARGS (more arguments for CMake),
RINGCOMM_SANITIZE=address|thread|undefined, RINGCOMM_WERROR=1, RINGCOMM_CUDA=auto|on|off (CUDA
tensors; auto: where torch has CUDA and nvcc is), RINGCOMM_CUDA_ARCHS="80;90" (GPU architectures;
without it those of the GPUs that are here, or several where none is). Build files are kept in
build/.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_LIBRARY = "libringcomm_cuda.so"
PLANNER = "_planner.*.so"
ARCHITECTURES = "80;90;100;120"
# Set by scripts/wheel.sh: the wheel is installed elsewhere, and says for which torch it is.
WHEEL = bool(os.environ.get("RINGCOMM_WHEEL"))


def stop(sentence: str) -> NoReturn:
    sys.exit(f"ringcomm {sentence}")


def torch_minor() -> str:
    """The minor version of the installed torch, as "2.13", found without importing it."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        stop(
            "builds against the torch that is installed: `pip install torch==2.13.0`, "
            "then `pip install --no-build-isolation .`"
        )
    major, minor = re.findall(r"\d+", installed)[:2]
    if (int(major), int(minor)) < (2, 11):
        stop(f"needs torch 2.11 or newer, and {installed} is installed")
    return f"{major}.{minor}"


def architectures() -> str:
    """The GPU architectures to build for, as "80;90", the newest last."""
    wanted = os.environ.get("RINGCOMM_CUDA_ARCHS", "").replace(",", ";")
    return wanted or architectures_here() or ARCHITECTURES


def architectures_here() -> str:
    """Those of this machine's GPUs, as its driver names them; "" where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    capabilities = {
        int(major + minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", told, re.MULTILINE)
    }
    return ";".join(str(number) for number in sorted(capabilities))


def own_version() -> str:
    """The package's version; in a wheel with the torch that it is for, as "0.1.0+torch2.13"."""
    source = (ROOT / "ringcomm" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert match is not None
    return f"{match[1]}+torch{torch_minor()}" if WHEEL else match[1]


def torch_needed() -> str:
    """Return the requirement of torch: in a wheel, the one minor version it is built for."""
    if not WHEEL:
        return "torch>=2.11,<2.16"
    major, minor = torch_minor().split(".")
    return f"torch>={major}.{minor},<{major}.{int(minor) + 1}"


def tool(name: str) -> str:
    """The path of cmake or ninja: that of this Python's environment, else the one on PATH."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if not path:
        stop(f"needs {name} to build: `pip install {name}`")
    return path


def check_compiler() -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        stop("needs a C++ compiler to build: `apt install g++`, or set CXX")
    macros = subprocess.run(
        [*compiler.split(), "-std=c++20", "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
    ).stdout
    standard = re.search(r"__cplusplus (\d+)", macros)
    if not standard or int(standard.group(1)) < 202002:
        stop(f"needs C++20, and {compiler} is too old: `apt install g++-11`, or newer, and set CXX")


class CMakeBuild(build_ext):
    """Runs CMake in build/, and puts the library and _build_info.py where setuptools wants them."""

    def build_extension(self, ext: Extension) -> None:
        check_compiler()
        built = self.cmake() / "ringcomm"
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built / target.name, target)
        self.beside = [
            built / "_build_info.py",
            *built.glob(PLANNER),
            *built.glob(CUDA_LIBRARY),  # where it is built
        ]
        for file in self.beside:
            shutil.copy(file, target.parent)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        (ROOT / "ringcomm" / CUDA_LIBRARY).unlink(missing_ok=True)
        for file in self.beside:
            shutil.copy(file, ROOT / "ringcomm")

    def cmake(self) -> Path:
        """Configure and compile; returns the build folder, one per Python, torch and sanitizer."""
        sanitize = os.environ.get("RINGCOMM_SANITIZE", "")
        name = f"{sys.implementation.cache_tag}-torch{torch_minor()}-{sanitize}".rstrip("-")
        name += "-wheel" if WHEEL else ""
        folder = ROOT / "build" / name
        torch = find_spec("torch")
        assert torch is not None
        arguments = {
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "RINGCOMM_TORCH_DIR": str(Path(str(torch.origin)).parent),
            "RINGCOMM_SANITIZE": sanitize,
            "RINGCOMM_WERROR": "ON" if os.environ.get("RINGCOMM_WERROR") else "OFF",
            "RINGCOMM_CUDA": os.environ.get("RINGCOMM_CUDA", "auto"),
            # A wheel goes to machines that may have another OpenSSL, or none.
            "OPENSSL_USE_STATIC_LIBS": "ON" if WHEEL else "OFF",
        }
        arguments["RINGCOMM_CUDA_ARCHS"] = architectures()
        (folder / "ringcomm" / CUDA_LIBRARY).unlink(missing_ok=True)
        configure = [tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        configure += [f"-D{key}={value}" for key, value in arguments.items()]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        subprocess.run([tool("cmake"), "--build", str(folder), "-j", jobs], check=True)
        return folder


if sys.version_info < (3, 10):
    stop(f"needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
torch_minor()
sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in {".cc", ".cu", ".h"}]
needed = [ROOT / "CMakeLists.txt", ROOT / "ringcomm" / "_build_info.py.in", *sources]
setup(
    version=own_version(),
    install_requires=[torch_needed()],
    ext_modules=[
        Extension("ringcomm._C", [], depends=[str(path.relative_to(ROOT)) for path in needed])
    ],
    cmdclass={"build_ext": CMakeBuild},
)
