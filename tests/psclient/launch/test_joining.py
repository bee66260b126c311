"""A worker's place in a running job: found by any server, kept as long as it is needed, and told to the script."""

from __future__ import annotations

import json
import threading

import pytest

from psclient._src.cluster_resolver.tf_config import TFConfigClusterResolver, task_of
from psclient._src.config import task_config
from psclient._src.launch import psworker
from psclient._src.launch.joining import Joined, Joiner, RunningJob, _check_reachable, certified_task
from psclient._src.launch.psworker import Invocation
from pswire.cluster import ClusterSpec, Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.model.log import JobStarted
from pswire.security.identity import Security, SecurityOptions
from tests.kit.rig import CHIEF, SOON, WORKERS, Job, eventually, serving

BEATS = Timeouts(beat=0.02, call=SOON, start=SOON)
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
    return Joiner(addresses, BEATS, Security(), wanted, name)


def kept(job):
    """The indices that are kept, and when they were asked for last."""
    places = job.servers.cores[0].machine._indices._kept
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


def test_a_place_is_kept_while_the_script_begins(job):
    """However long that takes; once a session of the task is open, that keeps it."""
    with joiner(job.verbs[0].address) as joining:
        joining.take()
        joining.hold(always=False)
        for _ in range(3):
            job.servers.spend(LEASE / 2, job.opened.session)
            eventually(lambda: kept(job) == {2: job.servers.clock.now})
        job.open(W2)
        eventually(lambda: not joining._thread.is_alive())


def test_a_place_is_kept_between_two_attempts(job):
    """By the process that starts the script again: also while a session is open, which may end at any time."""
    with joiner(job.verbs[0].address) as joining:
        joined = joining.take()
        joining.hold(always=True)
        session = job.open(W2).session
        for _ in range(3):
            job.servers.spend(LEASE / 2, job.opened.session, session)
            eventually(lambda: kept(job) == {2: job.servers.clock.now})
        assert joining.take() == joined
        thread = joining._thread
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

    monkeypatch.setattr(psworker, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(psworker, "set_variables", lambda variables: None)
    monkeypatch.setattr(psworker, "run_task", lambda *given: keeps())
    monkeypatch.setattr(psworker, "supervise", lambda *given: keeps())
    monkeypatch.setenv("PS_TIMEOUT_BEAT", "0.02")
    said = Invocation("x.py", (), None, 0, "warning", "text", False, join=(job.verbs[0].address,), restarts=restarts)
    assert psworker.run_joined(said) == 7


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
        with pytest.raises(ConfigError, match=rf"reaches /job:ps/task:{missing} at .*--join HOST:PORT,HOST:PORT"):
            _check_reachable(servers, {0, 1, 2} - {missing}, "10.0.0.7:1")


@pytest.mark.parametrize(("index", "workers"), [(2, ["a:0", "b:0", "d:0"]), (5, {0: "a:0", 1: "b:0", 5: "d:0"})])
def test_the_script_finds_its_place_as_any_other(monkeypatch, index, workers):
    """By TF_CONFIG: the cluster with this task in it, and of those that have joined before nobody who may be gone."""
    cluster = ClusterSpec({"ps": ["s:1"], "worker": {0: "a:0", 1: "b:0", index: "d:0"}, "chief": ["c:0"]})
    running = RunningJob("job", ("s:1",), 0, ("a:0", "b:0"), "c:0", True)
    variables = Joined(Task("worker", index), cluster, running).variables()
    assert (variables["PS_JOB"], variables["PS_REPLICATION"]) == ("job", "1")
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
        (tmp_path / "tls.crt").write_bytes(
            certificates.signed([f"{name}.paramserver" for name in names], -1, 2).certificate
        )
        return certified_task(SecurityOptions(tls_cert=str(tmp_path / "tls.crt")))

    assert shown("worker-7", "chief-0") == Task("worker", 7)
    for names in (["worker-1", "worker-2"], ["ps-0"], ["admin"], ["worker-x"]):
        with pytest.raises(ConfigError, match="as the one worker that its certificate names"):
            shown(*names)
    with pytest.raises(ConfigError, match=r"PS_TOKEN_FILE=\{task\}/token: a worker that joins is told its task later"):
        certified_task(SecurityOptions(token_file="{task}/token"))
