"""Lightning Fabric over ringcomm: a loop of one's own.

torchrun --standalone --nproc-per-node 2 examples/clients/with_fabric.py
"""

import argparse

import lightning
import tiny
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    options = parser.parse_args()
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=options.backend),
    )
    fabric.launch()
    network = tiny.Network()
    model, descent = fabric.setup(network, tiny.optimizer(network.parameters()))
    for inputs in fabric.setup_dataloaders(DataLoader(tiny.points(), batch_size=tiny.BATCH)):
        descent.zero_grad()
        fabric.backward(tiny.loss(model(inputs), inputs))
        descent.step()
    tiny.finish(f"fabric-{lightning.__version__}", network.parameters(), network.seen)


if __name__ == "__main__":
    main()
