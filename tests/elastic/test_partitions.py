"""Networks cut in two where many ranks share hosts, and a remote rank that hangs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lab.namespaces import missing
from lab.site import SILENCE, Site, site

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.timeout(400),
]


def cut_and_check(place: Site, host: int, stay: list[int], stop: list[int]) -> None:
    """Cut a host off: these go on as a world of their own, and those make no step any more."""
    place.hosts.cut(host)
    at = time.monotonic()
    size = len(stay) + len(stop)
    place.await_size(stay, len(stay), SILENCE + 10)
    for number in stop:
        assert place.await_stop(number, 3 * SILENCE + 10)["kind"] == "Evicted"
        assert all(event["size"] == size for event in place.steps_after(number, at))
    place.trainees.check_equal()
    place.trainees.check_ledger()


@pytest.mark.slow
@pytest.mark.parametrize("store_on", [0, 1])
def test_four_against_four(tmp_path: Path, store_on: int) -> None:
    """Two equal halves: the host goes on that has the store, whichever holds rank 0."""
    with site(2, tmp_path, store_on) as place:
        numbers = place.start(0, 0, 0, 0, 1, 1, 1, 1)
        halves = [numbers[:4], numbers[4:]]
        cut_and_check(place, 1, stay=halves[store_on], stop=halves[1 - store_on])


@pytest.mark.slow
@pytest.mark.parametrize("store_on", [0, 2])
def test_five_against_three(tmp_path: Path, store_on: int) -> None:
    """The five go on, of two hosts, also where the store is with the three."""
    with site(3, tmp_path, store_on) as place:
        numbers = place.start(0, 0, 0, 1, 1, 2, 2, 2)
        cut_and_check(place, 2, stay=numbers[:5], stop=numbers[5:])


def test_a_remote_rank_that_hangs_is_left(tmp_path: Path) -> None:
    """Its host answers, and its threads do, but its step never ends.

    The others wait for the timeout of their operation, and are silent to it for as long as a
    silence may last. Then they go on. When it wakes, it must not go on.
    """
    fates = ((2, "hangs", 8),)
    with site(2, tmp_path, 0, operation=2.0, fates=fates) as place:
        first, second, hung = place.start(0, 1, 1)
        place.trainees.await_events([hung], "dies")
        at = time.monotonic()
        place.await_size([first, second], 2, 5 * SILENCE + 10)
        change = place.trainees.events(first, "change")[0]
        assert [place.trainees.processes[hung].pid] == change["lost"]
        assert change["at"] - at > SILENCE, "it was given up without a silence"
        assert not place.trainees.events(hung, "raised")
        place.trainees.kill(hung, signal.SIGUSR1)
        assert place.await_stop(hung, 3 * SILENCE + 10)["kind"] == "Evicted"
        assert not place.steps_after(hung, at)
        place.trainees.check_equal()
        place.trainees.check_ledger()
