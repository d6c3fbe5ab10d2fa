"""Runs a wheel for arm64 on another processor: two ranks make a sum, under qemu.

    apt install qemu-user g++-aarch64-linux-gnu && dpkg --add-architecture arm64 && apt update
    python scripts/emulated.py dist/ringcomm-*-cp311-*_aarch64.whl [TORCH]

Debian's Python and torch's own wheel for arm64 are unpacked into build/rooms/arm64. That torch is
one for CUDA: functions that do nothing stand in for NVIDIA's libraries, which nothing here calls.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOM = ROOT / "build" / "rooms" / "arm64"
SYSTEM, SITE, STUBS = ROOM / "system", ROOM / "site", ROOM / "stubs"
CROSS = "aarch64-linux-gnu"
DEBIAN = """libpython3.11-minimal libpython3.11-stdlib python3.11-minimal libc6 libexpat1 zlib1g
libssl3 libffi8 libbz2-1.0 liblzma5 libstdc++6 libgcc-s1 libgomp1 libuuid1 libcrypt1"""
BESIDE_TORCH = "numpy typing_extensions filelock sympy mpmath networkx jinja2 markupsafe fsspec"
# A processor that torch knows; without one it finds this machine's and ends.
CPUINFO = """processor\t: {}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
RANKS = """
import os, platform, sys
import torch, torch.distributed as dist
rank = int(os.fork() == 0)
from ringcomm._runtime.registration import register
register()
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("ringcomm", store=store, rank=rank, world_size=2)
tensor = torch.arange(100_003, dtype=torch.float32) * (rank + 1)
dist.all_reduce(tensor)
assert torch.equal(tensor, 3 * torch.arange(100_003, dtype=torch.float32))
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
assert os.wait()[1] == 0
print(f"two ranks on {platform.machine()}, torch {torch.__version__}: the sum is right")
"""


def told(*words: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"ringcomm: {' '.join(map(str, words[:4]))} … failed")
    return done.stdout


def unpack(wheels: Iterable[Path]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(SITE)


def make_system() -> None:
    packages = ROOM / "packages"
    packages.mkdir(parents=True)
    told("apt-get", "download", "-q", *(f"{name}:arm64" for name in DEBIAN.split()), cwd=packages)
    for package in packages.glob("*.deb"):
        told("dpkg-deb", "-x", package, SYSTEM)
    (SYSTEM / "proc").mkdir()
    (SYSTEM / "proc" / "cpuinfo").write_text("".join(map(CPUINFO.format, range(2))))


def get_torch(version: str) -> None:
    downloads = ROOM / "wheels"
    told(
        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads),
        *("--only-binary", ":all:", "--platform", "manylinux_2_28_aarch64"),
        *("--platform", "manylinux2014_aarch64", "--python-version", "3.11"),
        *(f"torch=={version}", *BESIDE_TORCH.split()),
    )
    unpack(downloads.glob("*.whl"))


def make_stubs() -> None:
    """Make a library for each that torch's need and that isn't here, with all that is asked of it.

    Functions that name no version of a library may be of any of them: each gets them.
    """
    libraries = [*(SITE / "torch" / "lib").glob("*.so*")]
    here = {path.name for folder in (SYSTEM, SITE) for path in folder.rglob("*.so*")}
    needed: set[str] = set()
    asked: dict[str, set[str]] = {}
    defined: set[str] = set()
    for library in libraries:
        dynamic = told("readelf", "-dW", library)
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)) - here
        for section, symbol in re.findall(
            r"(\w+) +([\w.]+@?@?\S*)(?: \(\d+\))?$",
            told("readelf", "--dyn-syms", "-W", library),
            re.M,
        ):
            name, _, version = symbol.replace("@@", "@").partition("@")
            if section == "UND":
                asked.setdefault(version, set()).add(name)
            else:
                defined.add(name)
    unnamed = {name for name in asked.pop("", ()) if re.match("cu|p?nccl|nv", name)} - defined
    STUBS.mkdir()
    for name in needed:
        stem = name.partition(".")[0].partition("_")[0].removeprefix("lib")
        versions = {v: names for v, names in asked.items() if v in (name, stem.upper())}
        make_stub(name, versions, set() if versions else unnamed)


def make_stub(library: str, versions: dict[str, set[str]], unnamed: set[str]) -> None:
    source, script = ROOM / "stub.c", ROOM / "stub.map"
    names = sorted(unnamed.union(*versions.values()))
    source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions))
    told(
        *(f"{CROSS}-gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}"),
        *(["-Wl,--version-script", f"-Wl,{script}"] if versions else []),
        *("-o", STUBS / library, source),
    )


def main(wheel: str, torch: str = "2.13.0") -> None:
    ready = ROOM / "ready"
    if not ready.exists() or ready.read_text() != torch:
        shutil.rmtree(ROOM, ignore_errors=True)
        make_system()
        get_torch(torch)
        make_stubs()
        ready.write_text(torch)
    shutil.rmtree(SITE / "ringcomm", ignore_errors=True)
    unpack([Path(wheel)])
    store = ROOM / "store"
    store.unlink(missing_ok=True)
    settings = {
        "LD_LIBRARY_PATH": STUBS,
        "PYTHONPATH": SITE,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": 0,
        "OMP_NUM_THREADS": 1,
    }
    print(
        told(
            *("qemu-aarch64", "-L", SYSTEM),
            *(word for name, value in settings.items() for word in ("-E", f"{name}={value}")),
            *(SYSTEM / "usr" / "bin" / "python3.11", "-P", "-c", RANKS, store),
        ),
        end="",
    )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
