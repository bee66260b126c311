"""What all tests share: how long hypothesis searches, and how a test is interrupted."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A shell starts what it runs in the background with SIGINT ignored; tests that interrupt themselves would not be.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure. `pytest --hypothesis-profile=soak` searches for as long as one likes to wait.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("suite"), max_examples=3_000, stateful_step_count=100)
settings.load_profile("suite")
