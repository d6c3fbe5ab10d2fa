"""The machine, what a build needs, the build of ringcomm for the torch that is there; the probe."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import gpu.table
from gpu.stages import ROOT, Settings, by_name, parts
from gpu.table import Row

BUILT = ROOT / "build" / "gpu_check"  # kept from one run to the next
CUDA_LIBRARY = "libringcomm_cuda.so"
ARCHITECTURE = "90"  # the H200's
PROBE = Path(__file__).parent / "probe.cu"
SOURCES = ("csrc", "ringcomm", "setup.py", "pyproject.toml", "CMakeLists.txt")
BUILD_SECONDS = 280
PROBE_SOURCES = "probe*"  # beside PROBE


def output_of(*command: str, seconds: float = 20) -> str:
    """Return what a command prints; "" where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpu_facts(simulated: bool) -> dict[str, Any]:
    """Return what a reader must know of the GPU; asks no CUDA function."""
    if simulated:
        return {"gpu": "none: simulated"}
    fields = ["name", "driver_version", "memory.total", "mig.mode.current", "clocks.max.sm"]
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    values = output_of(*command).split(", ") + [""] * len(fields)
    return {
        "gpu": values[0] or torch.cuda.get_device_name(0),
        "driver": values[1],
        "gpu memory": values[2],
        "MIG": values[3],
        "highest clock": values[4],
        "CUDA of torch": str(torch.version.cuda),
        "NCCL": _nccl_version(),
    }


def _nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # this torch was built without it
        return "none"


def nvcc() -> str:
    """Return the path of nvcc, or ""; it may be pip's."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    places = [usual, *Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc")]
    return shutil.which("nvcc") or next((str(path) for path in places if path.exists()), "")


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or ""


def _compiles(include: str, *options: str) -> bool:
    compiler = os.environ.get("CXX") or _tool("c++") or _tool("g++")
    if not compiler:
        return False
    command = [*compiler.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", *options, "-"]
    source = f"#include <{include}>\n"
    return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0


def needs() -> dict[str, tuple[str, str]]:
    """Return what a build needs: what was found ("": nothing), and how to get it."""
    headers = sysconfig.get_paths()["include"]
    return {
        "C++20 compiler": ("yes" if _compiles("span") else "", "apt install g++"),
        "OpenSSL headers": ("yes" if _compiles("openssl/evp.h") else "", "apt install libssl-dev"),
        "Python headers": (
            headers if _compiles("Python.h", f"-I{headers}") else "",
            "apt install python3-dev",
        ),
        "setuptools": ("yes" if find_spec("setuptools") else "", "pip install setuptools"),
        "cmake": (_tool("cmake"), "pip install cmake, or put one on PATH"),
        "ninja": (_tool("ninja"), "pip install ninja, or put one on PATH"),
    }


@functools.lru_cache(maxsize=1)
def package() -> Path:
    """Return the folder for what this source and this torch make."""
    state = hashlib.sha256(f"{sys.version} {torch.__version__} {ARCHITECTURE}".encode())
    for name in SOURCES:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and path.suffix not in (".so", ".pyc", ".o"):
                state.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return BUILT / f"package-{state.hexdigest()[:12]}"


def built() -> Path | None:
    """Return that folder where a build is complete."""
    return package() if (package() / "complete").exists() else None


# ---- the stages


def machine(settings: Settings) -> Iterator[Row]:
    note = ", ".join(f"{k} {v}" for k, v in gpu_facts(settings.simulated).items() if v)
    yield gpu.table.info("GPU", note=note)
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").exists() else None
    yield gpu.table.info("cores", len(os.sched_getaffinity(0)))
    if shared:
        yield gpu.table.info("/dev/shm", shared.f_frsize * shared.f_blocks / 2**30, "GiB")
    version = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    yield gpu.table.info("versions", note=f"{version}, kernel {os.uname().release}")
    path = nvcc()
    release = output_of(path, "--version").splitlines()[-1:] if path else []
    yield gpu.table.info("nvcc", note=f"{path} {''.join(release)}" if path else "not there")


def make_package(settings: Settings) -> Iterator[Row]:
    """Build into a folder of its own, so that nothing that is installed changes."""
    if done := built():
        yield gpu.table.passed("ringcomm built", note=f"before, in {done.name}")
        return
    if missing := {name: how for name, (path, how) in needs().items() if not path}:
        text = "; ".join(f"{name} ({how})" for name, how in missing.items())
        yield gpu.table.failed("ringcomm built", f"missing: {text}")
        return
    yield from _build(settings)


def _build(settings: Settings) -> Iterator[Row]:
    folder = package()
    shutil.rmtree(folder, ignore_errors=True)
    compiler = "" if settings.library else nvcc()
    variables = {
        "RINGCOMM_CUDA": "on" if compiler else "off",
        "RINGCOMM_CUDA_ARCHS": ARCHITECTURE,
        "PATH": os.pathsep.join(
            [
                str(Path(sys.executable).parent),
                os.environ["PATH"],
                *([str(Path(compiler).parent)] if compiler else []),
            ]
        ),
    }
    start = time.monotonic()
    # Without pip: there is no index to ask on a machine without a network.
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(folder)]
    with (Path(settings.folder) / "build_output.txt").open("w+", encoding="utf-8") as log:
        status = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=BUILD_SECONDS,
        ).returncode
        log.seek(0)
        lines = log.read().splitlines()
    if status != 0:
        print("\n".join(lines[-60:]), flush=True)
        errors = [line for line in lines if "error" in line.lower() or line.startswith("ringcomm")]
        yield gpu.table.failed(
            "ringcomm built", gpu.table.first_line((errors or lines or ["?"])[0])
        )
        return
    if settings.library:
        shutil.copy(settings.library, folder / "ringcomm" / CUDA_LIBRARY)
    (folder / "complete").touch()
    yield gpu.table.passed("ringcomm built", time.monotonic() - start, "s")


def imports(settings: Settings) -> Iterator[Row]:
    """Import it in a process of its own; the CUDA library has to be beside it."""
    program = (
        "import ringcomm, pathlib; ringcomm.Options; "
        f"p = pathlib.Path(ringcomm.__file__).parent; print((p / '{CUDA_LIBRARY}').exists(), p)"
    )
    path = [str(done)] if (done := built() if settings.build else None) else []
    path += filter(None, [os.environ.get("PYTHONPATH")])
    done_import = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=settings.folder,  # where no other module lies
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    if done_import.returncode != 0:
        last = (done_import.stderr.strip().splitlines() or ["?"])[-1]
        yield gpu.table.failed("ringcomm imports", last)
        return
    has_cuda, _, where = done_import.stdout.strip().partition(" ")
    if has_cuda == "True" or settings.simulated:
        yield gpu.table.passed("ringcomm imports", note=where)
    else:
        how = "put nvcc on PATH, or give --library"
        yield gpu.table.failed("ringcomm imports", f"{where} has no {CUDA_LIBRARY}: {how}")


def tools(settings: Settings) -> Iterator[Row]:
    """Say what else is here, and what a build would lack."""
    for name in ("nvidia-cuda-mps-control", "compute-sanitizer"):
        yield gpu.table.info(name, note=shutil.which(name) or "not there")
    lacking = [name for name, (path, _) in needs().items() if not path]
    used = "this source is built" if settings.build else "the installed one is used"
    note = f"{used}; a build lacks {', '.join(lacking) or 'nothing'}"
    yield gpu.table.info("ringcomm", note=note)


def training_is_loaded(settings: Settings) -> Iterator[Row]:
    """Import what DDP needs: long the first time, and short for the stages that follow."""
    start = time.monotonic()
    importlib.import_module("torch._dynamo")
    yield gpu.table.info("import torch._dynamo", time.monotonic() - start, "s")


def facts(settings: Settings, size: int) -> Iterator[Row]:
    """Say what is here; the package that is used has to import, unless it is built first."""
    steps = [machine, tools] if settings.short else [machine, tools, training_is_loaded]
    if not settings.build:
        steps.append(imports)
    yield from parts(*(functools.partial(step, settings) for step in steps))


def build(settings: Settings, size: int) -> Iterator[Row]:
    """Build, import."""
    yield from parts(*(functools.partial(step, settings) for step in (make_package, imports)))


def compile_probe(program: Path) -> str:
    """Compile probe.cu; returns what nvcc says of an error."""
    command = [nvcc(), "-O3", "-std=c++17", f"-arch=sm_{ARCHITECTURE}", str(PROBE)]
    done = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, timeout=100
    )
    return "" if done.returncode == 0 else done.stderr or "nvcc failed"


def probe_rows(line: str) -> Row:
    """Read a line of the probe: verdict, what, figure, unit, target, note, with tabs between."""
    verdict, what, figure, unit, target, note = [*line.split("\t"), "", "", "", "", ""][:6]
    return Row(what, float(figure) if figure else None, unit, target, verdict, note)


def run_probe(*command: str | Path | float) -> Iterator[Row]:
    """Yield the rows of a compiled program as they come; it ends itself in time."""
    words = [str(word) for word in command]
    print(words[0], flush=True)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "\t" in line:
                yield probe_rows(line.rstrip("\n"))
            else:
                print(line, end="", flush=True)
    if running.returncode != 0:
        yield gpu.table.failed(Path(words[0]).name, f"status {running.returncode}: see its output")


def probe_program() -> Path:
    """Return where the probe is compiled to: a file for each state of its source."""
    state = hashlib.sha256()
    for path in sorted(PROBE.parent.glob(PROBE_SOURCES)):
        state.update(path.read_bytes())
    return BUILT / f"gpu_probe-{state.hexdigest()[:12]}"


def probe(settings: Settings, size: int) -> Iterator[Row]:
    """Compile the probe, or take the one that was brought, and run it."""
    program = Path(settings.probe) if settings.probe else probe_program()
    BUILT.mkdir(parents=True, exist_ok=True)
    if settings.simulated and (settings.short or not nvcc()):
        yield gpu.table.info("the probe", note="not run: it asks a GPU, and none is here")
        return
    if not program.exists() and (settings.probe or not nvcc()):
        note = "no nvcc here: compile gpu/probe.cu elsewhere and give --probe"
        if settings.probe:
            note = f"there is no {program}"
        yield gpu.table.failed("the probe", note=note)
        return
    if not program.exists():
        start, unfinished = time.monotonic(), program.with_suffix(".new")
        if error := compile_probe(unfinished):
            print(error, flush=True)
            yield gpu.table.failed("the probe is compiled", gpu.table.first_line(error))
            return
        unfinished.replace(program)
        yield gpu.table.passed("the probe is compiled", time.monotonic() - start, "s")
    if settings.simulated:
        yield gpu.table.info("the probe", note="not run: it asks a GPU, and none is here")
        return
    yield from run_probe(program, size, by_name(f"probe-{size}").limit - 10)
