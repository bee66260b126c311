"""Clusters on a real Ray: `psworker --ray`, and `psclient.launch.ray`, over two nodes that are one machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; it comes with paramserver[ray]")

import psclient.launch.ray  # noqa: E402
from psclient._src.launch.ray_actor import Prepared, RayTask  # noqa: E402
from psclient._src.launch.ray_cluster import RayCluster, Resources, parse_resources  # noqa: E402
from tests.kit import shell as kit  # noqa: E402
from tests.kit.internals import LOST, MODULE, ConfigError, LaunchConfig, PSError, Task, Timeouts  # noqa: E402
from tests.kit.shell import ENDS, ME, PROGRAMS, SECOND, WAITING, Done, Nodes, occupied, pids, ray_nodes, shell  # noqa: E402

SOON = 240.0

SPREAD = Resources(ps={"CPU": 0.5}, worker={"CPU": 0.5}, placement="SPREAD")

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
print("w", *w.numpy(), os.environ.get("PS_TOKEN", "no token"), os.environ["MKL_NUM_THREADS"], *sys.argv[1:])
"""


W0, W1, PS0, PS1 = Task("worker", 0), Task("worker", 1), Task("ps", 0), Task("ps", 1)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PS_INSECURE", "1")  # a node has no loopback address
        with ray_nodes() as found:
            yield found


def eventually(found: Callable[[], object], why: Callable[[], str] = lambda: "") -> None:
    kit.eventually(found, SOON, why)


def left() -> list[str]:
    """What is left of clusters: agents and tasks, actors, placement groups."""
    agents = [str(each.pid) for each in psutil.process_iter(["cmdline"]) if MODULE in (each.info["cmdline"] or [])]
    groups = ray.util.placement_group_table().values()
    return agents + [group["name"] for group in groups if group["state"] != "REMOVED"]


@pytest.fixture(autouse=True)
def nothing_left(nodes: Nodes) -> Iterator[None]:
    yield
    eventually(lambda: not left(), lambda: str(left()))


@pytest.fixture
def cluster(in_tmp_path: Path) -> Callable[..., RayCluster]:
    """Makes a cluster whose driver is this process, in the directory of its script."""

    def made(text: str, resources: Resources = SPREAD, **keys: object) -> RayCluster:
        (in_tmp_path / "script.py").write_text(ME + text)
        config = LaunchConfig(**{"script": "script.py", "chief": "none", "workers": 2, "ps": 2} | keys)  # type: ignore[arg-type]
        return RayCluster(resources, config)

    return made


def psworker(directory: Path, text: str, *flags: str, args: tuple[str, ...] = (), **environ: str) -> Done:
    (directory / "script.py").write_text(text)
    return shell(["psworker", "--ray", "auto", *flags, "script.py", *args], directory, SOON, **environ)


def test_a_job_over_two_nodes(tmp_path: Path) -> None:
    """Both workers train on servers of both nodes; lines have the names of their tasks; the token is not told."""
    flags = ("--ps", "2", "--workers", "2", "--placement", "SPREAD", "--worker-resources", "CPU=2")
    done = psworker(tmp_path, TRAINING, *flags, args=("a b", "$HOME"))
    assert (done.code, done.left) == (0, ()), done.err
    for worker in range(2):
        assert f"[worker {worker}] w -6.0 -6.0 -6.0 -6.0 no token 2 a b $HOME" in done.out.splitlines()
    hosts = re.findall(r"psserver /job:ps/task:[01] listening on (\S+):[0-9]+", done.out)
    assert len(set(hosts)) == 2
    assert SECOND in hosts


def test_from_python(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that ends well, and one that fails, whose last words are the error."""
    (in_tmp_path / "script.py").write_text(TRAINING)
    resources = {"ps_resources": {"CPU": 0.5}, "worker_resources": {"CPU": 1}}
    psclient.launch.ray.run("script.py", ["x"], workers=1, chief="none", **resources)  # type: ignore[arg-type]
    assert "w -3.0 -3.0 -3.0 -3.0 no token 1 x" in capsys.readouterr().out
    (in_tmp_path / "script.py").write_text("raise KeyError('mine')")
    with pytest.raises(PSError, match=r"(?s)/job:worker/task:0.*KeyError: 'mine'"):
        psclient.launch.ray.run("script.py", workers=1, chief="none", **resources)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "code", "said"), ENDS)
def test_codes_and_reports_are_those_of_a_local_cluster(
    cluster: Callable[..., RayCluster], text: str, code: int, said: str
) -> None:
    """The failing task's; a signal's is 128 more, and the report has its traceback."""
    with cluster(text) as running:
        outcome = running.wait(SOON)
    assert (outcome.task, outcome.code) == (W1, code)
    assert said in outcome.report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_driver_ends_everything(tmp_path: Path, number: int) -> None:
    """By a signal, whose exit code it has; and where it is killed, by Ray, which ends its actors."""
    (tmp_path / "script.py").write_text(ME + WAITING)
    words = [*PROGRAMS["psworker"], "--ray", "auto", "--workers", "2", "script.py"]
    with subprocess.Popen(words, cwd=tmp_path, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        tasks = pids(tmp_path, SOON)
        process.send_signal(number)
        assert process.wait(SOON) == (-number if number == signal.SIGKILL else 128 + number)
    eventually(lambda: not any(map(psutil.pid_exists, tasks)))


def test_an_actor_that_is_lost_is_named(cluster: Callable[..., RayCluster], tmp_path: Path) -> None:
    """Its task ends with it, and the report says on which node it was."""
    with cluster(WAITING) as running:
        tasks = pids(tmp_path, SOON)
        actor = running.processes[W1]._actor  # type: ignore[attr-defined]
        ray.kill(actor)
        outcome = running.wait(SOON)
    assert (outcome.task, outcome.code) == (W1, 255)
    assert re.search(r"psworker: the Ray actor on \S+ \([0-9.]+\) was lost: ", outcome.report), outcome.report
    eventually(lambda: not any(map(psutil.pid_exists, tasks)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_task_whose_actor_cannot_be_made_ends() -> None:
    """Whatever the reason is, a launcher does not wait for ever."""

    def prepare(unwanted: Callable[[], bool]) -> Prepared:
        raise LookupError("there is none")

    assert RayTask(prepare, lambda: "lost").wait(SOON) == LOST


@pytest.mark.usefixtures("leaves_soon")
def test_a_task_that_fails_is_started_again(cluster: Callable[..., RayCluster]) -> None:
    """In its bundle; and a server at its address."""
    text = "if me and not os.path.exists('m'):\n    open('m', 'w')\n    sys.exit(3)\nprint(me)"
    with cluster(text, restarts=2) as running:
        before = dict(running.addresses)
        running.kill(PS1)
        assert running.wait(SOON).code == 0
        assert running.addresses == before
        assert running.output(W1) == ["1"]


COUNTING = """
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    w = ps.Variable(np.zeros(4))
    u = ps.Variable(np.zeros(4))
    optimizer = ps.optimizers.SGD(1.0)
while strategy.round < 400:
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(4), w), (np.ones(4), u)]))
    if strategy.round == 5:
        print("five")
    time.sleep(0.02 if os.path.exists("on") else 0.5)
print("sums", w.numpy()[0], u.numpy()[0])
"""


def test_a_node_that_is_lost_takes_no_job_with_it(
    nodes: Nodes, cluster: Callable[..., RayCluster], tmp_path: Path
) -> None:
    """With copies: its tasks are started on the other one, where a server waits for the place of the lost one."""
    needs = Resources(ps={"CPU": 3.0}, worker={"CPU": 0.5}, placement="SPREAD")
    running = cluster(COUNTING, needs, replication_factor=2, restarts=9, timeouts=Timeouts(session_timeout=2.0))
    with occupied(4.0):  # so that each node has room for one server
        running.start()
    try:
        (lost,) = [task for task in (PS0, PS1) if running.place(task).address == SECOND]
        eventually(lambda: running.output(W0) and running.output(W1))
        nodes.lose()

        def hurry() -> None:
            eventually(lambda: any(f"{lost} is back" in line for line in running.output(lost, error=True)))
            (tmp_path / "on").touch()

        hurries = threading.Thread(target=hurry)
        hurries.start()
        try:
            outcome = running.wait(SOON)
        finally:
            nodes.add()
            hurries.join()
    finally:
        running.stop()
    assert outcome.code == 0, outcome.report
    for task in (W0, W1):
        (sums,) = [line for line in running.output(task) if line.startswith("sums")]
        assert len(set(sums.split()[1:])) == 1, sums


def test_no_room(tmp_path: Path) -> None:
    """It says what is asked for, what there is, and ends."""
    done = psworker(tmp_path, "", "--workers", "3", "--worker-resources", "CPU=7,GPU=1", PS_START_TIMEOUT="3")
    assert done.code == 2
    (line,) = done.errors[-1:]
    assert "error: Ray had no room for 5 tasks of CPU 22.1, GPU 3 (PACK) within 3 s (PS_START_TIMEOUT): " in line
    assert "it has CPU 16, GPU 0, of which CPU 16, GPU 0 are free; request less with --ps-resources" in line


def test_a_script_that_nodes_lack(tmp_path: Path, cluster: Callable[..., RayCluster]) -> None:
    made = cluster("")
    (tmp_path / "script.py").unlink()
    with pytest.raises(
        ConfigError, match=r"\([0-9.]+\) has script.py neither in Ray's working_dir nor in .*--working-dir"
    ):
        made.start()
    made.stop()


def test_the_working_directory_of_ray(nodes: Nodes, tmp_path: Path) -> None:
    """A driver that Ray has given a copy of the user's directory runs the script in it, and not in its own."""
    (tmp_path / "script.py").write_text("import os, helper\nprint('in', os.getcwd())")
    (tmp_path / "helper.py").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    driver = (
        "import ray, psclient.launch.ray\n"
        f"ray.init(runtime_env={{'working_dir': {str(tmp_path)!r}}}, log_to_driver=False)\n"
        "psclient.launch.ray.run('script.py', workers=1, chief='none')"
    )
    done = shell(["python", "-c", driver], elsewhere)
    assert done.code == 0, done.err
    (place,) = re.findall(r"\[worker 0\] in (\S+)", done.out)
    assert "working_dir_files" in place


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ray", "auto", "--standalone"], "--standalone and --ray cannot be used together"),
        (["--ray", "auto", "--hosts", "hosts"], "--hosts and --ray cannot be used together"),
        (["--placement", "SPREAD"], "--placement is for tasks on a Ray cluster; add --ray auto"),
        (["--ray", "auto", "--placement", "WIDE"], "placement WIDE is unknown; known are PACK"),
        (["--ray", "auto", "--ps-resources", "4"], "--ps-resources '4' must be resources with amounts"),
        (["--ray", "auto", "--worker-resources", "CPU=0"], "must have amounts above 0"),
        (["--ray", "127.0.0.1:1"], "found no Ray cluster at 127.0.0.1:1 (nothing listens there)"),
        (["--ray", "ten"], "found no Ray cluster at ten"),
    ],
)
def test_flags_that_cannot_be(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = shell(["psworker", *flags, "script.py"], tmp_path)
    assert (done.code, len(done.errors), done.out) == (2, 1, ""), (done.out, done.err)
    assert said in done.err


def test_resources() -> None:
    assert parse_resources("CPU=4, GPU=0.5,memory=8e9,tpu=1", "x") == {"CPU": 4, "GPU": 0.5, "memory": 8e9, "tpu": 1}
    for wrong in ("", "CPU", "CPU=", "CPU=-1", "CPU=1,CPU=2", "CPU=four"):
        with pytest.raises(ConfigError, match=r"x .*such as CPU=4,GPU=1"):
            parse_resources(wrong, "x")


def test_without_ray(tmp_path: Path) -> None:
    """It says what to install; and who has not called init is told to."""
    (tmp_path / "script.py").write_text("")
    driver = "import psclient.launch.ray\npsclient.launch.ray.run('script.py')"
    done = shell(["python", "-c", driver], tmp_path)
    assert "this process is not connected to a Ray cluster; call ray.init() first" in done.err
    (tmp_path / "ray.py").write_text("raise ImportError('none')")
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
    done = shell(["psworker", "--ray", "auto", "script.py"], tmp_path, PYTHONPATH=path)
    assert (done.code, done.errors) == (
        2,
        ["psworker: error: Ray is not installed; in the clone: pip install -e '.[ray]'"],
    )
