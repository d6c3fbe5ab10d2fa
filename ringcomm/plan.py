"""The name of `ringcomm.algorithms` from before 1.0."""

import warnings

from ringcomm.algorithms.language import *  # noqa: F403

warnings.warn("ringcomm.plan is now ringcomm.algorithms", FutureWarning, stacklevel=2)
