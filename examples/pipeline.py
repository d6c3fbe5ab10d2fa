"""Train a model as a pipeline: one stage a rank, and microbatches that keep all stages busy.

    torchrun --standalone --nproc-per-node 2 examples/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py --schedule 1f1b

Shows `torch.distributed.pipelining`: a stage, a schedule, and `step`, which gets inputs on the
first rank and labels on the last. Every rank also trains the whole model alone, and exits with 1
when its own stage differs from that.
"""

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
WIDTH = 16


def whole_model(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.flip(1) / 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def main() -> int:
    options = parse()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = ranks - 1

    mine = whole_model(ranks)[rank]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    stage = PipelineStage(mine, rank, ranks, torch.device("cpu"))
    pipeline = SCHEDULES[options.schedule](
        stage, options.microbatches, loss_fn=nn.functional.mse_loss
    )
    whole = whole_model(ranks)
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    losses: list[torch.Tensor] = []
    for step in range(options.steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        losses = []
        pipeline.step(
            *([inputs] if rank == 0 else []),
            target=labels if rank == last else None,
            losses=losses if rank == last else None,
        )
        optimizer.step()

        whole_optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(inputs), labels)
        loss.backward()
        whole_optimizer.step()

    difference = max(
        (a - b).abs().max().item()
        for a, b in zip(mine.parameters(), whole[rank].parameters(), strict=True)
    )
    if rank == last:
        difference = max(difference, abs(torch.stack(losses).mean().item() - loss.item()))
    dist.destroy_process_group()
    if rank == last:
        words = f"schedule={options.schedule} difference={difference:.1e}"
        print(f"{words} backend={options.backend} ranks={ranks}")
    return 0 if difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
