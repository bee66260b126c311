"""Runs a user's script in this process, as `python SCRIPT` would, and says in one line what went wrong."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import pswire
from psclient._src.interpreter import tracebacks
from psclient._src.interpreter.interrupts import calls_user
from psclient._src.processes import shutdown
from psclient._src.processes.sigterm import NOTICE
from pswire.cluster import Task
from pswire.errors import PSError
from pswire.telemetry import logging_setup

log = logging.getLogger("psworker")

_OURS = tuple(str(path) + os.sep for path in (Path(__file__).parents[2], *map(Path, pswire.__path__)))
_PR_SET_PDEATHSIG = 1


def run_script(script: str, args: Sequence[str], task: Task | None, debug: bool = False) -> int:
    """Runs a script as `__main__`.

    Args:
        script: path of the script.
        args: the script's arguments.
        task: the task that this process is, for messages; None without a cluster.
        debug: True to show errors of this package with their traceback.

    Returns:
        The exit code: 0, the script's own, 2 without such a script, that of the error that ended it, or
        `shutdown.code_after` what was to be done after its end and was not.
    """
    path = Path(script)
    if not path.exists():
        hint = "; options come before the script" if script.startswith("-") else f" in {Path.cwd()}"
        say(task, f"error: there is no script {script!r}{hint}")
        return 2
    sys.argv = [script, *args]
    sys.path.insert(0, str(path.resolve() if path.is_dir() else path.resolve().parent))
    return _run_as(script, partial(runpy.run_path, script, run_name="__main__"), task, debug)


def run_module(module: str, script: str, args: Sequence[str], task: Task, debug: bool = False) -> int:
    """Imports a module, in the process of a worker, and does what is to be done at the end of its script.

    It is looked for in the working directory, and beside the script.

    Args:
        module: its name, such as "package.closures".
        script: path of the script that the chief runs, "" if it is not said.
        args: the arguments of that, which the module may read as well.
        task: the task that this process is, for messages.
        debug: True to show errors of this package with their traceback.

    Returns:
        The exit code, as of `run_script`; 2 without such a module.
    """
    sys.argv = [script or module, *args]
    sys.path[:0] = [str(Path.cwd()), *([str(Path(script).resolve().parent)] if script else [])]
    try:
        found = importlib.util.find_spec(module)  # imports the packages around it
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        found = None
    if found is None or found.origin is None:
        say(task, f"error: there is no module {module!r} in {' or '.join(sys.path[: 1 + bool(script)])}")
        return 2
    return _run_as(found.origin, partial(importlib.import_module, module), task, debug)


def _run_as(script: str, program: Callable[[], object], task: Task | None, debug: bool) -> int:
    """Runs a program, whose text is in a file, and then what is registered for its end; returns the exit code."""
    sys.excepthook = _hook(script, task, debug)
    if debug:
        tracebacks.log.setLevel(logging.DEBUG)
    if logging_setup.structured():
        threading.excepthook = _log_of_thread
    try:
        code = _run(program)
    finally:
        failures = shutdown.run()
    for error in failures:
        say(task, f"error: {' '.join(str(error).split())}")
    return code or shutdown.code_after(failures)


@calls_user
def _run(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as exit:
        return _exit_code(exit)
    except BaseException as error:
        _remember(error)
        sys.excepthook(type(error), error, error.__traceback__)  # by now others may have hung on to it
        return shutdown.code_of(error)
    return 0


def _hook(script: str, task: Task | None, debug: bool) -> Callable[..., None]:
    """Returns how an exception that nobody catches is shown: ours in one line, the user's as python shows it."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stdout.flush()
        if isinstance(error, KeyboardInterrupt):
            say(task, "interrupted")
        elif isinstance(error, PSError) and not debug:
            say(task, f"error: {one_line(error, Path(script))}")
        else:
            trace = _from_script(trace, script)
            if logging_setup.structured():
                log.error("%s failed: %s", script, error, exc_info=(kind, error.with_traceback(trace), trace))
            else:
                sys.__excepthook__(kind, error.with_traceback(trace), trace)

    return show


def say(task: Task | None, text: str) -> None:
    """Prints one line on stderr, headed by the program and the task; where the log is JSON, as an error of it."""
    sys.stdout.flush()
    if logging_setup.structured():
        log.error("%s", text.removeprefix("error: "))
    else:
        print(f"psworker: {task}: {text}" if task else f"psworker: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _log_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Writes an exception that ended a thread to the log, with its traceback."""
    error = failed.exc_value
    if error is not None and not isinstance(error, SystemExit):
        where = failed.thread.name if failed.thread else "a thread"
        log.error("%s failed: %s", where, error, exc_info=(type(error), error, failed.exc_traceback))


def one_line(error: PSError, script: Path) -> str:
    """The error's text, and the line of the user's code that it comes from."""
    text = " ".join(str(error).split())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    beside = [frame for frame in frames if Path(frame.filename).is_relative_to(script.parent)]
    where = (beside or frames)[-1:]
    if not where or " (created at " in text:  # it names a line already, which is often another one
        return text
    return f"{text} ({_relative(where[0].filename)}:{where[0].lineno})"


def end_on_sigterm(launched: bool = False) -> None:
    """Makes a worker leave its job at its next step when it receives SIGTERM.

    Any other process, and a worker at the second signal, exits with code 143, so that its sessions are closed. One
    more signal kills the process.

    Args:
        launched: True if the launcher of a local cluster has started this process: at its SIGHUP nothing is left first.
    """
    NOTICE.install(launched)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends (Linux).

    Args:
        parent: process id of who started this process; when it is gone already, this process ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(128 + signal.SIGKILL)


def _remember(error: BaseException) -> None:
    """Sets `sys.last_value` and its kin, as the interpreter does: functions at exit see why the script failed."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Leaves out what led from the command line to the script's first frame."""

    def is_script(filename: str) -> bool:
        return filename == script or filename.startswith(script.rstrip(os.sep) + os.sep)

    while trace is not None and not is_script(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _exit_code(exit: SystemExit) -> int:
    if exit.code:
        _remember(exit)
    if exit.code is None or isinstance(exit.code, int):
        return exit.code or 0
    sys.stdout.flush()
    print(exit.code, file=sys.stderr, flush=True)  # noqa: T201
    return 1


def _is_users(filename: str) -> bool:
    return not filename.startswith((*_OURS, "<"))  # as of dataclasses, whose methods are in "<string>"


def _relative(filename: str) -> str:
    path = Path(filename).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
