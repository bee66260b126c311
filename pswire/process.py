"""What a process of this package is: the installed versions, and how a command begins and ends.

Importing takes up to a second, in which an interrupt would be raised in a module of anybody, with its traceback, or be
lost in a callback. `psclient` and `psserver` call `begin_command` first.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from functools import cache
from types import FrameType, MappingProxyType

PACKAGES = ("paramserver", "grpcio", "numba", "numpy", "protobuf", "cupy", "cupy-cuda12x", "cupy-cuda13x")
"""Names of packages, as package indexes write them."""


def version(name: str = PACKAGES[0]) -> str:
    """Returns the version of an installed package; raises `ModuleNotFoundError` if it is not installed."""
    from importlib import metadata  # it parses mail headers: no process waits for it at its start

    return metadata.version(name)


@cache
def versions() -> MappingProxyType[str, str]:
    """Versions by name, without those that are not installed."""
    found = {"python": "{}.{}.{}".format(*sys.version_info)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return MappingProxyType(found)


_COMMANDS = {"psserver", "psworker", "psctl"}
_MODULES = {"psserver", "psclient", "psclient.psctl"}

INTERRUPTED = 130
"""The exit code of a command after Ctrl-C: 128 + SIGINT."""


_is_command = False
"""True in a process that runs one of our commands, from `begin_command` on."""

_ends_with: int | None = None
"""The exit code of a command that ends without taking its modules apart; None for one that ends as ever."""


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has begun that would have to end


def begin_command() -> None:
    """If this process runs one of our commands, until `take_interrupts` Ctrl-C ends it at once, and silently.

    Meanwhile the garbage collector rests, since importing makes no garbage. A process that runs somebody's own script
    is left as it is.
    """
    global _is_command
    module = sys.orig_argv[sys.orig_argv.index("-m") :][1:2] if sys.argv[:1] == ["-m"] else []
    ours = module[0] in _MODULES if module else os.path.basename((sys.argv or [""])[0]) in _COMMANDS
    if not ours or _is_command:
        return
    _is_command = True
    gc.disable()
    atexit.register(_end_quickly)  # the first that is registered is called last
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # another thread than the main one imports it
            signal.signal(signal.SIGINT, _end)


def take_interrupts() -> None:
    """The command has been imported: from now on Ctrl-C raises `KeyboardInterrupt`, as ever."""
    if not _is_command:
        return
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what has been imported stays, so that the collector need not look at it
    gc.enable()


def ends_with(code: int) -> int:
    """Returns an exit code. A command ends with it as soon as all functions have been called that run at exit.

    Python would take all modules apart then, which takes 0.1 to 0.4 s. This is for processes in which only code of ours
    has run: a script may count on files being flushed by that.
    """
    global _ends_with
    _ends_with = code
    return code


def _end_quickly() -> None:
    if not isinstance(_ends_with, int):
        return  # as of a command that another package has given `psctl`
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        return  # Python says what is wrong with them
    os._exit(_ends_with)
