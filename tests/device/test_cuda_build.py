"""The device kernels compile without a device, to what they are meant to be.

The machine code in the library that was built, for sm_90; and, at RINGCOMM_TEST_LEVEL=all, that of
every architecture that one may build for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lab import ROOT

LIBRARY = ROOT / "ringcomm" / "libringcomm_cuda.so"
PIPS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"  # requirements-dev.txt
NVCC, PTXAS = shutil.which("nvcc"), shutil.which("ptxas")
TORCH = Path(torch.__file__).parent / "include"  # for its version alone
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-fmad=false"]
FLAGS += [f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH)]
FILES = ["kernels_reduce", "kernels_meetings", "kernels_ring"]
ARCHITECTURES = (75, 80, 90, 100, 120)
FAMILIES = ("reduce_kernel", "two_shot", "one_shot", "low_latency", "ring_kernel")
# Per thread. Three blocks of 256 fit on a multiprocessor; of low_latency there are few blocks.
REGISTERS = {"reduce_kernel": 80, "low_latency": 128}
MOST_REGISTERS = 104  # a block of 512 may have 128, so none is moved to memory
# Bytes of a thread's memory that ptxas 13.0 uses for a kernel where it knows of no better way.
FRAME = {100: 16, 120: 16}
BYTES = 14_000_000  # per architecture, before it is compressed
# float, double, float16, bfloat16, float8_e4m3fn, float8_e5m2
BYTES_EACH = ["Float8E4M3", "FormatIhLj2"]  # need so many registers that fewer loads fit
HOT = ["FloatIf", "FloatId", "FormatItLj10", "BFloat16", *BYTES_EACH]


def run(*command: str | Path | None) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def family(kernel: str) -> str:
    (name,) = [name for name in FAMILIES if name in kernel]
    return name


def loads_at_once(accesses: Iterator[str]) -> int:
    """How many loads come before a store, of "l" and "s" in the order of a kernel's code."""
    return max(len(loads) for loads in "".join(accesses).split("s"))


def check_hot_loops(kernels: dict[str, int], name: str) -> None:
    """All loads of a hot loop are under way at once: some 8 of 16 bytes, and then a store."""
    for sources in (2, 4, 8):
        loops = [k for k in kernels if re.search(rf"{name}.*SumThen.*Li{sources}E", k)]
        assert all(any(number in kernel for kernel in loops) for number in HOT), loops
        for kernel in loops:
            enough = 4 if any(number in kernel for number in BYTES_EACH) else 8
            assert kernels[kernel] >= max(sources, enough), kernel


# ---- what was built


def disassembled(*options: str) -> Iterator[str]:
    path = f"{PIPS}{os.pathsep}{os.environ['PATH']}"  # it starts nvdisasm
    tool = shutil.which("cuobjdump", path=path)
    assert tool, f"`{sys.executable} -m pip install -r requirements-dev.txt` brings cuobjdump"
    command = [tool, *options, str(LIBRARY)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
    ) as process:
        assert process.stdout is not None
        yield from process.stdout
    assert process.returncode == 0


@pytest.fixture(scope="module")
def built() -> None:
    if not LIBRARY.exists():
        pytest.skip("the library was built without nvcc: there are no kernels to look at")
    if not any("sm_90" in line for line in disassembled("-lelf")):
        pytest.skip("the library was built for other GPUs by nvcc: these checks are for sm_90")


@pytest.fixture(scope="module")
def code(built: None) -> dict[str, list[str]]:
    """Each kernel's instructions in order, by its mangled name: "LDG.E.128.STRONG.SYS"."""
    kernels: dict[str, list[str]] = defaultdict(list)
    own: list[str] = []
    instruction = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)")
    for line in disassembled("-sass", "-arch", "sm_90"):
        if match := instruction.match(line):
            own.append(sys.intern(match[1]))
        elif "Function : " in line:
            own = kernels[line.split()[-1]]
    return kernels


@pytest.mark.timeout(300)
def test_words_that_ranks_meet_at_are_ordered(code: dict[str, list[str]]) -> None:
    """An acquire drops what the cache has, and a release comes after all that was stored before."""
    for name in FAMILIES:
        assert sum(name in kernel for kernel in code) > 60, name
    for kernel, own in code.items():
        for at, line in enumerate(own):
            if line.startswith("LDG") and line.endswith(".STRONG.SYS") and ".128" not in line:
                assert own[at + 1] == "CCTL.IVALL", (kernel, own[at : at + 3])
            if line.startswith("STG") and line.endswith(".STRONG.SYS") and ".128" not in line:
                assert "MEMBAR.ALL.SYS" in own[at - 3 : at], (kernel, own[at - 4 : at + 1])
        weak = {line for line in own if re.match(r"(LD|ST)G?\.", line) and "STRONG" in line}
        assert all(line.endswith(".SYS") for line in weak), (kernel, weak)
        assert "LDG.E.STRONG.SYS" in own, kernel  # the word that aborts
        releases = family(kernel) != "reduce_kernel"
        assert ("STG.E.STRONG.SYS" in own) == releases, kernel
        lines = {"LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS"}  # data and their flag in one
        assert lines & set(own) == (lines if family(kernel) == "low_latency" else set()), kernel


def test_data_of_others_are_read_from_memory(code: dict[str, list[str]]) -> None:
    """A peer may have written it while the kernel ran: no load takes it from a constant cache."""
    for kernel, own in code.items():
        assert not any("CONSTANT" in line or line.startswith("TEX") for line in own), kernel
        assert "LDG.E.EF.128" in own, kernel
        assert "STG.E.EF.128" in own, kernel


def test_loops_keep_the_memory_busy(code: dict[str, list[str]]) -> None:
    wide = {"LDG.E.EF.128": "l", "STG.E.EF.128": "s"}
    at_once = {
        kernel: loads_at_once(wide[line] for line in own if line in wide)
        for kernel, own in code.items()
    }
    check_hot_loops(at_once, "reduce_kernel")
    check_hot_loops(at_once, "two_shot")


def test_registers_suffice(built: None) -> None:
    text = "".join(disassembled("-res-usage", "-arch", "sm_90"))
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert len(usage) > 60 * len(FAMILIES)
    for kernel, registers, stack, local in usage:
        assert int(registers) <= REGISTERS.get(family(kernel), MOST_REGISTERS), kernel
        assert (stack, local) == ("0", "0"), kernel


# ---- what every architecture makes of the source


class Compiled(NamedTuple):
    ptx: str
    ptxas: str  # what it says
    bytes: int

    def kernels(self) -> dict[str, str]:
        """The body of every kernel, by its mangled name."""
        parts = re.split(r"^(?:\.visible )?\.entry ", self.ptx, flags=re.MULTILINE)[1:]
        return {part.split("(")[0].strip(): part.split("\n}\n")[0] for part in parts}


def compile_one(name: str, architecture: int, folder: Path) -> Compiled:
    ptx, cubin = folder / f"{name}.ptx", folder / f"{name}.cubin"
    source = ROOT / "csrc" / "cuda" / f"{name}.cu"
    run(NVCC, *FLAGS, f"-arch=compute_{architecture}", "-ptx", source, "-o", ptx)
    said = run(PTXAS, "-v", f"-arch=sm_{architecture}", ptx, "-o", cubin)
    return Compiled(ptx.read_text(), said, cubin.stat().st_size)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (NVCC and PTXAS), reason="no nvcc and ptxas on the path: CUDA's kernels are not compiled"
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_are_compiled_to_what_they_should_be(architecture: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(FILES)) as pool:
        files = list(pool.map(lambda name: compile_one(name, architecture, tmp_path), FILES))
    assert sum(file.bytes for file in files) < BYTES
    for file in files:
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", file.ptxas)
        assert len(frames) >= len(file.kernels()) > 60
        most = FRAME.get(architecture, 0)
        assert all(int(number) <= most for frame in frames for number in frame), set(frames)
        assert not re.search(r"\bfma\.", file.ptx), "a result would not be that of the host"
        assert "ld.global.nc" not in file.ptx, "a peer may have written it meanwhile"
        for name, body in file.kernels().items():
            assert "ld.global.cs.v4.u32" in body, name
            assert "st.global.cs.v4.u32" in body, name
            assert "ld.acquire.sys.global.u32" in body, name  # at least of the word that aborts
            if "low_latency" in name:  # a flag comes with its data: 8 bytes are whole
                assert re.search(r"st\.volatile\.global\.v2\.[ub]64", body), name
                assert re.search(r"ld\.volatile\.global\.v2\.[ub]64", body), name
            elif family(name) != "reduce_kernel":
                assert "st.release.sys.global.u32" in body, name
    bodies = {name: body for file in files for name, body in file.kernels().items()}
    at_once = {
        name: loads_at_once(iter(re.findall(r"(l|s)[dt]\.global\.cs\.v4", body)))
        for name, body in bodies.items()
    }
    check_hot_loops(at_once, "reduce_kernel")
    check_hot_loops(at_once, "two_shot")
