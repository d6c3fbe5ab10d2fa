"""DeepSpeed over ringcomm: ZeRO in any stage.

torchrun --standalone --nproc-per-node 2 examples/clients/with_deepspeed.py --stage 3
"""

import argparse
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # where a GPU is, leave it to DeepSpeed

import deepspeed
import tiny
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--stage", type=int, default=1)
    options = parser.parse_args()
    deepspeed.init_distributed(dist_backend=options.backend)
    network = tiny.Network()
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=tiny.optimizer(network.parameters()),
        config={
            "train_micro_batch_size_per_gpu": tiny.BATCH,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # else DeepSpeed clips at 1.0
        },
    )
    everything, mine = tiny.points(), dist.get_rank()
    for inputs in everything.split(tiny.BATCH)[mine :: dist.get_world_size()]:
        engine.backward(tiny.loss(engine(inputs), inputs))
        engine.step()
    # In stage 3 each rank has a part of each parameter.
    with deepspeed.zero.GatheredParameters(list(network.parameters())):
        parameters = [torch.clone(parameter.detach()) for parameter in network.parameters()]
    tiny.finish(f"deepspeed-{deepspeed.__version__}-stage{options.stage}", parameters, network.seen)


if __name__ == "__main__":
    main()
