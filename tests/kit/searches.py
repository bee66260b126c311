"""How long hypothesis searches: three profiles, and searches that are longer or shorter than most.

`PS_SEARCH`, or `--hypothesis-profile`, chooses: `suite`, for `make test`, tries a few examples, the same in each run;
`ci` draws others each time; `soak` searches for as long as one likes to wait.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

EXAMPLES = {"suite": 20, "ci": 50, "soak": 3_000}
STEPS = {"suite": 30, "ci": 40, "soak": 100}


def load() -> None:
    """Registers the profiles, and loads the one that PS_SEARCH names."""
    for name, examples in EXAMPLES.items():
        same: dict[str, Any] = {"derandomize": True, "database": None} if name == "suite" else {}
        settings.register_profile(
            name,
            max_examples=examples,
            stateful_step_count=STEPS[name],
            deadline=None,  # a slow machine is no failure
            suppress_health_check=[HealthCheck.too_slow],
            **same,
        )
    settings.load_profile(os.environ.get("PS_SEARCH", "suite"))


def search(share: float = 1, steps: float = 1, suppress: tuple[HealthCheck, ...] = ()) -> settings:
    """Returns the profile's settings with `share` of its examples, and of a machine's `steps`."""
    profile = settings()
    return settings(
        max_examples=max(1, round(share * profile.max_examples)),
        stateful_step_count=max(1, round(steps * profile.stateful_step_count)),
        suppress_health_check=[*profile.suppress_health_check, *suppress],
    )
