"""Notices of clouds: by servers that answer as theirs do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

from lab.course import starters
from lab.limits import limit
from lab.ranks import HOST
from lab.trainee import Log
from ringcomm import elastic
from ringcomm.elastic import notices


class Cloud:
    """A server on loopback. `notified` turns on the notice; `asked` has each request."""

    def __init__(self, kind: str) -> None:
        self.kind, self.notified, self.tokens = kind, False, 0
        self.asked: list[str] = []
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                cloud.asked.append(self.path)
                code, text = getattr(cloud, cloud.kind)(self.command, self.path, self.headers)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = answer  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer((HOST, 0), Handler)
        self.base = f"http://{HOST}:{self.server.server_port}"

    def aws(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if method == "PUT":
            assert headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.tokens += 1
            return 200, f"token {self.tokens}"
        if headers["X-aws-ec2-metadata-token"] != f"token {max(2, self.tokens)}":
            return 401, ""  # the first one is too old at once
        assert path == "/latest/meta-data/spot/instance-action"
        told = json.dumps({"action": "terminate", "time": "2026-09-18T08:22:00Z"})
        return (200, told) if self.notified else (404, "")

    def gcp(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if headers["Metadata-Flavor"] != "Google":
            return 403, ""
        assert path == "/computeMetadata/v1/instance/preempted"
        return 200, "TRUE" if self.notified else "FALSE"

    def azure(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if headers["Metadata"] != "true":
            return 400, ""
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, "mine"
        assert path == "/metadata/scheduledevents?api-version=2020-07-01"
        event = {"EventType": "Preempt", "Resources": ["other"], "EventStatus": "Scheduled",
                 "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT"}  # fmt: skip
        events = [event, {**event, "EventType": "Freeze", "Resources": ["mine"]}]
        if self.notified:
            events.append({**event, "Resources": ["mine"]})
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})


@contextmanager
def cloud_of(kind: str) -> Iterator[Cloud]:
    cloud = Cloud(kind)
    thread = threading.Thread(target=cloud.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield cloud
    finally:
        cloud.server.shutdown()
        thread.join()
        cloud.server.server_close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("aws", "AWS will terminate this machine at 2026-09-18T08:22:00Z"),
        ("gcp", "Google Cloud is about to stop this machine"),
        ("azure", "Azure will preempt this machine at Mon, 19 Sep 2026 18:29:47 GMT"),
    ],
)
def test_a_notice_is_read(kind: str, text: str) -> None:
    with cloud_of(kind) as cloud:
        asks = notices.CLOUDS[kind](cloud.base)  # type: ignore[call-arg]
        assert asks.notice() == ""
        assert asks.notice() == ""
        cloud.notified = True
        assert asks.notice() == text


def test_a_cloud_that_does_not_answer_is_said_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        asked = 0

        def notice(self) -> str:
            self.asked += 1
            if self.asked < 4:
                raise OSError("unreachable")
            return "at last"

    left = threading.Event()
    monkeypatch.setattr(notices, "ASK_SECONDS", 0.01)
    notices.watch(Silent(), left.set)
    assert left.wait(limit(5))
    told = capfd.readouterr().err
    assert told.count("does not tell notices: unreachable") == 1
    assert "at last: this rank leaves after its step" in told


def leaves(world: elastic.World, log: Log, base: str) -> None:
    notices.ASK_SECONDS = 0.05
    net = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    world.track(net=net, opt=opt)
    with pytest.raises(ValueError, match="on_notice='mars': one of aws, gcp, azure"):
        world.leave(on_notice="mars")  # type: ignore[arg-type]
    if world.rank == 1:
        notices.CLOUDS["gcp"] = partial(notices.Gcp, base)
        world.leave(on_notice="gcp")
    while world.size == 2 or world.step_number < 5:
        with world.step():
            net(torch.ones(1, 2)).sum().backward()
            opt.step()
    log("end", size=world.size)


def test_a_rank_leaves_by_a_notice() -> None:
    with cloud_of("gcp") as cloud, starters(2, partial(leaves, base=cloud.base)) as some:
        some.await_events([0, 1], "joined")
        cloud.notified = True
        (end,) = some.await_ends([0])
        assert end["size"] == 1
        some.processes[1].join(limit(30))
        assert some.processes[1].exitcode == 0
