"""Lightning's Trainer over ringcomm.

torchrun --standalone --nproc-per-node 2 examples/clients/with_lightning.py
"""

import argparse

import lightning
import tiny
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = tiny.Network()

    def training_step(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        return tiny.loss(self.network(inputs), inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tiny.optimizer(self.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    options = parser.parse_args()
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=options.backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(tiny.points(), batch_size=tiny.BATCH))
    tiny.finish(f"lightning-{lightning.__version__}", module.parameters(), module.network.seen)


if __name__ == "__main__":
    main()
