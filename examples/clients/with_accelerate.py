"""Accelerate over ringcomm. On the CPU it asks for gloo, whatever it is told.

RINGCOMM_AS=gloo torchrun --standalone --nproc-per-node 2 examples/clients/with_accelerate.py
torchrun --standalone --nproc-per-node 2 examples/clients/with_accelerate.py --backend ringcomm

The second makes the process group first, by name: Accelerate takes one that is there.
"""

import argparse

import accelerate
import tiny
import torch.distributed as dist
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="of a group made here; else Accelerate makes its own")
    options = parser.parse_args()
    if options.backend:
        dist.init_process_group(options.backend)
    accelerator = accelerate.Accelerator(cpu=True)
    network = tiny.Network()
    model, descent, batches = accelerator.prepare(
        network,
        tiny.optimizer(network.parameters()),
        DataLoader(tiny.points(), batch_size=tiny.BATCH),
    )
    for inputs in batches:
        descent.zero_grad()
        accelerator.backward(tiny.loss(model(inputs), inputs))
        descent.step()
    tiny.finish(f"accelerate-{accelerate.__version__}", network.parameters(), network.seen)
    accelerator.end_training()


if __name__ == "__main__":
    main()
