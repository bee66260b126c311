"""Hosts for a test, which is skipped where none can be made: it says what is missing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pstesting.hosts import Host, Hosts, HostsUnavailable


def linked(stack: ExitStack, *hosts: Host) -> Hosts:
    """Makes hosts that end with the stack; skips the test where the machine has none."""
    try:
        return stack.enter_context(Hosts(hosts))
    except HostsUnavailable as error:
        pytest.skip(str(error))
