"""The command psworker: for one task, with a file of hosts, and in a running job, where it finds and keeps a place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from psclient._src.cluster_resolver.tf_config import TFConfigClusterResolver, task_of
from psclient._src.config import LaunchConfig, task_config
from psclient._src.launch import cluster, supervisor
from psclient._src.launch import psworker as module
from psclient._src.launch.hosts_file import Host, load_hosts
from psclient._src.launch.joining import Joined, Joiner, RunningJob, _check_reachable, certified_task
from psclient._src.launch.psworker import Invocation, command
from psclient._src.launch.restarts import Replacement, Restarts
from psclient._src.processes.shutdown import SERVER_LOST
from psserver.services.joining import JoiningWorkers
from pstesting import forks
from pswire.cluster import ClusterSpec, Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.model.log import JobStarted
from pswire.security.identity import Security, SecurityOptions
from tests.kit.rig import CHIEF, SOON, WORKERS, Job, eventually, serving
from tests.kit.shell import shell
from tests.kit.strategies import refused

SECONDS = 180
WORKER = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}'
EVALUATOR = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "evaluator", "index": 0}}'
PS = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "ps", "index": 0}}'


def write(tmp_path: Path, text: str, name: str = "script.py") -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return name


def test_a_script_runs_as_python_runs_it(tmp_path):
    """Name, arguments and the directory of its imports are those of `python SCRIPT ARGS`."""
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", "X = 3", "beside.py")
    script = write(tmp_path / "deep", "import sys, beside\nprint(__name__, sys.argv, beside.X)")
    done = shell(["psworker", f"deep/{script}", "--lr", "1", "--help"], tmp_path, TF_CONFIG=WORKER)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"__main__ ['deep/{script}', '--lr', '1', '--help'] 3\n"


OURS = "from pswire.cluster import Task\n\ndef inner():\n    Task.parse('nonsense')\n\ninner()\n"
SAID = "psworker: /job:worker/task:0: error: 'nonsense' is not a task; write /job:worker/task:0 (script.py:4)\n"
TRACEBACK = "Traceback (most recent call last):\n"
RAISES = "import psclient as ps\nraise ps.errors.{}('so it is')"
MADE = "from psclient.optimizers.local_steps.schedule import Schedule\n\nSchedule(5, 3)\n"
NOT_DIVISIBLE = (
    "psworker: /job:worker/task:0: error: sync_every=5 is not divisible by the number of fragments, 3; one fragment is "
    "exchanged after every sync_every / 3 steps (script.py:3)\n"
)
ATEXIT = "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\nraise KeyError('x')"

FAILS: dict[str, tuple[list[str], str, int, str, str]] = {
    "ours is one line, with the user's": ([], OURS, 2, "", SAID),
    "and not code that Python has made": ([], MADE, 1, "", NOT_DIVISIBLE),
    "--debug shows it all": (["--debug"], OURS, 2, "", f'{TRACEBACK}  File "script.py", line 6'),
    "the script sees it at exit": ([], ATEXIT, 1, "KeyError('x')\n", "Traceback"),
    "another attempt goes on from a checkpoint": ([], RAISES.format("ServerLost"), 75, "", "psworker: "),
    "this process is not to blame": ([], RAISES.format("Abandoned"), 69, "", "psworker: "),
    "it may help": ([], RAISES.format("Fenced"), 1, "", "psworker: "),
    **{f"no attempt helps: {e}": ([], RAISES.format(e), 2, "", "psworker: ") for e in ("Forbidden", "ConfigError")},
}


@pytest.mark.parametrize("case", FAILS)
def test_what_a_script_ends_by_is_said(tmp_path, case):
    """By the exit code whether another attempt helps, and in words."""
    flags, text, code, out, err = FAILS[case]
    done = shell(["psworker", *flags, write(tmp_path, text)], tmp_path, TF_CONFIG=WORKER)
    assert (done.code, done.out) == (code, out)
    assert done.err.startswith(err)
    assert err != SAID or done.err == SAID


@pytest.mark.parametrize("text", ["1 / 0", "def f(:"], ids=["error", "syntax"])
def test_the_user_s_errors_are_the_user_s(tmp_path, text):
    """A traceback of user code looks as python shows it."""
    script = write(tmp_path, text)
    done = shell(["psworker", script], tmp_path, TF_CONFIG=WORKER)
    plain = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.code == plain.returncode == 1
    assert done.err.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert "psclient" not in done.err
    assert "script.py" in done.err


@pytest.mark.parametrize(
    ("args", "tf_config", "said"),
    [
        ([], WORKER, "/job:worker/task:0: error: a worker needs a script"),
        ([], EVALUATOR, "/job:evaluator/task:0: error: an evaluator needs a script"),
        ([], PS, "/job:ps/task:0: error: TF_CONFIG names /job:ps/task:0 as this process's task; start it with"),
        ([], "", "there is no TF_CONFIG and no script"),
        (["--standalne"], "", "--standalne"),
        (["--ps", "2", "x.py"], "", "--ps describes a local cluster; add --standalone"),
        (["--standalone", "--ps", "0"], "", "--ps"),
        (["--standalone"], "", "needs a script; write psworker --standalone [OPTIONS] SCRIPT [ARGS]"),
        (["--config", "bare.yaml"], "", "psworker --config bare.yaml [OPTIONS] SCRIPT [ARGS], or `script: SCRIPT`"),
    ],
)
def test_bad_input_is_one_line(tmp_path, args, tf_config, said):
    """What is wrong is said in one line, with exit code 2; more of it is in jobs/test_bad_input.py."""
    (tmp_path / "bare.yaml").write_text("ps: 2\n", encoding="utf-8")
    done = shell(["psworker", *args], tmp_path, TF_CONFIG=tf_config)
    assert done.code == 2
    assert done.err.startswith("psworker: ")
    assert done.err.count("\n") == 1
    assert said in done.err


def test_a_log_level_is_that_of_all_processes(tmp_path, monkeypatch):
    """Of a cluster's tasks as well, where one is given; else each has its own."""
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path, "")
    for flags, own, others in ((["--log-level", "info"], "info", "info"), ([], "warning", "")):
        invocation = command.main(["--standalone", *flags, name], standalone_mode=False)
        assert (invocation.log_level, invocation.launch.log_level) == (own, others)


def test_a_chief_without_servers_says_who_it_is(tmp_path, monkeypatch):
    """The errors of a task that only drives are headed by its name, as those of scripts are."""
    monkeypatch.setenv("PS_START_TIMEOUT", "1")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        cluster = {"ps": [address], "worker": ["h:2"], "chief": ["h:3"]}
        tf_config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        done = shell(["psworker"], tmp_path, TF_CONFIG=tf_config)
    assert done.code == 1
    assert done.err.startswith(f"psworker: /job:chief/task:0: error: /job:ps/task:0: no answer at {address}")
    assert done.err.count("\n") == 1


INTERRUPTS = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
for _ in range(1000): pass
"""
"""In place of click, which all of them import: Ctrl-C comes meanwhile."""


@pytest.mark.parametrize("module", ["psclient", "psserver", "psclient.psctl"])
@pytest.mark.parametrize("script", [False, True], ids=["python -m", "console script"])
def test_ctrl_c_while_a_command_is_imported_says_nothing(tmp_path, module, script):
    """It ends with 130. A script of one's own that imports the package is interrupted as any other."""
    (tmp_path / "click.py").write_text(INTERRUPTS)
    name = {"psclient": "psworker", "psserver": "psserver"}.get(module, "psctl")
    where = {"psworker": "psclient._src.launch.psworker", "psserver": "psserver.cli"}.get(name, "psclient.psctl")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    def run(*words):
        command = [sys.executable, "-P", *words]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)

    text = f"from {where} import main\nmain()\n"
    (tmp_path / name).write_text(text)
    done = run(name, "--version") if script else run("-m", module, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    if script:
        (tmp_path / "own.py").write_text(text)
        assert "KeyboardInterrupt" in run("own.py").stderr


def test_a_task_without_a_launcher_ends_before_it_begins(tmp_path):
    """Where the launcher is gone before it has said which cluster it is, the script does not run."""
    command = [sys.executable, "-P", "-m", "psclient", "--die-with-parent", str(os.getpid()), "--early"]
    command += ["--", write(tmp_path, "print('runs')")]
    done = forks.run(command, input=b'{"cluster": {"ps"', capture_output=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (137, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("lost", [False, True])
def test_a_signal_while_a_cluster_starts_ends_it(monkeypatch, number, lost):
    """Also where what a handler raises is lost in a callback, as in those of the garbage collector."""

    class Starting(cluster.Cluster):
        def start(self):
            with suppress(BaseException) if lost else nullcontext():
                os.kill(os.getpid(), number)
                time.sleep(SECONDS)

        def stop(self, grace=0.0, number=0):
            stopped.append(number)

    stopped = []
    monkeypatch.setattr(cluster, "Cluster", Starting)
    monkeypatch.setattr(module, "end_on_sigterm", lambda: None)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    said = Invocation("x.py", (), LaunchConfig(), 0, "warning", "text", False)
    try:
        if lost:
            assert module.run_cluster(said, LaunchConfig()) == 128 + number
            assert number in stopped
        else:
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
                module.run_cluster(said, LaunchConfig())
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def read(directory: Path, text: str) -> tuple[Host, ...]:
    path = directory / "hosts"
    path.write_text(text, encoding="utf-8")
    return load_hosts(path)


def test_hosts_and_their_tasks(tmp_path):
    """In the order of the lines; slots are workers, one where none is said; ssh is told user and port where said."""
    text = (
        "# name  tasks\n\nnode1 ps=1 worker=2  # the fast one\nme@node2:2222 ps=1 slots=4 address=10.0.0.2 "
        "listen=0.0.0.0\nnode3\n[fe80::1]:22 worker=0 ps=2\n"
    )
    assert read(tmp_path, text) == (
        Host("node1", ps=1, worker=2, address="node1", listen="node1"),
        Host("node2", "me", 2222, ps=1, worker=4, address="10.0.0.2", listen="0.0.0.0"),
        Host("node3", worker=1, address="node3", listen="node3"),
        Host("fe80::1", port=22, ps=2, worker=0, address="fe80::1", listen="fe80::1"),
    )
    assert Host("node1").target == ["node1"]
    assert Host("node1", "me", 2222).target == ["-p", "2222", "me@node1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a ps=1\n\na worker=1", "line 3: host a is also in line 1; write all of its tasks there"),
        ("a ps=1\n-oProxyCommand=x worker=1", "line 2: '-oProxyCommand=x' is not a host; write node1"),
        ("a:70000 ps=1", "line 1: 'a:70000' is not a host"),
        ("a:b@c ps=1", "line 1: 'a:b@c' is not a host"),
        ("a ps=1 wroker=1", "line 1: key.*wroker.*worker"),
        ("a ps", "line 1: 'ps' has no value; write ps=1"),
        ("a ps=1 address=", "line 1: 'address=' has no value; write address=ADDRESS"),
        ("a ps=one", "line 1: ps must be a whole number from 0 to 1000, not 'one'"),
        ("a ps=-1", "line 1: ps must be a whole number"),
        ("a ps=1 worker=1 slots=1", "line 1: worker appears twice"),
        ("a\nb", "no host has a server; write ps=1 after one of them"),
        ("# nothing", "no host has a server"),
        ("localhost ps=1\nnode2", "line 1: other hosts cannot reach servers at localhost, .*; write address=NAME"),
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path, text, said):
    """So is a file that is not there, or is no text."""
    refused(ConfigError, said, lambda: read(tmp_path, text))
    refused(ConfigError, r"cannot read .*none: No such file", lambda: load_hosts(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    refused(ConfigError, "binary is not a text file", lambda: load_hosts(tmp_path / "binary"))


SERVER, A, B = Task("ps", 0), Task("worker", 0), Task("worker", 1)


def begun(left: int) -> Restarts:
    restarts = Restarts(left)
    for task in (SERVER, A, B):
        restarts.started(task, 0.0)
    return restarts


def test_who_fails_by_itself_costs_a_restart():
    """As long as there are any; of a server that hangs its clients say so, which costs one for all of them."""
    restarts = begun(1)
    assert restarts.unexplained({A: 1}) is None
    assert restarts.spend({A: 1}, [], 1.0) == [Replacement(A, True)]
    assert restarts.left == 0
    assert restarts.spend({B: -9}, [], 2.0) == []
    assert begun(1).spend({SERVER: -9, B: -9}, [], 1.0) == [], "two that are killed at once are two causes"
    restarts = begun(2)
    failed = {A: SERVER_LOST, B: SERVER_LOST}
    assert restarts.unexplained(failed) == A
    follow = [Replacement(A, False), Replacement(B, False)]
    assert restarts.spend(failed, [SERVER], 5.0) == [Replacement(SERVER, True), *follow]
    restarts.started(A, 6.0)
    assert restarts.unexplained({A: SERVER_LOST}) == A
    assert restarts.spend({A: SERVER_LOST}, [A], 7.0) == [Replacement(A, True)]
    assert restarts.left == 0


def test_who_follows_a_lost_server_costs_nothing():
    """At the same time, or later: once each, for a successor was not there."""
    restarts = begun(2)
    failed = {A: SERVER_LOST, SERVER: -9}
    assert restarts.unexplained(failed) is None
    assert restarts.spend(failed, [], 5.0) == [Replacement(SERVER, True), Replacement(A, False)]
    restarts.started(A, 5.1)
    assert restarts.unexplained({B: SERVER_LOST}) is None
    assert restarts.spend({B: SERVER_LOST}, [], 6.0) == [Replacement(B, False)]
    assert restarts.left == 1
    assert restarts.unexplained({A: SERVER_LOST}) == A


HEARTBEATS = Timeouts(heartbeat_interval=0.02, call_timeout=SOON, start_timeout=SOON)
LEASE = 12.0
W2 = WORKERS[2]


@pytest.fixture
def job(tmp_path):
    """A job of two servers and two workers, over gRPC, by a clock that only the test turns."""
    with serving("grpc", 2, tmp_path) as servers:
        yield begin(servers, [server.address for server in servers.verbs])


def begin(servers, addresses, name=""):
    """Begins a job whose chief reaches the servers at some addresses."""
    job = Job(servers)
    job.opened = job.open(CHIEF, 0, True)
    lives = tuple(one.incarnation for one in servers.cores)
    entry = JobStarted(job.opened.token, lives, name, tuple(addresses), workers=("a:0", "b:0"), chief="c:0")
    for server in servers.verbs:
        assert server.approve(job.opened.token, 0, [entry]) == 1
    return job


def joiner(*addresses, name="", wanted=None):
    return Joiner(addresses, HEARTBEATS, Security(), wanted, name)


def kept(job):
    """The indices that are kept, and when they were asked for last."""
    (joining,) = (one for one in job.servers.cores[0].machine.job.services if isinstance(one, JoiningWorkers))
    places = joining._kept
    return {index: place.seen for index, place in places.items()}


def test_any_server_tells_of_the_job(job):
    """All servers of the log, the workers of the cluster and the chief; and which worker this process is."""
    for number, server in enumerate(job.verbs):
        with joiner(server.address) as joining:
            joined = joining.take()
        assert joined.task == Task("worker", 2 + number)
        assert joined.job.servers == tuple(server.address for server in job.verbs)
        config = json.loads(joined.variables()["TF_CONFIG"])
        assert config["cluster"]["chief"] == ["c:0"]
        assert config["task"] == {"type": "worker", "index": 2 + number}
        assert list(joined.cluster.job_tasks("worker"))[:2] == ["a:0", "b:0"]


@pytest.mark.parametrize("always", [False, True])
def test_a_place_is_kept_while_the_script_begins(job, always):
    """However long that takes; once a session of the task is open, that keeps it. By a process that starts the script
    again it is kept also then, as the session may end at any time."""
    with joiner(job.verbs[0].address) as joining:
        joined = joining.take()
        joining.hold(always=always)
        session = job.open(W2).session if always else job.opened.session
        for _ in range(3):
            job.servers.spend(LEASE / 2, job.opened.session, session)
            eventually(lambda: kept(job) == {2: job.servers.clock.now})
        thread = joining._thread
        if always:
            assert joining.take() == joined
        else:
            job.open(W2)
            eventually(lambda: not thread.is_alive())
    eventually(lambda: not thread.is_alive())


@pytest.mark.parametrize("restarts", [0, 1])
def test_psworker_keeps_the_place_as_long_as_it_needs_it(job, monkeypatch, restarts):
    """Until a session is open; where it may start the script again, until that is over."""

    def keeps():
        session = job.open(W2).session
        for _ in range(3):
            job.servers.spend(LEASE / 2, job.opened.session, session)
            if restarts:
                eventually(lambda: kept(job) == {2: job.servers.clock.now})
        eventually(lambda: bool(restarts) or not [each for each in threading.enumerate() if each.name == "place"])
        return 7

    monkeypatch.setattr(module, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(module, "set_variables", lambda variables: None)
    monkeypatch.setattr(module, "run_task", lambda *given: keeps())
    monkeypatch.setattr(supervisor, "supervise", lambda *given: keeps())
    monkeypatch.setenv("PS_HEARTBEAT_INTERVAL", "0.02")
    said = Invocation("x.py", (), None, 0, "warning", "text", False, join=(job.verbs[0].address,), restarts=restarts)
    assert module.run_joined(said) == 7


def test_a_job_that_is_begun_anew_has_the_same_place(job):
    """After a loss all processes start again: this one as the worker that it was."""
    with joiner(job.verbs[0].address) as joining:
        assert joining.take().task == W2
        with joiner(job.verbs[0].address) as other:
            assert other.take().task == WORKERS[3]
            begin(job.servers, [server.address for server in job.verbs], "again")
            assert other.take().task == WORKERS[3]
        joined = joining.take()
        assert (joined.task, joined.job.name) == (W2, "again")


def test_given_addresses_go_before_the_log_s(job):
    """The chief may reach a server by another name than this process; of those that are not given the log tells."""
    begin(job.servers, ["192.0.2.1:1", "192.0.2.2:2"])
    first, second = (server.address for server in job.verbs)
    with joiner(second, first) as joining:
        assert joining.take().job.servers == (first, second)
    with joiner(first) as joining:
        assert joining.take().job.servers == (first, "192.0.2.2:2")


def test_an_address_that_is_another_machine_here():
    """A chief beside its servers reaches them by loopback; whoever is elsewhere has to be told."""
    servers = ("127.0.0.1:1", "[::1]:2", "localhost:3")
    _check_reachable(servers, set(), "127.0.0.1:1")
    _check_reachable(servers, {0, 1, 2}, "10.0.0.7:1")
    _check_reachable(("10.0.0.7:1", "host:2"), {0}, "10.0.0.7:1")
    for missing in range(3):
        with pytest.raises(ConfigError, match=rf"has /job:ps/task:{missing} at .*--join HOST:PORT,HOST:PORT"):
            _check_reachable(servers, {0, 1, 2} - {missing}, "10.0.0.7:1")


@pytest.mark.parametrize(("index", "workers"), [(2, ["a:0", "b:0", "d:0"]), (5, {0: "a:0", 1: "b:0", 5: "d:0"})])
def test_the_script_finds_its_place_as_any_other(monkeypatch, index, workers):
    """By TF_CONFIG: the cluster with this task in it, and of those that have joined before nobody who may be gone."""
    cluster = ClusterSpec({"ps": ["s:1"], "worker": {0: "a:0", 1: "b:0", index: "d:0"}, "chief": ["c:0"]})
    running = RunningJob("job", ("s:1",), 0, ("a:0", "b:0"), "c:0", True)
    variables = Joined(Task("worker", index), cluster, running).variables()
    assert (variables["PS_JOB"], variables["PS_REPLICATION_FACTOR"]) == ("job", "2")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = task_config()
    assert found == task_of(TFConfigClusterResolver())
    assert found.task == Task("worker", index)
    assert found.cluster == cluster
    assert found.cluster.as_dict()["worker"] == workers


def test_the_worker_of_a_certificate(certificates, tmp_path):
    """One that names exactly one worker; whom else it names, such as a chief, does not matter."""
    folder = certificates.out / "worker-1"
    own = SecurityOptions(*(str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt", "token")))
    assert certified_task(own) == WORKERS[1]
    assert certified_task(SecurityOptions(token_file=str(folder / "token"))) is None

    def shown(*names):
        made = certificates.signed([f"{name}.paramserver" for name in names], -1, 2)
        (tmp_path / "tls.crt").write_bytes(made.certificate)
        return certified_task(SecurityOptions(tls_cert=str(tmp_path / "tls.crt")))

    assert shown("worker-7", "chief-0") == Task("worker", 7)
    for names in (["worker-1", "worker-2"], ["ps-0"], ["admin"], ["worker-x"]):
        refused(ConfigError, "needs the certificate of exactly one worker", lambda names=names: shown(*names))
    with pytest.raises(ConfigError, match=r"PS_TOKEN_FILE=\{task\}/token: a worker that joins does not know its task"):
        certified_task(SecurityOptions(token_file="{task}/token"))
