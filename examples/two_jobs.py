"""Run two jobs on one host at the same time.

    python examples/two_jobs.py

Starts `torchrun --standalone` twice, which picks a free port for each job; nothing else is needed
to keep them apart. The jobs wait for each other, so that both are there while they add up numbers;
each exits with 1 when a rank or a number of the other one is among its own.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

JOBS = {"first": 1.0, "second": 10.0}  # and the number that each of its ranks contributes


def start(job: str, folder: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(options.ranks)]
    arguments = ["--backend", options.backend, "--steps", str(options.steps)]
    arguments += ["--job", job, "--folder", folder]
    return subprocess.Popen([*launcher, __file__, *arguments])


def both(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        running = [start(job, folder, options) for job in JOBS]
        try:
            codes = [process.wait(timeout=120) for process in running]
        finally:
            for process in running:
                process.terminate()  # torchrun takes its ranks along
                process.wait()
    if any(codes):
        print(f"the jobs ended with {codes}", file=sys.stderr)
        return 1
    print(f"both jobs are right backend={options.backend} ranks={options.ranks}")
    return 0


def one_job(options: argparse.Namespace) -> int:
    """Run one rank of a job."""
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (options.folder / f"{options.job}-{rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(options.folder.iterdir())) < len(JOBS) * ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{options.job}: the other job did not come")
        time.sleep(0.01)

    members: list[tuple[str, int] | None] = [None] * ranks
    dist.all_gather_object(members, (options.job, rank))
    good = members == [(options.job, other) for other in range(ranks)]
    number = JOBS[options.job]
    for _ in range(options.steps):
        total = torch.full((50_000,), number)
        dist.all_reduce(total)
        good = good and bool((total == number * ranks).all())
    dist.destroy_process_group()
    if not good:
        print(f"{options.job}: {members} made {total[0]} of {number}", file=sys.stderr)
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--ranks", type=int, default=2, help="of each job")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return one_job(options) if options.job else both(options)


if __name__ == "__main__":
    sys.exit(main())
