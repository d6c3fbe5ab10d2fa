"""Fixtures and options that all tests share.

RINGCOMM_TEST_LEVEL=fast|sample|all|soak says how much runs: `slow` tests from "all" on, `soak`
ones only at "soak". At "sample" nothing but `slow` tests runs, another choice of them each day,
until SAMPLE_SECONDS are over.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lab import ROOT
from lab.limits import limit, seed
from lab.zygote import Zygote

if TYPE_CHECKING:
    from lab.ranks import Ranks

# Tests of flight records say where they are to be. Other tests leave none behind.
os.environ.setdefault("RINGCOMM_TRACE", "off")

LEVELS = ["fast", "sample", "all", "soak"]
COMMANDS = {"all": "make test-all", "soak": "make soak"}
SAMPLE_SECONDS = float(os.environ.get("RINGCOMM_SAMPLE_SECONDS") or 900)
SAMPLE_ENDS = pytest.StashKey[float]()  # by time.monotonic()
# The tests of one host run over TCP as well: test_tcp.py.
OVER_TCP = os.environ.get("RINGCOMM_TRANSPORT") == "tcp"
NEEDS = {"slow": "all", "soak": "soak"}
# They come first, so that no worker is left with one at the end.
PROGRAMS = "ZYGOTE_PYTHON"  # what sys.executable is then
LONGEST = ["cpp", "fault_table", "torch_suite", "benchmarks", "examples", "stack_compile"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skips-allowed",
        metavar="REASON",
        help="a regular expression: fail when a test was skipped for any other reason",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let the programs that tests start be forked from one interpreter: lab/zygote.py.

    The long forms start them as users do. With workers, which are such programs themselves, one
    interpreter serves them all.
    """
    if (os.environ.get("RINGCOMM_TEST_LEVEL") or "fast") != "fast":
        return
    if PROGRAMS not in os.environ:
        zygote = Zygote()
        config.add_cleanup(zygote.close)
        os.environ[PROGRAMS] = str(zygote.python)
    sys.executable = os.environ[PROGRAMS]
    multiprocessing.set_executable(sys.executable)


def pytest_report_header() -> str:
    return f"samples are drawn with RINGCOMM_SEED={seed()}"


def skipped(config: pytest.Config) -> Counter[str]:
    """Why tests were skipped, and how many."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    allowed = session.config.getoption("--skips-allowed")
    if hasattr(session.config, "workerinput") or allowed is None:
        return
    if not all(re.search(allowed, reason) for reason in skipped(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the blocks of the documents that did not run: tests/test_docs.py."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "not run":
                terminalreporter.write_line(f"{name}: {text}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End with one line that says what did not run, and how it would."""
    reasons = skipped(config)
    if hasattr(config, "workerinput") or not reasons:
        return
    allowed = config.getoption("--skips-allowed")
    told = [f"{count} {reason}" for reason, count in reasons.most_common()]
    print(f"{reasons.total()} skipped: {'; '.join(told)}")
    if allowed is not None:
        for reason in (reason for reason in reasons if not re.search(allowed, reason)):
            print(f"FAILED: was to run here, and was skipped: {reason}", file=sys.stderr)


def sample(items: list[pytest.Item], number: int) -> list[pytest.Item]:
    """The long forms in the order in which a sample takes them.

    First come those that run every day: `slow(daily=True)`. Then files take turns, in a random
    order, and give one of their tests at random each time. So every file has its chance each day,
    however many tests the others have.
    """
    chance = random.Random(number)
    daily = [item for item in items if is_daily(item)]
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(set(items) - set(daily), key=lambda item: item.nodeid):
        by_file[item.path.name].append(item)
    files = list(by_file.values())
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    return daily + [
        tests[turn]
        for turn in range(max(map(len, files), default=0))
        for tests in files
        if turn < len(tests)
    ]


def is_daily(item: pytest.Item) -> bool:
    return any(marker.kwargs.get("daily") for marker in item.iter_markers("slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no other long form once the time of the sample is over."""
    if time.monotonic() > item.config.stash.get(SAMPLE_ENDS, math.inf):
        pytest.skip("long forms (of another day's sample; `make test-all` runs all)")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    level = os.environ.get("RINGCOMM_TEST_LEVEL") or "fast"
    if level not in LEVELS:
        raise pytest.UsageError(f"RINGCOMM_TEST_LEVEL={level} is none of {', '.join(LEVELS)}")
    if level == "sample":
        items[:] = sample([item for item in items if item.get_closest_marker("slow")], seed())
        config.stash[SAMPLE_ENDS] = time.monotonic() + SAMPLE_SECONDS
        level = "all"
    else:
        longest = [f"test_{name}.py" for name in LONGEST]
        items.sort(key=lambda item: item.path.name not in longest)
    for item in items:
        if item.path.name != "test_cpp.py":  # whose tests share nothing
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        for marker, needed in NEEDS.items():
            if item.get_closest_marker(marker) and LEVELS.index(level) < LEVELS.index(needed):
                item.add_marker(
                    pytest.mark.skip(reason=f"long forms (`{COMMANDS[needed]}` runs them)")
                )
        if timeout := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit(timeout.args[0])), append=False)


def forms(values: Iterable[Any], *short: Any) -> list[Any]:
    """Parameters of a test: `short` in its short form too, all others in the long one alone.

    A tuple is the value of several parameters.
    """
    values = list(values)
    assert all(value in values for value in short), "a form of a case that is not there"
    return [
        value
        if value in short
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]


def run_again(name: str, only: str, **environment: str) -> None:
    """Run a file of tests once more, or those of its tests that `only` selects, as -k does."""
    (file,) = (ROOT / "tests").rglob(f"test_{name}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only]
    # Within a sample: the short forms. The file may have no long ones.
    sampled = os.environ.get("RINGCOMM_TEST_LEVEL") == "sample"
    level = {"RINGCOMM_TEST_LEVEL": "fast"} if sampled else {}
    done = subprocess.run(
        [*command, str(file)],
        env={**os.environ, **level, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,  # its tests have limits of their own
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks without a group, for all tests of a file; so are `three` and `four`."""
    yield from waiting(2)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    yield from waiting(3)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    yield from waiting(4)


def waiting(size: int) -> Iterator[Ranks]:
    from lab.ranks import (
        ranks,  # it imports torch, which the process above the workers does without
    )

    with ranks(size, backend=None) as some:
        yield some


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run() -> Run:
    """Run a command with some environment changed, and return it with its output.

    `environment` overrides variables, None removes one. `seconds` are ample for the command.
    """

    def run_command(
        *command: str | Path, seconds: float = 100, cwd: Path = ROOT, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        merged = {**os.environ, **environment}
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=limit(seconds),
            env={name: value for name, value in merged.items() if value is not None},
        )

    return run_command


@pytest.fixture
def python(run: Run, tmp_path: Path) -> Run:
    """Run Python source in a fresh interpreter, from a folder where no package of ours lies."""

    def run_python(source: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "-c", source, cwd=tmp_path, **environment)

    return run_python


@pytest.fixture
def torchrun(run: Run, tmp_path: Path) -> Run:
    """Run a Python script on some ranks: `torchrun(2, script, *arguments)`."""

    def run_ranks(
        ranks: int, script: Path, *arguments: str | Path, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        return run(*launcher, script, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1", **environment)

    return run_ranks


JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import ringcomm
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank has died
dist.init_process_group("ringcomm")
rank = dist.get_rank()
for i in range(5):
    dist.all_reduce(torch.ones(10))
"""


@pytest.fixture
def job(torchrun: Run, tmp_path: Path) -> Any:
    """Run a job, of two ranks if not said, whose program goes on as given; return its outputs."""

    def run_job(source: str, ranks: int = 2, **environment: str | None) -> str:
        script = tmp_path / "program.py"
        script.write_text(JOB + source)
        done = torchrun(ranks, script, **environment)
        return done.stdout + done.stderr

    return run_job


def environment_of(*kind: str) -> Path:
    """The Python of an environment that scripts/clients.sh makes; skips where it cannot."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = subprocess.run(
        [ROOT / "scripts" / "clients.sh", *kind],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    if made.returncode != 0:
        reason = (made.stderr.strip() or "pip failed").splitlines()[-1]
        pytest.skip(f"the packages of examples/clients cannot be installed: {reason}")
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def environment() -> Path:
    return environment_of()


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    return environment_of("vllm")


@pytest.fixture(scope="session")
def cpp_program() -> Callable[..., Path]:
    """Find a C++ test program by name; with a sanitizer, build that variant of it first."""

    def find(name: str, variant: str | None = None) -> Path:
        folder = ROOT / "build" / "tests"
        if variant:
            built = subprocess.run(
                [ROOT / "scripts" / "cpp.sh", variant],
                capture_output=True,
                env={**os.environ, "TARGETS": name},
            )
            assert built.returncode == 0, built.stderr.decode()
            folder = ROOT / "build" / variant / "bin"
        assert (folder / name).exists(), (
            f"{name} is not built: run `make test`, or name it in CMake"
        )
        return folder / name

    return find
