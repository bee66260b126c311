"""Starts our programs by forks of a process that has imported them: 0.02 s of processor time in place of 0.5 and more.

A forked process is like one that was started: a child of its caller, with its own command line, environment,
directory, streams, session and process group, and without threads or connections of anybody else. Programs that start
further processes of this package, such as `psworker --standalone`, fork these as well.

    Forked    a `subprocess.Popen` that forks where that is possible
    run       `subprocess.run` with `Forked`
    having    forks of a process that has imported further modules
    serve     what the process does that is forked
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.machinery
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, AnyStr, NoReturn

import numpy as np

import psclient
from psclient._src.config import child_environ
from psserver.cli import leave_scipy_out
from psserver.programs.kernels.compiler import compile_numba
from pswire.variables import EXECS, THREADS

PROGRAMS = {
    "psclient": "psclient._src.launch.psworker",
    "psserver": "psserver.cli",
    "psclient.psctl": "psclient.psctl.cli",
}
"""The programs, as in `python -m psserver`, and what they import."""

LATER = (
    *("psclient._src.launch.cluster", "psclient._src.launch.chief", "psclient._src.launch.joining"),
    *("psclient.psctl.doctor", "psclient.psctl.job", "psclient.psctl.checkpoint"),
)
"""What they import for some of their command lines alone, with all that others need as well."""

SEEDS = ("1", "2")
"""Processes that are forked, in turns, by their PYTHONHASHSEED: sets of strings have an order of their own in each."""

LOADED = ("GLIBC_TUNABLES", "LANG", "LC_ALL", "LD_PRELOAD", "TZ")
"""Variables that are read when a process begins, beside Python's own."""

APPLIED = ("PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONUNBUFFERED")
"""Variables of Python's own that a fork can take over."""

OPTIONAL = ("GLIBC_TUNABLES", "LANG", "LC_ALL")
"""Variables that make no difference to a program whose caller leaves them out."""

LONGEST = 1 << 18
"""Most bytes of a command with its environment."""

PYTHON = sys.executable
"""Whose programs are forked: a test may start those of another Python."""

CLONE = {"x86_64": 56}
"""Numbers of the system call, by processor: on others, processes are started."""

CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_SET_PDEATHSIG = 1

HIGH = 250
"""The descriptor by which a program asks for others: above those that it opens itself."""

NAME = "fork-server"
"""The name, in lists of processes, of a process that others are forked from."""


class Forked(subprocess.Popen[AnyStr]):
    """A process that is forked if it runs Python on our programs, a script or `-c`, and nothing would differ by that.

    Any other process is started. Takes arguments as `subprocess.Popen`. The main thread has to start the first one,
    because processes that another thread starts would end with it.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, preexec, _, passed, cwd, env = rest[:6]
        as_shell, pipes, user, session, group = rest[8], rest[9:15], rest[16:20], rest[20], rest[21]
        others = preexec or passed or as_shell or any(each not in (None, -1) for each in user)
        command = [] if others or isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        environ = dict(os.environ if env is None else env)
        directory = os.path.join(os.getcwd(), os.fspath(cwd or ""))
        program = _program(command, directory)
        server = _fork_server() if program else None
        if server is None or not server.can_be(environ):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        streams = [end if end != -1 else own for own, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        told = {"program": program, "environ": environ, "directory": directory, "session": session, "group": group}
        self.pid = server.start(told, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **keys: Any,
) -> subprocess.CompletedProcess[Any]:
    """Runs a command to its end. Arguments, result and errors are those of `subprocess.run`."""
    if input is not None:
        keys["stdin"] = subprocess.PIPE
    if capture_output:
        keys["stdout"] = keys["stderr"] = subprocess.PIPE
    with Forked[Any](command, **keys) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextmanager
def having(*modules: str) -> Iterator[None]:
    """Within it, what is started is forked from a process that has imported further modules, such as `torch`.

    That process has the environment of its first fork, and serves all that ask for the same modules.
    """
    global _modules
    before, _modules = _modules, modules
    try:
        yield
    finally:
        _modules = before


_turns = count()

_servers: list[ForkServer] = []

_modules: tuple[str, ...] = ()

_having: dict[tuple[str, ...], ForkServer] = {}
"""Processes that are forked, by the modules that they have imported beside the programs."""

forked_from = set[int]()
"""Ids of the processes that are forked: they end with this process, and not before."""


def _program(command: list[str], directory: str) -> list[str]:
    """Returns what Python is to run: `-P` or "", `-m`, `-c` or "", and the rest; [] for none of our programs."""
    if command[:1] != [PYTHON] or not os.path.isdir(directory) or len(command) < 2 or platform.machine() not in CLONE:
        return []
    safe, words = ("-P", command[2:]) if command[1] == "-P" else ("", command[1:])
    if words[0] == "-m":
        return [safe, *words] if words[1] in PROGRAMS else []
    if words[0] == "-c":
        return [safe, *words]
    is_script = not words[0].startswith("-") and os.path.isfile(os.path.join(directory, words[0]))
    return [safe, "", *words] if is_script else []


def _fork_server() -> ForkServer | None:
    """Returns a process that is forked; None where there can be none, since it would end with this thread."""
    if any(server.owner != os.getpid() for server in (*_servers, *_having.values())):
        return None  # this process is a fork itself, by other means
    if _modules and not _is_fork:
        if _modules not in _having and threading.current_thread() is threading.main_thread():
            _having[_modules] = ForkServer.begin(SEEDS[0], _modules)
        return _having.get(_modules)
    turn = next(_turns)
    if turn >= len(_servers) and len(_servers) < len(SEEDS) and not _is_fork:
        if threading.current_thread() is not threading.main_thread():
            return _servers[0] if _servers else None
        _servers.append(ForkServer.begin(SEEDS[len(_servers)]))
    return _servers[turn % len(_servers)] if _servers else None


_is_fork = False
"""Whether this process was forked here: then it begins no process that is forked but the one that it got."""


class ForkServer:
    """A process that is forked, seen from who asks it. Any thread may ask. It ends with this process.

    Args:
        pid: its process id.
        own: the end of a socket to it.
        loaded: variables of its environment that those forked from it have as well.

    Attributes:
        owner: the process that may ask it.
    """

    def __init__(self, pid: int, own: socket.socket, loaded: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._pid, self._socket, self._loaded = pid, own, dict(loaded)
        self._lock = threading.Lock()  # guards the socket: a request and its answer
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        forked_from.add(pid)

    @classmethod
    def begin(cls, seed: str, modules: Sequence[str] = ()) -> ForkServer:
        """Starts one whose PYTHONHASHSEED is `seed`, and which imports some modules beside the programs."""
        environ = child_environ(1, None)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = "import sys; own = sys.path[:]; sys.path += {}; from pstesting.forks import serve; serve({}, own, {})"
        # A BLAS of one thread starts none. What has threads cannot be forked.
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program.format(sys.path, theirs.fileno(), tuple(modules))],
                stdin=subprocess.DEVNULL,
                env={**environ, **dict.fromkeys(THREADS, "1"), "PYTHONHASHSEED": seed},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        process.returncode = 0  # nobody waits for it
        return cls(process.pid, own, _loaded(environ))

    def can_be(self, environ: Mapping[str, str]) -> bool:
        """Returns whether a process that is forked from it can have an environment."""
        if environ.get(EXECS):
            return False
        wanted, own = _loaded(environ), self._loaded
        return all(
            wanted.get(name) == own.get(name) or (name in OPTIONAL and name not in wanted) for name in wanted | own
        )

    def start(self, told: Mapping[str, Any], streams: list[int]) -> int:
        """Starts a program.

        Args:
            told: its command, environment and so on, as `_become` and `_execute` read them.
            streams: descriptors that become its stdin, stdout and stderr.

        Returns:
            Its process id.
        """
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(told).encode()], streams)
            answer = self._socket.recv(4096)
        if not answer.isdigit():
            raise OSError(answer.decode() or f"process {self._pid}, which is forked, has ended; stderr says why")
        return int(answer)


def _loaded(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a process reads when it begins."""
    return {
        name: value
        for name, value in environ.items()
        if name in LOADED or (name.startswith(("PYTHON", "NUMBA_")) and name not in APPLIED)
    }


def _paths(environ: Mapping[str, str]) -> list[str]:
    """Returns what PYTHONPATH adds to `sys.path`."""
    given = environ.get("PYTHONPATH")
    return list(dict.fromkeys(map(os.path.abspath, given.split(os.pathsep)))) if given else []


def serve(descriptor: int, path: list[str], modules: Sequence[str]) -> None:
    """Imports the programs and forks for each request, until the other end is closed. In a fork, runs the program.

    Args:
        descriptor: this process's end of a socket.
        path: where a fork looks for modules.
        modules: what it imports beside the programs.
    """
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in (*PROGRAMS.values(), *LATER):
        importlib.import_module(module)
    for name in psclient.__all__:
        getattr(psclient, name)
    _load_compiler()
    for module in modules:
        importlib.import_module(module)
    _rename()
    clone = _clone()
    loaded = {name: value for name, value in _loaded(os.environ).items() if name != "PYTHONHASHSEED"}
    path = path[len(_paths(os.environ)) :]
    gc.collect()
    gc.freeze()
    told = _answer(socket.socket(fileno=descriptor), clone)
    while _starts_others(told):
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            high = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, HIGH)  # programs find low descriptors free
            for end in (own, theirs):
                end.close()
            _fork_from(ForkServer(pid, socket.socket(fileno=high), loaded))
            break
        own.close()
        _end_with_parent()
        told = _answer(theirs, clone)
    try:
        _execute(told, path)
        code = 0
    except SystemExit as end:
        code = _code(end)
    _exit(code)


def _load_compiler() -> None:
    """Compiles a kernel: the first one of a process that is forked takes 0.1 s then, in place of 0.9."""
    leave_scipy_out()
    with suppress(ImportError):
        compile_numba(lambda carray: lambda n, numbers: None, 1, ["float32"])
    if sys.modules["scipy"] is None:
        del sys.modules["scipy"]  # scripts may import it


def _answer(asked: socket.socket, clone: Callable[[], int]) -> dict[str, Any]:
    """Forks for each request, until the other end is closed; returns, in a fork, the request."""
    with asked:
        while True:
            request, streams, _, _ = socket.recv_fds(asked, LONGEST, 3)
            if not request:
                os._exit(0)
            if not clone():
                break
            for stream in streams:
                os.close(stream)
        told: dict[str, Any] = json.loads(request)
        try:
            _become(told, streams)
        except OSError as error:
            asked.send(str(error).encode())
            os._exit(1)
        asked.send(str(os.getpid()).encode())
    return told


def _become(told: Mapping[str, Any], streams: list[int]) -> None:
    """Makes this process what it would be had it been started."""
    if told["session"]:
        os.setsid()
    elif told["group"] >= 0:
        os.setpgid(0, told["group"])
    else:
        os.setpgid(0, os.getpgid(os.getppid()))
    os.chdir(told["directory"])
    os.environ.clear()
    os.environ.update(told["environ"])
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    for stream in streams:
        os.close(stream)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _rename("python")
    np.random.seed()  # a script's, which begins otherwise in each process


def _starts_others(told: Mapping[str, Any]) -> bool:
    """Returns whether a program may start others of ours: those of a cluster start none."""
    kind, name, *flags = told["program"][1:]
    if kind == "-m" and name != "psclient":
        return "calibrate" in flags
    return "TF_CONFIG" not in told["environ"] and "--early" not in flags


def _fork_from(server: ForkServer) -> None:
    """Makes this process fork what it starts."""
    global _is_fork
    from psclient._src.processes import process

    _is_fork, _servers[:] = True, [server]
    process.popen = Forked


def _end_with_parent() -> None:
    """Makes this process one that its parent's programs are forked from: it holds nothing, and ends with the parent."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in range(3):
        os.dup2(nothing, own)
    os.close(nothing)
    _rename()


def _rename(name: str = NAME) -> None:
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _code(end: SystemExit) -> int:
    """Returns an exit code; prints what stands in its place, as Python does."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stdout.flush()
    print(end.code, file=sys.stderr, flush=True)  # noqa: T201
    return 1


def _exit(code: int) -> NoReturn:
    """Ends this process as Python does, but for taking all modules apart, which takes 0.1 s of processor time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python says what is wrong with them
    os._exit(code)


def _execute(told: Mapping[str, Any], path: list[str]) -> None:
    """Runs a program as Python would."""
    safe, kind, first, *args = told["program"]
    sys.orig_argv[:] = [PYTHON, *([safe] if safe else []), *([kind] if kind else []), first, *args]
    sys.path[:] = [*_paths(told["environ"]), *path]
    if any(os.path.isfile(os.path.join(place, "sitecustomize.py")) for place in _paths(told["environ"])):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")  # as Python does where it starts
    if not safe:
        beside = {"-m": told["directory"], "-c": ""}.get(kind)
        sys.path.insert(0, os.path.dirname(os.path.realpath(first)) if beside is None else beside)
    if kind == "-m":
        sys.argv = ["-m", *args]
        runpy.run_module(first, run_name="__main__", alter_sys=True)
        return
    sys.argv = [kind or first, *args]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if not kind:
        main.__file__ = os.path.abspath(first)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        main.__dict__["__cached__"] = None
    try:
        text = first if kind else Path(first).read_bytes()
        code = compile(text, "<string>" if kind else main.__file__ or first, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


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
