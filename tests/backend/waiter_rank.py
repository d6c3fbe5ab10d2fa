"""A rank of test_waiting.py: synchronous collectives, beside a thread that waits for a message.

Writes JSON into a file of its own: the seconds of each, in turns without and with such a thread.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ringcomm  # noqa: F401


def main(folder: Path, turns: int, calls: int) -> None:
    dist.init_process_group("ringcomm")
    me, tensor, message = dist.get_rank(), torch.ones(4), torch.zeros(1)
    alone: list[float] = []
    beside: list[float] = []
    for turn in range(turns):
        waiter = threading.Thread(target=dist.recv, args=(message, 1 - me), kwargs={"tag": 5})
        if turn % 2:
            waiter.start()
            time.sleep(0.05)  # until it has lost its patience
        dist.barrier()
        for _ in range(calls):
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            (beside if turn % 2 else alone).append(time.perf_counter() - begin)
            time.sleep(0.0003)
        if turn % 2:
            dist.send(torch.full((1,), float(turn)), 1 - me, tag=5)
            waiter.join()
            assert message.item() == turn
    (folder / f"rank{me}").write_text(json.dumps({"alone": alone, "beside": beside}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
