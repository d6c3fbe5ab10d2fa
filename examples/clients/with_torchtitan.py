"""torchtitan over ringcomm: its own way to make groups, and its Llama in two FSDP shards.

RINGCOMM_DEFAULT=cpu torchrun --standalone --nproc-per-node 2 examples/clients/with_torchtitan.py

torchtitan asks torch which backend belongs to the device: RINGCOMM_DEFAULT answers. Its Trainer
wants a GPU, so this calls the parts that the Trainer is made of. With a GPU nothing of this is
needed: `RINGCOMM_DEFAULT=cpu,cuda torchrun ... -m torchtitan.train ...`

Its shards are reduced with PREMUL_SUM, which Gloo refuses. `--sum` lets Gloo run this too.
"""

import argparse
import copy

import tiny
import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch.distributed.fsdp import FSDPModule

# torchtitan says "cuda" where no GPU is; the modules below read these.
torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = torch.cpu

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import CommConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as titan  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry, parallelize_llama  # noqa: E402

LENGTH = 32


def llama() -> torch.nn.Module:
    """The debug model with two layers and an attention that needs no compiler."""
    torch.manual_seed(0)
    config = copy.deepcopy(model_registry("debugmodel").model)
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_weights(buffer_device=None)
    return model


def loss(outputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of guessing each next token."""
    return torch.nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sum", action="store_true", help="reduce with SUM alone, as Gloo must")
    options = parser.parse_args()
    size = titan.init_distributed(CommConfig(trace_buf_size=0))
    parallelism = ParallelismConfig(data_parallel_shard_degree=size, spmd_backend="partial_dtensor")
    model = parallelize_llama(
        llama(),
        parallel_dims=ParallelDims.from_config(parallelism, size),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(options.sum)
    descent = tiny.optimizer(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(tiny.STEPS):
        tokens = torch.randint(0, 2048, (2, LENGTH), generator=generator)
        seen.append(tokens)
        descent.zero_grad()
        (loss(model(tokens), tokens) / size).backward()  # its shards add gradients up
        descent.step()
    parameters = [parameter.full_tensor() for parameter in model.parameters()]
    client = f"torchtitan-{torchtitan.__version__}"
    tiny.finish(client, parameters, seen, (llama(), loss))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
