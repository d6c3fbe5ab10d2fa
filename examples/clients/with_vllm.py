"""vLLM on the CPU, cut in two by tensor parallelism: the same tokens over Gloo and ringcomm.

python examples/clients/with_vllm.py --no-own-memory
RINGCOMM_AS=gloo python examples/clients/with_vllm.py --no-own-memory

vLLM starts its two ranks itself and asks for Gloo. On one host, with AVX-512, it adds tensors up in
shared memory of its own, and the process groups only help it start. `--no-own-memory` makes it take
what it takes between hosts and without AVX-512: the process groups. The line at the end says which
it was. The model is a small Llama of random numbers, made here.

On two hosts, with a rank on each, start it on both, and name the first one's address:

python examples/clients/with_vllm.py --first 10.0.0.1 --host 0
python examples/clients/with_vllm.py --first 10.0.0.1 --host 1
"""

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from typing import Any

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import tiny  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import vllm  # noqa: E402
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: E402
from vllm.distributed.parallel_state import get_tp_group  # noqa: E402
from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

RANKS = 2
WORDS = 512
PROMPTS, LENGTH, ANSWER = 4, 16, 128


class Worker(CPUWorker):
    """vLLM's worker, which can do without vLLM's own shared memory and says what it uses."""

    def init_device(self) -> None:
        if not self.vllm_config.additional_config["own_memory"]:
            # vLLM asks this before it takes its own: no where the ranks are on several hosts.
            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
        super().init_device()

    def made_of(self) -> tuple[str, str]:
        """Return the name of what adds up the tensors of a layer, and that of the groups."""
        group = get_tp_group()
        groups = tiny.made_of(group.device_group)
        through = group.device_communicator.dist_module
        return groups if through is torch.distributed else "own", groups


def save_model(folder: str) -> None:
    """Write a Llama of random numbers, the same each time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def settings(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    hosts = {"nnodes": 2, "node_rank": options.host, "master_addr": options.first}
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "tensor_parallel_size": RANKS,
        "distributed_executor_backend": "mp",
        "worker_cls": "with_vllm.Worker",
        "additional_config": {"own_memory": options.own_memory},
        **(hosts if options.first else {}),
    }


def serve(folder: str, options: argparse.Namespace) -> None:
    """Run this host's rank until the first host ends it."""
    config = vllm.EngineArgs(**settings(folder, options)).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def answer(model: vllm.LLM) -> list[list[int]]:
    """Let the model go on from each prompt with what it finds likeliest; return token ids."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, WORDS, (PROMPTS, LENGTH), generator=generator).tolist()
    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = model.generate(asked, greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def timed(model: vllm.LLM) -> tuple[list[list[int]], float]:
    """Return the tokens and the median of the seconds that they take."""
    tokens = answer(model)  # warms up
    seconds = []
    for _ in range(3):
        before = time.perf_counter()
        if answer(model) != tokens:
            raise ArithmeticError("the same prompts got other tokens the second time")
        seconds.append(time.perf_counter() - before)
    return tokens, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-own-memory",
        action="store_false",
        dest="own_memory",
        help="have vLLM add tensors up through the process group",
    )
    parser.add_argument("--first", metavar="ADDRESS", help="of the first of two hosts")
    parser.add_argument("--host", type=int, default=0, help="0 or 1: which of them this is")
    options = parser.parse_args()
    if not options.first:
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        if options.host > 0:
            serve(folder, options)
            return
        model = vllm.LLM(**settings(folder, options))
        tokens, seconds = timed(model)
        backends = set(map(tuple, model.collective_rpc("made_of")))
    ((backend, groups),) = backends
    count = sum(map(len, tokens))
    digest = hashlib.sha256(str(tokens).encode()).hexdigest()[:16]
    print(
        f"client=vllm-{vllm.__version__} tokens={digest} tokens_per_second={count / seconds:.0f} "
        f"backend={backend} groups={groups} ranks={RANKS}",
        flush=True,
    )


if __name__ == "__main__":
    main()
