"""Bad input, typed as a user types it: one line that says what is wrong, where, and what to do; no hang."""

from __future__ import annotations

import json
import re
import socket

import pytest

import psclient as ps
from tests.kit.shell import Done, shell

STARTING = 115.0
"""Seconds that starting and ending processes may take on a busy machine, beside the deadline that is tested."""

START = 2.0
"""PS_START_TIMEOUT: how long a process waits for the others. The default is two minutes."""

QUICK = {
    "PS_START_TIMEOUT": str(START),
    "PS_ROUND_TIMEOUT": "6",
    "PS_SESSION_TIMEOUT": "2",
    "PS_HEARTBEAT_INTERVAL": "0.3",
}

CLUSTER = {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}

FINE = "import psclient as ps\nps.ParameterServerStrategy()\n"


def tf_config(job: str, index: int, cluster: dict[str, list[str]] | None = None) -> str:
    return json.dumps({"cluster": cluster or CLUSTER, "task": {"type": job, "index": index}})


def check(done: Done, code: int, says: str, deadline: float = 0.0) -> None:
    """One line of ours, as expected; no traceback; the exit code; in time; nothing left."""
    assert done.code == code, done.err
    assert len(set(done.errors)) == 1, done.err
    assert re.search(says, done.errors[0]), done.errors[0]
    assert "Traceback" not in done.out + done.err
    assert done.seconds < deadline + STARTING
    assert not done.left


CASES = {
    "malformed TF_CONFIG, worker": ("psworker fine.py", r"TF_CONFIG is not JSON .*; write \{", '{"cluster"'),
    "malformed TF_CONFIG, server": ("psserver", r"TF_CONFIG is not JSON .*; write \{", '{"cluster"'),
    "unknown worker": (
        "psworker fine.py",
        r"no /job:worker/task:5; it has 1 ps, 2 worker: correct the",
        tf_config("worker", 5),
    ),
    "unknown server": ("psserver", r"no /job:ps/task:7; it has 1 ps, 2 worker: correct the", tf_config("ps", 7)),
    "a server as a worker": (
        "psworker fine.py",
        r"names /job:ps/task:0 as .*; start it with psserver",
        tf_config("ps", 0),
    ),
    "missing script": ("psworker none.py", r"there is no script 'none.py' in /"),
    "missing script of a cluster": ("psworker --standalone none.py", r"there is no script 'none.py' in /"),
    "missing file of a cluster": ("psworker --config none.yaml", r"cannot read none.yaml: No such file"),
    "hosts, and a number of servers": ("psworker --hosts hosts --ps 2 fine.py", r"defines the tasks; leave --ps out"),
    "hosts, and a local cluster": ("psworker --hosts hosts --standalone fine.py", r"cannot be used together; keep one"),
    "no file of hosts": ("psworker --hosts none fine.py", r"cannot read none"),
    "a remote shell without hosts": ("psworker --ssh ssh fine.py", r"is for tasks on other hosts; add --hosts FILE"),
    "unknown option, worker": ("psworker --standlone fine.py", r"'--standlone'.*'--standalone'"),
    "unknown option, server": ("psserver --prot 1", r"'--prot'.*'--port'"),
    "unknown timeout": (
        "psworker fine.py",
        r"PS_TIMEOUT_STRAT is unknown; did you mean PS_START_TIMEOUT",
    ),
    "no GPU, server": ("psserver --device gpu:99", r"(no gpu:99|CuPy, which cannot be imported).* --device cpu"),
    "no GPU, cluster": ("psworker --standalone --device gpu:99 fine.py", r"ps/task:0: .* --device cpu"),
    "no GPU, script": ("psworker gpu.py", r"gpu:99 does not exist: .*; use cpu:0, or .* \(gpu.py:2\)$"),
    "no size": ("psserver --memory-limit lots", r"--memory-limit 'lots' is not a size; write bytes with a unit"),
    "a tier without a bound": (
        "psserver --tier-path .",
        r"--tier-path needs --tier-memory, the maximum bytes of table rows",
    ),
    "a bound without a tier": ("psserver --tier-memory 1GiB", r"--tier-memory limits .* --tier-path; give --tier-path"),
    "a small bound": ("psserver --tier-path . --tier-memory 1MiB", r"--tier-memory 1MiB is too small; give .* 16 MiB"),
    "a tier that is all memory": (
        "psserver --tier-path . --tier-memory 1GiB --memory-limit 1GiB",
        r"--tier-memory 1GiB is part of .* lower --tier-memory",
    ),
    "a tier in memory": (
        "psserver --tier-path /dev/shm --tier-memory 1GiB",
        r"--tier-path /dev/shm is in memory \(tmpfs\); name",
    ),
    "not this machine": ("psserver --host 192.0.2.1", r"cannot listen on 192.0.2.1:0 .*; choose another"),
    "join, a task by TF_CONFIG as well": (
        "psworker --join 127.0.0.1:1 fine.py",
        r"with --join the servers choose this process's task, .*; unset TF_CONFIG, or leave out --join",
        tf_config("worker", 0),
    ),
    "join, a missing script": ("psworker --join 127.0.0.1:1 none.py", r"there is no script 'none.py' in /"),
    "join, no address": ("psworker --join nowhere fine.py", r"--join: 'nowhere' is not an address; write host:port"),
    "join, half an address": ("psworker --join a:1, fine.py", r"--join: '' is not an address; write host:port"),
    "join, a local cluster": (
        "psworker --join a:1 --standalone fine.py",
        r"--join adds a worker to a running job; leave out",
    ),
    "join, a chief that stands by": (
        "psworker --join a:1 --standby",
        r"--join adds a worker to a running job; leave out",
    ),
    "join, no number of restarts": ("psworker --join a:1 --restarts -1 fine.py", r"--restarts"),
    "a module without a cluster": (
        "psworker --module m",
        r"m is for workers of a cluster; set TF_CONFIG, or add --sta",
    ),
    "a module that nobody schedules": (
        "psworker --standalone --no-chief --module m fine.py",
        r"workers import m, so no process runs the script",
    ),
    "a module that is not there": (
        "psworker --module package.others fine.py",
        r"there is no module 'package.others' in",
        tf_config("worker", 0),
    ),
    "join, no certificate": (
        "psworker --join a:1 --tls-cert none.crt --tls-key k --tls-ca c fine.py",
        r"--tls-cert none.crt cannot be read",
    ),
}
"""What is typed, where `fine.py` is a script that only makes a strategy; a pattern for what is wrong, where, and what
to do; and TF_CONFIG."""


@pytest.mark.parametrize("name", CASES)
def test_a_command_that_cannot_be_done(tmp_path, name):
    """Malformed input never starts anything: one line, exit code 2, also where a script had begun."""
    (tmp_path / "fine.py").write_text(FINE)
    (tmp_path / "hosts").write_text("h:22 ps=1 worker=1\n")
    (tmp_path / "gpu.py").write_text(FINE.replace("()", "(['gpu:99'])"))
    words, says, *config = CASES[name]
    environ = {"TF_CONFIG": "".join(config)} | ({"PS_TIMEOUT_STRAT": "1"} if name == "unknown timeout" else {})
    check(shell(words.split(), tmp_path, **environ), 2, says)


@pytest.mark.parametrize("silent", [False, True], ids=["nothing listens", "silent"])
@pytest.mark.parametrize("index", [0, 1], ids=["chief", "worker"])
def test_a_server_that_cannot_be_reached(tmp_path, silent, index):
    """A worker, also the one that is chief, gives up after PS_START_TIMEOUT, and names the task and its address."""
    (tmp_path / "fine.py").write_text(FINE)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if silent:
            bound.listen()
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        config = tf_config("worker", index, {**CLUSTER, "ps": [address]})
        done = shell(["psworker", "fine.py"], tmp_path, TF_CONFIG=config, **QUICK)
    why = "it does not answer" if silent else "nothing listens there"
    says = rf"ps/task:0: no answer at {address} for \S+ s \({why}\); start this task, .* TF_CONFIG \(fine.py:2\)$"
    check(done, 1, f"/job:worker/task:{index}: error: .*{says}", START)


# ---- Scripts with a coordinator ----

CLOSURES = """
import sys
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy(consistency=ps.Async())
with strategy.scope():
    v = ps.Variable(np.zeros(2), name="v")
    optimizer = ps.optimizers.SGD(1.0)


@ps.coordinator.function
def add(amount):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(2, -amount), v)]))
    return sys.argv[1:]
"""
MAIN = """
import psclient as ps
from package.closures import add, strategy, v

coordinator = ps.coordinator.ClusterCoordinator(strategy)
results = [coordinator.schedule(add, args=(float(n),)) for n in range(10)]
coordinator.join()
print(v.numpy(), results[3].fetch())
"""


def test_workers_import_a_module(tmp_path):
    """The chief alone runs the script; both have the script's arguments."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "closures.py").write_text(CLOSURES, encoding="utf-8")
    (tmp_path / "main.py").write_text(MAIN, encoding="utf-8")
    done = shell(
        ["psworker", "--standalone", "--workers", "2", "--module", "package.closures", "main.py", "--x"], tmp_path
    )
    assert (done.code, done.left) == (0, ()), done.err
    assert "[45. 45.] ['--x']" in done.out


def test_who_coordinates():
    """The chief; and a process without a cluster, which is told how to start one."""
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    for task, coordinates in (("chief", True), ("worker", False)):
        resolver = ps.SimpleClusterResolver(ps.ClusterSpec(cluster), task_type=task, task_id=0)
        assert ps.coordinator.is_coordinator(resolver) is coordinates
    assert ps.coordinator.is_coordinator()
    alone = ps.ParameterServerStrategy(consistency=ps.Async())
    with (
        alone,
        pytest.raises(
            ps.errors.ConfigError, match=r"ClusterCoordinator needs a cluster whose workers .* --chief-runs-script"
        ),
    ):
        ps.coordinator.ClusterCoordinator(alone)
    with pytest.raises(TypeError, match="takes a ParameterServerStrategy, not MirroredStrategy"):
        ps.coordinator.ClusterCoordinator(ps.MirroredStrategy(["cpu:0"]))
