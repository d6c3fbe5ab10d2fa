"""ignite over ringcomm. It averages for the names it knows; for others it trains each rank alone.

RINGCOMM_AS=gloo torchrun --standalone --nproc-per-node 2 examples/clients/with_ignite.py
torchrun --standalone --nproc-per-node 2 examples/clients/with_ignite.py --backend ringcomm

The second makes the process group first, by name, and wraps the model itself. With `--automatic`
too it leaves that to ignite, which does nothing then: the check at the end fails.
"""

import argparse

import ignite
import ignite.distributed as idist
import tiny
import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch.nn.parallel import DistributedDataParallel


def training(local_rank: int, by_hand: bool) -> None:
    network = tiny.Network()
    model = DistributedDataParallel(network) if by_hand else idist.auto_model(network)
    descent = idist.auto_optim(tiny.optimizer(model.parameters()))
    everything, ranks = tiny.points(), idist.get_world_size()
    # auto_dataloader gives each rank its part of a data set; it takes the batch of all ranks.
    batches = idist.auto_dataloader(everything, batch_size=ranks * tiny.BATCH, shuffle=True)

    def step(engine: Engine, inputs: torch.Tensor) -> float:
        descent.zero_grad()
        value = tiny.loss(model(inputs), inputs)
        value.backward()
        descent.step()
        return value.item()

    Engine(step).run(batches, max_epochs=1)
    tiny.finish(f"ignite-{ignite.__version__}", network.parameters(), network.seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="of a group made here; else ignite makes its own")
    parser.add_argument("--automatic", action="store_true", help="idist.auto_model all the same")
    options = parser.parse_args()
    if options.backend:
        dist.init_process_group(options.backend)
        training(0, by_hand=not options.automatic)
        dist.destroy_process_group()
    else:
        with idist.Parallel(backend="gloo") as parallel:
            parallel.run(training, by_hand=False)


if __name__ == "__main__":
    main()
