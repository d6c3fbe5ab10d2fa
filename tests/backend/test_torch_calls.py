"""The virtual functions of c10d::Backend that each supported version of torch may call.

Each is served, or left as torch has it because that answer is right, or declined: torch then says
that the backend does not support it. A new call of a new torch is told here, and not by a user.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab import ROOT
from lab.ranks import Rank, Ranks, error_of

HEADER = "torch/include/torch/csrc/distributed/c10d/Backend.hpp"
MINOR = ".".join(torch.__version__.split(".")[:2])

# Names that each version has in addition to the one before it.
ADDED = {
    "2.11": """
        _allgather_base _reduce_scatter_base abort allgather allgather_coalesced
        allgather_into_tensor_coalesced allocateTensor allreduce allreduce_coalesced
        allreduce_sparse alltoall alltoall_base barrier broadcast eagerConnectSingleDevice
        enableCollectivesTiming endCoalescing gather getBackendName getBackendOptions getError
        getMemAllocator getSequenceNumberForGroup merge monitoredBarrier recv recvAnysource reduce
        reduce_scatter reduce_scatter_tensor_coalesced registerOnCompletionHook scatter send
        setGroupUid setSequenceNumberForGroup setTimeout shrink shutdown split startCoalescing
        supportsCoalescing supportsShrinking supportsSplitting supportsTensorAlloc
        supportsTimeEstimation waitForPendingWorks
    """,
    "2.12": "getMemoryStats resume suspend",
    "2.13": "",
    "2.14": """
        addEphemeralTimeout all_gather_single all_gather_single_coalesced all_to_all_single clone
        gather_into_tensor gather_single getBoundDeviceId get_reconfigure_handle new_window
        reconfigure reduce_scatter_single reduce_scatter_single_coalesced registerAbortHook
        setBoundDeviceId supportsReconfigure supportsWindow unregisterAbortHook
    """,
    "2.15": """
        endTimeEstimate isInitialized registerCompletionHook startTimeEstimate supportsAbortHooks
        supportsCompletionHooks unregisterCompletionHook
    """,
}
# Left as torch has them. The first end in calls that are served, under their older names.
FORWARDED = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "gather_into_tensor": "gather_single",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
DECLINED = {
    *("endTimeEstimate", "getMemAllocator", "getMemoryStats", "merge", "resume"),
    *("startTimeEstimate", "suspend"),
}
NO = {  # does it support ...? No; and what there would be is declined
    "supportsTimeEstimation": "startTimeEstimate",
}
KEPT = {"setGroupUid", "getBoundDeviceId", "setBoundDeviceId", "isInitialized"}  # what it keeps


def virtuals(header: str) -> set[str]:
    return set(re.findall(r"^\s*virtual\b[^;{]*?\b(\w+)\(", header, re.MULTILINE))


def names(version: str) -> set[str]:
    """All that a version has."""
    versions = list(ADDED)
    return {name for v in versions[: versions.index(version) + 1] for name in ADDED[v].split()}


def declared(file: str) -> set[str]:
    """The functions that a header of ours declares."""
    text = (ROOT / "csrc" / "torch" / file).read_text()
    return set(re.findall(r"^  (?:[\w:<>,]+ )+?(?:const )?(\w+)\(", text, re.MULTILINE))


def installed_header() -> str:
    return (Path(torch.__file__).parent.parent / HEADER).read_text()


def test_the_list_is_that_of_the_installed_torch() -> None:
    assert virtuals(installed_header()) == names(MINOR)


def test_every_call_is_served_or_declined() -> None:
    served = declared("backend.h")
    left = {*FORWARDED, *NO, *KEPT}
    options = declared("options.h")  # clone() is the options'
    for name in names("2.15"):
        places = [name in some for some in (served, DECLINED, left, options)]
        assert sum(places) == 1, f"{name} is served, declined and left as it is: {places}"
    assert names("2.15") >= DECLINED, "torch has no such call"
    assert set(FORWARDED.values()) <= served
    assert set(NO.values()) <= DECLINED


CALLS = {  # that Python reaches in some versions
    "suspend": lambda backend: backend.suspend(),
    "resume": lambda backend: backend.resume(),
    "getMemoryStats": lambda backend: backend.memory_stats(),
    "getMemAllocator": lambda backend: backend.mem_allocator,
}


def refusals(rank: Rank) -> dict[str, tuple[str, str]]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    errors = {}
    for name, call in CALLS.items():
        errors[name] = error_of(lambda call=call: call(backend))  # type: ignore[misc]
    return errors


def test_a_declined_call_names_itself_and_the_backend() -> None:
    some = Ranks(1)
    (errors,) = some(refusals)
    some.leave()
    told = {name: text for name, (kind, text) in errors.items() if kind == "RuntimeError"}
    assert told, errors  # Python reaches some of them
    for name, text in told.items():
        assert f"Backend ringcomm does not support {name}" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("version", [version for version in ADDED if version != MINOR])
def test_the_lists_of_the_other_versions(version: str, tmp_path: Path) -> None:
    """From any wheel of that version: headers are the same on all platforms."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    for platform in ("macosx_14_0_arm64", "manylinux_2_28_aarch64", "manylinux_2_28_x86_64"):
        done = subprocess.run(
            [*command, "--platform", platform, "-d", tmp_path, f"torch=={version}.*"],
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"no wheel of torch {version} can be had here: {done.stderr[-300:]}")
    (wheel,) = tmp_path.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        header = archive.read(HEADER).decode()
    wheel.unlink()
    assert virtuals(header) == names(version)
