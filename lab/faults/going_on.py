"""The row of a training that goes on when a rank is killed: how soon it makes its next step."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.faults.table import Fault, Form, Verdict
from lab.limits import claim
from lab.trainees import trainees

SIZE = 4
SECONDS = 60.0  # until it has gone on, else it hangs
SOON = 1.0  # what is wanted: a job that starts anew takes longer
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("step_rank.py")
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=100)
print(server.address(), flush=True)
time.sleep(1 << 20)
"""


def elastic(chance: random.Random) -> float:
    """`ringcomm.elastic`: seconds until all survivors have applied another step."""
    with trainees(SIZE, epochs=1 << 30, pause=0.010) as some:
        some.await_events(list(range(SIZE)), "step", 20)
        victim = chance.randrange(SIZE)
        rest = [number for number in range(SIZE) if number != victim]
        time.sleep(chance.uniform(0, 0.05))
        at = some.kill(victim)
        some.await_events(rest, "change")
        some.await_events(rest, "step", max(len(some.events(n, "step")) for n in rest) + 1)
        return max(step_after(some.events(n, "step"), some.events(n, "change")) for n in rest) - at


def step_after(steps: Sequence[dict[str, float]], changes: Sequence[dict[str, float]]) -> float:
    return min(step["at"] for step in steps if step["at"] > changes[0]["at"])


class SteppingJob:
    """Processes of step_rank.py, which write their steps into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> dict[int, list[tuple[float, int]]]:
        """When each process, by its id, has applied which steps."""
        by_process = {}
        for path in self.folder.glob("rank-*"):
            lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 1]
            by_process[int(path.name[5:])] = [(float(at), int(step)) for at, step in lines]
        return by_process

    def await_steps(self, count: int) -> list[int]:
        """Wait until SIZE processes have made so many; returns their ids."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            ready = [pid for pid, steps in self.steps().items() if len(steps) >= count]
            if len(ready) == SIZE:
                return ready
            time.sleep(0.02)
        raise TimeoutError("the job does not begin")

    def kill_one(self, chance: random.Random) -> float:
        """Seconds from a kill until others apply a step that was not applied before."""
        pids = self.await_steps(20)
        victim = chance.choice(pids)
        time.sleep(chance.uniform(0, 0.05))
        reached = max(step for steps in self.steps().values() for _, step in steps)
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        deadline = at + SECONDS
        while time.monotonic() < deadline:
            late = [
                min(when for when, step in steps if step > reached + 1)
                for pid, steps in self.steps().items()
                if pid != victim and any(step > reached + 1 for _, step in steps)
            ]
            if len(late) >= SIZE - 1:
                return max(sorted(late)[: SIZE - 1]) - at
            time.sleep(0.005)
        raise TimeoutError("nobody goes on")


@contextlib.contextmanager
def running(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Processes, each with a session of its own; they and what they started are ended at last."""
    # torchrun asks for the names of addresses, and no name server may answer. With a store that its
    # lives share, Gloo calls those of the life before, who are dead (torch 2.13).
    more = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env = {**os.environ, **more}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen(command, start_new_session=True, cwd=ROOT, env=env, **quiet)  # type: ignore[call-overload]
        for command in commands
    ]
    try:
        yield
    finally:
        for process in started:
            children = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
            )
            for pid in [process.pid, *map(int, children.stdout.split())]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def torchrun(chance: random.Random) -> float:
    """All ranks restart, on Gloo, and read the checkpoint of the last step."""
    with tempfile.TemporaryDirectory() as name:
        command = [str(Path(sys.prefix) / "bin" / "python"), "-m", "torch.distributed.run"]
        command += ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(SIZE)]
        command += ["--max-restarts", "3", "--monitor-interval", "0.1"]
        with running([[*command, str(PROGRAM), name, "torchrun"]]):
            return SteppingJob(Path(name)).kill_one(chance)


def torchft(chance: random.Random) -> float:
    """Torchft 0.2 on Gloo, in its own environment (scripts/clients.sh)."""
    python = subprocess.run(
        [str(ROOT / "scripts" / "clients.sh")], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        lighthouse = subprocess.Popen(
            [python, "-c", LIGHTHOUSE, str(SIZE - 1)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert lighthouse.stdout is not None
            port = lighthouse.stdout.readline().strip().rpartition(":")[2]
            words = [str(SIZE), f"http://127.0.0.1:{port}"]
            ranks = [[python, str(PROGRAM), name, "torchft", str(n), *words] for n in range(SIZE)]
            with running(ranks):
                return SteppingJob(Path(name)).kill_one(chance)
        finally:
            lighthouse.kill()
            lighthouse.wait()


WAYS = {
    "ringcomm": ("ringcomm.elastic", elastic),
    "gloo": ("torchrun restarts all", torchrun),
    "torchft": ("torchft on Gloo", torchft),
}


def killed_and_on(form: Form) -> Verdict:
    """A rank dies at a random moment; the others make another step."""
    if form.backend not in WAYS:
        return Verdict(False, "nothing goes on")
    chance = random.Random(form.seed)
    name, way = WAYS[form.backend]
    took, stopped = [], 0
    for _ in range(20 if form.long else 3):
        try:
            took.append(way(chance))
        except TimeoutError:
            stopped += 1
    told = [f"{stopped} did not go on in {SECONDS:.0f} s"] if stopped else []
    if took:
        told.insert(0, f"{statistics.median(took):.3f} s, {max(took):.3f} s at most of {len(took)}")
    return Verdict(not stopped and max(took) < claim(SOON), f"{name}: " + "; ".join(told))


GOING_ON = [
    Fault(
        "elastic",
        "a rank of four is killed, and the training is to go on",
        f"another step within {SOON:.0f} s, no rank restarted",
        killed_and_on,
        namespaces=False,
    )
]
