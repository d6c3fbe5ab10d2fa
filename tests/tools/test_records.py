"""Flight records are read, damaged ones too; torch's own tool reads what is made of them."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  the library needs it to be loaded

from lab.flights import BEGIN, MS, Clock, Flight, training, write
from lab.limits import limit
from ringcomm import _C
from ringcomm._flight import records
from ringcomm._flight.records import read_folder, read_pickle, read_ring, record_name
from ringcomm._flight.torch_format import to_flight_recorder, write_flight_recorder

RECORDS_AT = 4096 + 64  # after the global ranks of two


def example() -> Flight:
    flight = Flight(1, [4, 7], Clock("b", error=3 * MS), group="dp", capacity=8)
    flight.call("all_reduce", 5 * MS, 7 * MS, waited=MS, peer=0, longest=MS // 2, op="MAX", sent=80)
    flight.call("recv", 8 * MS, tag=3, root=0, elements=10, dtype="bfloat16")
    flight.call("broadcast", 9 * MS, root=0, state="queued", resent=2)
    return flight


def test_a_record_says_what_was_called() -> None:
    record = read_ring(example().data())
    assert (record.global_rank, record.size, record.group, record.host) == (7, 2, "dp", "b")
    assert record.wall_ns == BEGIN + 3 * MS
    assert record.waits_ns == (MS, 0)
    first, recv, last = record.operations
    assert str(first) == "all_reduce #1 float32[1000] MAX"
    assert first.ended_ns == 7 * MS + record.steady_ns
    assert (first.sent, first.waited_ns, first.longest_ns) == (80, MS, MS // 2)
    assert (first.longest_peer, first.state, first.algorithm) == (0, "done", "ring")
    assert str(recv) == "recv with tag 3 bfloat16[10]"
    assert (recv.root, recv.sequence, recv.ended_ns, recv.state) == (0, 0, None, "running")
    assert str(last) == "broadcast #2 float32[1000] root 0"
    assert (last.began_ns, last.resent, last.state) == (None, 2, "queued")


def test_the_newest_operations_are_kept() -> None:
    flights, _ = training(2, steps=150, capacity=64)
    record = read_ring(flights[0].data())
    assert [operation.sequence for operation in record.operations] == [*range(87, 151)]
    assert record.lost == 86


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (RECORDS_AT, bytes(8)),  # being written: it has no number
        (RECORDS_AT + 16, b"\xff"),  # a collective that does not exist
        (RECORDS_AT + 64, b"\xff" * 5),  # called after it began
        (RECORDS_AT + 80, b"\xff" * 7 + b"\x03"),  # ended in years
        (RECORDS_AT + 112, b"\x07"),  # waited for rank 7 of 2
    ],
)
def test_a_half_written_operation_is_left_out(at: int, data: bytes) -> None:
    whole = bytearray(example().data())
    whole[at : at + len(data)] = data
    record = read_ring(bytes(whole))
    assert [operation.number for operation in record.operations] == [2, 3]
    told = ["the record of rank 7 in group dp has 1 half-written operation"]
    assert record.remarks == (told if any(data) else [])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: b"", "it is empty"),
        (lambda data: bytes(9000), "it is empty"),
        (lambda data: b"PK" + data, "it is no flight record"),
        (lambda data: data[:1000], "it ends within its header, after 1000 bytes"),
        (lambda data: data[:64] + b"{]" + data[66:], "its header is damaged"),
        (lambda data: data.replace(b'"rank"', b'"rang"'), "its header is damaged"),
        (lambda data: data.replace(b'"rank": 1', b'"rank": 9'), "its header is damaged"),
        (lambda data: data.replace(b'"version": 2', b'"version": 1'), "it has version 1"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(change: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_ring(change(example().data()))


@pytest.mark.parametrize("byte", b'0179-"{}[],x\x00\xff')
def test_no_byte_of_a_header_does_harm(byte: int) -> None:
    """It is read or refused, also where the record has something to remark on."""
    whole = bytearray(example().data())
    whole[RECORDS_AT + 16] = 0xFF
    read, refusals = 0, set()
    for at in range(8, 64 + whole[64:].index(0)):
        data = bytes(whole[:at]) + bytes([byte]) + bytes(whole[at + 1 :])
        try:
            read += bool(record_name(read_ring(data)))
        except ValueError as error:
            refusals.add(str(error))
    assert read
    assert refusals
    assert all(text.startswith("it") for text in refusals)


def test_half_a_file_is_used(tmp_path: Path) -> None:
    data = example().data()
    write(tmp_path, [])
    (tmp_path / "rank7-1-0.ring").write_bytes(data[: RECORDS_AT + 2 * 128 + 5])
    folder = read_folder(tmp_path)
    assert [operation.number for operation in folder.records[0].operations] == [1, 2]
    assert folder.remarks == [
        "the record of rank 7 in group dp is cut short: 2 of 8 records are left"
    ]


def test_files_of_others_are_named(tmp_path: Path) -> None:
    write(tmp_path, [example()])
    (tmp_path / "rank9-1-0.ring").write_text("hello")
    (tmp_path / "rank_3").write_bytes(pickle.dumps(Path("a")))
    folder = read_folder(tmp_path)
    assert len(folder.records) == 1
    assert folder.remarks[0] == "rank9-1-0.ring is left out: it is no flight record"
    assert folder.remarks[1].startswith("rank_3 is left out: it is no plain pickle (it asks for")


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Mine:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (print, ("code ran",))

    (tmp_path / "rank_0").write_bytes(pickle.dumps(Mine()))
    with pytest.raises(ValueError, match="no plain pickle"):
        read_pickle(tmp_path / "rank_0")


def test_pickles_are_read_where_there_is_no_ring_file(tmp_path: Path) -> None:
    flights, _ = training(2, steps=5)
    rings = read_folder(write(tmp_path / "rings", flights)).records
    write_flight_recorder(rings, tmp_path / "pickles")
    pickles = read_folder(tmp_path / "pickles").records
    assert [record.operations for record in pickles] == [record.operations for record in rings]
    assert [record.waits_ns for record in pickles] == [record.waits_ns for record in rings]
    # Beside ring files they say nothing new.
    write_flight_recorder(rings, tmp_path / "rings")
    assert len(read_folder(tmp_path / "rings").records) == 2


# ---- torchfrtrace


def torchfrtrace(folder: Path) -> str:
    name = "torch.distributed.flight_recorder.fr_trace"  # what torchfrtrace runs
    if importlib.util.find_spec("torch.distributed.flight_recorder") is None:
        pytest.skip("this torch has no torchfrtrace")
    command = [sys.executable, "-m", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def hang(size: int, missing: int) -> list[Flight]:
    flights, now = training(size, steps=90)  # more than the records hold
    for flight in flights:
        if flight.rank != missing:
            flight.call("all_reduce", now + MS)
    # One rank has lost more than the others.
    flights[0].call("recv", now + MS, root=1)
    return flights


def test_torchfrtrace_names_the_missing_rank(tmp_path: Path) -> None:
    records = read_folder(write(tmp_path / "rings", hang(4, missing=2))).records
    write_flight_recorder(records, tmp_path / "torch")
    told = torchfrtrace(tmp_path / "torch")
    assert "Not all ranks joining collective, sequence number: 91" in told
    assert "missing ranks: {2}" in told
    assert told.count("sequence number") == 1


def test_torchfrtrace_finds_all_well(tmp_path: Path) -> None:
    """The records have every collective, and messages in both directions."""
    flights = [Flight(rank, [0, 1], capacity=64) for rank in range(2)]
    for step, name in enumerate(
        ["all_gather", "reduce_scatter", "barrier", "all_to_all", "gather"]
    ):
        for flight in flights:
            root: dict[str, Any] = {"root": 0} if name == "gather" else {}
            flight.call(
                name, step * MS, step * MS + MS // 2, elements=0 if name[-1] == "l" else 8, **root
            )
    for source, target in ((0, 1), (1, 0), (0, 1)):
        flights[source].call("send", 9 * MS, 9 * MS + MS // 2, root=target, tag=source)
        flights[target].call("recv", 9 * MS, 9 * MS + MS // 2, root=source, tag=source)
    write_flight_recorder(
        read_folder(write(tmp_path / "rings", flights)).records, tmp_path / "torch"
    )
    told = torchfrtrace(tmp_path / "torch")
    assert "sequence number" not in told
    dump = to_flight_recorder([read_ring(flights[0].data())])
    assert len(dump["entries"]) == 8
    names = {entry["profiling_name"] for entry in dump["entries"] if entry["is_p2p"]}
    assert names == {"gloo:send 0->1", "gloo:recv 0<-1"}
    assert dump["pg_status"]["0"]["last_completed_collective"] == 5


def test_purposes_are_those_of_the_library() -> None:
    """The reader has them by number, because it needs no library."""
    names = ("call", "several", "sparse", "memory", "staged", "codes")
    assert names == _C.PURPOSES
    assert [getattr(records, name.upper()) for name in names] == [*range(len(names))]
