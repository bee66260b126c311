"""Tracebacks of errors that leave a step: they show the user's lines, and few of this package's own frames."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

log = logging.getLogger("psclient.tracebacks")
"""At `DEBUG`, as by `psworker --debug`, tracebacks stay whole."""

_PACKAGES = tuple(f"{Path(__file__).resolve().parents[3] / name}/" for name in ("psclient", "pswire", "psserver"))


def fold(error: BaseException) -> None:
    """Removes this package's inner frames from an error's traceback, unless the logger `psclient` is at `DEBUG`.

    Of frames of this package that follow each other, the first one stays, which the user's code has called, and the
    last frame of all, which raised the error. Frames of other code stay, such as those of a replica function.

    Args:
        error: is being handled by a public method, and raised again by a bare `raise`.
    """
    if log.isEnabledFor(logging.DEBUG):
        return
    entry = error.__traceback__
    while entry is not None and (after := entry.tb_next) is not None:
        if after.tb_next is not None and _is_ours(entry) and _is_ours(after):
            entry.tb_next = after.tb_next
        else:
            entry = after


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_PACKAGES)
