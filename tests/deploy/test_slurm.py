"""The job script for Slurm, with a stand-in for srun that starts the step's tasks on this machine.

What is not tried: Slurm itself, more than one node, and GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.shell import shell

ROOT = Path(__file__).resolve().parents[2]
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
        cwd=directory,
        env=kept | {"PATH": path} | environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def free_ports(count: int) -> int:
    """The first of so many ports in a row of which none is in use."""
    for first in range(20_000 + os.getpid() % 1000 * 10, 31_000, count):  # other processes of these tests look as well
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


@pytest.mark.ci
def test_one_allocation_is_one_job(tmp_path: Path) -> None:
    """A chief, a server and two workers train in one step, over TLS, and all end by themselves."""
    made = shell(["psctl", "certs", "certs", "--ps", "1", "--workers", "2"], tmp_path)
    assert made.code == 0, made.err
    words = [str(ROOT / "examples" / "digits.py"), "--epochs", "1"]
    done = sbatch(tmp_path, 4, *words, PS_SERVERS="1", PS_PORT=str(free_ports(4)))
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
    made = shell(["psctl", "certs", "certs", "--ps", "1", "--workers", "2"], tmp_path)
    assert made.code == 0, made.err
    (tmp_path / "script.py").write_text(FAILING.format(failing=failing), encoding="utf-8")
    quick = {"PS_TIMEOUT_ALONE": "12", "PS_TIMEOUT_LEASE": "4", "PS_TIMEOUT_BEAT": "0.5"}
    done = sbatch(tmp_path, 4, "script.py", PS_SERVERS="1", PS_PORT=str(free_ports(4)), **quick)
    fails = failing == {0, 1}  # by the chief's code, or by that of a server which is ended because of it
    assert bool(done.returncode) == fails, done.stderr
    told = [f"train.sbatch: task {2 + worker}, a worker, has failed: exit code 1" for worker in (0, 1)]
    assert [line in done.stderr for line in told] == [worker in failing for worker in (0, 1)]
    assert ("The job is given up" in done.stderr) == fails


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
    """The signal reaches every process; workers alone heed it, a checkpoint is written, and the job ends well.

    Libraries compute in as many threads as Slurm gives a task.
    """
    made = shell(["psctl", "certs", "certs", "--ps", "1", "--workers", "2"], tmp_path)
    assert made.code == 0, made.err
    port = str(free_ports(4))
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
    """Before anything starts."""
    done = sbatch(tmp_path, 4, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


def test_the_script_is_clean() -> None:
    """shellcheck, where it is at hand, has nothing to say."""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
