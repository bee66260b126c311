"""Functions to run before this process ends, while it can still start threads.

Since Python 3.12 no thread can be started once `atexit` runs its functions, and calls over the network may need one.
What is registered here runs before: when a script that `psworker` runs has ended, else when the main thread has. In
Python 3.12.0 and 3.12.1 that is too late as well, and has to do with the threads that there are (`threads.SPARE`).

What cannot be done, such as the last checkpoint, fails the process, though its script has come to its end.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Callable, Sequence

from pswire.errors import Abandoned, CheckpointError, ConfigError, Forbidden, PSError, ServerLost

log = logging.getLogger("psclient")

ABANDONED = 69
"""The exit code of a chief that has given its job up, since no worker was there: EX_UNAVAILABLE of sysexits.h. Another
attempt is of use where servers and workers are started again as well."""

NOT_SAVED = 73
"""The exit code of a process whose script ended well, and what was to be done after it was not: EX_CANTCREAT of
sysexits.h, as it was to write a checkpoint."""

SERVER_LOST = 75
"""The exit code of a process that `ServerLost` ended, EX_TEMPFAIL of sysexits.h: nothing is wrong with the process
itself, and another attempt goes on from a checkpoint."""

_CODES = {KeyboardInterrupt: 130, ConfigError: 2, Forbidden: 2, ServerLost: SERVER_LOST, Abandoned: ABANDONED}

_endings: list[Callable[[], None]] = []
_first: list[Callable[[], None]] = []


def register(ending: Callable[[], None], first: bool = False) -> None:
    """Registers a function to call before this process ends, the last one first; in a fork of the process, too.

    The process fails with what it raises, if that is a `PSError`. With `first` it goes before all that are not.
    """
    (_first if first else _endings).append(ending)


def unregister(ending: Callable[[], None]) -> None:
    """Removes a function; does nothing if it is not registered."""
    if ending in _endings:
        _endings.remove(ending)


def run() -> list[PSError]:
    """Calls what is registered, each once; an error keeps no other from being called.

    Returns:
        Why this process fails; other errors are ours, and logged.
    """
    failures: list[PSError] = []
    any_run = bool(_first or _endings)
    while _first or _endings:
        ending = (_first or _endings).pop()
        try:
            ending()
        except PSError as error:
            failures.append(error)
        except Exception:
            log.exception("an error occurred while the process ended")
    if any_run:
        # A call of gRPC's in a cycle of garbage would be deleted at the end of the interpreter, where it may wait for
        # good for a lock that a thread held when it was stopped.
        gc.collect()
    return failures


def code_of(error: BaseException) -> int:
    """Returns the exit code of a process that an error ends.

    2 says that another attempt would end in the same way, `SERVER_LOST` that another process is to blame.
    """
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)


def code_after(failures: Sequence[PSError]) -> int:
    """Returns the exit code of a process whose script ended well, and then something failed; 0 where nothing did."""
    if not failures:
        return 0
    return NOT_SAVED if isinstance(failures[0], CheckpointError) else code_of(failures[0])


def _run_at_exit() -> None:
    """After a script that `python` runs: says why the process fails, and has it end with that code.

    Only the code can still be changed, and by one function of Python: the one by which `sys.exit` itself ends. It does
    all that is left to do, which is all but what was done above.
    """
    failures = run()
    for error in failures:
        print(f"{sys.argv[0] or 'python'}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
    if failures:
        ctypes.pythonapi.Py_Exit(code_after(failures))


# The executors of `concurrent.futures` end by this function as well: Python has no public one that runs early enough.
threading._register_atexit(_run_at_exit)  # type: ignore[attr-defined]
