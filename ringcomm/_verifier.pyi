"""The verifier and the plans of scripts: csrc/verify/module.cc."""

# The collective, ranks, ranks of a host, bytes of an element, root, bytes, shards, send, recv, and
# the geometry.
_Call = tuple[
    int, int, int, int, int, int, list[int], list[int], list[int], list[int]
]  # fmt: skip
# The rank, the operation of the sequence, that of the script or -1, the pass, the signal that a
# wait meets or -1, and the step in words.
_Event = tuple[int, int, int, int, int, str]

def geometry(size: int, mapped: bool) -> list[int]: ...
def prove(
    shape: _Call, scripts: list[list[int]]
) -> tuple[str, str, bool, int, int, list[_Event], list[_Event]] | None: ...
def mutants(
    shape: _Call, scripts: list[list[int]]
) -> tuple[int, list[tuple[int, int, int, int, int]]]: ...
def steps(
    shape: _Call, rank: int, script: list[int]
) -> list[tuple[int, int, int, int, int, list[tuple[int, int, int, int]]]]: ...
def text(shape: _Call, rank: int, script: list[int]) -> str: ...
