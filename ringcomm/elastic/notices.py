"""Notices that this machine will be taken away, as clouds give them for spot machines.

Each cloud answers at an address that only its machines reach: AWS and Azure two minutes and half a
minute before the end, Google half a minute. The formats are those of the clouds' documentation: EC2
"Spot Instance interruption notices", Compute Engine "Detect if a preemption process has started",
Azure "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ringcomm._runtime.process import say

ASK_SECONDS = 5.0
ANSWER_SECONDS = 2.0  # for one answer, which comes from the machine's own host
TOKEN_SECONDS = 21_600  # as long as AWS allows
LONGEST = 1 << 20  # bytes of an answer

# No proxy is asked: the addresses mean this machine.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return the answer; None where there is no such thing, as before a notice."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _open(request, timeout=ANSWER_SECONDS) as answer:
            return str(answer.read(LONGEST).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


class Aws:
    """EC2: the notice is there, or it is not."""

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._base, self._token = base, ""

    def notice(self) -> str:
        """Return the notice in words, or ""."""
        try:
            return self._notice()
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            self._token = ""  # it was too old
            return self._notice()

    def _notice(self) -> str:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            self._token = _ask(f"{self._base}/latest/api/token", ttl, "PUT") or ""
        headers = {"X-aws-ec2-metadata-token": self._token}
        told = _ask(f"{self._base}/latest/meta-data/spot/instance-action", headers)
        if told is None:
            return ""
        action = json.loads(told)
        return f"AWS will {action['action']} this machine at {action['time']}"


class Gcp:
    """Compute Engine: a word says it."""

    def __init__(self, base: str = "http://metadata.google.internal") -> None:
        self._base = base

    def notice(self) -> str:
        """Return the notice in words, or ""."""
        url = f"{self._base}/computeMetadata/v1/instance/preempted"
        told = _ask(url, {"Metadata-Flavor": "Google"})
        is_told = told is not None and told.strip() == "TRUE"
        return "Google Cloud is about to stop this machine" if is_told else ""


class Azure:
    """Scheduled Events: a list, also of what happens to other machines of the same set."""

    ENDS = ("Preempt", "Terminate", "Redeploy")

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._base = base
        self._name: str | None = None

    def notice(self) -> str:
        """Return the notice in words, or ""."""
        headers = {"Metadata": "true"}
        if self._name is None:
            query = "api-version=2021-02-01&format=text"
            url = f"{self._base}/metadata/instance/compute/name?{query}"
            self._name = (_ask(url, headers) or "").strip()
        url = f"{self._base}/metadata/scheduledevents?api-version=2020-07-01"
        told: dict[str, Any] = json.loads(_ask(url, headers) or "{}")
        for event in told.get("Events", []):
            mine = not self._name or self._name in event.get("Resources", [])
            if mine and event.get("EventType") in self.ENDS:
                when = event.get("NotBefore") or "once"
                return f"Azure will {event['EventType'].lower()} this machine at {when}"
        return ""


CLOUDS: dict[str, Callable[[], Any]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def watch(cloud: Any, leave: Callable[[], None]) -> None:
    """Ask a cloud again and again, in a thread, and call `leave` once it gives notice.

    A cloud that does not answer is asked on; that is said once.
    """

    def ask() -> None:
        failed = False
        while True:
            time.sleep(ASK_SECONDS)
            try:
                notice = cloud.notice()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if not failed:
                    say(f"WARNING elastic: this machine's cloud does not tell notices: {error}")
                failed = True
                continue
            if notice:
                say(f"elastic: {notice}: this rank leaves after its step")
                leave()
                return

    threading.Thread(target=ask, name="ringcomm elastic notices", daemon=True).start()
