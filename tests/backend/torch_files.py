"""Runs test files of PyTorch's repository, which no wheel contains, on ringcomm.

`--source` is a checkout of PyTorch at the version that is installed, or near it:

    python tests/backend/torch_files.py --source ~/pytorch --json outcomes.json test_c10d_gloo
    python tests/backend/torch_files.py --source ~/pytorch --backend gloo test_c10d_gloo
    python tests/backend/torch_files.py --source ~/pytorch test_c10d_p2p test_c10d_collectives

test_c10d_gloo runs with RINGCOMM_AS=gloo, and where a test constructs `ProcessGroupGloo` itself, it
gets a group made as programs make them. The other files know no backend: they are given ours, by
a row of c10d_backend_common.py's table. Each test runs in a process of its own, and its ranks are
forked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import signal
import site
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch_suite import Outcome, Report, Settings, prepare

COMMON, GLOO = "c10d_backend_common", "test_c10d_gloo"
DIES, TEARS_DOWN = "the process of the test ended", 10  # seconds


def given(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", help="in test/distributed, without .py")
    parser.add_argument("--source", type=Path, required=True, help="a checkout of PyTorch")
    parser.add_argument("--backend", choices=["ringcomm", "gloo"], default="ringcomm")
    parser.add_argument("-k", dest="match", default="", help="a regular expression of test names")
    parser.add_argument("--seconds", type=float, default=60, help="that a test may take")
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    return parser.parse_args(arguments)


def fork_ranks() -> None:
    """Let test cases fork their ranks: those that are spawned import torch again, all of them."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def start(self: Any) -> None:
        self._start_processes(multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = start


def serve_ours() -> None:
    """Add ringcomm to the backends of the files that know none."""
    common: Any = importlib.import_module(COMMON)
    known = {field.name for field in dataclasses.fields(common.BackendConfig)}
    can = {"supports_bitwise_reductions", "supports_dropped_p2p_work", "supports_gather_single",
           "supports_sequence_numbers", "supports_work_sequence_number"}  # fmt: skip
    ours = common.BackendConfig("ringcomm", "cpu", **dict.fromkeys(can & known, True))
    common.C10D_BACKENDS = (*common.C10D_BACKENDS, ours)


def make_as_programs_do(module: Any) -> None:
    """Have the cases that construct a ProcessGroupGloo ask torch for a group of "gloo"."""
    import torch
    import torch.distributed as dist

    def create(self: Any, store: Any, rank: int, size: int, options: Any) -> Any:
        seconds = getattr(options._timeout, "total_seconds", lambda: options._timeout)()
        timeout = timedelta(seconds=seconds)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.barrier(group=backend)
        return backend

    for case in vars(module).values():
        if hasattr(case, "_create_process_group_gloo"):
            case._create_process_group_gloo = create


def judge_refusals_alone() -> None:
    """Leave out their words, which are Gloo's, and Gloo's own way to name an interface."""
    from ringcomm import _C

    def refuses(self: Any, errors: Any, _words: str, *args: Any, **options: Any) -> Any:
        return self.assertRaises(errors, *args, **options)  # noqa: PT027

    unittest.TestCase.assertRaisesRegex = refuses  # type: ignore[assignment]
    setattr(_C.Backend, "create_device", staticmethod(lambda **_options: None))  # noqa: B010


def load(options: argparse.Namespace) -> list[unittest.TestCase]:
    """Return the tests of the files that concern this backend, whose names match."""
    if options.backend == "ringcomm":
        if GLOO in options.files:
            os.environ["RINGCOMM_AS"] = "gloo"
        importlib.import_module("ringcomm")
    site.addsitedir(str(options.source / "test" / "distributed"))
    fork_ranks()
    if options.backend == "ringcomm" and set(options.files) - {GLOO}:
        serve_ours()
    tests = []
    for file in options.files:
        module = importlib.import_module(file)
        if file == GLOO and options.backend == "ringcomm":
            make_as_programs_do(module)
            judge_refusals_alone()
        whole = file == GLOO
        for test in all_of(unittest.TestLoader().loadTestsFromModule(module)):
            chosen = whole or options.backend in type(test).__name__.lower()
            if chosen and re.search(options.match, test.id()):
                tests.append(test)
    return tests


def all_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from all_of(test)
        else:
            yield test


class Sender(Report):
    """Sends the outcome of the one test."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self.results = results

    def _keep(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        if not self.tests:
            self.tests[test.id()] = Outcome(outcome, why, 0)
            self.results.send((outcome, why))


def run_here(test: unittest.TestCase, results: Any, log: int) -> None:
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    unittest.TestSuite([test]).run(Sender(results))


def run_one(test: unittest.TestCase, seconds: float) -> Outcome:
    """Run a test in a process of its own, and end what is left of it."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = multiprocessing.get_context("fork").Process(
            target=run_here, args=(test, theirs, log.fileno())
        )
        process.start()
        theirs.close()
        outcome, why = "failed", f"did not end within {seconds:g} s"
        if ours.poll(seconds):
            try:
                outcome, why = ours.recv()
            except EOFError:
                why = DIES
        process.join(TEARS_DOWN)
        end_group(process)
        log.seek(0)
        said = log.read() if outcome == "failed" else ""
    return Outcome(outcome, f"{why}\n{said[-3000:]}".strip(), round(time.monotonic() - began, 2))


def end_group(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def main(arguments: list[str]) -> int:
    options = given(arguments)
    prepare(Settings(backend=options.backend, seen=options.backend))
    del os.environ["BACKEND"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]
    outcomes: dict[str, Outcome] = {}
    for test in load(options):
        name = test.id()
        outcomes[name] = run_one(test, options.seconds)
        if outcomes[name].outcome != "skipped":
            print(f"{outcomes[name].outcome}  {outcomes[name].seconds:5.1f} s  {name}", flush=True)
    for name, told in outcomes.items():
        if told.outcome == "failed":
            print(f"\n==== {name}\n{told.why}")
    print(dict(Counter(told.outcome for told in outcomes.values())))
    if options.json:
        whole = {name: asdict(told) for name, told in outcomes.items()}
        options.json.write_text(json.dumps(whole, indent=1))
    return int(any(told.outcome == "failed" for told in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
