"""Train on sites far apart: each by itself, with rounds in the background (DiLoCo).

    ringcomm elastic store --port 29500 &
    for i in 1 2; do RINGCOMM_ELASTIC=127.0.0.1:29500 python examples/sites.py & done

Each process is a site with data of its own, or one of `--unit` that make a site. Kill one, and the
others go on; start one more, and it joins them. Every `--every` inner steps, or `--seconds`, a
round averages how far the sites have moved. The model predicts the letters of examples/diloco.py.
Each site prints one line at the end, and exits with 1 if the loss of the outer copy is above
`--enough`. benchmarks/diloco_sites.py runs it between two sites.
"""

import argparse
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import diloco
import torch
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import ringcomm.elastic as elastic


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="host:port; default: RINGCOMM_ELASTIC")
    parser.add_argument("--sites", type=int, default=2, help="sites that begin")
    parser.add_argument("--unit", type=int, default=1, help="processes of a site")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--every", type=int, default=20, help="inner steps between two rounds")
    parser.add_argument("--seconds", type=float, help="between two rounds, instead of --every")
    parser.add_argument("--bits", type=int, default=8, help="for each number: 32, 16, 8, 4 or 2")
    parser.add_argument("--topk", type=int, help="send only so many of each 4,096 numbers")
    parser.add_argument("--fragments", type=int, default=1, help="that take turns")
    parser.add_argument("--delay", type=int, default=0, help="inner steps that a round may take")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a site and step")
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--outer-rate", type=float, default=0.7, help="of the outer optimizer")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enough", type=float, default=3.0, help="the loss to be reached")
    return parser.parse_args(words)


def train(world: elastic.World, options: argparse.Namespace) -> tuple[float, str]:
    """Return the outer copy's loss on a sample that all sites have, and a line about the run."""
    text = torch.tensor([byte % diloco.LETTERS for byte in Path(diloco.__file__).read_bytes()])
    torch.manual_seed(options.seed)
    net: torch.nn.Module = diloco.Model(options.width, options.layers)
    if options.unit > 1:
        net = DDP(net, process_group=world.mesh["shard"].get_group(), init_sync=False)
    inner = torch.optim.AdamW(net.parameters(), lr=options.rate)
    rate, momentum = options.outer_rate, options.momentum
    outer_opt = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    outer = world.outer(
        net,
        inner,
        outer_opt,
        every=timedelta(seconds=options.seconds) if options.seconds else options.every,
        bits=options.bits,
        topk=options.topk,
        fragments=options.fragments,
        delay=options.delay,
    )
    world.leave(on_signal=signal.SIGTERM)
    chance = torch.Generator().manual_seed(1000 * options.seed + world.rank)
    losses: list[str] = []  # mean losses of inner steps, by round
    total, began, first, waited = 0.0, time.perf_counter(), outer.steps, outer.waited
    while outer.rounds < options.rounds:
        before = outer.rounds
        with outer.step():
            loss = diloco.loss_of(net, diloco.batch(text, options.batch, chance))
            inner.zero_grad()
            loss.backward()
            inner.step()  # after which there may be a round
        total += loss.item()
        if outer.rounds > before:
            losses.append(f"{total / (outer.steps - first):.4f}")
            total, first = 0.0, outer.steps
    seconds, waited = time.perf_counter() - began, outer.waited - waited

    outer.wait()
    sample = diloco.batch(text, 512, torch.Generator().manual_seed(0))
    with torch.no_grad():
        reached = diloco.loss_of(outer.model, sample).item()
    equal = sum(p.double().sum().item() for p in outer.model.parameters()).hex()
    return reached, (
        f"loss={reached:.4f} rounds={outer.rounds} steps={outer.steps} seconds={seconds:.2f} "
        f"waited={waited:.3f} sum={equal} losses={','.join(losses)}"
    )


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    world = elastic.join(
        options.store,
        start=options.sites * options.unit,
        unit=options.unit,
        timeout=timedelta(minutes=2),
    )
    reached, line = train(world, options)
    print(line)
    return 0 if reached < options.enough else 1


if __name__ == "__main__":
    sys.exit(main())
