"""Runs the fuzz targets (tests/cpp/fuzz/fuzz_*.cc): on inputs from seeds, and under libFuzzer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.limits import limit

Program = Callable[..., Path]
# Inputs from seeds that take about a second, and rules that a target must miss when they are off.
SEEDS = {
    "fuzz_channel": 8000,
    "fuzz_frame": 3000,
    "fuzz_handshake": 20000,
    "fuzz_session": 8000,
    "fuzz_texts": 20000,
    "fuzz_tls": 1000,
}
RULES = [
    ("fuzz_channel", "bounds"),
    ("fuzz_frame", "checksum"),
    ("fuzz_handshake", "key"),
    ("fuzz_session", "apply_once"),
    ("fuzz_session", "fence"),
    ("fuzz_session", "verify"),
    ("fuzz_session", "bounded"),
    ("fuzz_texts", "last_byte"),
    ("fuzz_tls", "secret"),
]
SOAK_SECONDS = 300


def output(command: list[str | Path], seconds: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=limit(seconds)
    )


def check(program: Path, first: int, count: int, seconds: float = 110) -> None:
    """Its corpus and these seeds hold."""
    for command in ([program], [program, "--seeds", first, count]):
        done = output([str(word) for word in command], seconds)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stdout.startswith("ok "), done.stdout


@pytest.mark.parametrize("name", SEEDS)
def test_seeds(cpp_program: Program, name: str) -> None:
    check(cpp_program(name), 0, SEEDS[name])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SEEDS)
def test_seeds_under_sanitizers(cpp_program: Program, name: str) -> None:
    # The channel needs the whole engine, which other tests build with this sanitizer.
    variant = "address" if name == "fuzz_channel" else "hostile"
    check(cpp_program(name, variant), 1_000_000, SEEDS[name], 500)


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_a_rule_switched_off_is_caught(cpp_program: Program, name: str, rule: str) -> None:
    done = output([cpp_program(name), "--without", rule, "20000"])
    assert done.returncode == 1, done.stdout
    assert f"caught without {rule}: seed" in done.stdout


def test_every_rule_is_switched_off(cpp_program: Program) -> None:
    known = [
        (name, rule)
        for name in SEEDS
        for rule in output([cpp_program(name), "--rules"]).stdout.split()
    ]
    assert sorted(known) == sorted(RULES)


def test_a_failing_seed_can_be_run_alone(cpp_program: Program) -> None:
    """With a rule off, the seed that is named fails by itself, and with the rule on it does not."""
    program = cpp_program("fuzz_session")
    said = output([program, "--without", "apply_once", "20000"]).stdout
    seed = said.split("--seeds ")[1].split()[0]
    alone = output([program, "--without", "apply_once", "1", seed])
    assert alone.stdout == said
    assert output([program, "--seeds", seed, "1"]).returncode == 0


def test_a_file_is_an_input(cpp_program: Program, tmp_path: Path) -> None:
    program = cpp_program("fuzz_channel")
    assert output([program, "--corpus", tmp_path]).returncode == 0
    files = sorted(tmp_path.iterdir())
    done = output([program, *files])
    assert done.stdout == f"ok {len(files)} files\n"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("clang++") is None, reason="libFuzzer needs `apt install clang`")
@pytest.mark.parametrize("name", SEEDS)
def test_libfuzzer(cpp_program: Program, name: str, tmp_path: Path) -> None:
    """An input that fails stays in build/fuzz/NAME-…: give that file to build/tests/NAME."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    assert output([cpp_program(name), "--corpus", corpus]).returncode == 0
    program = cpp_program(name, "fuzz")
    options = [
        f"-max_total_time={SOAK_SECONDS}",
        "-max_len=4096",
        "-rss_limit_mb=2048",
        "-timeout=20",
        "-seed=1",
        "-print_final_stats=1",
        f"-artifact_prefix={program.parent.parent}/{name}-",
    ]
    done = output([program, corpus, *options], SOAK_SECONDS + 600)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "stat::number_of_executed_units" in done.stderr
