"""The Trainer of transformers over ringcomm. On the CPU it asks for gloo, whatever it is told.

RINGCOMM_AS=gloo torchrun --standalone --nproc-per-node 2 examples/clients/with_trainer.py
torchrun --standalone --nproc-per-node 2 examples/clients/with_trainer.py --backend ringcomm

The second makes the process group first, by name: the Trainer takes one that is there.
"""

import argparse
import tempfile

import tiny
import torch
import torch.distributed as dist
import transformers


class Model(torch.nn.Module):
    """The model of a Trainer: called with a batch's names, it returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = tiny.Network()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": tiny.loss(self.network(inputs), inputs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="of a group made here; else the Trainer makes its own")
    options = parser.parse_args()
    if options.backend:
        dist.init_process_group(options.backend)
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=1,
            per_device_train_batch_size=tiny.BATCH,
            max_grad_norm=0.0,  # else it clips at 1.0
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        descent = tiny.optimizer(model.parameters())
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=[{"inputs": point} for point in tiny.points()],
            optimizers=(descent, torch.optim.lr_scheduler.ConstantLR(descent, 1.0)),
        )
        trainer.train()
    client = f"trainer-{transformers.__version__}"
    tiny.finish(client, model.parameters(), model.network.seen)


if __name__ == "__main__":
    main()
