"""Each task started by itself: by systemd's units, by the job script for Slurm, and by hand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from psserver.programs.kernels.kept import KeptCode
from pstesting.forks import Forked
from tests.kit.internals import OUTLIVED, Task, Timeouts, address_in, parse_tf_config
from tests.kit.internals import psserver_command as psserver
from tests.kit.internals import psworker_command as psworker
from tests.kit.shell import PROGRAMS, free_port, printed, shell

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "systemd"
UNITS = {job: FOLDER / f"paramserver-{job}@.service" for job in ("ps", "worker", "chief")}
COMMANDS: dict[str, click.Command] = {"psserver": psserver, "psworker": psworker}
GIVEN_UP, LOST = 69, 75
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
EXPOSURE = 25
"""What `systemd-analyze security` may find at most, in tenths: below 2.5 it calls a unit OK."""


def settings(job: str) -> dict[str, list[str]]:
    """What a unit says: all values of each name, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in UNITS[job].read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def environment() -> dict[str, str]:
    """The variables of job.env, as systemd reads them."""
    lines = (FOLDER / "job.env").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value[1:-1] if value.startswith("'") else value for name, _, value in pairs}


Words = Mapping[str, str]


def started(job: str, index: int, environ: Words, where: Words) -> tuple[dict[str, str], list[str]]:
    """What systemd makes of ExecStart and Environment: the variables and the words of the program."""

    def filled(text: str) -> str:
        text = re.sub(r"\$\{(\w+)\}", lambda match: environ[match[1]], text)
        return re.sub(r"%(\w)", lambda match: {"i": str(index), **where}[match[1]], text)

    one = settings(job)
    env, *words = shlex.split(one["ExecStart"][0])
    assert env == "/usr/bin/env"
    whole = [part for word in words for part in (environ[word[1:]].split() if word.startswith("$") else [filled(word)])]
    (assigned,) = [word for word in whole if word.startswith("TF_CONFIG=")]
    told = [filled(word) for value in one["Environment"] for word in value.split()]
    return dict(word.split("=", 1) for word in [*told, assigned]), whole[1:]


@pytest.mark.parametrize("job", sorted(UNITS))
def test_a_unit_is_a_task(job: str) -> None:
    """Its instance is the task's index; its program takes these flags, and finds its files with its credentials."""
    index = 0 if job == "chief" else 1  # of which there is one
    told, words = started(job, index, environment(), {"d": "/run/credentials/x", "S": "/var/lib", "C": "/var/cache"})
    config = parse_tf_config(told["TF_CONFIG"])
    assert config is not None
    assert config.task == Task(job, index)
    program = words[0].removeprefix("/opt/paramserver/bin/")
    context = COMMANDS[program].make_context(program, words[1:])
    assert program == ("psserver" if job == "ps" else "psworker")
    assert bool(context.params.get("script")) == (job == "worker")
    credentials = dict(value.split(":") for value in settings(job)["LoadCredential"])
    files = {name: told[name] for name in ("PS_TLS_CERT", "PS_TLS_KEY", "PS_TLS_CA", "PS_TOKEN_FILE")}
    assert {path.removeprefix("/run/credentials/x/") for path in files.values()} == set(credentials)
    assert set(credentials.values()) == {f"/etc/paramserver/certs/{job}-%i/{name}" for name in credentials}


@pytest.mark.parametrize("job", sorted(UNITS))
def test_a_unit_knows_how_a_task_ends(job: str) -> None:
    """Wrong settings, and a chief that gave up, stay ended; a lost server, and one that was outlived, start again.

    systemd kills later than a process ends by itself, and tells only that one, by the signal that it knows. A line of
    the journal has the unit's name, and not that of the program that sets TF_CONFIG.
    """
    one = settings(job)
    (prevent,) = one["RestartPreventExitStatus"]
    codes = {int(word) for word in prevent.split()}
    assert one["Restart"] == ["on-failure"]
    assert codes == ({2, GIVEN_UP} if job == "chief" else {2})
    assert not codes & {LOST, OUTLIVED}
    assert one["SuccessExitStatus"] == ([] if job == "ps" else ["143"])  # told to end, and late
    assert one["SyslogIdentifier"] == ["%N"]
    if job != "ps":
        (limit,) = one["TimeoutStopSec"]
        assert int(limit.removesuffix("s")) >= Timeouts().termination_grace + 5
        assert (one["KillSignal"], one["KillMode"]) == (["SIGTERM"], ["mixed"])


@pytest.mark.parametrize("job", sorted(UNITS))
def test_a_unit_keeps_kernels_in_a_folder_of_its_user(job: str, tmp_path: Path) -> None:
    """The cache directory of a dynamic user is a link, which no server takes code from; the folder is below it."""
    one = settings(job)
    assert one["DynamicUser"] == ["yes"]
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / one["CacheDirectory"][0]).symlink_to(tmp_path / "private")
    told, _ = started(job, 0, environment(), {"d": "/run/credentials/x", "S": "/var/lib", "C": str(tmp_path)})
    kept = KeptCode(told["PS_KERNEL_CACHE"])
    kept.write("0" * 64, b"code")
    assert kept.read("0" * 64) == b"code"


def test_systemd_reads_the_units() -> None:
    """systemd-analyze, where it is at hand, finds no fault in them, and little that they could do."""
    assert printed("systemd-analyze", "verify", *UNITS.values(), stderr=subprocess.STDOUT) == ""
    for unit in UNITS.values():
        printed("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", unit)


TRAINING = """
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    w = ps.Variable(np.zeros(2), name="w")
    optimizer = ps.optimizers.SGD(1.0)
strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))
print("trained to", w.numpy().tolist())
"""


def certified(directory: Path, workers: int = 1) -> None:
    made = shell(["psctl", "certs", "certs", "--ps", "1", "--workers", str(workers)], directory)
    assert made.code == 0, made.err


def all_end(start: Callable[[str, str], subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Starts a server, and a chief and a worker that are told its port; returns what they said, the worker first."""
    tasks = [start("ps", "0")]
    try:
        assert tasks[0].stdout is not None
        port = address_in(tasks[0].stdout.readline()).rpartition(":")[2]
        tasks += [start(job, port) for job in ("chief", "worker")]
        said = [task.communicate(timeout=SECONDS) for task in reversed(tasks)]  # the worker knows first what is wrong
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    return said


def test_units_start_a_cluster(tmp_path: Path) -> None:
    """Their commands, with certificates where `psctl certs` has made them, train, and end with 0, without systemd."""
    certified(tmp_path)
    (tmp_path / "script.py").write_text(TRAINING, encoding="utf-8")
    cluster = '{"ps": ["127.0.0.1:PORT"], "worker": ["w:0"], "chief": ["c:0"]}'
    told = environment() | {"SCRIPT": str(tmp_path / "script.py")}

    def start(job: str, port: str) -> subprocess.Popen[str]:
        where = {"d": str(tmp_path / "certs" / f"{job}-0"), "S": str(tmp_path), "C": str(tmp_path)}
        own, words = started(job, 0, told | {"CLUSTER": cluster.replace("PORT", port)}, where)
        words += ["--port", "0", "--data-port", "0"] if job == "ps" else []
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
        command = [*PROGRAMS[Path(words[0]).name], *words[1:]]
        return Forked(command, cwd=tmp_path, env=environ | {"PS_JOB": told["PS_JOB"]} | own, text=True, **PIPES)

    assert "trained to [-1.0, -1.0]" in all_end(start)[0][0]


SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"
SECONDS = 240

SRUN = """#!{python}
import os, signal, subprocess, sys, time
assert sys.argv[1:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=" + os.environ.get("SLURM_CPUS_PER_TASK", "1")]
words = sys.argv[3:]
step = {{"SLURM_STEP_NUM_TASKS": "{tasks}", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "{tasks}"}}
environs = [os.environ | step | {{"SLURM_PROCID": str(rank)}} for rank in range({tasks})]
tasks = [subprocess.Popen(words, env=environ, start_new_session=True) for environ in environs]
codes, told, signalled = [None], False, False
while None in codes:
    time.sleep(0.05)
    codes = [task.poll() for task in tasks]
    if os.path.exists("limit") and not signalled:  # --signal, to every process of the step
        signalled = True
        for task, code in zip(tasks, codes):
            code is None and os.killpg(task.pid, {signal})
    if any(codes) and not told:  # --kill-on-bad-exit
        told = True
        for task, code in zip(tasks, codes):
            code is None and os.killpg(task.pid, signal.SIGTERM)
sys.exit(max(map(abs, codes)))
"""


def sbatch(directory: Path, tasks: int, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as the first node of an allocation would."""
    srun = directory / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    signal = re.search(r"^#SBATCH --signal=(\w+)@", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    assert signal
    told = f"signal.SIG{signal[1]}"
    srun.write_text(SRUN.format(python=sys.executable, tasks=tasks, signal=told), encoding="utf-8")
    srun.chmod(0o755)
    path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PS_", "TF_CONFIG"))}
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=directory, env=kept | {"PATH": path} | environ, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


@pytest.mark.ci
def test_one_allocation_is_one_job(tmp_path: Path) -> None:
    """A chief, a server and two workers train in one step, over TLS, and all end by themselves."""
    certified(tmp_path, workers=2)
    words = [str(ROOT / "examples" / "digits.py"), "--epochs", "1"]
    done = sbatch(tmp_path, 4, *words, PS_SERVERS="1", PS_PORT=str(free_port(4)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert "psserver /job:ps/task:0 ended; it held" in done.stdout
    assert (tmp_path / "runs" / "digits" / "ckpt-1" / "manifest.json").exists()


FAILING = """
import numpy as np, psclient as ps
strategy = ps.ParameterServerStrategy()
total = lambda: ps.get_replica_context().all_reduce("sum", np.ones(3))
strategy.run(total)
if strategy.cluster_resolver.task_id in {failing}:
    raise ValueError("a slip")
strategy.run(total)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "failing", [pytest.param({1}, id="one", marks=pytest.mark.soak), pytest.param({0, 1}, id="all")]
)
def test_the_job_is_what_its_chief_says(tmp_path: Path, failing: set[int]) -> None:
    """A worker that fails is left out of it; where all have failed nothing holds the nodes."""
    certified(tmp_path, workers=2)
    (tmp_path / "script.py").write_text(FAILING.format(failing=failing), encoding="utf-8")
    quick = {"PS_NO_WORKERS_TIMEOUT": "12", "PS_SESSION_TIMEOUT": "4", "PS_HEARTBEAT_INTERVAL": "0.5"}
    done = sbatch(tmp_path, 4, "script.py", PS_SERVERS="1", PS_PORT=str(free_port(4)), **quick)
    fails = failing == {0, 1}  # by the chief's code, or by that of a server which is ended because of it
    assert bool(done.returncode) == fails, done.stderr
    told = [f"train.sbatch: task {2 + worker}, a worker, has failed: exit code 1" for worker in (0, 1)]
    assert [line in done.stderr for line in told] == [worker in failing for worker in (0, 1)]
    assert ("The job has ended; the workers' logs" in done.stderr) == fails


LEAVING = """
import os, time
from pathlib import Path
import numpy as np, psclient as ps
assert {name: os.environ[name] for name in ("OMP_NUM_THREADS", "PS_PORT")} == {"OMP_NUM_THREADS": "3", "PS_PORT": "%s"}
strategy = ps.ParameterServerStrategy()
with strategy.scope():
    total = ps.Variable(np.zeros(3), name="total")
def step():
    ps.get_replica_context().merge_call(lambda strategy: strategy.extended.update(total, lambda v: v.assign_add(v + 1)))
for turn in range(10_000):
    strategy.run(step)
    if turn == 3:
        Path("limit").touch()
    time.sleep(0.02)
raise SystemExit("nobody has told it to leave")
"""


@pytest.mark.ci
def test_workers_save_and_leave_before_the_time_limit(tmp_path: Path) -> None:
    """Workers alone heed the signal, and the job ends well; libraries have as many threads as Slurm gives a task."""
    certified(tmp_path, workers=2)
    port = str(free_port(4))
    (tmp_path / "script.py").write_text(LEAVING % port, encoding="utf-8")
    done = sbatch(tmp_path, 4, "script.py", PS_SERVERS="1", PS_PORT=port, SLURM_CPUS_PER_TASK="3")
    assert done.returncode == 0, done.stderr
    for rank in (2, 3):
        assert f"train.sbatch: task {rank}, a worker, is told to leave before the time limit" in done.stderr
    assert "has failed" not in done.stderr
    assert "psserver /job:ps/task:0 ended; it held" in done.stdout
    assert list((tmp_path / "runs" / "sigterm").glob("ckpt-*/manifest.json"))


def test_the_port_is_nobody_s() -> None:
    """Jupyter begins at 8888, and Linux gives ports above 32768 to whoever connects."""
    found = re.search(r"PS_PORT:-(\d+)", SCRIPT.read_text(encoding="utf-8"))
    assert found
    assert 10_000 < int(found[1]) < 32_768 - 1_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "train.sbatch: which script?"),
        (["train.py"], "train.sbatch: there is no script train.py in"),
        ([str(ROOT / "examples" / "digits.py")], "train.sbatch: there are no certificates in"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, words: list[str], said: str) -> None:
    done = sbatch(tmp_path, 4, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


def test_the_script_is_clean() -> None:
    """shellcheck, where it is at hand, has nothing to say."""
    printed("shellcheck", SCRIPT)


DOCUMENT = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")


def commands(section: str) -> list[str]:
    text = DOCUMENT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line[2:] for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


# On one host they are the same commands, without certificates.
@pytest.mark.parametrize("hosts", [pytest.param("one", marks=pytest.mark.soak), "many"])
def test_three_shells_are_a_cluster(tmp_path: Path, hosts: str) -> None:
    """The server, the chief and the worker of the document train, and end by themselves; between hosts with TLS."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    server, chief, worker, certs, export, *_ = commands("By hand")
    environ: dict[str, str] = {}
    if hosts == "many":
        made = shell(shlex.split(certs), tmp_path)
        assert made.code == 0, made.err
        environ = dict(word.split("=", 1) for word in shlex.split(export)[1:])
        server += " --host 0.0.0.0"
    # Two suites on one machine would want the same port: the server picks one, and the others are told.
    lines = {"ps": f"{server} --port 0", "chief": chief, "worker": worker}

    def start(job: str, port: str) -> subprocess.Popen[str]:
        """Types a line of the document into a shell of its own."""
        words = shlex.split(lines[job].replace(":2222", f":{port}") if job != "ps" else lines[job])
        given = dict(word.split("=", 1) for word in words if word.startswith(("TF_CONFIG=", "PS_")))
        program, *args = words[len(given) :]
        args += ["--epochs", "1"] if args[-1:] == ["examples/digits.py"] else []
        own = os.environ | environ | given
        return Forked([*PROGRAMS[program], *args], cwd=tmp_path, env=own, text=True, stdin=subprocess.DEVNULL, **PIPES)

    said = all_end(start)
    assert "test accuracy" in said[0][0]
    assert "psserver /job:ps/task:0 ended; it held" in said[2][0]
    assert json.loads((tmp_path / "runs" / "digits" / "ckpt-1" / "manifest.json").read_text())
