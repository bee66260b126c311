"""Starts our programs by forks of a process that has imported them: 0.05 s of processor time in place of 0.47.

What is started is a process as any other: a child of who asked for it, with the command line, environment, directory,
streams and process group that it would have had, and without anybody's threads or connections.

    Forked    a `subprocess.Popen` that is started so, where that is possible
    serve     what the process does that is forked
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from psclient._src.config import THREADS, child_environ

PROGRAMS = {"psclient": "psclient._src.launch.psworker", "psserver": "psserver.cli"}
"""The programs, as in `python -P -m psserver`, and what they import."""

SEEDS = ("1", "2")
"""Processes that are forked, in turns, by their PYTHONHASHSEED: sets of strings have an order of their own in each."""

LOADED = ("GLIBC_TUNABLES", "LANG", "LC_ALL", "LD_PRELOAD", "TZ")
"""Variables that are read when a process begins, beside Python's own."""

LONGEST = 1 << 18
"""Most bytes of a command with its environment."""

PYTHON = sys.executable
"""Whose programs are forked: a test may start those of another Python."""

CLONE = {"x86_64": 56}
"""Numbers of the system call, by processor: on others, processes are started."""

CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000


class Forked(subprocess.Popen[bytes]):
    """A process that is forked if it runs one of our programs, and nothing that it imports would differ; else started.

    Takes arguments as `subprocess.Popen`. Who starts the first one has to be the main thread: others end before it.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, preexec, _, passed, cwd, env = rest[:6]
        pipes = rest[9:15]
        command, environ = list(args), dict(os.environ if env is None else env)
        others = preexec or passed or cwd or not _is_ours(command)
        server = None if others else _fork_server(SEEDS[next(_turns) % len(SEEDS)])
        if server is None or server.loaded != _loaded(environ):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        ends = (pipes[0], pipes[3], pipes[5])
        streams = [end if end != -1 else own for own, end in enumerate(ends)]
        self.pid = server.start(command[3:], environ, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_turns = count()

forked_from = set[int]()
"""Ids of the processes that are forked: they end with this process, and not before."""


def _is_ours(command: list[str]) -> bool:
    return command[:3] == [PYTHON, "-P", "-m"] and command[3] in PROGRAMS and platform.machine() in CLONE


def _loaded(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a process cannot take over later."""
    return {name: value for name, value in environ.items() if name in LOADED or name.startswith("PYTHON")}


@cache
def _fork_server(seed: str) -> ForkServer | None:
    """Returns a process that is forked; None where there can be none, since it would end with this thread."""
    return ForkServer(seed) if threading.current_thread() is threading.main_thread() else None


class ForkServer:
    """A process that is forked, seen from who asks it. Any thread may ask. It ends with this process.

    Args:
        seed: its PYTHONHASHSEED.

    Attributes:
        loaded: variables of its environment that those forked from it have as well.
    """

    def __init__(self, seed: str) -> None:
        environ = child_environ(1, None)
        self.loaded = _loaded(environ)
        self._lock = threading.Lock()  # guards the socket: a request and its answer
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        program = "import sys; own = sys.path[:]; sys.path += {}; from pstesting.forks import serve; serve({}, own)"
        # A BLAS of one thread starts none. What has threads cannot be forked.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program.format(sys.path, theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**environ, **dict.fromkeys(THREADS, "1"), "PYTHONHASHSEED": seed},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        forked_from.add(self._process.pid)

    def start(self, command: list[str], environ: dict[str, str], streams: list[int]) -> int:
        """Starts a program.

        Args:
            command: its module, and its arguments.
            environ: its environment.
            streams: descriptors that become its stdin, stdout and stderr.

        Returns:
            Its process id.
        """
        told = {"command": command, "environ": environ, "directory": os.getcwd()}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(told).encode()], streams)
            answer = self._socket.recv(64)
        if not answer:
            raise OSError(f"the process that is forked has ended with {self._process.wait()}; stderr says why")
        return int(answer)


def serve(descriptor: int, path: list[str]) -> None:
    """Imports the programs and forks for each request, until the other end is closed. In a fork, runs the program.

    Args:
        descriptor: this process's end of a socket.
        path: where a fork looks for modules.
    """
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in PROGRAMS.values():
        importlib.import_module(module)
    clone = _clone()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as asked:
        while True:
            request, streams, _, _ = socket.recv_fds(asked, LONGEST, 3)
            if not request:
                os._exit(0)
            if not clone():
                break
            for stream in streams:
                os.close(stream)
        told = json.loads(request)
        _become(told["environ"], told["directory"], streams)
        asked.send(str(os.getpid()).encode())
    module, *args = told["command"]
    sys.argv = ["-m", *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _become(environ: Mapping[str, str], directory: str, streams: list[int]) -> None:
    """Makes this process what it would be had it been started."""
    os.setpgid(0, 0)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()  # a script's, which begins otherwise in each process


def _clone() -> Callable[[], int]:
    """Returns a function like `os.fork`, whose child is a child of this process's parent, which can wait for it.

    Raises:
        RuntimeError: this process has threads, or the C library is another one than expected.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("an import has started threads, so this process cannot be forked")
    library = ctypes.PyDLL(None)  # calls keep the interpreter's lock
    library.pthread_self.restype, library.syscall.restype = ctypes.c_void_p, ctypes.c_long
    # The C library keeps a thread's number beside the thread's own memory, where the kernel writes the child's.
    thread = library.pthread_self()
    words = (ctypes.c_int * 512).from_address(thread)
    places = [thread + 4 * n for n, word in enumerate(words) if word == threading.get_native_id()]
    if len(places) != 1:
        raise RuntimeError("the C library keeps the number of a thread elsewhere")
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | signal.SIGCHLD
    call = ctypes.c_long(CLONE[platform.machine()]), ctypes.c_ulong(flags), None, None, ctypes.c_void_p(places[0]), None

    def clone() -> int:
        library.PyOS_BeforeFork()
        pid = int(library.syscall(*call))
        after = library.PyOS_AfterFork_Parent if pid else library.PyOS_AfterFork_Child
        after()
        if pid < 0:
            raise OSError("the process could not be forked")
        return pid

    return clone
