"""Training that goes on while ranks die, leave and come: stock DDP, optimizer and DataLoader.

    world = elastic.join()
    …
    world.track(model=model, opt=opt, sampler=sampler)
    for x, y in world.batches(loader):
        with world.step():
            …

docs/elastic.md has the whole script, and what happens at each kind of failure.
"""

from ringcomm.elastic.changes import Change, Member
from ringcomm.elastic.errors import Diverged, Evicted, TooFew
from ringcomm.elastic.joining import join
from ringcomm.elastic.outer import Outer
from ringcomm.elastic.sampler import Sampler
from ringcomm.elastic.stats import Stats
from ringcomm.elastic.world import Step, World

__all__ = [
    "Change",
    "Diverged",
    "Evicted",
    "Member",
    "Outer",
    "Sampler",
    "Stats",
    "Step",
    "TooFew",
    "World",
    "join",
]
