"""What is bad of that which was found, in sentences, and what to do.

Each rule is a pure function from `Findings` to some `Finding`; RULES lists them.
"""

from __future__ import annotations

from ringcomm.tools.doctor import rules_links, rules_ranks
from ringcomm.tools.doctor.stages import Findings
from ringcomm.tools.doctor.words import STATUS, Finding, Rule

RULES: list[Rule] = [
    *(
        rules_ranks.store,
        rules_ranks.absent,
        rules_ranks.lost,
        rules_ranks.library,
        rules_ranks.versions,
        rules_ranks.settings,
    ),
    *(
        rules_links.listening,
        rules_links.unreached,
        rules_links.answers,
        rules_links.apart,
        rules_links.mtu,
    ),
    *(
        rules_ranks.descriptors,
        rules_ranks.secret_files,
        rules_ranks.memory,
        rules_ranks.names,
        rules_links.clock,
        rules_links.slow,
        rules_links.unmeasured,
        rules_ranks.cuda,
        rules_ranks.cores,
    ),
]


def judge(found: Findings) -> list[Finding]:
    """Return what all rules say, the worst first."""
    told = list(dict.fromkeys(each for rule in RULES for each in rule(found)))
    return sorted(told, key=lambda each: -STATUS[each.severity])
