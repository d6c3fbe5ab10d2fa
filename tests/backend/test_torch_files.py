"""Test files of PyTorch's repository on ours: see torch_files.py.

They run where RINGCOMM_PYTORCH names a checkout of PyTorch, at about the version that is installed,
because no wheel contains them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(os.environ.get("RINGCOMM_PYTORCH") or "nowhere")
FOLDER = SOURCE / "test" / "distributed"
RUNNER = Path(__file__).with_name("torch_files.py")

# Every difference from Gloo, with its reason. docs/coming-from-gloo.md has them, too.
SEVERAL = "several tensors in a call that is not coalesced, which no function of torch passes"
DIFFERENCES = {
    "test_allgather_basics": SEVERAL,
    "test_allgather_inference_mode": SEVERAL,
    "test_allgather_noncontiguous_input": SEVERAL,
    "test_allreduce_basics": SEVERAL,
    "test_broadcast_basics": SEVERAL,
    "test_sparse_allreduce_basics": SEVERAL,
    "test_allgather_checks": "outputs of several sizes work",
    "test_all_to_all_single": "tensors that are not contiguous work",
    "test_init_process_group_for_all_backends": "torch calls every other backend 'custom'",
}
# In the files for any backend. The second test wants a warning that not every torch gives.
LAYOUTS, DEPRECATED = "test_noncontiguous_all_to_all_error", "test_gather_into_tensor_deprecated"

Outcomes = dict[str, str]


@pytest.fixture
def outcomes(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Callable[..., Outcomes]:
    """Run files; return the reason by test for what failed, and "" for what passed."""

    def run_files(*files: str) -> Outcomes:
        told = tmp_path / "told.json"
        done = run(sys.executable, RUNNER, "--source", SOURCE, "--json", told, *files, seconds=900)
        assert told.exists(), done.stdout + done.stderr
        tests = json.loads(told.read_text())
        return {
            name.rpartition(".")[2]: test["why"]
            for name, test in tests.items()
            if test["outcome"] != "skipped"
        }

    return run_files


def has(*files: str) -> pytest.MarkDecorator:
    missing = not all((FOLDER / f"{file}.py").exists() for file in files)
    return pytest.mark.skipif(missing, reason="RINGCOMM_PYTORCH names no checkout with these files")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@has("test_c10d_gloo")
def test_what_gloo_passes_passes_as_gloo(outcomes: Callable[..., Outcomes]) -> None:
    ran = outcomes("test_c10d_gloo")
    failed = {name: why for name, why in ran.items() if why}
    assert set(failed) == set(DIFFERENCES), "\n\n".join(f"{n}: {w}" for n, w in failed.items())
    assert len(ran) >= 60


SUITES = [f"test_c10d_{name}" for name in ("collectives", "process_group", "p2p", "nan_check")]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@has("c10d_backend_common", *SUITES)
def test_the_suites_for_any_backend(outcomes: Callable[..., Outcomes]) -> None:
    ran = outcomes(*SUITES)
    failed = {name: why for name, why in ran.items() if why and name != DEPRECATED}
    assert set(failed) == {LAYOUTS}, "\n\n".join(f"{name}: {why}" for name, why in failed.items())
    assert len(ran) >= 30
