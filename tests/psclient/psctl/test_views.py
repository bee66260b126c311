"""What psctl makes of servers' answers: servers of several jobs, of none, in the wrong order; and how it says it."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from rich.console import Console

from psclient._src.telemetry.observer import Servers as Connections
from psclient.psctl.dashboard import _nothing, _number, _of_chief, _of_servers
from psclient.psctl.doctor import CHECKS
from psclient.psctl.findings import Finding
from psclient.psctl.output import plain
from psclient.psctl.status import lines
from psclient.psctl.variables import stats_of
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.model.consistency import ASYNC, SYNC
from pswire.model.log import Done, Generation, JobStarted, Member
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.status import Happened, LocalProgress, OpenRound, Pace, ServerStatus, SessionState, WorkerProgress
from pswire.model.tables import SlotTensor, TablePart, TableSpec
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.security.identity import Security
from pswire.telemetry.views import job_view as view_module
from pswire.telemetry.views.columns import cells_of
from pswire.telemetry.views.job_view import GONE, JobView, Problem, ServerView, TaskView, view_of
from pswire.telemetry.views.looked import Looked
from pswire.telemetry.views.numbers import duration, shape, short, size
from pswire.telemetry.views.rates import rate_words, rates
from pswire.telemetry.views.variable_list import VariableView, beside, slots, totals
from pswire.telemetry.views.words import STATES
from tests.kit.cases import search
from tests.kit.rig import WORKERS, Job, Servers, core, remote, serving
from tests.kit.storage import write_checkpoint

W0, W1 = WORKERS[:2]
CHIEF = Task("chief", 0)


@pytest.fixture
def serve(tmp_path):
    """Starts servers of one job each time."""
    with ExitStack() as stack:
        yield lambda count=2: stack.enter_context(serving("grpc", count, tmp_path))


def view(*servers: Any, expected: tuple[Task, ...] = ()) -> JobView:
    """What psctl sees of servers, in this order."""
    addresses = {Task("ps", index): server.address for index, server in enumerate(servers)}
    with Connections(addresses, 2.0, Security()) as connections:
        return view_of(connections.look(), expected)


def kinds(seen: JobView) -> list[tuple[str, str]]:
    return [(problem.kind, short(problem.task)) for problem in seen.problems]


def test_the_variables_of_a_job_that_ends_meanwhile(serve):
    """Those of the job that has begun since its status was asked for, whose log is shorter; it is asked for once."""
    servers = serve(1)
    job = Job(servers)
    (worker,) = job.join(W0)
    job.variable(worker, np.zeros(2), name="w")

    class Late(Connections):
        def look(self) -> list[Looked]:
            found = super().look()
            job.begin()
            return found

    with Late({Task("ps", 0): servers.verbs[0].address}, 2.0, Security()) as connections:
        assert connections.variables() == []


def test_a_job_begins_runs_and_ends(serve):
    """From the chief's first entry to its last; that nobody has begun one is no fault of the servers."""
    servers: Servers = serve()
    seen = view(*servers.verbs)
    assert (seen.state, seen.generation, seen.round, seen.tasks) == ("none", 0, -1, ())
    assert kinds(seen) == [("no_chief", "")]
    job = Job(servers)
    assert view(*servers.verbs).state == "starting"
    (worker,) = job.join(W0, replicas=3)
    seen = view(*servers.verbs)
    assert (seen.state, seen.generation, seen.replicas, kinds(seen)) == ("running", 1, 3, [])
    servers.verbs[0].leave(worker.session, "")
    job.append(Done())
    servers.verbs[0].leave(job.opened.session, "")
    seen = view(*servers.verbs)
    assert (seen.state, kinds(seen)) == ("over", [])
    assert [(task.task, task.state) for task in seen.tasks] == [(str(CHIEF), "left"), (str(W0), "left")]


def test_who_does_not_fit_is_told(serve):
    """One server twice, one too few, server 0 left out, one of another job; who never came is known by TF_CONFIG alone.
    Of a task that came back the newest session counts: what became of the one before is over."""
    job, other = Job(serve()), core(1, 777)
    (old,) = job.join(W0)
    with remote(other) as alone:
        assert other.approve(1, 0, [JobStarted(1, (776, 777))]) == 1
        seen = view(job.verbs[0], alone)
    other.close()
    assert (kinds(seen), "another job" in seen.problems[0].message) == ([("other_job", "ps-1")], True)
    one, two = job.verbs
    assert kinds(view(one, one)) == [("same_server", "ps-0")]
    assert kinds(view(one)) == [("incomplete", "")]
    assert kinds(view(two)) == [("no_keeper", "ps-0"), ("incomplete", "")]
    swapped = view(two, one)
    assert kinds(swapped) == []
    assert [server.task for server in swapped.servers] == ["/job:ps/task:1", "/job:ps/task:0"]
    seen = view(*job.verbs, expected=(CHIEF, W0, W1))
    assert kinds(seen) == [("missing", "worker-1")]
    assert [task.state for task in seen.tasks if task.task == str(W1)] == ["missing"]
    assert kinds(view(*job.verbs)) == []
    job.verbs[0].leave(old.session, "it failed")
    assert ("failed", "worker-0") in kinds(view(*job.verbs))
    job.open(W0)
    seen = view(*job.verbs)
    assert [(task.state, task.takes_part) for task in seen.tasks if not task.drives] == [("open", False)]
    assert ("failed", "worker-0") not in kinds(seen)


def test_who_is_lost_is_told(serve):
    """A worker whose lease ended, a chief that is gone, and a server that was started anew: its variables are gone."""
    job, fresh = Job(serve()), core(1, 777)
    one, _ = job.join(W0, W1)
    job.servers.spend(12, one.session, job.opened.session)
    seen = view(*job.verbs)
    assert (kinds(seen), "it sent no heartbeat" in seen.problems[0].message) == ([("lost", "worker-1")], True)
    job.servers.spend(12, one.session)
    assert kinds(view(*job.verbs)) == [("no_chief", "chief-0"), ("lost", "worker-1")]
    with remote(fresh) as again:
        assert ("replaced", "ps-1") in kinds(view(job.verbs[0], again))
    fresh.close()


def test_asynchronous_workers_have_their_own_rounds(serve):
    """Each stands where it is, and nobody waits for anybody."""
    job = Job(serve())
    workers = job.join(W0, W1, mode="async")
    _, plan = job.adder(workers[0])
    for worker, rounds in zip(workers, (8, 5), strict=True):
        for _ in range(rounds):
            worker.make(plan, [1])
    seen = view(*job.verbs)
    assert (seen.mode, kinds(seen)) == ("async", [])
    tasks = [each for each in seen.tasks if not each.drives]
    assert [(each.round, each.lag, list(each.waits_for)) for each in tasks] == [(7, 0, []), (4, 3, [])]


def test_local_steps_are_shown_by_worker(serve):
    """Since when a worker computes by itself, and what its exchanges cost a step; of another worker nothing."""
    job = Job(serve(1))
    one, _ = job.join(W0, W1)
    (server,) = job.verbs
    server.heartbeat(one.session, -1, b"", Pace(8, 9, 9, local=LocalProgress(300, 50, 60.0, 1.5e6, 300 << 20)), 0)
    seen = view(server)
    local, other = (each for each in seen.tasks if not each.drives)
    assert (local.local_steps, local.local_steps_since_exchange, local.tokens) == (300, 50, 1.5e6)
    assert 60 <= local.exchange_seconds < 120
    assert (local.bytes_per_local_step, other.local_steps, other.exchange_seconds) == (1 << 20, 0, -1)
    cells = cells_of(local)
    assert [cells[name] for name in ("local steps", "tokens", "bytes a local step")] == ["300", "1.5 M", "1.0 MiB"]
    assert cells["last exchange"].startswith("50 steps, 1.0 min ago")
    assert not any(cells_of(other)[name] for name in ("local steps", "last exchange", "tokens", "bytes a local step"))
    never = dataclasses.replace(local, exchange_seconds=-1.0)
    assert cells_of(never)["last exchange"] == "never"


TASKS = st.sampled_from([CHIEF, W0, W1])
ROUNDS = st.integers(-1, 5)
MEMBERS = st.builds(Member, TASKS, st.integers(1, 4), st.integers(0, 2), st.sampled_from([SYNC, ASYNC]))
SESSIONS = st.builds(
    SessionState,
    MEMBERS,
    st.sampled_from(["open", "left", "failed", "lost"]),
    st.sampled_from(["", "dataset:0"]),
    st.floats(0, 1e6),
    st.booleans(),
)
STATUSES = st.builds(
    ServerStatus,
    server=st.integers(0, 2),
    incarnation=st.integers(1, 4),
    log=st.integers(0, 9),
    generation=st.none() | st.builds(Generation, st.integers(1, 3), st.lists(MEMBERS, max_size=3).map(tuple)),
    round=ROUNDS,
    positions=st.just(()),
    waiting=st.lists(
        st.builds(OpenRound, st.integers(0, 6), st.just("adds"), st.lists(TASKS).map(tuple), st.booleans()), max_size=3
    ).map(tuple),
    variables=st.integers(0, 3),
    variable_bytes=st.integers(0, 1 << 40),
    memory_limit=st.integers(0, 1 << 40),
    chief=st.floats(0, allow_nan=False),
    places=st.lists(st.builds(WorkerProgress, TASKS, ROUNDS, st.just(())), max_size=2).map(tuple),
    sessions=st.lists(SESSIONS, max_size=4).map(tuple),
    incarnations=st.sampled_from([(), (1, 2), (3,)]),
    over=st.booleans(),
    broken=st.sampled_from(["", "round 3 failed halfway"]),
    process=st.none(),
)
ANSWERS = st.builds(Looked, st.builds(Task, st.just("ps"), st.integers(0, 2)), st.just("h:1"), st.none() | STATUSES)


@search(0.4)  # of thousands of values each
@given(st.lists(ANSWERS, min_size=1, max_size=3), st.lists(TASKS, max_size=3))
def test_whatever_servers_say_can_be_shown(looked, expected):
    """Also what no job would ever say: a tool for what is wrong must bear everything."""
    seen = view_of(looked, expected)
    json.dumps(dataclasses.asdict(seen), allow_nan=False)
    assert len(seen.servers) == len(looked)
    assert all(each.lag >= 0 for each in (*seen.servers, *seen.tasks))
    assert all(problem.message for problem in seen.problems)
    assert all(max(map(len, rendered(seen, width))) <= width for width in (80, 200))


def test_every_key_is_documented():
    """What `--json` gives stands in docs/psctl-json.md; every kind of problem, and every check, in docs/psctl.md."""
    docs = Path(__file__).parents[3] / "docs"
    page, keys = ((docs / name).read_text(encoding="utf-8") for name in ("psctl.md", "psctl-json.md"))
    kinds = (JobView, ServerView, TaskView, Problem, Finding, Happened)
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    problems = set(re.findall(r'Problem\("(\w+)"', inspect.getsource(view_module))) | set(GONE)
    assert len(problems) > 8
    for name in fields | set(STATES):
        assert f"`{name}`" in keys or f"`{name}[]`" in keys, name
    for name in problems:
        assert f"`{name}`" in page, name
    for check in CHECKS:
        assert f"| {check} |" in page, check


def rendered(seen: JobView, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    for each in lines(seen, width=width):
        console.print(each)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_tables_fit_their_terminal(serve, width):
    """What there is no room for is left out, and each server has one line."""
    job = Job(serve())
    job.join(W0, W1)
    said = rendered(view(*job.verbs), width)
    assert max(map(len, said)) <= width
    assert [line.split()[0] for line in said if line.startswith(("ps-", "worker-", "chief-"))] == [
        *("ps-0", "ps-1", "chief-0", "worker-0", "worker-1")
    ]
    assert any("address" in line for line in said) == (width >= 140)


def test_rates_are_of_one_process():
    """Differences in time; none over the life of two processes, or where there is no answer."""
    moved, later = {"shm sent": 100, "tcp sent": 5}, {"shm sent": 300, "tcp sent": 5}
    before = ServerView("t", "a", "up", incarnation=1, round=10, traffic=moved, phases={"waiting": 1.0})
    after = ServerView("t", "a", "up", incarnation=1, round=30, traffic=later, phases={"waiting": 2.5, "applying": 0.5})
    found = rates(before, after, 4.0)
    assert (found["rounds_per_second"], found["bytes_per_second"]) == (5.0, {"shm sent": 50.0})
    assert found["round_seconds"] == {"waiting": 0.075, "applying": 0.025}
    assert rate_words({"t": found})["t"]["a round's time"] == "100.0 ms: waiting 75 %, applying 25 %, answering 0 %"
    assert rates(after, after, 4.0)["round_seconds"] == {}, "no round, no time of one"
    assert rates(before, ServerView("t", "a", "up", incarnation=2, round=30), 4.0) == {}
    assert rates(before, ServerView("t", "a", "unreachable"), 4.0) == {}
    assert rates(after, before, 4.0)["rounds_per_second"] == 0


TIMES = {0.4: "0 s", 59: "59 s", 90: "1.5 min", 9000: "2.5 h", 2e5: "2.3 d"}


@given(st.integers(0, 1 << 60))
def test_numbers_are_short(number):
    """At most four digits and a unit, for everything that a machine can have."""
    said, unit = size(number).split()
    assert unit in ("bytes", "KiB", "MiB", "GiB", "TiB")
    assert float(said) <= 1024 or unit == "TiB"
    assert len(said) <= 5 or unit == "TiB"
    assert [duration(seconds) for seconds in TIMES] == [*TIMES.values()]


@given(st.data(), st.sampled_from([dtype for dtype in DTYPES if dtype != "bfloat16"]))
def test_values_and_their_statistics_are_json(data, dtype):
    """Also what JSON does not know: that is a text. Statistics are of finite elements; the others are counted."""
    value = data.draw(arrays(dtype, array_shapes(max_dims=2, min_side=0, max_side=4)))
    stats = stats_of(value)
    json.dumps([plain(value.tolist()), stats], allow_nan=False)
    finite = value[np.isfinite(value)]
    assert stats["count"] == value.size == finite.size + stats["nan"] + stats["infinite"]
    if dtype == "float64":
        assert (stats["min"], stats["max"]) == ((finite.min(), finite.max()) if finite.size else (None, None))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["status"], "no servers are given; write --address HOST:PORT[,HOST:PORT...], set TF_CONFIG, or use --local"),
        (["status", "--address", "here"], "--address: 'here' is not an address; write host:port"),
        (["status", "--timeout", "0"], "Invalid value for '--timeout'"),
        (["vars", "a", "b"], "unexpected extra argument"),
        (["read"], "Missing argument 'NAME'. (see psctl read --help)"),
        (["health", "nowhere"], "'nowhere' is not an address"),
        (["read", "x", "--npy", "{tmp}/no/x.npy"], "there is no directory {tmp}/no for x.npy"),
        (["status", "--address", "h:1", "--tls-cert", "{tmp}/none"], "missing: --tls-key, --tls-ca"),
        (["--address", "h:1,,", "status"], "'' is not an address"),
        (["checkpoint", "show", "{tmp}/nowhere"], "nowhere does not exist; give the whole path on this machine"),
        (["checkpoint", "show", "{tmp}/run/ckpt-1/manifest.json"], "is a file, not the directory of a checkpoint"),
        (["checkpoint", "show", "{tmp}"], "there is no complete checkpoint in"),
        (["checkpoint", "ls", "{tmp}/nowhere"], "nowhere does not exist"),
        (["checkpoint", "ls", "{tmp}/run/ckpt-1/manifest.json"], "is a file, not a directory of checkpoints"),
        (["checkpoint", "verify", "what://x/y"], "what://x/y cannot be opened: Protocol not known: what"),
        (["checkpoint", "verify"], "Missing argument 'PATH'. (see psctl checkpoint verify --help)"),
        (["checkpoint", "verfy", "x"], "No such command 'verfy'"),
        (["checkpoint", "diff", "{tmp}/run"], "Missing argument 'B'"),
        (
            ["checkpoint", "export", "{tmp}/run", "{tmp}/out.pt"],
            "out.pt has an unknown extension; use .safetensors",
        ),
        (["checkpoint", "export", "{tmp}/run", "{tmp}/there.npz"], "already exists; give another name, or --force"),
        (["checkpoint", "export", "{tmp}/run", "{tmp}/no/out.npz"], "there is no directory {tmp}/no for out.npz"),
    ],
)
def test_wrong_use_is_one_line(call, bare, tmp_path, args, said):
    """What is wrong and what to do, with exit code 2; with --json as JSON."""
    write_checkpoint(tmp_path / "run" / "ckpt-1", {"w": np.ones(2)})
    (tmp_path / "there.npz").touch()
    args, said = [arg.format(tmp=tmp_path) for arg in args], said.format(tmp=tmp_path)
    text, told = call(*args), call(*args, "--json")
    assert text.code == told.code == 2
    assert (text.err.startswith("psctl: error: "), text.err.count("\n"), told.err) == (True, 1, "")
    assert said in text.err
    assert said in told.json["error"]["message"]


CODE = "1-2-3"


def server(page: str, address: str = "10.0.0.7:2222", number: int = 0, incarnation: int = 1) -> ServerView:
    return ServerView(f"/job:ps/task:{number}", address, "up", incarnation=incarnation, page=page)


def view_with(*servers: ServerView, tasks: tuple[TaskView, ...] = ()) -> JobView:
    problems = (Problem("unreachable", "/job:ps/task:1", "nothing listens there"),)
    return JobView("running", "sync", 1, 1, 1, 0, 0, servers, tasks, problems)


@pytest.mark.parametrize(
    ("page", "url", "local"),
    [
        ("http://127.0.0.1:9100/", "http://127.0.0.1:9100/?code=1-2-3", True),
        ("http://0.0.0.0:9100/", "http://10.0.0.7:9100/?code=1-2-3", False),
        ("http://[::]:9100/", "http://10.0.0.7:9100/?code=1-2-3", False),
        ("http://[::1]:9100/", "http://[::1]:9100/?code=1-2-3", True),
        ("http://ps-0.jobs:9100/", "http://ps-0.jobs:9100/?code=1-2-3", False),
    ],
)
def test_a_link_leads_to_where_the_page_is(page, url, local):
    """A server that listens everywhere is reached where psctl has reached it."""
    (link,) = _of_servers([server(page)], None, CODE)
    assert (link.url, link.local) == (url, local)


def test_what_is_no_page_gets_no_code():
    """A task says where its page is; that goes to a terminal."""
    for page in ("", "x", "javascript:alert(1)", "http://a:1/\x1b[2J", "http://a:1/?b", "http://a b:1/", "ftp://a:1/"):
        task = TaskView(True, "/job:chief/task:0", "open", page=page)
        assert [*_of_servers([server(page)], None, CODE), *_of_chief(view_with(tasks=(task,)), CODE)] == [], page


def test_why_there_is_no_page_is_said():
    """A chief that is gone has none, as another may have its place; servers have short names."""
    page = "http://127.0.0.1:9102/"
    tasks = tuple(TaskView(True, "/job:chief/task:0", state, page=page) for state in ("lost", "open"))
    (link,) = _of_chief(view_with(tasks=tasks), "")
    assert link.url == page, "without a token there is no code"
    assert [_number(text) for text in ("ps:1", "ps-1", "1")] == [1, 1, 1]
    with pytest.raises(ConfigError, match="write ps:0"):
        _number("worker:0")
    found = view_with(server(""), server("", number=1, incarnation=0))
    assert "--metrics-port" in _nothing(found, None, False)
    assert "the chief has no status page" in _nothing(found, None, True)
    assert "ps-0 has no metrics port" in _nothing(found, 0, False)
    assert _nothing(found, 1, False) == "ps-1 does not answer: nothing listens there"
    assert "there is no ps-2 among the 2 servers" in _nothing(found, 2, False)


def part(id, name, server, slot=None):
    """Half of a table, or what lies beside it."""
    made = TablePart("users", TableSpec((8,)), 512 * server, 512, slot)
    return PlacedVariable(id, VariableSpec(name, made.tensor, slot is None, part=made), (server,))


M = SlotTensor("adam/users/m", "float32", (8,))
KNOWN = [
    part(0, "users/part_0", 0),
    part(1, "users/part_1", 1),
    PlacedVariable(2, VariableSpec("w", TensorSpec("float32", (2,))), (1,)),
    part(3, "adam/users/m/part_0", 0, M),
    part(4, "adam/users/m/part_1", 1, M),
    PlacedVariable(5, VariableSpec("adam/w/m", TensorSpec("float32", (2,)), False), (1,)),
]


def test_slots_of_tables_are_listed_beside_their_parts():
    """Slots come behind their parts, as those of variables; a part tells no rows or bytes, and counts for none."""
    primaries = slots(KNOWN)
    assert primaries == {"adam/users/m/part_0": "users/part_0", "adam/users/m/part_1": "users/part_1", "adam/w/m": "w"}
    assert [v.id for v in beside(KNOWN, primaries)] == [0, 3, 1, 4, 2, 5]
    said = VariableView.of(KNOWN[0], {})
    assert (said.shape, said.bytes) == ((None, 8), None)
    assert shape(said.shape) == "[?,8]"
    assert [server.bytes for server in totals(KNOWN)] == [0, 16]
