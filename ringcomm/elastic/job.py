"""Which job a process belongs to, where several share a store and none has a name.

A process that asks a store without a name meets whatever world is there. If it runs another script,
that is another job's, and to join it would be a mistake.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from ringcomm._runtime.process import say

NAME_IT = "give each job a name of its own, RINGCOMM_ELASTIC_RUN"


class Job(NamedTuple):
    """The command that a process was started with: the name of its script, and its words."""

    script: str
    words: list[str]

    @classmethod
    def this(cls) -> Job:
        return cls(Path(sys.argv[0]).name if sys.argv else "", sys.argv[1:])

    def to_text(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Job:
        return cls(*json.loads(text))

    def __str__(self) -> str:
        return shlex.join([self.script, *self.words])[:200]

    def check(self, theirs: Job) -> None:
        """Raise ValueError if the members of a world run another script; warn of other words."""
        if self.script != theirs.script:
            raise ValueError(
                f"the world at this store runs {theirs.script}, and this process {self.script}: "
                f"{NAME_IT}"
            )
        if self.words != theirs.words:
            say(
                f"WARNING elastic: the world at this store was started as `{theirs}`, and this "
                f"process as `{self}`: if they are not one job, {NAME_IT}"
            )
