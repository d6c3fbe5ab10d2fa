"""The C++ programs of benchmarks: each obeys lines of its input, and answers each with a line."""

from __future__ import annotations

import contextlib
import subprocess
import threading

from lab import ROOT
from lab.benchmark import BenchmarkError

FOLDERS = [ROOT / "build" / folder for folder in ("tests", "plain/bin")]


class Program:
    """A program of benchmarks/cpp that is built. A context manager: leaving it ends the program."""

    def __init__(self, name: str, *arguments: object, deadline: float) -> None:
        """Start it. It is killed after `deadline` seconds. Raises BenchmarkError."""
        path = next((folder / name for folder in FOLDERS if (folder / name).exists()), None)
        if path is None:
            raise BenchmarkError(f"{name} is not built: `make test`, or `scripts/cpp.sh plain`")
        self.name, pipe = name, subprocess.PIPE
        words = [str(word) for word in (path, *arguments)]
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._killer = threading.Timer(deadline, self._process.kill)
        self._killer.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._killer.cancel()
        self._process.communicate()  # its input ends, and so does it

    def ask(self, *words: object) -> list[float]:
        """Return the numbers that it answers. Raises BenchmarkError when it ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            errors = self._process.communicate()[1].strip()
            raise BenchmarkError(errors or f"{self.name} was killed")
        return [float(number) for number in answer.split()]
