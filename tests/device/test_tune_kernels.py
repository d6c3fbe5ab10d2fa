"""`ringcomm tune --device cuda`: from times to rules, and all of it on the simulated device.

How long its kernels take means nothing.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks, ranks
from lab.simulated_device import SIMULATED, on_device
from ringcomm import _C
from ringcomm.__main__ import main
from ringcomm.tools.bench import cases
from ringcomm.tools.bench.sample import Workload
from ringcomm.tools.tune import kernels
from ringcomm.tools.tune.kernels import KERNELS, Segment, Times, segments

OWN = {"RINGCOMM_SIM_DEVICES": "2", "RINGCOMM_SIM_ROTATE": "0,1"}
ABOUT = ["made up"]


# ---- from times to rules


def test_all_kernels_are_known() -> None:
    """The library's own list has no other, and no less."""
    names = {"all_to_all", *kernels.COLLECTIVES}
    seconds = [_C.kernel_seconds(name, 2, 1024, True, 90)[1] for name in names]
    assert {kernel for by_kernel in seconds for kernel in by_kernel} == set(KERNELS)


def drawn(choose: random.Random) -> list[Times]:
    """Times of some sizes; kernels have no room everywhere."""
    sizes = sorted(choose.sample(range(1, 1 << 22), choose.randrange(0, 12)))
    times = []
    for size in sizes:
        some = choose.sample(KERNELS, choose.randrange(0, len(KERNELS)))
        seconds = {kernel: choose.uniform(1e-6, 2e-6) for kernel in some}
        times.append(Times(size, choose.choice(KERNELS), size, seconds))
    return times


@pytest.mark.parametrize("seed", range(40))
def test_segments_cover_every_number_of_bytes(seed: int) -> None:
    measured = drawn(random.Random(seed))
    ranges = segments(measured)
    assert ranges[0].first == 0
    assert ranges[-1].last is None
    for before, after in itertools.pairwise(ranges):
        assert after.first == (before.last or 0) + 1  # no hole, and nothing twice
        assert after.kernel != before.kernel  # equal neighbours are one
    for size in measured:
        (spoken,) = [s for s in ranges if s.first <= size.bytes <= (s.last or size.bytes)]
        if not size.seconds:
            assert spoken.kernel == ""
            continue
        as_good = min(size.seconds.values()) * 1.05
        assert size.seconds[spoken.kernel or size.model] <= as_good
        if spoken.kernel:
            assert size.seconds.get(size.model, 1) > as_good


@pytest.mark.parametrize("seed", range(10))
def test_what_is_written_is_what_the_library_reads(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    table = {name: drawn(choose) for name in kernels.COLLECTIVES}
    for some in table.values():
        for times in some:  # copies are no sums'
            times.seconds = {k: s for k, s in times.seconds.items() if k != "copy_engines"}
    text = kernels.text(table, ABOUT)
    file = tmp_path / "rules"
    file.write_text(text)
    said = ringcomm.Options(algorithm=f"@{file}").algorithm
    assert said
    assert said.split(",") == [rule for some in kernels.rules(table)[0].values() for rule in some]


def test_ties_are_the_models() -> None:
    def choice(model: str, **seconds: float) -> str:
        (range_,) = segments([Times(1024, model, 1024, seconds)])
        return range_.kernel

    assert choice("one_shot", one_shot=1.04, two_shot=1.0) == ""
    assert choice("one_shot", one_shot=1.06, two_shot=1.0) == "two_shot"
    assert choice("one_shot", two_shot=1.0) == "two_shot"  # that of the model failed


def made_up() -> dict[str, list[Times]]:
    fast = {"one_shot": 1e-6, "two_shot": 2e-6}
    slow = {"one_shot": 4e-6, "two_shot": 2e-6, "hand_over": 9e-6}
    rows = [(1024, "two_shot", fast), (4096, "two_shot", fast), (6000, "two_shot", slow)]
    return {"all_reduce": [Times(b, m, b, s) for b, m, s in rows], "broadcast": []}


def test_the_file_and_the_table() -> None:
    table = made_up()
    assert segments(table["all_reduce"]) == [
        Segment(0, 4096, "one_shot"),
        Segment(4097, None, ""),
    ]
    text = kernels.text(table, ABOUT)
    assert text.splitlines()[0] == "# made up"
    assert text.splitlines()[-2:] == [
        "all_reduce:0-4K=one_shot",
        "# broadcast: the model's choices stand",
    ]
    lines = kernels.shown(table["all_reduce"])
    assert lines[0].split() == ["size", "message", "hand_over", "two_shot", "one_shot", "model"]
    assert lines[1].split() == ["1K", "1K", "-", "2.00", "1.00*", "two_shot"]
    assert lines[3].split() == ["6000", "6000", "9.00", "2.00*", "4.00", "two_shot"]


def test_a_table_that_is_too_long_takes_a_larger_margin() -> None:
    def jagged(gain: float, count: int) -> list[Times]:
        """Every other size has another kernel, by so much faster than the model's."""
        names = ("two_shot", "low_latency")
        return [
            Times(at << 20, "one_shot", 0, {"one_shot": 1 + gain, names[at % 2]: 1.0})
            for at in range(1, count)
        ]

    assert kernels.rules({"all_reduce": jagged(0.15, 20)})[1] == 0.05
    rules, margin = kernels.rules({"all_reduce": jagged(0.15, 200)})
    assert (rules, margin) == ({"all_reduce": []}, 0.2)
    with pytest.raises(ValueError, match="measure fewer --size"):
        kernels.text({"all_reduce": jagged(2, 200)}, ABOUT)


# ---- the command, on the simulated device


def use_simulated(rank: Rank) -> str:
    os.environ["RINGCOMM_CUDA_LIBRARY"] = str(SIMULATED)
    os.environ["RINGCOMM_ALGORITHM"] = "one_shot"  # the user's: is not what is measured
    for name, value in OWN.items():
        os.environ[name] = value.split(",")[rank.index] if "," in value else value
    return "cpu"


def use_one_that_fails(rank: Rank) -> str:
    """Two-shot cannot do one size: rank 1 has no memory for it, say."""
    call_of = kernels.call_of

    def refuse(workload: Workload, device: str) -> Callable[[], object]:
        asked = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options
        if rank.index == 1 and workload.count == 1024 and asked.algorithm == "two_shot":
            raise MemoryError("no room for it")
        return call_of(workload, device)

    kernels.call_of = refuse
    return use_simulated(rank)


def use_host(rank: Rank) -> str:
    os.environ["RINGCOMM_CUDA_MODE"] = "host"
    return use_simulated(rank)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(kernels, "gpus", lambda: ["made up"] * 2)
    monkeypatch.setattr(kernels, "use_gpu", use_simulated)


@pytest.mark.usefixtures("two_gpus")
def test_all_kernels_are_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "kernels.txt"
    words = ["tune", "--device", "cuda", "--size", "4K,1M", "--turns", "1"]
    assert main([*words, "--output", str(file)]) == 0
    out = capsys.readouterr().out
    for name in kernels.COLLECTIVES:
        assert f"{name}, 2 ranks, float32" in out
    cells = [line.split() for line in out.splitlines()]
    rows = [row for row in cells if row and row[0] in ("4K", "1M")]
    assert [row[0] for row in rows] == ["4K", "1M"] * 4
    assert [row[1] for row in rows] == ["4K", "1M", "2K", "512K", "2K", "512K", "4K", "1M"]
    for row in rows:
        large = row[0] == "1M"
        assert row.count("-") == (2 if large else 0), row  # one-shot kernels have no room
        assert row[-1] == ("two_shot" if large else "low_latency")
        assert len([cell for cell in row if cell.endswith("*")]) == 1
    head = file.read_text().splitlines()
    assert "2 x made up: 2 ranks, float32. torch" in head[1]
    asked = ringcomm.Options(algorithm=f"@{file}").algorithm
    assert bool(asked) == any(not line.startswith("#") for line in head)
    assert bool(asked) != ("the model's choices stand everywhere" in out)


def test_events_are_around_calls_that_are_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU sleeps first, and the first call does not count. No GPU was there to run this."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def query(self) -> bool:
            return len(done) > 2 * kernels.CALLS and late

        def synchronize(self) -> None:
            done.append("end")

        def elapsed_time(self, other: Event) -> float:
            assert other is not self
            return 3.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    late = False
    seconds = kernels.on_stream(lambda: done.append("call"))
    assert seconds == pytest.approx(3e-3 / kernels.CALLS)
    calls = ["call"] * kernels.CALLS
    assert done == ["sleep", "call", "event", *calls, "event", "end"] * 2
    late = True  # the GPU is through with its sleep before the host is
    done.clear()
    with pytest.raises(ValueError, match="the host needs longer to enqueue 20 calls"):
        kernels.on_stream(lambda: done.append("call"))


@pytest.mark.usefixtures("two_gpus")
def test_a_kernel_that_fails_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COLLECTIVES", ("all_reduce",))
    monkeypatch.setattr(kernels, "KERNELS", ("hand_over", "two_shot"))
    table = kernels.measure(2, [1024, 4096, 16384], 2, use_one_that_fails)
    said = capsys.readouterr().err
    assert "two_shot is left out: all_reduce of 4K: MemoryError: no room for it" in said
    assert [sorted(times.seconds) for times in table["all_reduce"]] == [["hand_over"]] * 3
    assert [times.model for times in table["all_reduce"]] == ["low_latency"] * 3


def test_without_gpus_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(kernels, "gpus", lambda: ["made up"])
    for words in ([], ["--ranks", "2"]):
        assert main(["tune", "--device", "cuda", *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "each rank needs a GPU of its own, and torch finds 1 here for 2 ranks" in line
    assert main(["tune", "--device", "cuda", "--ranks", "1"]) == 1
    assert "there are kernels for 2 ranks or more" in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("SLURM_STEP_NUM_TASKS", "8")):
        with monkeypatch.context() as launched:
            launched.setenv(name, value)
            assert main(["tune", "--device", "cuda"]) == 1
        assert "starts a rank for each GPU itself" in capsys.readouterr().err
    assert main(["tune", "--device", "cpu", "--size", "1K"]) == 1
    assert "--ranks, --size and --turns are for --device cuda" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_where_no_kernel_runs_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "use_gpu", use_host)
    assert main(["tune", "--device", "cuda", "--size", "1K", "--turns", "1"]) == 1
    assert "no kernel ran on the GPUs" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2, backend=None) as some:
        yield some


def by_file(rank: Rank, settings: dict[str, str], workloads: list[Workload]) -> Outcome:
    def body(rank: Rank) -> Outcome:
        rank.kept["device"] = "cpu"
        return {"used": [kernels.kernel_of(rank, workload) for workload in workloads]}

    return on_device(rank, "by file", {**OWN, **settings}, body)


def test_groups_take_the_file(two: Ranks, tmp_path: Path) -> None:
    """Kernels that the model would not choose, and beyond them those that it does."""
    file = tmp_path / "kernels.txt"
    times = {
        "all_reduce": [(4096, "hand_over"), (1 << 16, "device_ring"), (1 << 20, "two_shot")],
        "all_gather": [(2048, "copy_engines"), (1 << 19, "one_shot")],
    }
    table = {
        name: [Times(at, "another", at, {kernel: 1e-6}) for at, kernel in some]
        for name, some in times.items()
    }
    file.write_text(kernels.text(table, ABOUT))
    asked = [("all_reduce", size) for size in (1024, 4096, 8192, 1 << 18, 1 << 22)]
    asked += [("all_gather", size) for size in (1024, 4096, 8192)]
    workloads = [Workload(name, size // 4, 2, cases.PLAIN) for name, size in asked]
    for outcome in two(by_file, {"RINGCOMM_ALGORITHM": f"@{file}"}, workloads):
        assert outcome.get("used") == [
            *("hand_over", "hand_over", "device_ring", "two_shot", "two_shot"),
            *("copy_engines", "copy_engines", "one_shot"),
        ], outcome
