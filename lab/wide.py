"""Starts the program `wide` (tests/cpp/comm/wide.cc): hundreds of ranks without torch.

python -m lab.wide build/plain/bin/wide 32 8 --kill 3     on 32 hosts of 8 ranks; 0: on this one
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lab.hosts import Hosts
from lab.limits import limit

Text = dict[str, Any]


class Answer(NamedTuple):
    """The program's words: by rank, or the median and the most of all ranks."""

    body: dict[str, Any]
    log: str  # what the ranks logged

    @property
    def ok(self) -> bool:
        """Whether all ranks did what the scenario asks for."""
        return bool(self.body["ok"])

    @property
    def errors(self) -> list[Text]:
        """Each error that had not to come, and its ranks."""
        return list(self.body["errors"])

    @property
    def heard(self) -> list[Text]:
        """The same of errors that had to come."""
        return list(self.body["heard"])

    def most(self, name: str, stage: str | None = None) -> float:
        """The highest figure of all ranks."""
        return float((self.stage(stage) if stage else self.body)[name]["most"])

    def stage(self, name: str) -> dict[str, Any]:
        """One stage's figures."""
        (stage,) = (stage for stage in self.body["stages"] if stage["name"] == name)
        return dict(stage)

    @property
    def stages(self) -> list[str]:
        return [stage["name"] for stage in self.body["stages"]]

    def brief(self) -> str:
        """Return what a failed test shows."""
        lines = [f"{self.body['ranks']} ranks, ok: {self.ok}, stages: {', '.join(self.stages)}"]
        for name in ("heard_after", "left_after", "longest", "total", "count", "loops"):
            lines.append(f"{name}: {self.body[name]['median']:.6g}, at most {self.most(name):.6g}")
        for name in ("errors", "heard"):
            for text in self.body[name]:
                ranks = text["ranks"]
                some = f"{ranks[:4]} and {len(ranks) - 4} more" if len(ranks) > 4 else ranks
                lines.append(f"{name}: ranks {some}: {text['text'][:500]}")
        log = self.log.splitlines()
        return "\n".join([*lines, f"{len(log)} lines of log", *log[:4]])


def run(
    program: Path,
    *words: object,
    hosts: Hosts | None = None,
    local: int = 1,
    ranks: int = 4,
    seconds: float = 60,
    meanwhile: Callable[[], object] | None = None,
) -> Answer:
    """Run it with these options; on `hosts`, each with `local` ranks, or with `ranks` on this one.

    `meanwhile` is called over and over while the ranks loop, once they all do.
    """
    command = [program, "--deadline", limit(seconds)]
    if hosts is None:
        command += ["--ranks", ranks]
    else:
        command += ["--hosts", ",".join(hosts.namespaces), "--local", local]
    told = tempfile.TemporaryFile("w+")  # the ranks' log: no pipe, which would fill  # noqa: SIM115
    process = subprocess.Popen(
        [str(word) for word in [*command, *words]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=told,
        text=True,
    )
    # It ends by its own deadline; this is for the case that it hangs itself.
    guard = threading.Timer(limit(seconds) + limit(10), process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        lines = ""
        for line in process.stdout:
            lines += line
            if line == "looping\n" and meanwhile is not None:
                over(process, meanwhile)
        process.wait()
    finally:
        guard.cancel()
        process.kill()
        process.wait()
    with told:
        told.seek(0)
        log = told.read()
    results = [line for line in lines.splitlines() if line.startswith("{")]
    assert results, f"it ended with {process.returncode} and told no result: {log[-2000:]}"
    return Answer(json.loads(results[-1]), log)


def over(process: subprocess.Popen[str], meanwhile: Callable[[], object]) -> None:
    """Call it until the program has something more to tell, which is its end."""
    thread = threading.Thread(target=repeat, args=(process, meanwhile))
    thread.start()


def repeat(process: subprocess.Popen[str], meanwhile: Callable[[], object]) -> None:
    while process.poll() is None:
        meanwhile()


def table(answer: Answer) -> Iterator[str]:
    """Return the most that a rank cost after each stage."""
    names = [
        "rss_bytes",
        "pss_bytes",
        "vm_bytes",
        "descriptors",
        "mappings",
        "threads",
        "connections",
    ]
    names += ["requests", "store_bytes", "switches"]
    yield f"{'':24} {'seconds':>10} " + " ".join(f"{name:>12}" for name in names)
    for stage in answer.body["stages"]:
        figures = " ".join(f"{stage[name]['most']:12}" for name in names)
        yield f"{stage['name']:24} {stage['seconds']:10.6f} {figures}"


def main(words: list[str]) -> int:
    program, count, local, *rest = words
    if int(count) == 0:
        answer = run(Path(program), *rest, ranks=int(local))
    else:
        with Hosts(int(count)) as hosts:
            answer = run(Path(program), *rest, hosts=hosts, local=int(local))
    print("\n".join(table(answer)))
    print(answer.brief())
    return 0 if answer.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
