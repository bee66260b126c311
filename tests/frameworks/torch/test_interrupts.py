"""Ctrl-C at any moment of a loop with PyTorch: the same process goes on, with the values of whole rounds."""

from __future__ import annotations

import pytest

from pstesting import forks
from tests.kit.interrupted import TIMES, check_alone, check_beside, check_idle


@pytest.mark.parametrize("kind", ["torch", "early"])
@pytest.mark.parametrize("times", TIMES)
def test_a_process_with_torch_goes_on_after_interrupts(tmp_path, kind, times):
    """It has a server of its own. Gradients may leave while backward goes on."""
    with forks.having("torch", "psclient.torch"):
        check_alone(kind, times, tmp_path)


@pytest.mark.parametrize("kind", ["torch", "early"])
@pytest.mark.parametrize("times", TIMES)
def test_a_worker_with_torch_goes_on_after_interrupts(tmp_path, kind, times):
    """The other one makes the same steps, and has the same values."""
    with forks.having("torch", "psclient.torch"):
        check_beside(kind, times, tmp_path)


@pytest.mark.parametrize("kind", ["torch", "early"])
def test_a_wait_of_torch_may_be_interrupted(tmp_path, kind):
    """The round is sent already, and counts."""
    with forks.having("torch", "psclient.torch"):
        check_idle(kind, tmp_path)
