"""The units of systemd: what they start is ours and fits together, and they know the exit codes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from psserver.programs.kernels.kept import KeptCode
from pstesting.forks import Forked
from tests.kit.internals import OUTLIVED, Task, Timeouts, parse_tf_config
from tests.kit.internals import psserver_command as psserver
from tests.kit.internals import psworker_command as psworker
from tests.kit.shell import PROGRAMS, shell

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "systemd"
UNITS = {job: FOLDER / f"paramserver-{job}@.service" for job in ("ps", "worker", "chief")}
COMMANDS: dict[str, click.Command] = {"psserver": psserver, "psworker": psworker}
GIVEN_UP, LOST = 69, 75
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


def started(
    job: str, index: int, environ: Mapping[str, str], where: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
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
def test_a_unit_knows_the_exit_codes(job: str) -> None:
    """Wrong settings, and a chief that gave up, stay ended; a lost server, and one that was outlived, start again."""
    one = settings(job)
    (prevent,) = one["RestartPreventExitStatus"]
    codes = {int(word) for word in prevent.split()}
    assert one["Restart"] == ["on-failure"]
    assert codes == ({2, GIVEN_UP} if job == "chief" else {2})
    assert not codes & {LOST, OUTLIVED}
    assert one["SuccessExitStatus"] == ([] if job == "ps" else ["143"])  # told to end, and late


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


@pytest.mark.parametrize("job", sorted(UNITS))
def test_a_line_of_the_journal_has_its_task(job: str) -> None:
    """The unit's name, and not that of the program that sets TF_CONFIG."""
    assert settings(job)["SyslogIdentifier"] == ["%N"]


@pytest.mark.parametrize("job", ["worker", "chief"])
def test_a_unit_waits_for_the_grace_period(job: str) -> None:
    """systemd kills later than a process ends by itself, and tells only that one, by the signal that it knows."""
    one = settings(job)
    (limit,) = one["TimeoutStopSec"]
    assert int(limit.removesuffix("s")) >= Timeouts().grace + 5
    assert (one["KillSignal"], one["KillMode"]) == (["SIGTERM"], ["mixed"])


def test_systemd_reads_the_units() -> None:
    """systemd-analyze, where it is at hand, finds no fault in them, and little that they could do."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze: the units are read by the tests alone")
    done = subprocess.run([analyze, "verify", *UNITS.values()], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    for unit in UNITS.values():
        safe = [analyze, "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(unit)]
        done = subprocess.run(safe, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


SCRIPT = """
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy()
with strategy.scope():
    w = ps.Variable(np.zeros(2), name="w")
    optimizer = ps.optimizers.SGD(1.0)
strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))
print("trained to", w.numpy().tolist())
"""


def test_units_start_a_cluster(tmp_path: Path) -> None:
    """Their commands, with certificates where `psctl certs` has made them, train, and end with 0, without systemd."""
    made = shell(["psctl", "certs", "certs", "--ps", "1", "--workers", "1"], tmp_path)
    assert made.code == 0, made.err
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    cluster = '{"ps": ["127.0.0.1:PORT"], "worker": ["w:0"], "chief": ["c:0"]}'
    told = environment() | {"SCRIPT": str(tmp_path / "script.py")}

    def start(job: str, port: str, *flags: str) -> subprocess.Popen[str]:
        where = {"d": str(tmp_path / "certs" / f"{job}-0"), "S": str(tmp_path), "C": str(tmp_path)}
        own, words = started(job, 0, told | {"CLUSTER": cluster.replace("PORT", port)}, where)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PS_")}
        return Forked(
            [*PROGRAMS[Path(words[0]).name], *words[1:], *flags],
            cwd=tmp_path,
            env=environ | {"PS_JOB": told["PS_JOB"]} | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    server = start("ps", "1", "--port", "0", "--data-port", "0")
    tasks = [server]
    try:
        assert server.stdout is not None
        found = re.search(r"listening on [\w.]+:(\d+)", server.stdout.readline())
        assert found is not None
        tasks += [start(job, found[1]) for job in ("chief", "worker")]
        said = [task.communicate(timeout=120) for task in reversed(tasks)]
        assert [task.returncode for task in tasks] == [0, 0, 0], said
        assert "trained to [-1.0, -1.0]" in said[0][0]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
