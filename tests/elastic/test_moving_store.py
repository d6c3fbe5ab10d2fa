"""Stores that die: the lowest rank serves another one, and those that join find it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing
from lab.ports import free_port
from lab.ranks import HOST
from lab.trainee import Plan
from lab.trainees import Trainees, trainees
from ringcomm.elastic import store as stores
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import Record
from ringcomm.elastic.store import Address, RunStore, open_store
from ringcomm.elastic.watch import Watch


def await_size(some: Trainees, numbers: list[int], size: int) -> None:
    """Wait until each of them has made a step, from now on, in a world of so many."""
    at, deadline = time.monotonic(), time.monotonic() + limit(60)
    for number in numbers:
        while not any(
            event["at"] > at and event["size"] == size for event in some.events(number, "step")
        ):
            assert time.monotonic() < deadline, f"{number}: {some.events(number)[-2:]}"
            time.sleep(0.02)


def test_the_lowest_rank_serves_another_store() -> None:
    """Rank 0 serves the store, and is killed; then the next one, and is killed as well."""
    with trainees(3, store=f"{HOST}:{free_port()}", epochs=10**6) as some:
        some.await_events([0, 1, 2], "step", 3)
        some.kill(0)
        (third,) = some.start()
        await_size(some, [1, 2, third], 3)
        some.kill(1)
        (fourth,) = some.start()
        await_size(some, [2, third, fourth], 3)
        assert not some.all_events("raised")
        some.check_equal()


def serve(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ringcomm", "elastic", "store", "--port", str(port)]
    return subprocess.Popen([*command, "--host", HOST], stdout=subprocess.PIPE)


def test_a_store_that_is_started_again_learns_of_the_world() -> None:
    """A rank that could found a world waits for the store; it joins the one that runs instead."""
    port = free_port()
    server = serve(port)
    assert server.stdout is not None
    server.stdout.readline()
    try:
        with trainees(2, store=f"{HOST}:{port}", epochs=10**6) as some:
            some.await_events([0, 1], "step", 3)
            server.kill()
            server.wait()
            (third,) = some.start(start=1)
            server = serve(port)
            await_size(some, [0, 1, third], 3)
            assert some.events(third, "tracked")[0]["epoch"] > 0
    finally:
        server.kill()
        server.wait()


def test_addresses() -> None:
    assert Address.of(" a:1 ") == Address("a", 1)
    assert str(Address("a", 1)) == "a:1"
    for text in ("", "a", "a:", ":1", "a:b"):
        with pytest.raises(ValueError, match="is not a store address"):
            Address.of(text)
    assert Address(HOST, 1).is_here()
    assert not Address("192.0.2.1", 1).is_here()
    assert Address(HOST, 1).way_here() == HOST


def test_the_first_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several addresses stays without a server if another one has one already."""
    monkeypatch.delenv("RANK", raising=False)
    first, second = free_port(), free_port()
    served = dist.TCPStore(HOST, second, is_master=True, wait_for_workers=False)
    store = open_store("run", f"{HOST}:{first},{HOST}:{second}")
    store.keys.set("word", "said")
    assert served.get("ringcomm-elastic/run/word") == b"said"
    assert not Address(HOST, first).answers()
    alone = open_store("run", f"{HOST}:{first},{HOST}:{free_port()}")
    assert Address(HOST, first).answers()
    assert alone.ready is not None


def test_a_store_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    served = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    here = RunStore("run", dist.HashStore(), (Address(HOST, 1),))
    assert here.look_at_home() is None
    here.move(f"{HOST}:{served.port}")
    here.keys.set("word", "said")
    assert served.get("ringcomm-elastic/run/word") == b"said"
    assert here.address == f"{HOST}:{served.port}"
    here.move(f"{HOST}:{free_port()}")
    monkeypatch.setattr(stores, "TIMEOUT", timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match=r"has moved to .* and does not answer"):
        _ = here.keys
    assert here.ready is None
    home = dist.HashStore()
    here.move_back(home, "")
    assert (here.keys, here.address, here.is_lost) == (home, "", False)


def test_who_serves_does_not_connect() -> None:
    here = RunStore("run", dist.HashStore(), (Address(HOST, free_port()),))
    offer = here.offer = here.serve()
    assert offer is not None
    assert offer.address == here.home[0]
    here.move(str(offer.address))
    assert here.offer is None
    assert (here.address, here.ready is None) == ("", False)
    again = RunStore("run", dist.HashStore(), here.home).serve()
    assert again is not None
    assert again.address.port != offer.address.port, "that one is taken"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.xdist_group("hosts")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("named", ["one", "two"])
@pytest.mark.parametrize("late", [False, True])
def test_a_world_that_has_left_the_host_of_its_store(
    tmp_path: Path, named: str, late: bool
) -> None:
    """It serves its store on another host, and one that begins anew on the first one finds it.

    It would serve a store there, and found a world alone: before the others have a store, or late.
    """
    with Hosts(2) as hosts:
        addresses = [f"{host}:29498" for host in hosts.addresses]
        home = ",".join(addresses) if named == "two" else addresses[0]
        names = {"RES_OPTIONS": "timeout:1 attempts:1"}  # no name server is here
        plan = Plan(home, start=1, epochs=10**6, pause=0.01, settings=names)
        some = Trainees(plan, tmp_path)
        try:
            for host in (0, 1, 1):
                some.start(namespace=hosts.namespaces[host], start=3)
            some.await_events([0, 1, 2], "step", 3)
            some.kill(0)
            await_size(some, [1, 2], 2)
            if late:
                some.await_events([1, 2], "change", 2)
            (alone,) = some.start(namespace=hosts.namespaces[0], settings={**names, "RANK": "0"})
            await_size(some, [1, 2, alone], 3)
            some.check_equal()
        finally:
            some.end()


def test_only_the_newest_move_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to where the store was meanwhile may be made late."""
    late, old, new = threading.Event(), dist.HashStore(), dist.HashStore()

    def client(address: Address) -> dist.Store:
        if address.port == 1:
            late.wait(limit(10))
            return old
        return new

    monkeypatch.setattr(stores, "client", client)
    here = RunStore("run", dist.HashStore(), (Address(HOST, 3),))
    here.move(f"{HOST}:1")
    first = here._connecting
    assert first is not None
    assert not here.is_lost, "a connection is being made"
    here.move(f"{HOST}:2")
    here.keys.set("word", "said")
    late.set()
    first.join()
    assert here.keys.get("word") == b"said"
    assert new.get("ringcomm-elastic/run/word") == b"said"
    here.lose(RuntimeError("gone"))
    assert here.is_lost


def test_who_leads_without_a_connection_serves_a_store() -> None:
    """Its connection was lost before it led, so no request of its own fails."""
    here = RunStore("run", dist.HashStore(), (Address(HOST, free_port()),))
    here.lose(RuntimeError("the store is gone"))
    record = Record(0, 3, True, (Process("a", "host", 1),), unit=2)
    watch = Watch(here, lambda: 0, lambda: record)
    try:
        deadline = time.monotonic() + limit(10)
        while here.offer is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert here.offer.address == here.home[0]
        told = here.of_run(here.offer.client).get("world")
        assert Record.from_text(told.decode()) == record
    finally:
        watch.stop()


def test_a_world_tells_the_one_before_it_at_home_that_it_is_over() -> None:
    """It was founded in its place where the store was meanwhile."""
    served = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    here = RunStore("run", dist.HashStore(), (Address(HOST, served.port),))
    here.address = "elsewhere:1"
    before, now = (Record(life, 3, True, (Process(f"{life}", "host", 1),)) for life in (0, 1))
    home = here.of_run(served)
    home.set("world", before.to_text())
    here.keys.set("dead/0", "1")
    watch = Watch(here, lambda: 0, lambda: now)
    try:
        deadline = time.monotonic() + limit(10)
        while not home.check(["dead/0"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        told = Record.from_text(home.get("world").decode())
        assert told == replace(now, store=here.address)
    finally:
        watch.stop()


ASKS_A_SILENT_HOST = """
import sys
from datetime import timedelta
import torch.distributed as dist
from ringcomm.elastic import store
store.TIMEOUT = timedelta(seconds=2)
client = store.client(store.Address.of(sys.argv[1]))
print(client.check(["key"]), flush=True)
sys.stdin.readline()
try:
    client.check(["key"])
except dist.DistError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.xdist_group("hosts")
def test_a_request_to_a_silent_host_has_an_end() -> None:
    with Hosts(2) as hosts:
        address = f"{hosts.addresses[1]}:29497"
        serves = [sys.executable, "-m", "ringcomm", "elastic", "store", "--port", "29497"]
        names = {"RES_OPTIONS": "timeout:1 attempts:1"}  # no name server is here
        hosts.start(1, serves, names)
        asks = [sys.executable, "-c", ASKS_A_SILENT_HOST, address]
        inside = ["ip", "netns", "exec", hosts.namespaces[0], *asks]
        with subprocess.Popen(
            inside,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **names},
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == "False"
                hosts.cut(1)
                said, _ = process.communicate("now\n", timeout=limit(60))
                assert said.strip() == "DistNetworkError"
            finally:
                process.kill()
