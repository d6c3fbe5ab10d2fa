"""Use groups of some of the ranks: made one by one, and as rows and columns of a mesh.

    torchrun --standalone --nproc-per-node 4 examples/subgroups.py

Shows that `new_group` is called by every rank, members or not; that a root is named by its rank in
the group or by its global rank; and how a sum over the rows of a two-dimensional `DeviceMesh` and
then over its columns is one over all ranks. Exits with 1 when a result is wrong.
"""

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def sum_of(value: float, group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.full((1000,), value)
    dist.all_reduce(tensor, group=group)
    if not (tensor == tensor[0]).all():
        raise ArithmeticError(f"the elements of a sum differ: {tensor}")
    return tensor[0].item()


def evens_and_odds() -> dict[str, bool]:
    """One group of the even ranks, and one of the odd ones, at work at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    members = [list(range(first, ranks, 2)) for first in (0, 1)]
    groups = [dist.new_group(part) for part in members]  # every rank makes both
    group, peers = groups[rank % 2], members[rank % 2]
    checks = {"sum in a group": sum_of(rank, group) == sum(peers)}

    tensor = torch.tensor(rank)
    dist.broadcast(tensor, group_src=len(peers) - 1, group=group)  # its last member
    checks["rank in the group"] = tensor.item() == peers[-1]
    tensor = torch.tensor(rank)
    dist.broadcast(tensor, src=peers[0], group=group)
    checks["global rank"] = tensor.item() == peers[0]
    for made in groups:
        if made != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)
    return checks


def rows_and_columns() -> dict[str, bool]:
    """A mesh of `ranks / 2` rows with two ranks each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("column", "row"))
    row, column = mesh["row"].get_group(), mesh["column"].get_group()
    in_row = [rank - rank % 2, rank - rank % 2 + 1]
    in_column = list(range(rank % 2, ranks, 2))
    across = sum_of(rank, row)
    return {
        "members": [dist.get_process_group_ranks(g) for g in (row, column)] == [in_row, in_column],
        "backends": {dist.get_backend(g) for g in (row, column)} == {dist.get_backend()},
        "row": across == sum(in_row),
        "column": sum_of(rank, column) == sum(in_column),
        "rows, then columns": sum_of(across, column) == sum(range(ranks)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % 2:
        raise SystemExit(f"the mesh needs an even number of ranks, and there are {ranks}")
    checks = {**evens_and_odds(), **rows_and_columns()}
    checks["all"] = sum_of(rank) == sum(range(ranks))
    dist.destroy_process_group()
    wrong = [name for name, good in checks.items() if not good]
    if wrong:
        print(f"rank {rank}: wrong: {', '.join(wrong)}", file=sys.stderr)
    if rank == 0:
        right = len(checks) - len(wrong)
        print(f"right={right} of {len(checks)} backend={options.backend} ranks={ranks}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
