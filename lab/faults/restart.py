"""A rank of a job whose ranks are killed again and again, under torchrun --max-restarts.

    restart.py FOLDER BACKEND KILLS

Every other life is over TCP. Each rank of each life leaves a file: when it began, when its imports
were done, when it had its first result, and when it was to die.
"""

import time

BEGAN = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ringcomm  # noqa: F401, E402


def main() -> None:
    folder, backend, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if life % 2:
        os.environ["RINGCOMM_TRANSPORT"] = "tcp"
    said = {"life": life, "began": BEGAN, "imported": time.monotonic()}
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(1000) * (rank + life)
    dist.all_reduce(tensor)
    said["exact"] = tensor.eq(sum(range(size)) + size * life).all().item()
    said["ready"] = time.monotonic()
    chance = random.Random(life)
    victim, end = chance.randrange(size), time.monotonic() + chance.uniform(0.1, 0.4)
    file = folder / f"{life}.{rank}"
    while life < kills:
        if rank == victim and time.monotonic() > end:
            file.write_text(json.dumps({**said, "killed": time.monotonic()}))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)
    file.write_text(json.dumps(said))
    dist.destroy_process_group()


main()
