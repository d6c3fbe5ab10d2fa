"""Elastic training as Ray actors: Ray starts one that died again, and it joins the others.

    python examples/elastic_ray.py --ranks 3

Not Ray Train, which restarts the whole group. Needs `pip install ray`.
"""

import argparse
import os
import socket
import sys
from typing import Any

try:
    import ray  # type: ignore[import-not-found,unused-ignore]
except ImportError as missing:
    sys.exit(f"this example needs Ray: `pip install ray` ({missing})")

import ringcomm.elastic.store


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Trainer:
    """One rank. Ray calls `train` again in an actor that it has restarted."""

    def train(self, store: str, ranks: int) -> int:
        os.environ["RINGCOMM_ELASTIC"] = store
        sys.argv = ["elastic.py", "--ranks", str(ranks)]
        import elastic  # the example beside this one

        return elastic.main()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": folder}})
    host = socket.gethostbyname(socket.gethostname())
    store = ringcomm.elastic.store.serve("0.0.0.0", 0)
    address = f"{host}:{store.port}"
    actor: Any = Trainer  # the decorator has made more of it
    actors = [actor.remote() for _ in range(options.ranks)]
    codes = ray.get([each.train.remote(address, options.ranks) for each in actors])
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
