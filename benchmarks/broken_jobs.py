"""Ten jobs that break, and what the first line of `ringcomm trace` says about each.

    python benchmarks/broken_jobs.py                    # all of them; the slow link needs root
    python benchmarks/broken_jobs.py loader deadlock    # only these
    python benchmarks/broken_jobs.py --markdown         # the table of docs/trace.md

Each job has three ranks and a training loop of short steps. At step 20 something breaks in one of
them. Beside it stands what torch's own tool, torchfrtrace, says about the same records.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing

RANKS, STEP, STEPS = 3, 20, 2000
HOUR = 3600
SLOW = "20mbit"  # the slow link's rate
FINDING = re.compile(r"has errors|missing ranks|mismatch|not all ranks", re.I)  # of torchfrtrace


@dataclass(frozen=True)
class Job:
    """A job that breaks: how, in whose words, and what is to be said about it."""

    name: str
    words: str  # for the table
    first: str  # the first line of `ringcomm trace` matches this
    files: str = ""  # look at it once there are such files, or once all of its ranks have ended
    count: int = 1


JOBS = [
    Job(
        "loader",
        "rank 2 hangs in its data loader",
        r"rank 2 has not called all_reduce #21 yet: it is at broken_jobs\.py:\d+ in read_batch ",
        "rank2-*.stacks",
    ),
    Job(
        "branch",
        "rank 1 takes another branch and calls broadcast",
        r"the ranks differ in collective #21: rank 1 called broadcast .*"
        r"broken_jobs\.py:\d+ in validate",
    ),
    Job("killed", "rank 2 is killed", r"rank 2 died before all_reduce #21;"),
    Job(
        "memory",
        "rank 1 runs out of memory",
        r"rank 1 ended with RuntimeError: .*can't allocate memory"
        r".*broken_jobs\.py:\d+ in activations",
    ),
    Job(
        "stopped",
        "rank 2 is stopped by a signal",
        r"rank 2 has not called all_reduce #21 yet: it is stopped by a signal; "
        r"`kill -CONT` lets it go on \(host \S+, pid \d+\)",
        "rank[01]-*.stacks",
        2,
    ),
    Job(
        "deadlock",
        "two ranks use two groups in opposite orders",
        r"ranks 0 and 1 wait for each other in different groups: rank 0 in all_reduce #1 of group "
        r"\S+ \(broken_jobs\.py:\d+ in step_pipeline\), rank 1 in .*step_pipeline",
        "rank[01]-*.stacks",
        2,
    ),
    Job(
        "slow_disk",
        "each batch of rank 1 comes late",
        r"rank 1 is a straggler: .* broken_jobs\.py:\d+ in read_slowly",
        "rank1-*.often",
    ),
    Job(
        "slow_link",
        "the link of one host is slow",
        r"the network between the hosts is slow: .* rank . on host1",
        "rank1-*.often",
    ),
    Job(
        "exception",
        "rank 1 raises an exception",
        r"rank 1 ended with ValueError: a bad batch.*broken_jobs\.py:\d+ in read_bad_batch",
    ),
    Job("canceled", "the scheduler cancels the job", r"all 3 processes are gone; no failure was"),
]


# ---- the program of a rank


def train(name: str, rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    store = f"tcp://{os.environ['STORE']}" if "STORE" in os.environ else f"file://{folder}/store"
    dist.init_process_group("ringcomm", init_method=store, rank=rank, world_size=RANKS)
    elements = 500_000 if name == "slow_link" else 1000
    gradients = torch.ones(elements)
    breaks = BREAKS.get(name)
    for step in range(STEPS):
        time.sleep(0.005)  # forward and backward
        if breaks is not None and (step == STEP or (step > STEP and name in ALWAYS)):
            breaks(rank)
        dist.all_reduce(gradients)
        if step == STEP:
            (Path(folder) / f"broke{rank}").touch()


def read_batch(rank: int) -> None:
    if rank == 2:
        time.sleep(HOUR)


def validate(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        dist.broadcast(torch.ones(1000), src=1)


def kill(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def activations(rank: int) -> None:
    import torch

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.RLIM_INFINITY))
        torch.empty(1 << 37)


def stop(rank: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def step_pipeline(rank: int) -> None:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else reversed(groups):
        if rank < 2:
            dist.all_reduce(torch.ones(10), group=group)


def read_slowly(rank: int) -> None:
    if rank == 1:
        time.sleep(0.05)


def read_bad_batch(rank: int) -> None:
    if rank == 1:
        raise ValueError("a bad batch")


BREAKS: dict[str, Callable[[int], None]] = {
    "loader": read_batch,
    "branch": validate,
    "killed": kill,
    "memory": activations,
    "stopped": stop,
    "deadlock": step_pipeline,
    "slow_disk": read_slowly,
    "exception": read_bad_batch,
}
ALWAYS = ("slow_disk",)


# ---- the jobs, and what is said about them


@dataclass
class Running:
    """A job whose ranks have been started."""

    job: Job
    folder: Path
    ranks: list[subprocess.Popen[bytes]]

    @property
    def records(self) -> Path:
        return self.folder / "records"

    def is_ready(self) -> bool:
        """Tell whether the job has been broken for long enough."""
        alive = [rank for rank in self.ranks if rank.poll() is None]
        if self.job.name == "canceled" and len([*self.folder.glob("broke*")]) == RANKS:
            for rank in alive:
                rank.terminate()
        if not self.job.files:
            return not alive
        return len([*self.records.glob(self.job.files)]) >= self.job.count


@contextmanager
def running(job: Job, folder: Path) -> Iterator[Running]:
    """Start the ranks of a job, on hosts of their own where a link is to be slow."""
    folder.mkdir()
    records = str(folder / "records")
    environment = {**os.environ, "RINGCOMM_TRACE": records, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        outputs = [stack.enter_context((folder / f"log{rank}").open("wb")) for rank in range(RANKS)]
        commands = [
            [sys.executable, __file__, "--rank", str(rank), "--folder", str(folder), job.name]
            for rank in range(RANKS)
        ]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            if job.name == "slow_link":
                hosts = stack.enter_context(Hosts(RANKS))
                hosts.limit(1, SLOW)
                environment["STORE"] = f"{hosts.addresses[0]}:29501"
                for host, words in enumerate(commands):
                    ranks.append(hosts.start(host, words, environment, outputs[host].fileno()))
            else:
                for words, output in zip(commands, outputs, strict=True):
                    ranks.append(
                        subprocess.Popen(
                            words, env=environment, stdout=output, stderr=subprocess.STDOUT
                        )
                    )
            yield Running(job, folder, ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def await_all(jobs: Sequence[Running]) -> Iterator[Running]:
    """Yield each job once it has been broken for long enough. Raises TimeoutError."""
    end = time.monotonic() + limit(60)
    left = list(jobs)
    while left:
        for job in [job for job in left if job.is_ready()]:
            left.remove(job)
            yield job
        if time.monotonic() > end:
            raise TimeoutError(f"not broken yet: {', '.join(job.job.name for job in left)}")
        time.sleep(0.05)


def told(job: Running) -> str:
    """Return what `ringcomm trace` says about a job."""
    words = [sys.executable, "-m", "ringcomm", "trace", str(job.records)]
    words += ["--torch", str(job.folder / "pickles")]
    return subprocess.run(words, capture_output=True, text=True, timeout=limit(60)).stdout


def told_by_torch(job: Running) -> str:
    """Return what torchfrtrace finds in the same records."""
    words = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    words += [str(job.folder / "pickles")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit(60))
    lines = (done.stdout + done.stderr).splitlines()
    return "; ".join(line.strip() for line in lines if FINDING.search(line)) or "nothing"


def results(jobs: Sequence[Job], folder: Path) -> Iterator[tuple[Job, str, str]]:
    """Run jobs beside one another; yield what both tools say about each."""
    with ExitStack() as stack:
        some = [stack.enter_context(running(job, folder / job.name)) for job in jobs]
        for job in await_all(some):
            text = told(job)
            yield job.job, text, told_by_torch(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="job", help="which ones: else all")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.names[0], options.rank, str(options.folder))
        return
    chosen = [job for job in JOBS if not options.names or job.name in options.names]
    if missing():
        chosen = [job for job in chosen if job.name != "slow_link"]
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        for job, text, torchs in results(chosen, Path(folder)):
            first = text.partition("\n")[0]
            good = re.match(job.first, first) is not None
            right += good
            if options.markdown:
                print(f"| {job.words} | {first} | {torchs} |")
            else:
                print(f"{job.name}: {'right' if good else 'WRONG'}\n{text}torch: {torchs}\n")
    print(f"right: {right} of {len(chosen)}", file=sys.stderr)
    sys.exit(right != len(chosen))


if __name__ == "__main__":
    main()
