"""Megatron Core over ringcomm: a small GPT in tensor, pipeline and data parallel groups.

torchrun --standalone --nproc-per-node 2 examples/clients/with_megatron.py
torchrun --standalone --nproc-per-node 4 examples/clients/with_megatron.py --pipeline 2
torchrun --standalone --nproc-per-node 4 examples/clients/with_megatron.py

Each layer is shared by `--tensor` ranks, two if you don't say, and there are `--pipeline` stages of
layers, one if you don't say. More ranks than that are data parallel: Megatron's own DDP averages
their gradients. `--backend gloo` runs the same over Gloo.

Megatron says "cuda" in many places. This script takes that for the CPU: by the class CPU, by
replacing torch.cuda.current_device, and by the random numbers that Megatron uses for inference,
which ask no GPU for its state. It changes nothing in Megatron. With GPUs you need none of this.
"""

import argparse
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore", module="megatron")  # of what it would have with a GPU
import megatron.core  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

WORDS = 64
LENGTH = 16
MICRO_BATCHES = 2  # a step and data parallel rank

Whole = dict[str, torch.Tensor]
Part = tuple[int | None, torch.Tensor]


class CPU(TorchFunctionMode):
    """Takes "cuda" for the CPU: in `torch.zeros([], device="cuda")`, and in `weight.cuda()`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def build(tensor: int, pipeline: int) -> GPTModel:
    """Make this rank's part of the model; it has Megatron make the groups for it."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,  # else it compiles
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,  # else it waits for a GPU
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )


def batch(step: int, micro_batch: int, replica: int) -> torch.Tensor:
    """Return tokens; no two calls return the same ones."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + replica)
    return torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)


def losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of guessing each next token; before the last stage, what it passes on."""
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])


def names(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters by the names that they have in the whole model."""
    layers = {
        f"decoder.layers.{i}.": f"decoder.layers.{layer.layer_number - 1}."
        for i, layer in enumerate(model.decoder.layers)
    }
    for name, parameter in model.named_parameters():
        old = next(filter(name.startswith, layers), "")
        if name == "output_layer.weight":  # of another stage than the embedding that it copies
            name = "embedding.word_embeddings.weight"
        yield layers.get(old, "") + name.removeprefix(old), parameter


def cut(parameter: torch.nn.Parameter) -> int | None:
    """The dimension along which tensor parallel ranks share a parameter, if they share it."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def alone(steps: int, replicas: int) -> tuple[Whole, Whole]:
    """Train in this process on all ranks' data; return the parameters before and after."""
    model = build(1, 1)
    before = {name: parameter.detach().clone() for name, parameter in names(model)}
    descent = tiny.optimizer(model.parameters())
    for step in range(steps):
        descent.zero_grad()
        for part in itertools.product(range(MICRO_BATCHES), range(replicas)):
            loss = losses(model, batch(step, *part)).mean()
            (loss / (MICRO_BATCHES * replicas)).backward()
        descent.step()
    return before, {name: parameter.detach() for name, parameter in names(model)}


@torch.no_grad()
def load(model: GPTModel, whole: Whole) -> None:
    """Give each rank its part of these parameters."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in names(model):
        part = whole[name]
        if (dimension := cut(parameter)) is not None:
            part = part.chunk(size, dimension)[rank]
        parameter.copy_(part)


def forward(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """Do what Megatron's schedules call for each micro-batch."""
    return losses(model, next(batches)), lambda output: (output.mean(), {})


def train(model: GPTModel, steps: int) -> None:
    """Train as Megatron's training loop does: with its schedule, DDP and optimizer."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    descent = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="sgd",
            lr=tiny.RATE,
            sgd_momentum=0.0,
            weight_decay=0.0,
            clip_grad=0.0,
        ),
        [wrapped],
    )
    replica = parallel_state.get_data_parallel_rank()
    schedule = get_forward_backward_func()
    for step in range(steps):
        wrapped.zero_grad_buffer()
        descent.zero_grad()
        schedule(
            forward_step_func=forward,
            data_iterator=iter([batch(step, i, replica) for i in range(MICRO_BATCHES)]),
            model=[wrapped],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        descent.step()


def gather(model: GPTModel) -> list[Whole]:
    """Return the whole model as each data parallel replica has it, put together from all ranks."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank()
    mine = [(name, cut(whole), whole.detach().clone()) for name, whole in names(model)]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (replica, rank, mine))
    copies: dict[int, dict[str, dict[int, Part]]] = {}
    for replica, rank, parts in everybody:
        for name, dimension, part in parts:
            known = copies.setdefault(replica, {}).setdefault(name, {})
            if not torch.equal(known.setdefault(rank, (dimension, part))[1], part):
                raise ArithmeticError(f"stages have different {name}")
    return [{name: join(name, copy[name]) for name in copy} for copy in copies.values()]


def join(name: str, parts: dict[int, Part]) -> torch.Tensor:
    """Put together what the tensor parallel ranks have of a parameter."""
    dimension = parts[0][0]
    tensors = [parts[rank][1] for rank in sorted(parts)]
    if dimension is not None:
        return torch.cat(tensors, dimension)
    if not all(torch.equal(tensors[0], tensor) for tensor in tensors):
        raise ArithmeticError(f"tensor parallel ranks have different {name}")
    return tensors[0]


def check(replicas: list[Whole], expected: Whole) -> str:
    """Say what the ranks ended with. Raises ArithmeticError when it is wrong."""
    mine = list(map(replicas[0].__getitem__, expected))
    if not all(tiny.alike(mine, list(map(other.__getitem__, expected))) for other in replicas):
        raise ArithmeticError("replicas have different parameters: nothing was averaged")
    pairs = zip(mine, expected.values(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    if not difference < 1e-6:
        raise ArithmeticError(f"one process alone gets other parameters, by {difference:.1e}")
    return f"difference={difference:.1e} parameters={tiny.digest(mine)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--pipeline", type=int, default=1, help="stages of layers")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    size = dist.get_world_size()
    initialize_rng_tracker(inference_rng_tracker=True)
    before, expected = alone(tiny.STEPS, size // (options.tensor * options.pipeline))
    model = build(options.tensor, options.pipeline)
    load(model, before)
    train(model, tiny.STEPS)
    line = check(gather(model), expected)
    backend = tiny.made_of(parallel_state.get_tensor_model_parallel_group())
    if dist.get_rank() == 0:
        client = f"megatron-{megatron.core.__version__}"
        print(f"client={client} steps={tiny.STEPS} {line} backend={backend} ranks={size}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.cuda.current_device = lambda: "cpu"
    with CPU():
        main()
