"""Builds ringcomm: setuptools does the package, CMake and Ninja the library.

Settings: MAX_JOBS (compile jobs at once), CXX, CMAKE_ARGS (more arguments for CMake),
RINGCOMM_SANITIZE=address|thread|undefined, RINGCOMM_WERROR=1, RINGCOMM_CUDA=auto|on|off (CUDA
tensors; auto: where torch has CUDA and nvcc is), RINGCOMM_CUDA_ARCHS="80;90" (GPU architectures;
without it those of the GPUs that are here, or several where none is). Build files are kept in
build/. scripts/wheels.py sets RINGCOMM_BUILT, a folder with the library for several torches, and
RINGCOMM_WHEEL_TAG, as cp311-cp311-manylinux_2_28_x86_64. With RINGCOMM_URL, the address of the
repository, the package names it, and the README's links lead there: a release sets it.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # pyproject.toml and the imports need it
    sys.exit("ringcomm needs setuptools 77 or newer to build: `pip install --upgrade setuptools`")

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_LIBRARY = "libringcomm_cuda.so"
ARCHITECTURES = "80;90;100;120"
BUILT = os.environ.get("RINGCOMM_BUILT", "")
TAG = os.environ.get("RINGCOMM_WHEEL_TAG", "")
URL = os.environ.get("RINGCOMM_URL", "").rstrip("/")


def stop(sentence: str) -> NoReturn:
    sys.exit(f"ringcomm {sentence}")


def torch_folder() -> Path:
    """Return the folder of the installed torch, found without importing it.

    pip and others build in an environment of their own, which has no torch. There the environment
    that ringcomm is for is looked at.
    """
    spec = find_spec("torch")
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    for site in sites():
        if (site / "torch" / "version.py").exists():
            return site / "torch"
    stop(
        "builds against the torch that is installed, and found none: `pip install torch==2.13.0`, "
        "then the same command again, with --no-build-isolation if torch was there already"
    )


def sites() -> Iterator[Path]:
    """Yield the folders where packages of the environment may be that this build is for."""
    yield Path(sysconfig.get_path("platlib"))  # pip's own environment has the interpreter's prefix
    prefixes = [os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    # uv names its own environment there. The one that is activated is still on PATH.
    on_path = [Path(folder).parent for folder in os.get_exec_path()]
    prefixes += [str(prefix) for prefix in on_path if (prefix / "pyvenv.cfg").exists()]
    for prefix in filter(None, prefixes):
        yield Path(sysconfig.get_path("platlib", vars={"platbase": prefix, "base": prefix}))


def torch_minor(folder: Path) -> str:
    """Return the minor version of that torch, as "2_13"."""
    text = (folder / "version.py").read_text()
    match = re.search(r"^__version__ = '((\d+)\.(\d+)[^']*)'", text, re.MULTILINE)
    assert match is not None
    if (int(match[2]), int(match[3])) < (2, 11):
        stop(f"needs torch 2.11 or newer, and {match[1]} is installed")
    return f"{match[2]}_{match[3]}"


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
    """Runs CMake in build/, and puts the libraries and _build_info.py where setuptools wants them.

    Of the extension only the folder counts: CMake names the files.
    """

    def build_extension(self, ext: Extension) -> None:
        if BUILT:
            built = Path(BUILT)
        else:
            check_compiler()
            built = self.cmake() / "ringcomm"
        python = TAG.partition("-")[0].removeprefix("cp") or "*"
        self.files = [
            built / "_build_info.py",
            *built.glob("libringcomm*.so"),
            *built.glob(f"_*.cpython-{python}-*.so"),
        ]
        self.put(Path(self.get_ext_fullpath(ext.name)).parent)

    def put(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CUDA_LIBRARY).unlink(missing_ok=True)  # it may not be built any more
        for file in self.files:
            # A process that runs may have the old one mapped.
            (folder / file.name).unlink(missing_ok=True)
            shutil.copy(file, folder)

    def copy_extensions_to_source(self) -> None:
        self.put(ROOT / "ringcomm")

    def cmake(self) -> Path:
        """Configure and compile; returns the build folder, one per Python, torch and sanitizer."""
        sanitize = os.environ.get("RINGCOMM_SANITIZE", "")
        torch = torch_folder()
        minor = torch_minor(torch).replace("_", ".")
        name = f"{sys.implementation.cache_tag}-torch{minor}-{sanitize}".rstrip("-")
        folder = ROOT / "build" / name
        arguments = {
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "RINGCOMM_TORCH_DIRS": str(torch),
            "RINGCOMM_SANITIZE": sanitize,
            "RINGCOMM_WERROR": "ON" if os.environ.get("RINGCOMM_WERROR") else "OFF",
            "RINGCOMM_CUDA": os.environ.get("RINGCOMM_CUDA", "auto"),
            "RINGCOMM_CUDA_ARCHS": architectures(),
        }
        (folder / "ringcomm" / CUDA_LIBRARY).unlink(missing_ok=True)
        configure = [tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        configure += [f"-D{key}={value}" for key, value in arguments.items()]
        configure += os.environ.get("CMAKE_ARGS", "").split()
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        subprocess.run([tool("cmake"), "--build", str(folder), "-j", jobs], check=True)
        return folder


def version() -> str:
    text = (ROOT / "ringcomm" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None
    return match[1]


def readme() -> str:
    """Return README.md. With an address its links are absolute, as PyPI's page needs them."""
    text = (ROOT / "README.md").read_text()
    if not URL:
        return text
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:|#)", rf"\1({URL}/raw/v{version()}/", text)
    return re.sub(r"(?<!!)(\[[^\]]*\])\((?!https?:|#)", rf"\1({URL}/blob/v{version()}/", text)


def urls() -> dict[str, str]:
    files = f"{URL}/blob/v{version()}"
    named = {
        "Source": URL,
        "Documentation": f"{files}/docs/quickstart.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    }
    return named if URL else {}


class Wheel(bdist_wheel):
    """Names the wheel after what its library was built for, which may be another Python."""

    def get_tag(self) -> Any:
        return tuple(TAG.split("-")) if TAG else super().get_tag()


if sys.version_info < (3, 10):
    stop(f"needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in {".cc", ".cu", ".h"}]
needed = [ROOT / "CMakeLists.txt", ROOT / "ringcomm" / "_build_info.py.in", *sources]
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
    extras_require={
        "cuda": [f"ringcomm-cuda=={version()}"],  # scripts/wheels.py makes it, for wheels
        "tools": ["jinja2>=3.1", "plotly>=6", "rich>=13", "shtab>=1.7"],
    },
    ext_modules=[
        Extension("ringcomm._C", [], depends=[str(path.relative_to(ROOT)) for path in needed])
    ],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel},
)
