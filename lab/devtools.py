"""A headless Chromium that is driven over the DevTools protocol: scripts run in its pages.

Messages go through two pipes, as JSON that ends with a zero byte: no port, no package.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any

from lab.browser import CHROMIUM, SECONDS

# Chromium reads commands from descriptor 3 and writes answers to 4.
START = 'from=$1 to=$2; shift 2; exec "$@" 3<&"$from" 4>&"$to"'
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


class Browser:
    """A Chromium with one page, which ends with the `with` block."""

    def __enter__(self) -> Browser:
        self.folder = tempfile.TemporaryDirectory()
        theirs, self.commands = high_pipe()
        self.answers, ours = high_pipe()
        command = [str(CHROMIUM), *ARGUMENTS, f"--user-data-dir={self.folder.name}"]
        command += ["--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", START, "bash", str(theirs), str(ours), *command],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self.unread = b""
        self.number = 0
        self.session = ""
        pages = self.ask("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.commands)  # Chromium ends with its pipe
        os.close(self.answers)
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError where Chromium refuses it."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        end = time.monotonic() + SECONDS
        while True:
            answer = self.receive(end)
            if answer.get("id") == self.number:  # others are events
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.answers], [], [], max(end - time.monotonic(), 0))
            data = os.read(self.answers, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("Chromium ended" if ready else "Chromium does not answer")
            self.unread += data
        text, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; of a promise, its result.

        Raises RuntimeError with the exception's text.
        """
        answer = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        """Open a page and wait until it is there."""
        self.ask("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true in the page. Raises RuntimeError after a minute."""
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise RuntimeError(f"the page never came to {condition}")
            time.sleep(0.05)


def high_pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors do not collide with 3 and 4."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in low)
    for descriptor in low:
        os.close(descriptor)
    return high[0], high[1]
