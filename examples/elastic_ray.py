"""Elastic training as Ray actors: Ray starts one that died again, and it joins the others.

    python examples/elastic_ray.py --ranks 3

Other options are those of elastic.py, as `--pause 0.1`. Kill an actor by `kill -9`, or by Ray:

    ray.init("auto", namespace="elastic")
    ray.kill(ray.get_actor("rank1"), no_restart=False)

This process serves the store, and prints what the actors print. They may be on any node that has
ringcomm and this folder. Not Ray Train, which restarts the whole group. Needs `pip install ray`.
"""

import argparse
import os
import sys
from typing import Any

try:
    import ray  # type: ignore[import-not-found,unused-ignore]
except ImportError as missing:
    sys.exit(f"this example needs Ray: `pip install ray` ({missing})")

import ringcomm.elastic.store


@ray.remote(max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD")
class Trainer:
    """One rank. Ray calls `train` again in an actor that it has restarted."""

    def train(self, store: str, arguments: list[str]) -> int:
        os.environ["RINGCOMM_ELASTIC"] = store
        sys.argv = ["elastic.py", *arguments]
        import elastic  # the example beside this one

        return elastic.main()


def ends(tasks: list[Any]) -> list[int]:
    """Wait for all ranks; return the exit codes of those that came to an end."""
    codes = []
    while tasks:
        done, tasks = ray.wait(tasks)
        try:
            codes += ray.get(done)
        except ray.exceptions.RayActorError as error:  # it has left; the others go on
            why = str(error).splitlines()[0]
            print(f"a rank has gone for good: {why}", file=sys.stderr, flush=True)
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    options, others = parser.parse_known_args()
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    ray.init(namespace="elastic", runtime_env={"env_vars": {"PYTHONPATH": folder}})
    store = ringcomm.elastic.store.serve("0.0.0.0", 0)
    address = f"{ray.util.get_node_ip_address()}:{store.port}"
    actor: Any = Trainer  # the decorator has made more of it
    actors = [actor.options(name=f"rank{index}").remote() for index in range(options.ranks)]
    arguments = ["--ranks", str(options.ranks), *others]
    codes = ends([trainer.train.remote(address, arguments) for trainer in actors])
    ray.shutdown()  # before the store goes
    return max(codes, default=1)


if __name__ == "__main__":
    sys.exit(main())
