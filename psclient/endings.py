"""What has to be done before this process ends, while it can still start threads.

Since Python 3.12 no thread can be started once `atexit` runs its functions, and calls over the network may need one.
What is registered here runs before: when a script that `psworker` runs has ended, else when the main thread has. In
Python 3.12.0 and 3.12.1 that is too late as well, and has to do with the threads that there are (`threads.SPARE`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_endings: list[Callable[[], None]] = []


def register(ending: Callable[[], None]) -> None:
    """Has a function called before this process ends, the last one first; in a fork of the process, too."""
    _endings.append(ending)


def unregister(ending: Callable[[], None]) -> None:
    """Has a function not called any more; does nothing if it is not registered."""
    if ending in _endings:
        _endings.remove(ending)


def run() -> None:
    """Calls what is registered, each once; an error is logged, and keeps no other from being called."""
    while _endings:
        ending = _endings.pop()
        try:
            ending()
        except Exception:
            log.exception("an error at the end of the process")


# The executors of `concurrent.futures` end by this function as well: Python has no public one that runs early enough.
threading._register_atexit(run)  # type: ignore[attr-defined]
