"""What a process of this package is: the installed versions, and how a command takes Ctrl-C while it is imported.

Importing takes a second, in which an interrupt would be raised in a module of anybody, with its traceback, or be lost
in a callback. `psclient` and `psserver` call `begin_command` first.
"""

from __future__ import annotations

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


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)  # nothing has begun that would have to end


def begin_command() -> None:
    """Until `take_interrupts` Ctrl-C ends this process at once, and silently, if it runs one of our commands.

    A process that runs somebody's own script takes it as ever.
    """
    module = sys.orig_argv[sys.orig_argv.index("-m") :][1:2] if sys.argv[:1] == ["-m"] else []
    ours = module[0] in _MODULES if module else os.path.basename((sys.argv or [""])[0]) in _COMMANDS
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # another thread than the main one imports it
            signal.signal(signal.SIGINT, _end)


def take_interrupts() -> None:
    """The command has been imported: from now on Ctrl-C raises `KeyboardInterrupt`, as ever."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
