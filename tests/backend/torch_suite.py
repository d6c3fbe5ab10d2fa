"""Runs the tests that PyTorch ships for its own backends on ours.

The wheel holds `DistributedTest`, some 285 tests of everything that torch.distributed does with a
backend. Half of them ask for the backend's name first, and know only PyTorch's own names. Hence
`--as gloo`: the suite sees "gloo" wherever it looks, and every group it makes is ours. Only CPU
tests run.

    python tests/backend/torch_suite.py --ranks 3 --as gloo
    python tests/backend/torch_suite.py --as mpi -k all_to_all
    python tests/backend/torch_suite.py --backend gloo --json gloo.json

Ranks are forked, which makes a test a fraction of a second, and end with this process. A test that
hangs fails after `--seconds`, with the stack of every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import io
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG = 1
TAIL = 3000  # characters kept of what failed


@dataclass
class Settings:
    backend: str = "ringcomm"
    seen: str = "ringcomm"  # the name that the suite sees
    ranks: int = 2
    match: str = ""
    part: int = 0
    parts: int = 1
    seconds: float = 60
    file: str = ""


@dataclass
class Outcome:
    """The end of a test: "passed", "failed" or "skipped", and why."""

    outcome: str
    why: str
    seconds: float


def settings(arguments: list[str]) -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", default="ringcomm", help="what runs")
    parser.add_argument("--as", dest="seen", help="the name that the suite sees")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-k", dest="match", default="", help="a regular expression of test names")
    parser.add_argument("--parts", type=int, default=1, help="run one test in so many,")
    parser.add_argument("--part", type=int, default=0, help="and which ones: from 0 on")
    parser.add_argument("--seconds", type=float, default=60, help="that a test may take")
    parser.add_argument("--json", dest="file", default="", help="where the outcomes are written")
    given = Settings(**vars(parser.parse_args(arguments)))
    given.seen = given.seen or given.backend
    return given


def prepare(chosen: Settings) -> None:
    """Set what the suite and torch read when they are imported."""
    os.environ["BACKEND"] = chosen.seen
    os.environ["WORLD_SIZE"] = str(chosen.ranks)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.disable(logging.CRITICAL)


def impersonate(backend: str, seen: str, suite: Any) -> None:
    """Make groups of `backend` where `seen` is asked for, and call them `seen`."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    init, make, events_of = (
        dist.init_process_group,
        c10d._new_process_group_helper,
        suite.get_profiling_event,
    )

    def ours(name: Any) -> Any:
        return backend if name == seen else name

    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
        init(ours(backend), *args, **options)

    def make_group(size: int, rank: int, ranks: Any, name: Any, *args: Any, **options: Any) -> Any:
        group, store = make(size, rank, ranks, ours(name), *args, **options)
        if group in c10d._world.pg_map and ours(name) == backend:
            c10d._world.pg_map[group] = (seen, c10d._world.pg_map[group][1])  # get_backend's answer
        return group, store

    def get_profiling_event(title: str, *args: Any, **options: Any) -> Any:
        """Titles keep the real name, so that is what they are searched for."""
        events = events_of(title.replace(f"{seen}:", f"{backend}:"), *args, **options)
        for event in events:
            event.name = event.name.replace(f"{backend}:", f"{seen}:")
        return events

    dist.init_process_group = init_process_group
    c10d._new_process_group_helper = make_group
    suite.get_profiling_event = get_profiling_event


def test_case(chosen: Settings) -> Any:
    """Return PyTorch's test case, on our backend and with forked ranks."""
    importlib.import_module("ringcomm")
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed import distributed_test as suite

    for allowed in DistTestCases.backend_feature.values():
        allowed.add(chosen.backend)
    if chosen.seen != chosen.backend:
        impersonate(chosen.backend, chosen.seen, suite)
    elif chosen.backend not in suite.PROFILING_SUPPORTED_BACKENDS:
        suite.PROFILING_SUPPORTED_BACKENDS.append(chosen.backend)
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(chosen.backend)

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        said: IO[str]  # what the ranks print

        def setUp(self) -> None:
            super().setUp()
            type(self).said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            sys.stdout.flush()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        @classmethod
        def _run(cls, *args: Any, **options: Any) -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            faulthandler.register(signal.SIGUSR1, file=cls.said)
            os.dup2(cls.said.fileno(), 1)
            os.dup2(cls.said.fileno(), 2)
            super()._run(*args, **options)

        def _join_processes(self, test: Any) -> None:
            """Wait for all ranks, or for the first that fails; the base class then judges."""
            end = time.monotonic() + chosen.seconds
            while running := [p for p in self.processes if p.exitcode is None]:
                if any(p.exitcode == self.TEST_ERROR_EXIT_CODE for p in self.processes):
                    break
                if not wait([p.sentinel for p in running], max(0.0, end - time.monotonic())):
                    self._show_stacks(running)
                    late = [self.processes.index(p) for p in running]
                    raise TimeoutError(f"ranks {late} did not end within {chosen.seconds:g} s")
            with contextlib.redirect_stdout(io.StringIO()):
                super()._join_processes(test)

        def _show_stacks(self, running: list[Any]) -> None:
            for process in running:
                os.kill(process.pid, signal.SIGUSR1)
            wait([p.sentinel for p in running], 0.3)

    Case.__name__ = Case.__qualname__ = "Case"
    return Case


class Report(unittest.TestResult):
    """Prints and keeps the outcome of every test."""

    def __init__(self) -> None:
        super().__init__()
        self.tests: dict[str, Outcome] = {}
        self._begin = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._begin = time.monotonic()

    def _keep(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        if name in self.tests and self.tests[name].outcome == "failed":
            return  # what tears it down does not change that
        seconds = round(time.monotonic() - self._begin, 2)
        self.tests[name] = Outcome(outcome, why, seconds)
        if outcome != "skipped":
            print(f"{outcome}  {seconds:5.1f} s  {name}", flush=True)
        if outcome == "failed":
            print(why, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._keep(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._keep(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        why = "".join(traceback.format_exception_only(err[0], err[1])).strip()[-TAIL:]
        if said := getattr(test, "said", None):
            said.seek(0)
            why += "\n" + said.read()[-TAIL:]
        self._keep(test, "failed", why.strip())

    addError = addFailure  # noqa: N815

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._keep(test, "failed", "it was expected to fail")


def table(chosen: Settings, tests: dict[str, Outcome], seconds: float) -> str:
    counts = Counter(test.outcome for test in tests.values())
    name = chosen.backend if chosen.seen == chosen.backend else f"{chosen.backend} as {chosen.seen}"
    head = f"{name}, {chosen.ranks} ranks: {counts['passed']} passed, {counts['failed']} failed, "
    lines = [f"{head}{counts['skipped']} skipped in {seconds:.0f} s"]
    reasons = Counter(test.why for test in tests.values() if test.outcome == "skipped")
    lines += [f"{count:6} skipped: {reason}" for reason, count in reasons.most_common()]
    lines += [f"       FAILED: {name}" for name, test in tests.items() if test.outcome == "failed"]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    chosen = settings(arguments)
    prepare(chosen)
    case = test_case(chosen)
    names = unittest.TestLoader().getTestCaseNames(case)[chosen.part :: chosen.parts]
    report, begin = Report(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # the suite leaves files behind
        for name in names:
            if re.search(chosen.match, name):
                unittest.TestSuite([case(name)]).run(report)
        tempfile.tempdir = None
    print(table(chosen, report.tests, time.monotonic() - begin))
    if chosen.file:
        outcomes = {name: asdict(test) for name, test in report.tests.items()}
        Path(chosen.file).write_text(json.dumps(outcomes, indent=1))
    return int(any(test.outcome == "failed" for test in report.tests.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
