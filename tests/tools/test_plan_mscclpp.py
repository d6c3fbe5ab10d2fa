"""Execution plans of MSCCL++: what is written does the collective, and what is read is the same."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT
from ringcomm.__main__ import main
from ringcomm.tools.plan import mscclpp, of_mscclpp
from ringcomm.tools.plan.check import PlaceError
from ringcomm.tools.plan.draw.story import story_of
from ringcomm.tools.plan.source import plans_of
from ringcomm.tools.plan.tables import GroupPlans

EXAMPLES = ROOT / "examples" / "algorithms"
Json = dict[str, Any]


class Machine:
    """Runs the JSON: a number for each chunk, ranks in any order, and ports that are late.

    A port is a queue: what is put is read only when it is delivered. Threads of a block meet at
    `nop` alone, so an operation must not need what others moved since then.
    """

    def __init__(self, body: Json, inputs: list[list[int]], chance: random.Random) -> None:
        self.gpus, self.chance = body["gpus"], chance
        self.memory = [
            {"i": list(own), "o": [-1] * g["output_chunks"], "s": [-1] * g["scratch_chunks"]}
            for own, g in zip(inputs, self.gpus, strict=True)
        ]
        self.links = [[self.link(r, k) for k in ("memory", "port")] for r in range(len(self.gpus))]
        self.arrived: dict[Any, int] = {}
        self.queues: dict[Any, deque[Any]] = {}
        self.at = [0] * len(self.gpus)
        self.moved: list[list[Any]] = [[] for _ in self.gpus]
        self.alone = [False] * len(self.gpus)

    def link(self, rank: int, kind: str) -> list[tuple[int, int]]:
        """The peer of each channel, and which one of this pair it is."""
        gpu = self.gpus[rank]
        peers = [p for c in gpu["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
        block = gpu["threadblocks"][0]["channels"]
        ids = [i for c in block if c["channel_type"] == kind for i in c["channel_ids"]]
        return [(peers[i], peers[:i].count(peers[i])) for i in ids]

    def channel(self, rank: int, op: Json) -> tuple[str, int, int]:
        kind = op["channel_type"]
        return (kind, *self.links[rank][kind == "port"][op["channel_ids"][0]])

    def spot(self, rank: int, op: Json, buffer: Json) -> tuple[int, str, int, int]:
        which = buffer.get("type")
        if which is None:
            gpu = self.gpus[rank]
            refs = gpu["threadblocks"][0]["remote_buffer_refs"]
            own = [r for r in refs if r["access_channel_type"] == op["channel_type"]]
            ids = [i for r in own for i in r["remote_buffer_ids"]]
            remote = gpu["remote_buffers"][ids[buffer["buffer_id"]]]
            rank, which = remote["rank"], remote["type"]
        end = buffer["index"] + buffer["size"]
        assert end <= len(self.memory[rank][which])
        return rank, which, buffer["index"], end

    def move(self, target: Any, sources: list[Any]) -> None:
        values = [self.memory[r][which][first:end] for r, which, first, end in sources]
        assert all(number >= 0 for one in values for number in one), "reads what nobody wrote"
        rank, which, first, end = target
        self.memory[rank][which][first:end] = [sum(one) for one in zip(*values, strict=True)]

    def deliver(self, key: Any) -> None:
        what = self.queues[key].popleft()
        if what:
            self.move(*what)
        else:
            self.arrived[key] = self.arrived.get(key, 0) + 1

    def step(self, rank: int) -> bool:
        """Do the next operation of a rank; False: it waits."""
        op = self.gpus[rank]["threadblocks"][0]["ops"][self.at[rank]]
        name, moved = op["name"], self.moved[rank]
        if name == "nop":
            moved.clear()
            self.alone[rank] = False
        elif name in ("copy", "re") or (name == "put" and op["channel_type"] == "memory"):
            target = self.spot(rank, op, op["dst_buff"][0])
            sources = [self.spot(rank, op, one) for one in op["src_buff"]]
            assert not self.alone[rank]
            for old, olds in moved:
                assert not any(meet(target, one) for one in (old, *olds))
                assert not any(meet(one, old) for one in sources)
            moved.append((target, sources))
            self.move(target, sources)
        else:
            kind, peer, number = self.channel(rank, op)
            key, back = (rank, peer, kind, number), (peer, rank, kind, number)
            if name == "wait":
                if not self.arrived.get(back):
                    return False
                self.arrived[back] -= 1
                self.alone[rank] = True
            else:
                assert not moved
                queue = self.queues.setdefault(key, deque())
                if name in ("put", "pwsf"):
                    source = self.spot(rank, op, op["src_buff"][0])
                    queue.append((self.spot(rank, op, op["dst_buff"][0]), [source]))
                if name in ("signal", "pwsf"):
                    queue.append(None)
                if name in ("pwsf", "flush") or kind == "memory":
                    while queue:
                        self.deliver(key)
                self.alone[rank] |= name in ("pwsf", "flush")
        self.at[rank] += 1
        return True

    def run(self) -> list[list[int]]:
        ends = [len(gpu["threadblocks"][0]["ops"]) for gpu in self.gpus]
        while True:
            left = [("rank", r) for r in range(len(ends)) if self.at[r] < ends[r]]
            late = [("queue", key) for key, queue in self.queues.items() if queue]
            if not left and not late:
                break
            self.chance.shuffle(left)
            self.chance.shuffle(late)
            choices: list[Any] = left + late if self.chance.random() < 0.5 else late + left
            done = (kind == "queue" or self.step(one) for kind, one in choices)
            for (kind, one), did in zip(choices, done, strict=False):
                if did:
                    if kind == "queue":
                        self.deliver(one)
                    break
            else:
                raise AssertionError("all ranks wait")
        assert not any(self.arrived.values())
        return [own["o"] for own in self.memory]


def meet(one: Any, other: Any) -> bool:
    return one[:2] == other[:2] and one[2] < other[3] and other[2] < one[3]


def check(body: Json, collective: str, seed: int = 0) -> None:
    """Run it in several orders, with a contribution of each rank that no sum hides."""
    ranks, count = len(body["gpus"]), body["gpus"][0]["input_chunks"]
    inputs = [[4096**rank * (chunk + 1) for chunk in range(count)] for rank in range(ranks)]
    sums = [sum(row) for row in zip(*inputs, strict=True)]
    own = count // ranks
    wanted = {
        "all_reduce": [sums] * ranks,
        "all_gather": [[one for row in inputs for one in row]] * ranks,
        "reduce_scatter": [sums[r * own : (r + 1) * own] for r in range(ranks)],
        "all_to_all": [
            [x for i in inputs for x in i[r * own : (r + 1) * own]] for r in range(ranks)
        ],
    }[collective]
    for each in range(4):
        assert Machine(body, inputs, random.Random(seed + each)).run() == wanted


CASES = [
    (algorithm, collective, ranks)
    for algorithm, collectives in {
        "ring": ("all_reduce", "all_gather", "reduce_scatter"),
        "pairwise": ("all_gather", "reduce_scatter", "all_to_all"),
        "doubling": ("all_reduce",),
        "bruck": ("all_reduce", "all_gather"),
        "ring:ring": ("all_reduce", "all_gather", "reduce_scatter"),
        "halving_doubling:halving_doubling": ("all_reduce", "all_gather"),
        "swing:swing": ("all_reduce",),
    }.items()
    for collective in collectives
    for ranks in range(2, 9)
    if ranks in (2, 4, 8) or algorithm.split(":")[0] not in ("halving_doubling", "swing")
]


def made(algorithm: str, collective: str, ranks: int, hosts: int, each: int = 64) -> GroupPlans:
    name = f"{EXAMPLES}/{algorithm.replace(':', '.py:')}" if ":" in algorithm else algorithm
    return plans_of(collective, ranks, each * ranks, hosts, name)


@pytest.mark.parametrize(("algorithm", "collective", "ranks"), CASES)
def test_there_and_back(algorithm: str, collective: str, ranks: int) -> None:
    """Between hosts, and inside of them; and read again it is the same text."""
    for hosts in {ranks, 2 - ranks % 2}:
        group = made(algorithm, collective, ranks, hosts)
        text = mscclpp.text_of(group)
        check(json.loads(text), collective)
        again = of_mscclpp.parse(json.loads(text))
        assert again.shape == group.shape
        assert again.algorithm == group.algorithm
        assert mscclpp.text_of(again) == text
        story = story_of(again)
        cells = [(rank, c) for rank in range(ranks) for c in range(len(story.chunks))]
        wanted = [cell for cell in cells if story.wanted(*cell)]
        assert all(story.done(rank, story.rounds[-1], c) for rank, c in wanted)


def test_segments_and_credits() -> None:
    """Long messages go in segments, through slots that credits give back."""
    group = made("ring", "all_reduce", 3, 3, 1 << 20)
    assert any(step.lane == "credit" for step in group.steps()[0])
    body = json.loads(mscclpp.text_of(group))
    assert body["gpus"][0]["scratch_chunks"] < 4 * body["gpus"][0]["input_chunks"]
    check(body, "all_reduce")


@pytest.mark.parametrize("hosts", [1, 3])
def test_no_operation_is_spare(hosts: int) -> None:
    """Without any one operation the machine stops, or the sums are wrong."""
    whole = json.loads(mscclpp.text_of(made("ring:ring", "all_reduce", 3, hosts)))
    spare = []
    for number, op in enumerate(whole["gpus"][1]["threadblocks"][0]["ops"]):
        body = copy.deepcopy(whole)
        del body["gpus"][1]["threadblocks"][0]["ops"][number]
        try:
            check(body, "all_reduce")
        except AssertionError:
            continue
        spare.append((number, op["name"]))
    assert spare == []


# ---- what one of them cannot say


@pytest.mark.parametrize(
    ("collective", "size", "hosts", "algorithm", "sentence"),
    [
        ("broadcast", 256, 4, None, "MSCCL++ has no broadcast"),
        ("barrier", 256, 4, None, "MSCCL++ has no barrier"),
        ("all_reduce", 256, 1, None, "rank 0 reads the window of rank 1"),
        ("all_reduce", 40, 4, "ring", "parts have 4 bytes"),
        ("all_gather", 40, 4, "ring", "shards differ in length"),
        ("all_reduce", 0, 4, "ring", "parts have 0 bytes"),
    ],
)
def test_plans_that_it_cannot_say(
    collective: str, size: int, hosts: int, algorithm: str | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence.replace("+", r"\+")):
        mscclpp.text_of(plans_of(collective, 4, size, hosts, algorithm))


def foreign() -> Json:
    """Two ranks of one host that share an all_reduce in place, by `res`, with relaxed signals."""
    memory = {"channel_ids": [0], "channel_type": "memory"}

    def part(kind: str, index: int) -> Json:
        return {"type": kind, "index": index, "size": 1}

    def gpu(rank: int) -> Json:
        far = [{"buffer_id": 0, "index": index, "size": 1} for index in range(2)]
        ops: list[Json] = [
            {"name": "put", "src_buff": [part("i", 1 - rank)], "dst_buff": [far[0]], **memory},
            {"name": "nop"},
            {"name": "signal", **memory},
            {"name": "wait", **memory},
            {"name": "res", "src_buff": [part("i", rank), part("s", 0)],
             "dst_buff": [part("i", rank), far[1]], "channel_type": "memory", "reduce_op": "sum"},
            {"name": "rlxsignal", **memory},
            {"name": "rlxwait", **memory},
            {"name": "copy", "src_buff": [part("s", 1)], "dst_buff": [part("i", 1 - rank)]},
        ]  # fmt: skip
        ref = {"access_channel_type": "memory", "remote_buffer_ids": [0]}
        channels = [{"channel_type": "memory", "channel_ids": [0]}]
        return {
            "id": rank,
            "input_chunks": 2,
            "output_chunks": 2,
            "scratch_chunks": 2,
            "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
            "remote_buffers": [{"rank": 1 - rank, "type": "s", "access_channel_types": ["memory"]}],
            "threadblocks": [
                {"id": 0, "ops": ops, "channels": channels, "remote_buffer_refs": [ref]}
            ],
        }

    head = {"name": "halves", "collective": "allreduce", "protocol": "Simple", "inplace": True}
    return {**head, "gpus": [gpu(0), gpu(1)]}


def test_a_file_of_others() -> None:
    group = of_mscclpp.parse(foreign())
    assert (group.shape.hosts, group.shape.bytes, group.algorithm) == (1, 32, "halves")
    check(json.loads(mscclpp.text_of(group)), "all_reduce")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("name", None, "the file: it has no name"),
        ("collective", "allsum", "collective: it must be one of allreduce"),
        ("protocol", "LL", "protocol: ringcomm has no packets"),
        ("inplace", 1, "inplace: it must be true or false"),
        ("gpus", {}, "gpus: it must be a list"),
        ("gpus 1 id", 0, "gpus[1].id: it must be 1"),
        ("gpus 0 input_chunks", 3, "gpus[1]: ranks have different"),
        ("gpus 0 scratch_chunks", True, "gpus[0].scratch_chunks: it must be a whole number"),
        (
            "gpus 0 channels 0 channel_type",
            "switch",
            "ringcomm knows memory and port, not 'switch'",
        ),
        ("gpus 0 channels 0 connected_to 0", 2, "there are 2 ranks, and no 2"),
        ("gpus 0 channels 0 connected_to 0", 0, "a channel leads to its own rank"),
        ("gpus 0 threadblocks 0 ops 0 name", "rres", "ringcomm cannot say the operation 'rres'"),
        ("gpus 0 threadblocks 0 ops 0 name", "pipeline", "say the operation 'pipeline'"),
        ("gpus 0 threadblocks 0 ops 0 tbg_info", {}, "put is shared by threadblocks"),
        ("gpus 0 threadblocks 0 ops 0 src_buff 0 index", 2, "it needs 3 chunks of the input"),
        ("gpus 0 threadblocks 0 ops 0 src_buff 0 index", "2", "index: it must be a whole number"),
        ("gpus 0 threadblocks 0 ops 0 src_buff 0 type", "x", "type: it must be one of i, o, s"),
        ("gpus 0 threadblocks 0 ops 0 dst_buff 0 index", 1, "ops[4].src_buff[1]: no rank"),
        ("gpus 0 threadblocks 0 ops 0 dst_buff 0 buffer_id", 1, "there are 1 buffers, and no 1"),
        ("gpus 0 threadblocks 0 ops 2 channel_ids 0", 1, "there are 1 memory channels, and no 1"),
        ("gpus 0 threadblocks 0 ops 2", None, "waits for a data signal of rank 0 that never"),
        ("gpus 0 threadblocks 0 ops 4 reduce_op", "max", "no other reduce_op than sum"),
        ("gpus 0 remote_buffers 0 type", "o", "it puts into the output of rank 1, and ringcomm"),
        ("gpus 0 threadblocks 0 ops 7 dst_buff 0 type", "s", "has two writers, 0 and 1"),
    ],
)
def test_files_that_are_wrong(path: str, value: Any, sentence: str) -> None:
    body: Any = foreign()
    *way, last = [int(word) if word.isdigit() else word for word in path.split()]
    holder = body
    for key in way:
        holder = holder[key]
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    if path.endswith("ops 7 dst_buff 0 type"):
        holder["index"] = 0
    with pytest.raises(PlaceError) as error:
        of_mscclpp.parse(body)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def places_in(body: Any) -> list[tuple[Any, Any]]:
    keys = list(body) if isinstance(body, dict) else range(len(body))
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found.append((body, key))
        if isinstance(body[key], dict | list):
            found += places_in(body[key])
    return found


def test_damaged_files_are_errors_or_plans() -> None:
    chance = random.Random(7)
    values: list[Any] = [None, True, -1, 0, 1, 2, 7, 1 << 39, 1 << 70, 1.5, "", "s", "put", [], {}]
    whole = json.loads(mscclpp.text_of(made("ring", "all_reduce", 3, 3)))
    refused = 0
    for _ in range(1500):
        body = copy.deepcopy(chance.choice([foreign(), whole]))
        for _ in range(chance.choice((1, 1, 2, 4))):
            holder, key = chance.choice(places_in(body))
            if chance.random() < 0.2:
                del holder[key]
            else:
                holder[key] = chance.choice(values)
        try:
            of_mscclpp.parse(body)
        except PlaceError:
            refused += 1
    assert 750 < refused < 1500


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    words = ["all_reduce", "--hosts", "4", "--algorithm", "ring", "--export", str(path)]
    assert main(["plan", *words, "--bytes", "4K", "--format", "mscclpp"]) == 0
    for command in (["plan"], ["simulate"], ["draw", "--svg", str(tmp_path / "x.svg")]):
        assert main([command[0], str(path), *command[1:]]) == 0
        assert "ring" in capsys.readouterr().out
    assert main(["plan", *words, "--bytes", "40", "--format", "mscclpp"]) == 1
    assert "change --bytes" in capsys.readouterr().err
    assert main(["plan", *words, "--bytes", "1M", "--format", "mscclpp"]) == 0
    assert "and MSCCL++ takes 64" in capsys.readouterr().out
