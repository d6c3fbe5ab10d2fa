"""Algorithms by hand: examples are proved, and send what their papers say; wrong ones are told."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ringcomm
from lab import ROOT
from ringcomm import _planner
from ringcomm.__main__ import main
from ringcomm.algorithms import AlgorithmError, Counterexample, Shape, copy, reduce, send
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.proof import SLOTS, Proof, plans_by_hand
from ringcomm.algorithms.schedule import schedule
from ringcomm.tools.plan.source import load

EXAMPLES = ROOT / "examples" / "algorithms"
MIB = 1 << 20


def example(name: str, function: str = "") -> Callable[[Shape], None]:
    return load(f"{EXAMPLES / name}.py:{function or name}")


def prove(
    name: str, collective: str, ranks: int, size: int, root: int = 0, local: int = 1
) -> Proof:
    file, _, function = name.partition(":")
    verified = example(file, function)
    return ringcomm.algorithms.verify(verified, ranks, size, collective, root=root, local=local)


# ---- the examples

HALVES = ("all_reduce", "reduce_scatter", "all_gather")
# The examples, their collectives, and whether they are for powers of two alone.
CASES = [
    *(("ring", name, False) for name in HALVES),
    *(("ring:pipelined", name, False) for name in HALVES),
    *(("halving_doubling", name, True) for name in HALVES),
    *(("binomial_tree", name, False) for name in ("all_reduce", "broadcast", "reduce")),
    *(("double_binary_trees", name, False) for name in ("all_reduce", "broadcast", "reduce")),
    ("bruck:all_gather", "all_gather", False),
    ("bruck:all_to_all", "all_to_all", False),
    ("swing", "all_reduce", True),
    ("torus_2d", "all_reduce", False),
    *(("pat", name, False) for name in ("reduce_scatter", "all_gather")),
    *(("bine", name, True) for name in ("broadcast", "reduce")),
]


@pytest.mark.parametrize(("name", "collective", "powers"), CASES)
def test_examples_are_proved(name: str, collective: str, powers: bool) -> None:
    """For few and more ranks; messages in lines, in one slot, in several segments, uneven ones."""
    for ranks in (2, 8, 16) if powers else (2, 3, 8, 13):
        for elements in (0, 1, 1021, MIB // 4 + 3) if ranks < 9 else (1021,):
            even = elements // ranks * ranks if collective == "all_to_all" else elements
            rooted = collective in ("broadcast", "reduce") and name != "double_binary_trees"
            prove(name, collective, ranks, 4 * even, root=ranks - 1 if rooted else 0)


@pytest.mark.parametrize(("ranks", "local"), [(4, 2), (6, 2), (6, 3), (12, 4)])
def test_hierarchical_is_proved(ranks: int, local: int) -> None:
    for size in (0, 4 * ranks, MIB + 12):
        prove("hierarchical", "all_reduce", ranks, size, local=local)
    with pytest.raises(AlgorithmError, match="needs several ranks on each of several hosts"):
        prove("hierarchical", "all_reduce", ranks, 64)


def test_examples_are_short() -> None:
    """40 lines each, without the docstring and imports."""
    for path in EXAMPLES.glob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
        assert len(lines) <= 40, path.name


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_traffic_is_that_of_the_papers(ranks: int) -> None:
    """In chunks of an n-th, the bytes that a rank sends at most, and its messages."""
    n, log = ranks, int(math.log2(ranks))
    size = 4096 * n
    wanted = {
        ("ring", "all_reduce"): (2 * (n - 1), 2 * (n - 1)),
        ("ring", "reduce_scatter"): (n - 1, n - 1),
        ("ring", "all_gather"): (n - 1, n - 1),
        ("halving_doubling", "all_reduce"): (2 * (n - 1), 2 * log),
        ("swing", "all_reduce"): (2 * (n - 1), 2 * log),
        ("bruck:all_gather", "all_gather"): (n - 1, log),
        ("bruck:all_to_all", "all_to_all"): (n // 2 * log, log),
        ("pat", "all_gather"): (n - 1, log),
        ("pat", "reduce_scatter"): (n - 1, log),
        ("torus_2d", "all_reduce"): (2 * (n - 1), {4: 4, 8: 8, 16: 12}[n]),
        ("binomial_tree", "broadcast"): (n * log, log),
        ("binomial_tree", "reduce"): (n, 1),
        ("bine", "broadcast"): (n * log, log),
        ("bine", "reduce"): (n, 1),
    }
    for (name, collective), (chunks, messages) in wanted.items():
        proof = prove(name, collective, n, size)
        assert max(proof.sent) == chunks * 4096, (name, collective)
        assert max(proof.messages) == messages, (name, collective)
    trees = prove("double_binary_trees", "broadcast", n, size)
    assert max(trees.sent) <= 3 * size // 2  # two halves to two children each, less at leaves
    for name in ("bine", "binomial_tree"):
        assert sum(prove(name, "broadcast", n, size).messages) == n - 1


def test_hierarchical_sends_little_between_hosts() -> None:
    ranks, local, size = 12, 3, 12 * 4096
    call = call_of("all_reduce", ranks, size, ranks // local)
    group = plans_by_hand(call, example("hierarchical"), "hierarchical")
    between = [0] * (ranks // local)
    for rank, steps in enumerate(group.steps):
        for step in steps:
            to = step.receiver(rank)
            if to >= 0 and to // local != rank // local:
                between[rank // local] += step.bytes
    hosts = ranks // local
    assert between == [2 * (hosts - 1) * size // hosts] * hosts


def test_long_messages_are_short_plans() -> None:
    call = call_of("all_reduce", 8, 64 * MIB, 8)
    scripts = schedule(example("ring"), call, 2)
    text = _planner.text(call, _planner.geometry(8, True), 0, scripts.words[0])
    assert "passes" in text
    assert len(text.splitlines()) < 250


def test_verifying_a_mebibyte_takes_two_seconds_at_most() -> None:
    for name in ("ring", "swing", "torus_2d"):
        began = time.perf_counter()
        prove(name, "all_reduce", 8, MIB)
        assert time.perf_counter() - began < 2, name


def test_a_roll_call_is_as_small_as_it_can_be() -> None:
    assert prove("ring", "all_reduce", 8, 4096).calls == 0
    assert prove("binomial_tree", "broadcast", 8, 4096).calls == 7
    assert prove("binomial_tree", "reduce", 8, 4096, root=3).calls == 7


# ---- mutants


@pytest.mark.parametrize("name", ["ring", "swing", "halving_doubling", "torus_2d"])
def test_every_signal_of_these_is_needed(name: str) -> None:
    proof = ringcomm.algorithms.verify(example(name), 4, 4096, mutants=True)
    assert proof.dropped > 0
    assert proof.spare == []


def test_a_signal_that_nobody_needs_is_found() -> None:
    def chatty(shape: Shape) -> None:
        example("ring")(shape)
        shape.signal(0, to=1)
        shape.wait(1, from_=0)

    proof = ringcomm.algorithms.verify(chatty, 3, 120, mutants=True)
    lines = {spare.line.number for spare in proof.spare if spare.line}
    assert chatty.__code__.co_firstlineno + 2 in lines


# ---- wrong ones


def wrong(
    function: Callable[[Shape], None],
    ranks: int,
    size: int = MIB,
    collective: str = "all_reduce",
) -> AlgorithmError:
    with pytest.raises(AlgorithmError) as raised:
        ringcomm.algorithms.verify(function, ranks, size, collective)
    return raised.value


def line_with(function: Callable[[Shape], None], text: str) -> str:
    """Return "file.py:12" of the line of the function's file that has that text."""
    path = Path(function.__code__.co_filename)
    lines = path.read_text().splitlines()
    first = function.__code__.co_firstlineno
    number = next(i for i, line in enumerate(lines[first - 1 :], first) if text in line)
    return f"{path.name}:{number}:"


def test_slots_used_too_early_are_a_story() -> None:
    hasty = example("broken", "hasty")
    error = wrong(hasty, 3, 3 * MIB, "broadcast")
    assert str(error).startswith(line_with(hasty, "send(held"))
    assert "overwrites what rank 1 may still be reading" in str(error)
    story = error.counterexample
    assert isinstance(story, Counterexample)
    assert story.found == len(story.parts) - 1
    assert story.parts[story.found].line == error.line
    assert 0 <= story.other < story.found
    assert f"{story.parts[story.other].line}:" == line_with(hasty, "held = copy(got")
    assert len(story.parts) <= 16
    assert "no signal orders them" in str(story)


def test_a_forgotten_rank_is_told() -> None:
    error = wrong(example("broken", "forgetful"), 4, 4096, "all_gather")
    assert re.search(r"rank \d's output at byte \d+ was never written", str(error))


def test_a_deadlock_says_where_ranks_are() -> None:
    stuck = example("broken", "stuck")
    error = wrong(stuck, 3, 0, "barrier")
    assert str(error).startswith(line_with(stuck, "shape.wait"))
    assert "deadlock" in str(error)
    assert isinstance(error.counterexample, Counterexample)
    assert sorted(part.rank for part in error.counterexample.stuck) == [0, 1, 2]


def test_an_endless_algorithm_is_stopped() -> None:
    endless = example("broken", "endless")
    error = wrong(endless, 4, 0, "barrier")
    assert str(error).startswith(line_with(endless, "shape.signal"))
    assert "does this loop end?" in str(error)


def test_an_algorithm_s_own_error_is_passed_on() -> None:
    swing = example("swing")
    error = wrong(swing, 6)
    assert str(error).startswith(line_with(swing, "raise ValueError"))
    assert "ValueError: swing is for a power of two of ranks, not 6" in str(error)
    assert isinstance(error.__cause__, ValueError)


def twice(shape: Shape) -> None:
    """Add what rank 1 has given twice."""
    got = send(shape.input(1), to=0)
    copy(reduce(shape.input(0), got, got), shape.output(0))


def again(shape: Shape) -> None:
    """Write a whole sum twice."""
    shape.cut(1)
    for rank in (0, 1):
        got = send(shape.input(1 - rank), to=rank)
        total = reduce(shape.input(rank), got)
        copy(total, shape.output(rank))
        copy(total, shape.output(rank))


def elsewhere(shape: Shape) -> None:
    """Use another rank's memory."""
    copy(shape.input(0), shape.output(1))


def beyond(shape: Shape) -> None:
    """Name a rank that is not there."""
    send(shape.input(0), to=shape.ranks)


def deaf(shape: Shape) -> None:
    """Take no message."""
    send(shape.input(0), to=1)


def lonely(shape: Shape) -> None:
    """Wait for a signal that nobody sends."""
    shape.wait(0, from_=1)


def unread(shape: Shape) -> None:
    """Read an output that was not written."""
    send(shape.output(0), to=1)


def other_order(shape: Shape) -> None:
    """Every rank adds its own input first."""
    shape.cut(1)
    for rank in (0, 1):
        copy(reduce(shape.input(rank), send(shape.input(1 - rank), to=rank)), shape.output(rank))


@pytest.mark.parametrize(
    ("function", "at", "why"),
    [
        (twice, "got, got", "adds what rank 1 has given to chunk 0 twice"),
        (elsewhere, "copy(", "rank 0 cannot write chunk 0 of rank 1's output: send it there"),
        (beyond, "send(", "the rank that gets it is 2: the group has ranks 0 to 1"),
        (deaf, "send(", "the message from rank 0 to rank 1 is never taken there"),
        (unread, "send(", "which no line has written"),
    ],
)
def test_a_wrong_line_is_named(function: Callable[[Shape], None], at: str, why: str) -> None:
    error = wrong(function, 2, 4096)
    assert str(error).startswith(line_with(function, at))
    assert why in str(error)


def test_writing_twice_names_both_lines() -> None:
    error = wrong(again, 2, 4096)
    first = again.__code__.co_firstlineno + 6
    assert str(error).startswith(f"{Path(__file__).name}:{first + 1}:")
    assert f"it was whole since {Path(__file__).name}:{first}" in str(error)


def test_what_the_proof_finds_is_told() -> None:
    assert "signals left over" in str(wrong(lonely, 2, 4096))
    assert "in another order" in str(wrong(other_order, 2, 4096))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"collective": "all_sum"}, "there is no collective 'all_sum'"),
        ({"ranks": 1}, "a group of 1 ranks"),
        ({"bytes": 7}, "no whole number of elements"),
        ({"collective": "broadcast", "root": 9}, "it cannot be the root"),
    ],
)
def test_wrong_arguments_are_refused(how: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ringcomm.algorithms.verify(example("ring"), **how)  # type: ignore[arg-type]


# ---- the command


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "ringcomm", "plan", "verify", *words]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT)


def test_the_command_proves() -> None:
    done = command(
        "examples/algorithms/swing.py:swing", "--ranks", "4", "--size", "64K", "--mutants"
    )
    assert done.returncode == 0, done.stderr
    assert "proved in" in done.stdout
    assert "a rank sends 98,304 bytes at most, in 4 messages" in done.stdout
    assert re.search(r"of (\d+) plans without one signal, \1 are wrong", done.stdout)


def test_the_command_tells_the_story() -> None:
    done = command("examples/algorithms/broken.py:hasty", "broadcast", "--ranks", "3")
    assert done.returncode == 1
    assert "the shortest run that shows it" in done.stdout
    assert "broken.py:" in done.stderr
    assert command("nothing.py:ring").returncode == 1
    assert "no function 'rings'" in command("examples/algorithms/ring.py:rings").stderr


def test_former_names_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Names from before 1.0: of the command, its options, and what an error has."""
    words = [
        f"{EXAMPLES}/ring.py:ring",
        "--collective",
        "all_gather",
        "--bytes",
        "64K",
        "--local",
        "2",
    ]
    assert main(["verify", *words]) == 0
    out, told = capsys.readouterr()
    assert "all_gather of 64K bytes, 8 ranks" in out
    assert told.splitlines() == [
        "ringcomm verify: it is now `ringcomm plan verify`",
        "ringcomm plan verify: --collective is now COLLECTIVE",
        "ringcomm plan verify: --bytes is now --size",
        "ringcomm plan verify: --local is now --hosts: how many there are",
    ]
    with pytest.raises(SystemExit):
        main(["model", "--ranks", "2..4096"])
    assert "model is gone: `ringcomm plan simulate" in capsys.readouterr().err
    with pytest.warns(FutureWarning, match="now ringcomm.algorithms.Counterexample"):
        assert ringcomm.Story is Counterexample
    error = wrong(example("broken", "stuck"), 3, 0, "barrier")
    assert error.story is error.counterexample


def test_damaged_scripts_are_refused() -> None:
    """Each word is looked at before it names a link, a message or a chunk."""
    call, geometry = call_of("all_reduce", 4, 4096, 4), _planner.geometry(4, False)
    ring = load(f"{ROOT / 'examples' / 'algorithms' / 'ring.py'}:ring")
    words = schedule(ring, call, geometry[SLOTS]).words[1]
    chance, refused = random.Random(1), 0
    for _ in range(3000):
        damaged = list(words)
        damaged[chance.randrange(len(words))] = chance.choice([0, 1, 2, 5, 100, 300, 2**31, -1])
        try:
            _planner.text(call, geometry, 1, damaged)
        except ValueError:  # nothing else comes, and no crash
            refused += 1
    assert refused > 1000
