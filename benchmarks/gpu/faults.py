"""Failures: what survivors see, and when; what is left on the GPU; compute-sanitizer."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gpu.table
from gpu.ranks import LIBRARY, DeviceRanks, Entry, place_of
from gpu.stages import FOLDER, Settings, parts
from gpu.table import Row
from lab.ranks import HOST, Rank

WITHIN = 2.0  # seconds from a death or a mismatch to the error on every other rank
LEFT_BYTES = 64 << 20  # so much of the GPU's memory may be missing afterwards
UNDER_WAY = 24  # operations when a rank is killed
FIRST_TOOL = "memcheck"
TOOL_SECONDS = 150  # importing torch under a tool takes long

Seen = tuple[str, str, float, float]  # type and text of the error, when, seconds to leave


def operate(rank: Rank, elements: int, calls: int, stop: int = -1) -> Seen:
    """Run operations until one fails. Rank `stop` says when many are under way, and goes on.

    A GPU's operations fail after the call: waiting for its stream and calling again tells.
    """
    place = place_of(rank)
    tensor = place.full(elements, 1)
    limit = time.monotonic() + 60
    number = 0
    try:
        while time.monotonic() < limit:
            for _ in range(calls):
                dist.all_reduce(tensor)
            number += 1
            if number == 3 and rank.index == stop:
                rank.store.set("under way", "x")
            place.synchronize()
    except Exception as error:  # noqa: BLE001  what it is, is the question
        return leave(error)
    return "", "no error within 60 s", time.monotonic(), 0


def leave(error: Exception) -> Seen:
    """Return what was seen, with the time to destroy the group."""
    at = time.monotonic()
    dist.destroy_process_group()
    return type(error).__name__, str(error), at, time.monotonic() - at


def call_another(rank: Rank, culprit: int) -> Seen:
    """Let one rank give another number of elements."""
    place = place_of(rank)
    start = time.monotonic()
    try:
        for _ in range(3):
            dist.all_reduce(place.full(1000 + (rank.index == culprit), 1))
            place.synchronize()
            dist.barrier()
    except Exception as error:  # noqa: BLE001
        kind, text, at, left = leave(error)
        return kind, text, at - start, left
    return "", "no error", time.monotonic() - start, 0


def stay_away(rank: Rank, culprit: int) -> Seen:
    """Let one rank make no call until the others have given up."""
    place = place_of(rank)
    start = time.monotonic()
    if rank.index == culprit:
        others = [f"given up/{other}" for other in range(rank.size) if other != culprit]
        rank.store.wait(others)
        return "", "", 0, 0
    try:
        work = dist.all_reduce(place.full(1000, 1), async_op=True)
        work.wait()
        place.synchronize()
        dist.barrier()
    except Exception as error:  # noqa: BLE001
        at = time.monotonic() - start
        rank.store.set(f"given up/{rank.index}", "x")
        kind, text, _, left = leave(error)
        return kind, text, at, left
    rank.store.set(f"given up/{rank.index}", "x")
    return "", "no error", time.monotonic() - start, 0


def judge(what: str, answers: dict[int, Any], culprit: int, late: float, since: float = 0) -> Row:
    """Return the row: each of these ranks has an error in time, and it names the culprit."""
    worst, leaving, sample = 0.0, 0.0, ""
    for index, seen in sorted(answers.items()):
        if isinstance(seen, Exception):
            return gpu.table.failed(what, f"rank {index}: {gpu.table.first_line(seen)}")
        kind, text, at, left = seen
        print(f"{what}: rank {index}: {kind}: {text}", flush=True)
        if not kind:
            return gpu.table.failed(what, f"rank {index}: {text}")
        if not re.search(rf"\brank {culprit}\b", text):
            return gpu.table.failed(what, f"rank {index} names another: {text.splitlines()[0]}")
        worst, leaving, sample = max(worst, at - since), max(leaving, left), text
    note = f"destroyed within {leaving:.1f} s; {gpu.table.first_line(sample, 90)}"
    if worst > late:
        return gpu.table.failed(what, f"the last error came late: {note}", worst, "s")
    return gpu.table.passed(what, worst, "s", note)


def killed(what: str, size: int, culprit: int, elements: int, settings: Settings) -> Iterator[Row]:
    """End a rank by SIGKILL while its operations are under way."""
    entry = Entry(settings.kind, settings.library, timeout=30)
    with DeviceRanks(size, entry) as ranks:
        ranks.abandon()
        ranks.begin(operate, elements, UNDER_WAY, culprit)
        ranks.await_key("under way")
        os.kill(ranks.pids[culprit], signal.SIGKILL)
        since = time.monotonic()
        answers = ranks.collect(30)
        del answers[culprit]
        # On top of what was enqueued, and on a GPU has to end.
        yield judge(what, answers, culprit, WITHIN + settings.pick(1, 2, 2), since)


def mismatch(size: int, settings: Settings) -> Iterator[Row]:
    with DeviceRanks(size, Entry(settings.kind, settings.library, timeout=20)) as ranks:
        ranks.abandon()
        ranks.begin(call_another, 1)
        # The culprit too: it sees that the others called something else.
        yield judge(f"{size} ranks: one gives another size", ranks.collect(25), 1, WITHIN)


def never_comes(size: int, settings: Settings) -> Iterator[Row]:
    timeout, culprit = settings.pick(5.0, 2.0, 2.0), size // 2
    entry = Entry(settings.kind, settings.library, timeout=timeout)
    with DeviceRanks(size, entry) as ranks:
        ranks.abandon()
        ranks.begin(stay_away, culprit)
        answers = ranks.collect(timeout + 20)
        del answers[culprit]
        what = f"{size} ranks: one never comes, {timeout:.0f} s allowed"
        yield judge(what, answers, culprit, timeout + WITHIN)


def free_memory() -> int:
    free: int = torch.cuda.mem_get_info(0)[0]
    return free


def memory_is_back(before: int, settings: Settings) -> Iterator[Row]:
    """Look whether all that the ranks had is free again, those that were killed included."""
    if settings.simulated:
        yield gpu.table.info("memory of the GPU afterwards", note="not looked at: it is simulated")
        return
    end = time.monotonic() + 10
    while (missing := before - free_memory()) > LEFT_BYTES and time.monotonic() < end:
        time.sleep(0.1)
    note = f"{before / 2**30:.1f} GiB were free before"
    row = gpu.table.passed if missing <= LEFT_BYTES else gpu.table.failed
    yield row("memory missing afterwards", figure=missing / 2**20, unit="MiB", note=note)


def faults(settings: Settings, size: int) -> Iterator[Row]:
    """Cause each; every one has ranks of its own."""
    before = 0 if settings.simulated else free_memory()
    elements: int = settings.pick(64 << 20, 1 << 18, 1 << 16)  # on a GPU 256 MiB of each rank
    deaths: list[tuple[str, int, int]] = [
        (f"{size} ranks: one is killed between small operations", size // 2, 1000),
        (f"{size} ranks: an exporter is killed under the leader's kernel", size - 1, elements),
        (f"{size} ranks: the leader is killed", 0, elements),
    ]
    steps: list[Callable[[], Iterator[Row]]] = [
        _named(what, killed, what, size, culprit, count, settings)
        for what, culprit, count in deaths
    ]
    steps += [
        functools.partial(mismatch, size, settings),
        functools.partial(never_comes, size, settings),
        functools.partial(memory_is_back, before, settings),
    ]
    yield from parts(*steps)


def _named(name: str, function: Any, *args: Any) -> Callable[[], Iterator[Row]]:
    made = functools.partial(function, *args)
    made.__name__ = name  # type: ignore[attr-defined]
    return made


# ---- compute-sanitizer


def sanitizer_path() -> str:
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else "")


def small_run(command: list[str], settings: Settings, size: int) -> list[tuple[int | None, str]]:
    """Run gpu/ranks.py on some ranks, under `command`; returns each one's status and output."""
    store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    program = [sys.executable, "-m", "gpu.ranks", settings.kind]
    variables = {LIBRARY: settings.library} if settings.library else {}
    running = [
        subprocess.Popen(
            [*command, *program, str(rank), str(size), str(store.port)],
            cwd=FOLDER,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        for rank in range(size)
    ]
    end = time.monotonic() + TOOL_SECONDS
    answers: list[tuple[int | None, str]] = []
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            answers.append((process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            answers.append((None, process.communicate()[0]))
    return answers


def sanitized(tool: str, size: int, settings: Settings) -> Iterator[Row]:
    """Run a tool over a small run; where there is none, the small run alone."""
    path = sanitizer_path()
    command = [path, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    without = settings.simulated or not path
    if without:
        yield gpu.table.info(tool, note=f"compute-sanitizer: {path or 'not there'}; not run")
        if tool != FIRST_TOOL:  # the small run would be the same
            return
    answers = small_run([] if without else command, settings, size)
    what = "a small run without a tool" if without else f"{size} ranks: {tool}"
    for _, output in answers:
        print(output[-3000:], flush=True)
    if all(status == 0 and "all sums are right" in output for status, output in answers):
        yield gpu.table.passed(what)
        return
    lines = [line for _, output in answers for line in output.splitlines()]
    errors = [line for line in lines if "error" in line.lower()] or lines or ["no output"]
    statuses = ", ".join("late" if status is None else str(status) for status, _ in answers)
    yield gpu.table.failed(what, f"status {statuses}: {gpu.table.first_line(errors[0])}")


def memcheck(settings: Settings, size: int) -> Iterator[Row]:
    yield from parts(_named("memcheck", sanitized, "memcheck", size, settings))


def racecheck(settings: Settings, size: int) -> Iterator[Row]:
    yield from parts(_named("racecheck", sanitized, "racecheck", size, settings))


def synccheck(settings: Settings, size: int) -> Iterator[Row]:
    yield from parts(_named("synccheck", sanitized, "synccheck", size, settings))
