"""Ctrl-C at any moment of a loop with a framework: the same process goes on, with the values of whole rounds."""

from __future__ import annotations

import pytest

from pstesting import forks
from tests.kit.interrupted import TIMES, check_alone, check_beside, check_idle

KINDS = {"torch": "torch", "early": "torch", "jax": "jax"}
"""Loops, and what they need. In `early` gradients leave while backward goes on."""


@pytest.fixture(params=KINDS)
def kind(request, need):
    framework = KINDS[request.param]
    need(framework)
    with forks.having(framework, f"psclient.{framework}"):
        yield request.param


@pytest.mark.parametrize("times", TIMES)
def test_a_process_with_a_framework_goes_on_after_interrupts(tmp_path, kind, times):
    """It has a server of its own. A state of JAX from before goes on where the new one is lost."""
    check_alone(kind, times, tmp_path)


@pytest.mark.parametrize("times", TIMES)
def test_a_worker_with_a_framework_goes_on_after_interrupts(tmp_path, kind, times):
    """The other one makes the same steps, and has the same values."""
    check_beside(kind, times, tmp_path)


def test_a_wait_of_a_framework_may_be_interrupted(tmp_path, kind):
    """The round is sent already, and counts."""
    check_idle(kind, tmp_path)
