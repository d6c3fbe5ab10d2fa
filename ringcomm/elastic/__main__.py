"""`python -m ringcomm.elastic store`: serve the store of elastic worlds, and nothing else."""

from __future__ import annotations

import argparse
import sys
import threading

from ringcomm.elastic.store import serve


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringcomm.elastic")
    commands = parser.add_subparsers(dest="command", required=True)
    store = commands.add_parser(
        "store",
        help="serve the store through which ranks find one another",
        description="Serves a store until it is stopped. Give ranks its address in "
        "RINGCOMM_ELASTIC, as host:port.",
    )
    store.add_argument("--host", default="0.0.0.0", help="the address to listen at")
    store.add_argument("--port", type=int, default=29500, help="0: any free one")
    options = parser.parse_args(arguments)
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


if __name__ == "__main__":
    sys.exit(main())
