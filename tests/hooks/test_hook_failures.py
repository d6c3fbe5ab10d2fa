"""A rank that dies inside a hook is named by the others, and a program that fails ends at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from lab import ROOT
from lab.limits import claim, limit
from lab.outcomes import Outcome, check, in_child, outcome_of, rank_of
from lab.ports import free_port
from lab.ranks import Rank, Ranks, join, ranks
from ringcomm.compression import hooks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3, backend=None) as some:
        yield some


def die(rank: Rank, life: str, victim: int) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, life), seconds=20)
        model = DistributedDataParallel(nn.Linear(300, 300))
        state = hooks.CompressionState(None, "int8", flat=True)

        def deadly(
            state: hooks.CompressionState, bucket: dist.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            if rank.index == victim and state._iterations == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return hooks.compress(state, bucket)

        model.register_comm_hook(state, deadly)

        def train() -> None:
            for _ in range(5):
                model(torch.ones(4, 300)).sum().backward()

        return outcome_of(train)

    return in_child(body)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_a_hook_is_named(three: Ranks, victim: int) -> None:
    outcomes = three(die, f"hook{victim}", victim)
    assert outcomes[victim] == {"killed": signal.SIGKILL}
    for index, outcome in enumerate(outcomes):
        if index != victim:
            # torch wraps what a hook in Python raises: the type is in the text.
            assert outcome["kind"] == "RuntimeError"
            check(outcome | {"kind": "DistBackendError"}, f"rank {victim}", "DistBackendError: all")


def die_in_call(rank: Rank, life: str) -> Outcome:
    def body() -> Outcome:
        join(rank_of(rank, life), seconds=20)
        tensor = torch.ones(1000)
        ringcomm.compression.quantized_all_reduce(tensor, format="bf16")
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome_of(lambda: ringcomm.compression.quantized_all_reduce(tensor))

    return in_child(body)


def test_a_rank_killed_before_a_call_is_named(three: Ranks) -> None:
    outcomes = three(die_in_call, "call")
    assert outcomes[1] == {"killed": signal.SIGKILL}
    for index in (0, 2):
        check(outcomes[index], "rank 1")


LEAVES = """
import datetime, torch, torch.distributed as dist, ringcomm
dist.init_process_group("ringcomm", timeout=datetime.timedelta(seconds=1000))
tensor = torch.ones(1000)
ringcomm.compression.quantized_all_reduce(tensor)
if dist.get_rank() == 0:
    work = ringcomm.compression.quantized_all_reduce(tensor, async_op=True)
    raise SystemExit(3)  # while the thread waits for rank 1
input()  # until the process of rank 0 has ended
try:
    ringcomm.compression.quantized_all_reduce(tensor)
except dist.DistBackendError as error:
    print("told:", error)
    raise SystemExit(4)
"""


def test_a_program_that_ends_while_its_thread_waits() -> None:
    """It ends at once, without a crash, and its peers hear of it."""
    began = time.monotonic()
    port = free_port()
    some = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES],
            env={
                **os.environ,
                "RANK": str(index),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate("go on\n", timeout=limit(60))[0] for process in some]
    assert some[0].returncode == 3, outputs[0]
    assert some[1].returncode == 4, outputs[1]
    assert "rank 0" in outputs[1]
    assert time.monotonic() - began < claim(40)
