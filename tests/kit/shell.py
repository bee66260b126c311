"""Commands as a user types them, terminals, other hosts, and what a test may leave behind: processes, ports, files."""

from __future__ import annotations

import fcntl
import getpass
import itertools
import os
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pstesting import forks, processes
from pstesting.forks import NAME, Forked, forked_from
from pstesting.hosts import Host, Hosts, HostsUnavailable
from pstesting.processes import CALM, W0, ProcessCluster, until
from pswire.cluster import Task

PROGRAMS = {
    "psworker": [sys.executable, "-P", "-m", "psclient"],
    "psctl": [sys.executable, "-P", "-m", "psclient.psctl"],
    "psserver": [sys.executable, "-P", "-m", "psserver"],
    "python": [sys.executable],
}

SECONDS = 120.0
"""How long a command may take that has no deadline of its own: far longer than it does."""


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Attributes:
        code: its exit code.
        out, err: what it printed.
        seconds: how long it took.
        left: processes of its session that outlived it.
    """

    code: int
    out: str
    err: str
    seconds: float
    left: tuple[str, ...]

    @property
    def errors(self) -> list[str]:
        """The lines on stderr that our programs head with their names."""
        return [line for line in self.err.splitlines() if line.startswith(("psworker: ", "psserver: "))]


def shell(words: Sequence[str], cwd: Path, seconds: float = SECONDS, *, fork: bool = True, **environ: str) -> Done:
    """Runs a command to its end.

    Args:
        words: a key of `PROGRAMS`, then its arguments.
        cwd: where it runs.
        seconds: after which it is killed.
        fork: False where it matters that Python itself starts, and imports.
        environ: environment variables, beside this process's.
    """
    began = time.monotonic()
    popen: type[subprocess.Popen[str]] = Forked if fork else subprocess.Popen
    env = {**{name: value for name, value in os.environ.items() if name != "TF_CONFIG"}, **environ}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*PROGRAMS[words[0]], *words[1:]]
    process = popen(command, cwd=cwd, env=env, **pipes, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        left = _end_session(process.pid)
    return Done(process.returncode, out, err, time.monotonic() - began, left)


def printed(program: str, *words: object, **keys: Any) -> str:
    """What a program prints that has to succeed; skips the test where it is not at hand."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program} is at hand")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | keys
    done = subprocess.run([found, *map(str, words)], text=True, timeout=SECONDS, check=False, **pipes)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def _end_session(leader: int) -> tuple[str, ...]:
    """Kills what is left of a session; says what it was."""
    left = [
        process for process in psutil.process_iter(["cmdline", "name", "status"]) if _session(process.pid) == leader
    ]
    for process in left:
        with suppress(psutil.NoSuchProcess):  # it ends by itself
            process.kill()
    outlived = [process.info for process in left if process.pid != leader and process.info["name"] != NAME]
    # What has ended is there until its parent, by now the first process of the machine, asks for it.
    return tuple(" ".join(info["cmdline"] or ["?"]) for info in outlived if info["status"] != psutil.STATUS_ZOMBIE)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def listens(address: str) -> bool:
    """Whether anybody accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def terminal(start: Callable[..., Any], columns: int = 80) -> Iterator[tuple[subprocess.Popen[Any], int]]:
    """A process on a terminal of its own, and that terminal's other end.

    Args:
        start: starts the process, with the arguments of `Popen` that it is given.
        columns: the terminal's width.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = start(stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def shown(terminal: int, expected: str) -> str:
    """All that a terminal shows until it has shown something."""
    text = b""
    while expected.encode() not in text:
        ready, _, _ = select.select([terminal], [], [], SECONDS)
        assert ready, f"{expected!r} does not come: {text.decode()!r}"
        text += os.read(terminal, 1 << 16)
    return text.decode()


def sockets_of(process: int) -> list[Path]:
    """The names in the file system at which a server's process listens for transports."""
    bound = {Path(one.laddr) for one in psutil.Process(process).net_connections("unix") if one.laddr}
    # A name begins with a dot until somebody listens there.
    return [path.with_name(path.name.lstrip(".")) for path in bound if "paramserver-" in path.name]


def open_files() -> list[str]:
    """What the descriptors of this process stand for."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(link.readlink()))
    return found


def children() -> set[int]:
    """Ids of the processes that this one has started, and theirs; but for those that others are forked from."""
    return {process.pid for process in psutil.Process().children(recursive=True)} - forked_from


def linked(stack: ExitStack, *hosts: Host) -> Hosts:
    """Makes hosts that end with the stack; skips the test where the machine has none."""
    try:
        return stack.enter_context(Hosts(hosts))
    except HostsUnavailable as error:
        pytest.skip(str(error))


PROGRAM = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

HOSTS = ("127.0.0.1", "127.0.0.2")
"""The addresses of one machine that stand for two."""

CONFIG = """
ListenAddress 127.0.0.1:{port}
ListenAddress 127.0.0.2:{port}
HostKey {directory}/host
PidFile {directory}/pid
AuthorizedKeysFile {directory}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""


@dataclass(frozen=True)
class Sshd:
    """A server of ssh.

    Attributes:
        port: its port, on each of `HOSTS`.
        ssh: the command that gets in.
        process: the server.
    """

    port: int
    ssh: str
    process: subprocess.Popen[bytes]

    def connections(self) -> list[psutil.Process]:
        """The processes that sshd has for the connections that are open."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def sshd(directory: Path) -> Iterator[Sshd]:
    """Runs a server; skips the test where there is none."""
    if PROGRAM is None or shutil.which("ssh") is None:
        pytest.skip("no sshd, or no ssh: no task runs on another host (apt-get install openssh-server)")
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own place, which the service would make
    port = free_port()
    config = directory / "sshd_config"
    config.write_text(CONFIG.format(port=port, directory=directory))
    key = (directory / "host.pub").read_text()
    (directory / "known").write_text("".join(f"[{host}]:{port} {key}" for host in HOSTS))
    said = directory / "log"
    with said.open("wb") as log:
        process = subprocess.Popen([PROGRAM, "-D", "-e", "-f", str(config)], stderr=log, stdin=subprocess.DEVNULL)
    try:
        addresses = [f"{host}:{port}" for host in HOSTS]
        until(lambda: process.poll() is not None or all(map(listens, addresses)), 60.0, said.read_text)
        assert process.poll() is None, said.read_text()
        options = {
            "IdentityFile": directory / "user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": directory / "known",
            "User": getpass.getuser(),
        }
        words = ["ssh", "-F", "none", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        yield Sshd(port, shlex.join(words), process)
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait()
        for one in left:
            if one.is_running():
                one.kill()


ROOT = Path(__file__).parents[2]

SECOND = "127.0.0.2"
"""The address of the second node. That of the first is the machine's: Ray takes no loopback there."""


class Nodes:
    """The cluster.

    Attributes:
        address: that of its head.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address
        self._second: Any = None

    def add(self) -> None:
        """Starts the second node."""
        self._second = self._cluster.add_node(num_cpus=8, node_ip_address=SECOND, object_store_memory=STORE)

    def lose(self) -> None:
        """Kills the second node, and all that runs there."""
        processes = psutil.Process(self._second.all_processes["raylet"][0].process.pid).children(recursive=True)
        self._cluster.remove_node(self._second, allow_graceful=False)
        for process in processes:
            if process.is_running():
                process.kill()


@contextmanager
def occupied(cpus: float) -> Iterator[None]:
    """Takes so many CPUs of each node."""
    ray = pytest.importorskip("ray")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    options = [{"num_cpus": cpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(n, soft=False)} for n in nodes]
    actors = [ray.remote(Idle).options(**each).remote() for each in options]
    try:
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        yield
    finally:
        for actor in actors:
            ray.kill(actor)


class Idle:
    """An actor that does nothing."""


STORE = 80 << 20
"""Bytes of a node's object store: the least that Ray takes."""


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """Starts the two nodes, and connects this process with them. One process of a run has them at a time."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with ExitStack() as stack:
        fcntl.flock(stack.enter_context((ROOT / "pyproject.toml").open()), fcntl.LOCK_EX)
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))  # short: sockets lie there
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (("TMPDIR", directory), ("USAGE_STATS_ENABLED", "0")):
            patch.setenv(f"RAY_{name}", value)
        patch.setenv("PYTHONPATH", str(ROOT))
        head = {"num_cpus": 8, "object_store_memory": STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        stack.callback(ray.shutdown)
        nodes = Nodes(cluster)
        nodes.add()
        patch.setenv("RAY_ADDRESS", nodes.address)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="error")
        yield nodes


ME = "import json, os, pathlib, signal, sys, time\nme = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"
"""The begin of a script, by which it knows which worker it is."""

WAITING = "pathlib.Path(f'pid-{me}').write_text(str(os.getpid()))\ntime.sleep(600)\n"
"""The rest of one that waits, and says which process it is."""

ENDS = [
    ("sys.exit(7 * me)", 7, "(exit code 7)"),
    ("os.kill(os.getpid(), signal.SIGKILL) if me else time.sleep(600)", 137, "(killed by SIGKILL)"),
    ("raise KeyError('mine') if me else time.sleep(600)", 1, "KeyError: 'mine'"),
]
"""Of scripts in which worker 1 fails the rest, the launcher's exit code, and what its report says."""


def eventually(found: Callable[[], object], seconds: float, why: Callable[[], str] = lambda: "") -> None:
    """Waits until something is true; fails, with a reason, where it does not become so."""
    until(lambda: bool(found()), seconds, why)


def pids(directory: Path, seconds: float) -> list[int]:
    """The process ids of two workers of a script that waits, once they do."""
    paths = [directory / f"pid-{me}" for me in range(2)]
    eventually(lambda: all(path.exists() and path.read_text() for path in paths), seconds)
    return [int(path.read_text()) for path in paths]


HOST = "127.0.0.7"
"""An address on which nobody else gets ports."""


class Waiting:
    """A process that waits for the place of a server of a job.

    Attributes:
        address: where it will serve.
        process: the process.
    """

    def __init__(
        self, job: ProcessCluster, directory: Path, domain: str = "elsewhere", until_done: bool = False, **environ: str
    ) -> None:
        port = free_port()
        self.address = f"{HOST}:{port}"
        self.said = directory / f"waiting-{port}.log"
        servers = ",".join(job.cluster.addresses[task] for task in _servers(job))
        root = str(directory / "checkpoints")
        flags = ("--join", servers, "--host", HOST, "--port", str(port), "--domain", domain, "--checkpoint-root", root)
        kept = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        kept["PS_TOKEN"] = job.cluster.security(W0).token
        with self.said.open("w") as file:
            self.process = forks.Forked[str](
                [sys.executable, "-m", "psserver", *flags, *["--until-done"] * until_done],
                env={**kept, **CALM.environ(), **environ},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        """What it has said."""
        return self.said.read_text()

    def hear(self, text: str) -> None:
        """Waits until it says something."""
        until(lambda: text in self.text(), processes.SECONDS, self.text)

    def end(self) -> int:
        """Ends it; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(processes.SECONDS)


def _servers(job: ProcessCluster) -> list[Task]:
    return sorted(task for task in job.cluster.addresses if task.job == "ps")


_blocks = itertools.count(os.getpid())  # other processes of these tests look as well


def free_port(count: int = 1) -> int:
    """The first of so many ports in a row, at most ten, at which nothing listens.

    The kernel gives none of them to a connection: it takes those above for anybody, until a test's server is there.
    """
    for block in itertools.islice(_blocks, 1200):
        first = 20_000 + block % 1200 * 10
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(sockets):
                each.bind(("0.0.0.0", first + offset))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return first
    raise AssertionError("all ports are in use")


@contextmanager
def waiting(job: ProcessCluster, directory: Path, count: int = 1, **keys: Any) -> Iterator[list[Waiting]]:
    """Processes that wait, and have said so to all servers."""
    made = [Waiting(job, directory, **keys) for _ in range(count)]
    try:
        for each in made:
            for task in _servers(job):
                with job.server(task) as server:
                    assert each.process.poll() is None, each.text()
                    job.until(
                        lambda each=each, server=server: each.address in {s.address for s in server.status().standbys}
                    )
        yield made
    finally:
        for each in made:
            each.process.kill()
            each.process.wait()
