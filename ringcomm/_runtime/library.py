"""Loads the compiled library, which happens when a group first asks for it.

The engine is libringcomm.so, which knows no torch. The module on top of it, `ringcomm._C`, is built
once for each minor version of torch, because torch's C++ classes differ between these: the wrong
one would not fail to load, it would crash later. So the file that fits is chosen by its name.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringcomm._runtime.exit import close_groups_with

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import ModuleType

NAME = "ringcomm._C"
FOLDER = Path(__file__).parents[1]
SUFFIX = EXTENSION_SUFFIXES[0]  # of this Python's modules
MODULE = re.compile(r"(?:_C_torch(\d+)_(\d+))?\.cpython-3(\d+)-(\w+?)-linux")

load_recorder: Any = None  # returns ringcomm._flight.recorder, above: ringcomm/__init__.py sets it


def load_library() -> ModuleType:
    """Return the compiled library, loading it the first time.

    Raises ImportError when it is not built, or neither for this Python nor for this minor version
    of torch.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    import torch

    major, minor = torch.__version__.split(".")[:2]
    path = FOLDER / f"_C_torch{major}_{minor}{SUFFIX}"
    if not path.exists():
        raise ImportError(_missing(f"{major}.{minor}"))
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None
    assert spec.loader is not None
    library = sys.modules[NAME] = module_from_spec(spec)
    try:
        spec.loader.exec_module(library)
        complete(library.Backend)
        # The recorder is loaded now, while there are descriptors for that.
        recorder = load_recorder()
    except BaseException:
        del sys.modules[NAME]
        raise
    close_groups_with(library, recorder.end, recorder.await_torch)
    return library


class Build(NamedTuple):
    """A module of a package: the processor, the Python and the torch that it is for."""

    processor: str
    Python: str
    torch: str


def built(folder: Path = FOLDER) -> list[Build]:
    """Return what a package is built for."""
    matches = [match for path in folder.glob("_C_torch*.so") if (match := MODULE.match(path.name))]
    return [Build(match[4], f"3.{match[3]}", f"{match[1]}.{match[2]}") for match in matches]


def span(versions: Collection[str]) -> str:
    """Return minor versions as text: "2.11 to 2.13" where those in between are there, too."""
    minors = sorted({int(version.split(".")[1]) for version in versions})
    texts = [f"{next(iter(versions)).split('.')[0]}.{minor}" for minor in minors]
    if len(minors) > 1 and minors[-1] - minors[0] == len(minors) - 1:
        return f"{texts[0]} to {texts[-1]}"
    return ", ".join(texts)


def _missing(torch: str) -> str:
    """Say what this package is built for, and what to do."""
    fitting = built(FOLDER)
    if not fitting:
        return "ringcomm is not built: run `pip install --no-build-isolation .` in its folder"
    match = MODULE.match(SUFFIX)
    assert match is not None
    here = Build(match[4], f"3.{match[3]}", torch)
    for field, now in here._asdict().items():
        then = {getattr(build, field) for build in fitting}
        if now not in then:
            break
        fitting = [build for build in fitting if getattr(build, field) == now]
    were = ", ".join(sorted(then)) if field == "processor" else span(then)
    # pip unpacks a wheel into a folder that has other packages, too.
    source = "." if (FOLDER.parent / "setup.py").exists() else "--no-binary ringcomm ringcomm"
    return (
        f"ringcomm was built for {field} {were} but {field} {now} is running: rebuild it with "
        f"`pip install --no-build-isolation --force-reinstall --no-deps {source}`"
    )


def complete(backend: Any) -> None:
    """Give the class those methods of torch's own backends that are easier said in Python."""
    backend.flight_record = flight_record
    backend._is_initialized = lambda self: True
    # Ranks outside a split need to do nothing.
    backend.perform_nocolor_split = lambda self, device: None
    pools = importlib.import_module("ringcomm._runtime.pools")
    backend.register_mem_pool = pools.register_mem_pool
    backend.deregister_mem_pool = pools.deregister_mem_pool
    backend.register_tensors = pools.register_tensors
    backend.deregister_tensors = pools.deregister_tensors


def flight_record(backend: Any) -> list[dict[str, Any]]:
    """Return the last operations of a group; `_C.pyi` says what of each."""
    operations: list[dict[str, Any]] = load_recorder().last_operations(backend._flight_rings())
    return operations
