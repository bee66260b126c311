"""`psworker --hosts`: clusters that a real ssh starts through a real sshd, on two addresses of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import psutil
import pytest

from psclient._src.launch.hosts_file import load_hosts
from psclient._src.launch.ssh_cluster import RemoteShell, SshCluster
from tests.kit import shell as kit
from tests.kit.internals import MODULE, LaunchConfig, Outcome, Task, Timeouts
from tests.kit.shell import HOSTS, ME, PROGRAMS, WAITING, Done, Sshd, pids, shell, sshd

pytestmark = pytest.mark.ci  # each cluster is four agents and four tasks, which all start anew

SOON = 90.0

TRAINING = """
import os, sys
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    w = ps.Variable(np.zeros(4, "float32"))
    optimizer = ps.optimizers.SGD(1.0)
for _ in range(3):
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(4, "float32"), w)]))
print("w", *w.numpy(), os.environ.get("PS_TOKEN", "no token"), *sys.argv[1:])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture
def hosts(tmp_path: Path, server: Sshd) -> Path:
    path = tmp_path / "hosts"
    path.write_text(f"{HOSTS[0]}:{server.port} ps=1 worker=1\n{HOSTS[1]}:{server.port} ps=1 slots=1\n")
    return path


def agents() -> list[psutil.Process]:
    """The agents of all clusters on this machine, and what they have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if MODULE in words and words[0] == sys.executable:
            found += [process, *process.children(recursive=True)]
    return found


@pytest.fixture(autouse=True)
def nothing_left(server: Sshd) -> Iterator[None]:
    yield
    eventually(lambda: not server.connections(), lambda: str(server.connections()))


def eventually(found: Callable[[], object], why: Callable[[], str] = lambda: "") -> None:
    kit.eventually(found, SOON, why)


def run(hosts: Path, server: Sshd, text: str, *more: str, args: tuple[str, ...] = (), **environ: str) -> Done:
    (hosts.parent / "script.py").write_text(text)
    words = ["psworker", "--hosts", str(hosts), "--ssh", server.ssh, *more, "script.py", *args]
    return shell(words, hosts.parent, **environ)


def test_a_job_over_two_hosts(hosts: Path, server: Sshd) -> None:
    """Both workers train on servers of both hosts; lines have the names of their tasks; the token is not told."""
    done = run(hosts, server, TRAINING, args=("a b", "$HOME"))
    assert (done.code, done.left) == (0, ()), done.err
    for worker in range(2):
        assert f"[worker {worker}] w -6.0 -6.0 -6.0 -6.0 no token a b $HOME" in done.out.splitlines()
    for index, host in enumerate(HOSTS):
        assert re.search(rf"\[ps {index}\] psserver /job:ps/task:{index} listening on {host}:[0-9]+", done.out)


@pytest.fixture
def cluster(hosts: Path, server: Sshd) -> Iterator[Callable[..., SshCluster]]:
    """Makes a cluster that this process launches, in the directory of its script."""

    def made(text: str, silence: float = 30.0, **keys: object) -> SshCluster:
        (hosts.parent / "script.py").write_text(ME + text)
        config = LaunchConfig(**{"script": "script.py", "chief": "none"} | keys)  # type: ignore[arg-type]
        return SshCluster(load_hosts(hosts), RemoteShell(tuple(server.ssh.split()), silence=silence), config)

    with chdir(hosts.parent):
        yield made


def test_nobody_can_see_the_token(cluster: Callable[..., SshCluster], hosts: Path) -> None:
    """Neither a command line nor an environment of any process on either host has it; servers want it all the same.

    A connection that ends ends its task, and, without restarts, the cluster; the report names the host.
    """
    with cluster(WAITING) as running:
        tasks = pids(hosts.parent, SOON)
        token = running._options.token
        assert len(token) == 64
        seen = 0
        for process in agents():
            for name in ("cmdline", "environ"):
                text = Path(f"/proc/{process.pid}/{name}").read_bytes()
                assert token.encode() not in text, (process, name)
                seen += len(text) > 0
        assert seen >= 2 * (4 + 4)  # agents and tasks, of four each
        assert running._ask(Task("ps", 1)) is not None
        kept, running._options = running._options, running._options.__class__(token="0" * 64)
        assert running._ask(Task("ps", 1)) is None
        running._options = kept
        os.kill(running.processes[Task("worker", 1)].pid, signal.SIGKILL)
        outcome = running.wait(SOON)
    assert (outcome.task, outcome.code) == (Task("worker", 1), 137)
    eventually(lambda: not any(map(psutil.pid_exists, tasks)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_everything(hosts: Path, server: Sshd, number: int) -> None:
    """Also on the other hosts; the exit code is that of the signal. Agents see the ends of their connections."""
    (hosts.parent / "script.py").write_text(ME + WAITING)
    words = [*PROGRAMS["psworker"], "--hosts", str(hosts), "--ssh", server.ssh, "script.py"]
    with subprocess.Popen(words, cwd=hosts.parent, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        tasks = pids(hosts.parent, SOON)
        process.send_signal(number)
        assert process.wait(SOON) == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:
        eventually(lambda: not any(map(psutil.pid_exists, tasks)))
    assert not any(map(psutil.pid_exists, tasks))


def test_a_host_that_drops_a_connection_is_named(cluster: Callable[..., SshCluster], hosts: Path, server: Sshd) -> None:
    """ssh ends with 255 then, whose meaning is told."""
    with cluster(WAITING) as running:
        (task,) = [pid for pid in pids(hosts.parent, SOON) if (hosts.parent / "pid-1").read_text() == str(pid)]
        above = psutil.Process(task).parent()
        assert above is not None
        door = above.parent()  # sshd's process for this connection
        assert door is not None
        door.kill()
        outcome = running.wait(SOON)
    assert (outcome.task, outcome.code) == (Task("worker", 1), 255)
    assert f"the ssh connection to {HOSTS[1]} was lost" in outcome.report
    eventually(lambda: not psutil.pid_exists(task))


def test_a_connection_on_which_nothing_comes_ends_its_task(cluster: Callable[..., SshCluster], hosts: Path) -> None:
    """A network may lose all packets, and no end comes: an agent gives the launcher up after a while."""
    with cluster(WAITING, silence=2.0) as running:
        tasks = pids(hosts.parent, SOON)
        time.sleep(3.0)
        assert all(map(psutil.pid_exists, tasks)), "signs of life come"
        os.kill(running.processes[Task("worker", 1)].pid, signal.SIGSTOP)
        eventually(lambda: not psutil.pid_exists(tasks[1]))
        assert psutil.pid_exists(tasks[0])
        os.kill(running.processes[Task("worker", 1)].pid, signal.SIGCONT)


@pytest.mark.usefixtures("leaves_soon")
def test_a_task_that_fails_is_started_again(cluster: Callable[..., SshCluster]) -> None:
    """On its host, and a server at its address; with the variables of this package, and the working directory."""
    text = (
        "import socket\nif me and not os.path.exists('m'):\n    open('m', 'w')\n    sys.exit(3)\n"
        "print(me, os.environ['PS_CALL_TIMEOUT'], os.getcwd() == os.path.dirname(os.path.abspath('script.py')))"
    )
    with cluster(text, restarts=2, timeouts=Timeouts(call_timeout=77.0)) as running:
        before = dict(running.addresses)
        running.kill(Task("ps", 1))
        assert running.wait(SOON) == Outcome(0)
        assert running.addresses == before
        assert running.output(Task("worker", 1)) == ["1 77.0 True"]


def python(directory: Path, *lines: str) -> str:
    path = directory / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {sys.executable} "$@"\n']))
    path.chmod(0o755)
    return str(path)


def test_hosts_that_cannot_run_tasks_are_refused_at_once(hosts: Path, server: Sshd, tmp_path: Path) -> None:
    """Before anything is started; the error names the host, and what to do."""
    old = tmp_path / "old" / "paramserver-0.0.9.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: paramserver\nVersion: 0.0.9\n")
    wrong = {
        "has no Python at /nowhere/python .*--remote-python": ["--remote-python", "/nowhere/python"],
        "has paramserver 0.0.9, protocol 4, and this machine .*; install the same version on both": [
            "--remote-python",
            python(tmp_path, f"export PYTHONPATH={old.parent}"),
        ],
        "does not have this package": ["--remote-python", python(tmp_path / "old", 'shift 3; set -- -m "no.such"')],
        "cannot run no-ssh: .*--ssh": ["--ssh", "no-ssh"],
    }
    for said, more in wrong.items():
        done = run(hosts, server, "print('ran')", *more)
        assert done.code == 2
        (line,) = done.errors
        assert re.search(f"psworker: error: .*{said}", line), line
        assert "ran" not in done.out
        assert "no-ssh" in said or HOSTS[0] in line


def test_hosts_that_are_not_there_are_refused_at_once(hosts: Path, server: Sshd, tmp_path: Path) -> None:
    """One that refuses connections, and one that does not let us in."""
    with hosts.open("a") as file:
        file.write("127.0.0.3:1 worker=1\n")
    done = run(hosts, server, "print('ran')")
    assert done.code == 2
    assert "cannot reach 127.0.0.3 by ssh: " in done.err
    assert "Connection refused; it needs a key and a known host" in done.err
    hosts.write_text(f"{HOSTS[0]}:{server.port} ps=1 worker=1\n")
    strict = "ssh -F none -o StrictHostKeyChecking=yes -o UserKnownHostsFile=/dev/null"
    done = run(hosts, server, "print('ran')", "--ssh", strict)
    assert done.code == 2
    assert f"cannot reach {HOSTS[0]} by ssh: Host key verification failed" in done.err
