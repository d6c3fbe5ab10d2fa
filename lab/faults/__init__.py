"""The fault table: what is done to a job, and what it does then.

`rows` has all rows, `table` what a row is. Rows of `network` and `wire` disturb the links between
hosts, with jobs of `job`, whose ranks run network_rank.py; `sweep` resets connections at each byte.
Rows of `ranks`, `resources` and `strangers` disturb ranks that `crew` has forked: agent.py runs on
each host, with tasks of `place` and `trouble`, and shim.c in it; `tally` counts how they ended.
"""
