"""Inside each host, between hosts by a ring, and inside each host again.

Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018. all_reduce,
for h hosts of `shape.local` ranks each: each host sends 2 (h - 1) / h of the message to others.
"""

from ringcomm.algorithms import Shape, Value, copy, reduce, send


def hierarchical(shape: Shape) -> None:
    n, local = shape.ranks, shape.local
    if local in (1, n):
        raise ValueError("a hierarchy needs several ranks on each of several hosts")
    hosts = n // local
    host = [range(r // local * local, r // local * local + local) for r in range(n)]
    # Rank r of a host adds up the chunks of all ranks with its index, one for each host.
    group = [[h * local + r % local for h in range(hosts)] for r in range(n)]
    inside = {(r, m): send([shape.input(r, c) for c in group[m]], to=m)
              for r in range(n) for m in host[r] if m != r}  # fmt: skip
    held: list[list[Value]] = [
        [
            reduce(*(shape.input(r, c) if m == r else inside[m, r][h] for m in host[r]))
            for h, c in enumerate(group[r])
        ]
        for r in range(n)
    ]
    for step in range(1, hosts):
        at = [(r // local - step) % hosts for r in range(n)]  # the host whose chunk leaves
        sent = [send(held[r][at[r]], to=(r + local) % n) for r in range(n)]
        for r in range(n):
            h = at[r - local]
            held[r][h] = reduce(sent[r - local], held[r][h])
    for r in range(n):
        copy(held[r][r // local], shape.output(r, r))
    for step in range(hosts - 1):
        at = [(r - step * local) % n for r in range(n)]
        sent = [send(shape.output(r, at[r]), to=(r + local) % n) for r in range(n)]
        for r in range(n):
            copy(sent[r - local], shape.output(r, at[r - local]))
    for r in range(n):
        for m in host[r]:
            for got in send([shape.output(m, c) for c in group[m]], to=r) if m != r else []:
                copy(got, shape.output(r, got.chunk))
