"""Train the CNN of train_digits.py on workers of a Ray cluster, wherever Ray puts them.

    pip install "ray[train]"
    python examples/ray_train.py --workers 4

Ray makes the process group itself, before it calls the training function: TorchConfig names the
backend, and a setup hook imports ringcomm in each worker, for those that run with
TORCH_DEVICE_BACKEND_AUTOLOAD=0. ringcomm, scikit-learn and this folder must be there on every node.
Exits with a number other than 0 when the accuracy on digits it has not seen is below 0.95.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

try:
    import ray  # type: ignore[import-not-found,unused-ignore]
    from ray.train import ScalingConfig  # type: ignore[import-not-found,unused-ignore]
    from ray.train.torch import (  # type: ignore[import-not-found,unused-ignore]
        TorchConfig,
        TorchTrainer,
    )
except ImportError as missing:
    sys.exit(f'this example needs Ray Train: `pip install "ray[train]"` ({missing})')


def set_up_worker() -> None:
    """Make the name known to torch; runs in each process that Ray starts."""
    import ringcomm  # noqa: F401


def train(settings: dict[str, Any]) -> None:
    """Run in each worker. The process group is there already, and Ray destroys it."""
    sys.path.insert(0, settings["folder"])
    import torch
    import torch.distributed as dist
    import train_digits as digits
    from torch.nn.parallel import DistributedDataParallel

    if dist.get_backend() != settings["backend"]:
        raise RuntimeError(f"the group uses {dist.get_backend()}, not {settings['backend']}")
    options = argparse.Namespace(**settings)
    torch.manual_seed(options.seed)
    learn, test = digits.digits(options.seed)
    model = DistributedDataParallel(digits.network())
    digits.train(model, learn, options)
    score = digits.accuracy(model.module, test)
    if score < digits.ENOUGH:
        raise ArithmeticError(f"rank {dist.get_rank()}: accuracy={score:.2f} is too low")
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"accuracy={score:.2f} backend={options.backend} ranks={ranks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = str(Path(__file__).resolve().parent)
    ray.init(runtime_env={"worker_process_setup_hook": set_up_worker})
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "folder": folder},
        torch_config=TorchConfig(backend=options.backend),
        scaling_config=ScalingConfig(num_workers=options.workers),
    )
    trainer.fit()  # raises what a worker raises


if __name__ == "__main__":
    main()
