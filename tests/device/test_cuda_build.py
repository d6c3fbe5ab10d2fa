"""The device kernels compile without a device, to what they are meant to be.

For one architecture; at RINGCOMM_TEST_LEVEL=all for every one that is built for.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lab import ROOT

NVCC = shutil.which("nvcc")
PTXAS = shutil.which("ptxas")
pytestmark = pytest.mark.skipif(
    not (NVCC and PTXAS), reason="no nvcc and ptxas on the path: CUDA's kernels are not compiled"
)

TORCH = Path(torch.__file__).parent / "include"  # of its version alone
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-fmad=false"]
FLAGS += [f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH)]
FILES = ["kernels_reduce", "kernels_meetings", "kernels_ring"]
ARCHITECTURES = [pytest.param(number, marks=pytest.mark.slow) for number in (80, 90, 100, 120)]
SECONDS = 120  # of one processor; some 25 are normal, and others may share it
BYTES = 6_000_000  # of an architecture, before it is compressed to some 400,000
# float, double, float16, bfloat16, float8_e4m3fn, float8_e5m2
BYTES_EACH = ["Float8E4M3", "FormatIhLj2"]  # need so many registers that fewer loads fit
HOT = ["FloatIf", "FloatId", "FormatItLj10", "BFloat16", *BYTES_EACH]


def run(*command: str | Path | None) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


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


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_are_compiled_to_what_they_should_be(architecture: int, tmp_path: Path) -> None:
    before = processor_seconds()
    with ThreadPoolExecutor(len(FILES)) as pool:
        both = list(pool.map(lambda name: compile_one(name, architecture, tmp_path), FILES))
    reduce, meetings = both
    assert processor_seconds() - before < SECONDS
    assert sum(file.bytes for file in both) < BYTES

    for file in both:
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", file.ptxas)
        assert len(frames) >= len(file.kernels()) > 60
        assert set(frames) == {("0", "0")}, "registers do not suffice"
        assert not re.search(r"\bfma\.", file.ptx), "a result would not be that of the host"
        assert "ld.global.nc" not in file.ptx, "a peer may have written it meanwhile"
        for name, body in file.kernels().items():
            assert "ld.global.cs.v4.u32" in body, name
            assert "st.global.cs.v4.u32" in body, name

    # All loads of a hot loop are under way at once: some 8 of 16 bytes, and then a store.
    for sources in (2, 4, 8):
        found = [name for name in reduce.kernels() if re.search(rf"SumThen.*Li{sources}E", name)]
        assert all(any(number in name for name in found) for number in HOT), found
        for name in found:
            accesses = "".join(re.findall(r"(l|s)[dt]\.global\.cs\.v4", reduce.kernels()[name]))
            at_once = max(len(loads) for loads in accesses.split("s"))
            enough = 4 if any(number in name for number in BYTES_EACH) else 8
            assert at_once >= max(sources, enough), name

    for name, body in meetings.kernels().items():
        looks = body.count("ld.acquire.sys.global.u32")  # at the word that aborts, too
        if "low_latency" in name:  # a flag comes with its data: 8 bytes are whole
            assert re.search(r"st\.volatile\.global\.v2\.[ub]64", body), name
            assert re.search(r"ld\.volatile\.global\.v2\.[ub]64", body), name
            assert looks >= 1, name
        else:
            assert "st.release.sys.global.u32" in body, name
            assert looks >= 2, name
    for name, body in reduce.kernels().items():
        assert "ld.acquire.sys.global.u32" in body, name  # the leader's, of the word that aborts
