"""Ray Train over ringcomm, on a cluster of its own on this host.

python examples/clients/with_ray.py
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model


def train(settings: dict[str, Any]) -> None:
    """Run in each worker. Ray has made the process group, and destroys it."""
    sys.path.insert(0, settings["folder"])
    import tiny
    from torch.utils.data import DataLoader

    network = tiny.Network()
    model = prepare_model(network)
    descent = tiny.optimizer(model.parameters())
    for inputs in prepare_data_loader(DataLoader(tiny.points(), batch_size=tiny.BATCH)):
        descent.zero_grad()
        tiny.loss(model(inputs), inputs).backward()
        descent.step()
    tiny.finish(f"ray-{ray.__version__}", network.parameters(), network.seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=2, include_dashboard=False, _temp_dir=folder, _node_ip_address="127.0.0.1"
        )
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": str(Path(__file__).resolve().parent)},
            torch_config=TorchConfig(backend=options.backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()  # raises what a worker raises
        ray.shutdown()


if __name__ == "__main__":
    main()
