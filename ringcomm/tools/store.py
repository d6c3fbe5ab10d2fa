"""`ringcomm elastic store`: serve the store of elastic worlds, and nothing else.

Ranks find one another through it. Give them its address in RINGCOMM_ELASTIC, as host:port.
"""

from __future__ import annotations

import argparse
import sys
import threading

EXAMPLES = ("ringcomm elastic store --port 29400",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="0.0.0.0", help="the address to listen at")
    add("--port", type=int, default=29500, help="0: any free one")


def run(options: argparse.Namespace) -> int:
    from ringcomm.elastic.store import serve  # with torch, without which --help does

    served = serve(options.host, options.port)
    if served is None:
        print(
            f"port {options.port} is taken: is another store served there? Give --port another",
            file=sys.stderr,
        )
        return 1
    print(f"serves a store at port {served.port}", flush=True)
    threading.Event().wait()
    return 0
