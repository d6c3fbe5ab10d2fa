"""Plans as JSON: there and back, loops and motions, and files that are wrong."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringcomm.__main__ import main
from ringcomm._network.costs import DEFAULT
from ringcomm.algorithms.steps import COLLECTIVES, plan_of, shape_of
from ringcomm.tools.plan import file
from ringcomm.tools.plan.check import PlaceError
from ringcomm.tools.plan.draw.story import story_of
from ringcomm.tools.plan.simulate import topology
from ringcomm.tools.plan.simulate.setting import simulate
from ringcomm.tools.plan.source import plans_of
from ringcomm.tools.plan.tables import (
    Block,
    Extent,
    GroupPlans,
    Loop,
    Motion,
    Move,
    Ref,
    Tables,
)

PLACE = re.compile(
    r"(the file|format|version|algorithm|plans|shape)(\.\w+)?(\[\d+\])?(\.\w+(\[\d+\])?)*: "
)


def read_again(group: GroupPlans) -> GroupPlans:
    return file.parse(json.loads(file.text_of(group)))


def groups() -> Iterator[GroupPlans]:
    for name in COLLECTIVES:
        for ranks, hosts in ((1, 1), (2, 2), (4, 1), (5, 5), (8, 2)):
            for size in (40, 40 << 10):
                whole = size // (4 * ranks) * 4 * ranks or 4 * ranks
                yield plans_of(name, ranks, whole, hosts, None, ranks - 1)


def test_there_and_back() -> None:
    for group in groups():
        again = read_again(group)
        assert again == group
        assert file.text_of(again) == file.text_of(group)


def test_the_steps_are_those_of_the_library() -> None:
    shape = shape_of("all_reduce", 4, 3 << 20, 4)
    group = plans_of("all_reduce", 4, 3 << 20, 4, None)
    assert group.steps() == [plan_of(shape, rank).steps for rank in range(4)]


def star() -> GroupPlans:
    """Rank 1 sends 1,000 bytes to rank 0 in passes of 256 through two slots; rank 0 adds them up.

    The plan of docs/algorithms.md for two ranks, its sums going one way: a reduce.
    """
    shape = shape_of("reduce", 2, 1000, 2)._replace(word="")
    motions, extents = (Motion(256), Motion(256, 2, 0, 1, 0)), (Extent(0, 1000),)
    inbox = Ref("inbox", 0, 1, motion=2)
    refs0 = (Ref("output", 0, 0, motion=1), Ref("input", 0, 0, motion=1), inbox)
    refs1 = (inbox, Ref("input", 1, 1, motion=1))
    adds = Move("reduce", bytes=256, targets=1, sources=2, extent=1, motion=1, final=True)
    copies = Move("copy", bytes=256, targets=1, sources=1, extent=1, motion=1)
    loop, block = (Loop(0, 1, 4),), (Block(0, 2),)
    first = Tables(loop, block, (Move("wait", 1, "data"), adds), refs0, motions, extents)
    other = Tables(loop, block, (copies, Move("signal", 0, "data")), refs1, motions, extents)
    return GroupPlans(shape, "star", (first, other))


def test_loops_and_motions() -> None:
    group = read_again(star())
    assert group == star()
    copies = [step for step in group.steps()[1] if step.verb == "copy"]
    assert [step.bytes for step in copies] == [256, 256, 256, 232]
    assert [step.targets[0].offset for step in copies] == [0, 256, 0, 256]
    assert [step.sources[0].offset for step in copies] == [0, 256, 512, 768]
    story = story_of(group)
    assert all(story.done(0, story.rounds[-1], c) for c in range(len(story.chunks)))
    seconds, _ = simulate(group, topology.named("switch", 2, DEFAULT), DEFAULT)
    assert seconds > 1000 * DEFAULT.network.beta


def test_rounds_go_from_extent_to_extent() -> None:
    refs = (Ref("output", 0, 0, extent=1), Ref("input", 0, 0, extent=1))
    extents = (Extent(0, 8), Extent(8, 4))
    move = Move("copy", bytes=8, targets=1, sources=1, extent=1)
    plan = Tables((Loop(0, 1),), (Block(0, 1, 2),), (move,), refs, (), extents)
    shape = shape_of("all_reduce", 1, 12)._replace(word="")
    group = read_again(GroupPlans(shape, "rounds", (plan,)))
    assert [(s.bytes, s.sources[0].offset) for s in group.steps()[0]] == [(8, 0), (4, 8)]


# ---- files that are wrong


def change(body: Any, path: str, value: Any) -> Any:
    *way, last = [int(word) if word.isdigit() else word for word in path.split()]
    for key in way:
        body = body[key]
    if value is None:
        del body[last]
    else:
        body[last] = value
    return body


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("format", "plans", 'format: it must be "ringcomm plans"'),
        ("version", 2, "version: this version of ringcomm reads version 1"),
        ("algorithm", "", "algorithm: it must be a name"),
        ("shape ranks", 3, "plans: there are 2, and the shape has 3 ranks"),
        ("shape collective", "all_sum", "shape.collective: it must be one of"),
        ("shape local", 0, "shape.local: it must be a whole number from 1 to 2"),
        ("shape root", True, "shape.root: it must be a whole number"),
        ("shape shards", [4, 4], "shape.shards: reduce has none"),
        ("shape bytes", 999, "plans[0].steps[1]: it needs 1000 bytes of the output, which has 999"),
        ("plans 0 loops 0 passes", 1 << 60, "there are more than 4,000,000 steps"),
        ("plans 0 loops 0 passes", 3, "rank 0 takes 1 too few of its data signals"),
        ("plans 0 loops 0 passes", 0, "plans[0].loops[0].passes: it must be 1 at least"),
        ("plans 0 loops 0 block_count", 2, "plans[0].loops[0]: it needs blocks 0 to 1"),
        ("plans 0 blocks 0 first_step", 1, "plans[0].blocks[0]: it needs steps 1 to 2"),
        ("plans 0 blocks 0 step_count", -1, "plans[0].blocks[0].step_count: it must be a whole"),
        ("plans 0 steps 0 peer", 0, "plans[0].steps[0].peer: it must be another rank"),
        ("plans 0 steps 0 lane", "fast", "plans[0].steps[0].lane: it must be one of data, credit"),
        ("plans 0 steps 0 verb", "get", "plans[0].steps[0].verb: it must be one of copy, reduce"),
        ("plans 0 steps 0 bytes", 8, "plans[0].steps[0]: a wait moves no bytes"),
        ("plans 0 steps 1 targets", 0, "plans[0].steps[1]: a reduce needs targets and sources"),
        ("plans 0 steps 1 sources", 9, "plans[0].steps[1]: it needs refs 0 to 9, and there are 3"),
        ("plans 0 steps 1 extent", 2, "plans[0].steps[1].extent: there are 1 extents"),
        ("plans 0 steps 1 verb", None, "plans[0].steps[1]: it has no verb"),
        ("plans 0 steps 1 speed", 1, "plans[0].steps[1]: there is no key 'speed'"),
        ("plans 0 refs 0 space", "input", "plans[0].steps[1]: it writes to the input"),
        ("plans 0 refs 1 rank", 1, "plans[0].steps[1]: the input of rank 1 is out of reach"),
        ("plans 0 refs 2 rank", 1, "plans[0].steps[1]: rank 0 reads an inbox of rank 1"),
        ("plans 0 refs 2 motion", 3, "plans[0].refs[2].motion: there are 2 motions"),
        ("plans 0 motions 1 slots", 3, "plans[0].motions[1].slots: it must be 0 or a power of two"),
        ("plans 1 refs 0 writer", 0, "plans[1].steps[0]: rank 1 writes memory whose writer is"),
        ("plans 1 steps 1", None, "plans[1].blocks[0]: it needs steps 0 to 1, and there are 1"),
        ("plans 1 loops 0 passes", 3, "rank 0 waits for a data signal of rank 1 that never comes"),
    ],
)
def test_mistakes_name_the_place(path: str, value: Any, sentence: str) -> None:
    body = json.loads(file.text_of(star()))
    change(body, path, value)
    with pytest.raises(PlaceError, match=re.escape(sentence)):
        file.parse(body)


VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    7,
    1 << 40,
    1 << 61,
    1 << 70,
    1.5,
    "",
    "data",
    "copy",
    [],
    {},
]


def places_in(body: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key."""
    keys = list(body) if isinstance(body, dict) else range(len(body))
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found.append((body, key))
        if isinstance(body[key], dict | list):
            found += places_in(body[key])
    return found


def parsed(body: Any) -> tuple[GroupPlans | None, str]:
    """Return the plans, or the error."""
    try:
        return file.parse(body), ""
    except PlaceError as error:
        return None, str(error)


def test_damaged_files_are_errors_or_plans() -> None:
    """Each error names the place, and what is read can be simulated and drawn, or says why not."""
    chance = random.Random(7)
    whole = [
        star(),
        plans_of("all_reduce", 3, 120, 3, None),
        plans_of("all_to_all", 2, 64, 1, None),
    ]
    bodies = [json.loads(file.text_of(one)) for one in whole]
    refused = 0
    for _ in range(1500):
        body = copy.deepcopy(chance.choice(bodies))
        for _ in range(chance.choice((1, 1, 2, 4))):
            holder, key = chance.choice(places_in(body))
            if chance.random() < 0.2:
                del holder[key]
                continue
            holder[key] = chance.choice(VALUES)
        group, error = parsed(body)
        if group is None:
            assert PLACE.match(error), error
            refused += 1
            continue
        simulate(group, topology.named("switch", group.shape.hosts, DEFAULT), DEFAULT)
        try:
            story_of(group)
        except ValueError:
            continue
    assert 750 < refused < 1500


def test_files_that_are_no_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    for text in (b"", b"[", b"\xff\xfe", b"[" * 100_000, b'{"format": 1e999}', b"1" * 10_000):
        path.write_bytes(text)
        for command in ("plan", "simulate", "draw"):
            more = ["--svg", str(tmp_path / "x.svg")] if command == "draw" else []
            assert main([command, str(path), *more]) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"ringcomm {command}: {path}"), error
            assert error.count("\n") == 1


# ---- the commands


def test_export_and_all_that_read_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, picture = tmp_path / "plans.json", tmp_path / "picture.svg"
    words = ["all_reduce", "--hosts", "4", "--bytes", "4K", "--algorithm", "ring", "--rank", "2"]
    assert main(["plan", *words, "--export", str(path)]) == 0
    table = capsys.readouterr().out.partition("rank 2: ")[2].partition(f"\n{path}")[0]
    assert main(["plan", str(path), "--rank", "2", "--svg", str(picture)]) == 0
    assert table.strip() in capsys.readouterr().out
    times = []
    for what in (["all_reduce", "--bytes", "4K", "--algorithm", "ring"], [str(path)]):
        assert main(["simulate", *what, "--topology", "ring"]) == 0
        times.append(capsys.readouterr().out)
    assert times[0] == times[1]
    assert main(["draw", str(path), "--svg", str(picture)]) == 0
    assert "6 rounds, 4 chunks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["plan --algorithm ring", "draw --ranks 4 --svg x", "plan --root 1"]
)
def test_a_file_has_its_own_shape(capsys: pytest.CaptureFixture[str], words: str) -> None:
    command, *rest = words.split()
    assert main([command, "plans.json", *rest]) == 1
    assert f"leave out {rest[0]}" in capsys.readouterr().err
