"""Pass a token around a ring, then add up a tensor over the same ring by hand.

    torchrun --standalone --nproc-per-node 2 examples/ring.py

Shows `send`/`recv` for what has an order, and `isend`/`irecv` for neighbours that send at the same
time. The sum goes around twice: n - 1 steps after which each rank has the sum of one chunk, and
n - 1 that hand these sums on. Exits with 1 when `all_reduce` says something else.
"""

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def pass_token() -> int:
    """Each rank adds its number to the token; rank 0 gets it back at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1, dtype=torch.int64)
    if rank > 0:
        dist.recv(token, src=rank - 1)
    token += rank
    dist.send(token, dst=(rank + 1) % ranks)
    if rank == 0:
        dist.recv(token, src=ranks - 1)
    dist.broadcast(token, src=0)
    return int(token.item())


def exchange(send: torch.Tensor, receive: torch.Tensor) -> None:
    """Send to the next rank while the previous one sends to this one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(send, dst=(rank + 1) % ranks)
    received = dist.irecv(receive, src=(rank - 1) % ranks)
    for work in (sent, received):
        if work is not None:
            work.wait()


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor`, on every rank, by the sum over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.tensor_split(ranks))  # views, of almost equal lengths
    for step in range(ranks - 1):
        ours, theirs = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        received = torch.empty_like(theirs)
        exchange(ours, received)
        theirs += received
    for step in range(ranks - 1):
        exchange(chunks[(rank - step + 1) % ranks], chunks[(rank - step) % ranks])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--elements", type=int, default=1_000_001)
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        raise SystemExit("a ring needs two ranks: torchrun --nproc-per-node 2")

    token = pass_token()
    # Whole numbers, so that the order of the additions makes no difference.
    generator = torch.Generator().manual_seed(rank)
    by_hand = torch.randint(-1000, 1000, (options.elements,), generator=generator).float()
    expected = by_hand.clone()
    ring_all_reduce(by_hand)
    dist.all_reduce(expected)
    wrong = int((by_hand != expected).sum())
    dist.destroy_process_group()
    if rank == 0:
        print(f"token={token} wrong={wrong} backend={options.backend} ranks={ranks}")
    return 0 if token == sum(range(ranks)) and wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
