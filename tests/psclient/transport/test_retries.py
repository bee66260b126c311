"""What is told where a call has no answer: the most that was known of the server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from psclient._src.transport.retries import Attempts
from pswire.cluster import Task
from pswire.encoding.verbs import VERBS
from pswire.errors import Unreachable
from pswire.limits import Timeouts
from pswire.security.identity import Security
from pswire.transport.grpc_channel import open_channel, stub

HOST = "127.0.0.1"

STATUS = VERBS["Status"]

TIMEOUTS = Timeouts(call=0.5, lease=8.0)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        yield f"{HOST}:{sock.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which a connection is taken, and nothing is said."""
    with socket.create_server((HOST, 0)) as sock:
        yield f"{HOST}:{sock.getsockname()[1]}"


def told(*addresses: str) -> str:
    """What is told of a server whose first attempts go to some addresses, and all others to the last of these."""
    attempts = Attempts(
        addresses[-1],
        Task("ps", 0),
        TIMEOUTS,
        threading.Event(),
        lambda: None,
        lambda: "",
        lambda: "",
        lambda: None,
    )
    left = list(addresses)

    def once(seconds: float) -> bytes:
        address = left.pop(0) if len(left) > 1 else left[0]
        began = time.monotonic()
        with open_channel(address, Security(), "") as channel:
            try:
                return bytes(stub(channel, STATUS.path, STATUS.streams)(b"", timeout=seconds))
            except grpc.RpcError:
                if address != addresses[-1]:
                    time.sleep(max(0.0, began + seconds - time.monotonic() - 0.05))  # little is left for the next
                raise

    with pytest.raises(Unreachable) as caught:
        attempts.until_answered(STATUS, once)
    return str(caught.value)


def test_what_was_known_of_a_server_is_told(nobody: str, silent: str) -> None:
    """The last attempt has what is left of the deadline; it may be too short to hear that nothing listens."""
    assert "(nothing listens there)" in told(nobody, silent)


def test_a_server_that_was_always_silent_is_silent(silent: str) -> None:
    """Nothing else was known of it."""
    assert "(it is silent)" in told(silent)
