"""The witness of an agreement: a store that answers, that fails, or that never does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lab.limits import limit
from ringcomm.elastic.agreement import ASK_AGAIN_SECONDS, Witness


class Ballots:
    """A request as the engine makes them: the witness keeps the highest ballot that it has seen."""

    def __init__(self, ballot: int) -> None:
        self.ballot = ballot

    def answer(self, before: bytes) -> bytes:
        return b"%d" % max(self.ballot, int(before or b"0"))


class Keys:
    """A store whose one call does what a test says."""

    def __init__(self, call: Callable[[], bytes]) -> None:
        self.call, self.calls = call, 0

    def compare_set(self, key: str, before: bytes, wanted: bytes) -> bytes:
        self.calls += 1
        return self.call()


def await_answer(witness: Witness, ballot: int) -> bytes:
    end = time.monotonic() + 10
    while (answer := witness.ask(Ballots(ballot))) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return answer


def test_the_store_keeps_what_the_last_request_made_of_it() -> None:
    keys = dist.HashStore()
    assert await_answer(Witness(keys, "witness/1"), 7) == b"7"
    other = Witness(keys, "witness/1")
    assert await_answer(other, 5) == b"7"
    assert await_answer(other, 9) == b"9"
    assert keys.get("witness/1") == b"9"


def test_a_request_is_sent_once() -> None:
    keys = Keys(lambda: b"7")
    witness = Witness(keys, "witness/1")
    for _ in range(3):
        assert await_answer(witness, 7) == b"7"
    assert keys.calls == 1


def test_a_store_that_never_answers_holds_nobody_up() -> None:
    lock = threading.Lock()
    lock.acquire()

    def wait() -> bytes:
        with lock:
            return b"7"

    witness = Witness(Keys(wait), "witness/1")
    began = time.monotonic()
    for _ in range(100):
        assert witness.ask(Ballots(7)) is None
    assert time.monotonic() - began < limit(1)
    lock.release()
    assert await_answer(witness, 7) == b"7"


def test_a_store_that_fails_is_asked_again_after_a_while() -> None:
    def fail() -> bytes:
        if keys.calls == 1:
            raise dist.DistStoreError("it moves")
        return b"7"

    keys = Keys(fail)
    began = time.monotonic()
    assert await_answer(Witness(keys, "witness/1"), 7) == b"7"
    assert time.monotonic() - began >= ASK_AGAIN_SECONDS
    assert keys.calls == 2


@pytest.mark.parametrize("ballot", [8, 9])
def test_an_answer_to_an_earlier_request_is_none_to_this_one(ballot: int) -> None:
    lock = threading.Lock()
    lock.acquire()

    def wait() -> bytes:
        with lock:
            return b"%d" % ballot

    witness = Witness(Keys(wait), "witness/1")
    assert witness.ask(Ballots(7)) is None
    assert witness.ask(Ballots(ballot)) is None
    lock.release()
    assert await_answer(witness, ballot) == b"%d" % ballot
