"""Whatever bytes ring files hold, they are read, or refused with a sentence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lab.flights import MS, training, write
from lab.limits import seed
from ringcomm.__main__ import main

SAMPLES = 60
VALUES = [0, 1, 7, 2**31, 2**62, 2**64 - 1]


def rings() -> list[tuple[str, bytes]]:
    flights, now = training(4, steps=12, hosts=2, capacity=16)
    flights[0].call("recv", now, root=1)
    flights[1].call("send", now, root=0, tag=3)
    flights[2].failure = "rank 1: its process died"
    for flight in flights[1:]:
        flight.call("barrier", now + MS)
    return [(flight.name(), flight.data()) for flight in flights]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes of the clocks, the header and the records, and cut some files short."""
    changed = bytearray(data)
    for _ in range(chance.randrange(4)):
        word = chance.randrange(4096, len(data) - 8) // 8 * 8
        changed[word : word + 8] = chance.choice(VALUES).to_bytes(8, "little")
        changed[chance.choice([*range(8, 32), *range(64, 900)])] = chance.randrange(256)
    if chance.random() < 0.1:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def test_damage_is_borne(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(seed())
    whole = rings()
    statuses = set()
    for sample in range(SAMPLES):
        folder = write(tmp_path / str(sample), [])
        for name, data in whole:
            (folder / name).write_bytes(damaged(data, chance))
        out, pickles = str(folder / "out.json"), str(folder / "pickles")
        status = main(["trace", str(folder), "--perfetto", out, "--torch", pickles])
        told = capsys.readouterr()
        assert (told.err if status == 2 else told.out).strip()
        statuses.add(status)
    assert statuses & {0, 1}


def test_a_deep_header_is_damage(tmp_path: Path) -> None:
    """The parser gives up on it with an error of its own kind."""
    name, data = rings()[0]
    write(tmp_path, [])
    (tmp_path / name).write_bytes(data[:64] + b"[" * 2900 + data[64 + 2900 :])
    assert main(["trace", str(tmp_path)]) == 2
