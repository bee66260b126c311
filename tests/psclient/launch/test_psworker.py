"""The command psworker for one task: scripts run as python runs them, and errors are one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from psclient._src.launch.psworker import command
from pstesting import forks

SECONDS = 180
WORKER = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}'
EVALUATOR = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "evaluator", "index": 0}}'
PS = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "ps", "index": 0}}'


def psworker(*args: str, cwd: Path, tf_config: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TF_CONFIG": tf_config}
    command = [sys.executable, "-P", "-m", "psclient", *args]
    return forks.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, env=environ)


def write(tmp_path: Path, text: str, name: str = "script.py") -> str:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return name


def test_a_script_runs_as_python_runs_it(tmp_path):
    """Name, arguments and the directory of its imports are those of `python SCRIPT ARGS`."""
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", "X = 3", "beside.py")
    script = write(tmp_path / "deep", "import sys, beside\nprint(__name__, sys.argv, beside.X)")
    done = psworker(f"deep/{script}", "--lr", "1", "--help", cwd=tmp_path, tf_config=WORKER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"__main__ ['deep/{script}', '--lr', '1', '--help'] 3\n"


def test_an_error_of_ours_is_one_line_with_the_user_s_line(tmp_path):
    """The task, what is wrong, and where in the user's code; no traceback. Nobody is to try a wrong setting again."""
    text = "from pswire.cluster import Task\n\ndef inner():\n    Task.parse('nonsense')\n\ninner()\n"
    done = psworker(write(tmp_path, text), cwd=tmp_path, tf_config=WORKER)
    assert done.returncode == 2
    expected = "psworker: /job:worker/task:0: error: 'nonsense' is no task; write /job:worker/task:0 (script.py:4)\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("error", "code"), [("ServerLost", 75), ("Fenced", 1), ("Forbidden", 2), ("ConfigError", 2), ("Abandoned", 69)]
)
def test_the_code_says_whether_another_attempt_helps(tmp_path, error, code):
    """2 that none will, 75 that this process is not to blame and that the next attempt goes on from a checkpoint."""
    text = f"import psclient as ps\nraise ps.errors.{error}('so it is')"
    assert psworker(write(tmp_path, text), cwd=tmp_path, tf_config=WORKER).returncode == code


def test_debug_shows_it_all(tmp_path):
    """With --debug the same error has its traceback, from the script on."""
    text = "from pswire.cluster import Task\nTask.parse('nonsense')"
    done = psworker("--debug", write(tmp_path, text), cwd=tmp_path, tf_config=WORKER)
    assert done.returncode == 2
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "script.py", line 2')


@pytest.mark.parametrize("text", ["1 / 0", "def f(:"], ids=["error", "syntax"])
def test_the_user_s_errors_are_the_user_s(tmp_path, text):
    """A traceback of user code looks as python shows it."""
    script = write(tmp_path, text)
    done = psworker(script, cwd=tmp_path, tf_config=WORKER)
    plain = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
    assert "psclient" not in done.stderr
    assert "script.py" in done.stderr


@pytest.mark.parametrize(
    ("args", "tf_config", "said"),
    [
        ([], WORKER, "/job:worker/task:0: error: a worker needs a script"),
        ([], EVALUATOR, "/job:evaluator/task:0: error: an evaluator needs a script"),
        ([], PS, "/job:ps/task:0: error: TF_CONFIG says that this process is /job:ps/task:0; start it with"),
        ([], "", "there is no TF_CONFIG and no script"),
        (["--standalne"], "", "--standalne"),
        (["--ps", "2", "x.py"], "", "--ps describes a local cluster; add --standalone"),
        (["--standalone", "--ps", "0"], "", "--ps"),
        (["--standalone"], "", "needs a script; write psworker --standalone [OPTIONS] SCRIPT [ARGS]"),
        (
            ["--config", "bare.yaml"],
            "",
            "write psworker --config bare.yaml [OPTIONS] SCRIPT [ARGS], or `script: SCRIPT`",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, args, tf_config, said):
    """What is wrong is said in one line, with exit code 2; more of it is in jobs/test_bad_input.py."""
    (tmp_path / "bare.yaml").write_text("ps: 2\n", encoding="utf-8")
    done = psworker(*args, cwd=tmp_path, tf_config=tf_config)
    assert done.returncode == 2
    assert done.stderr.startswith("psworker: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_log_level_is_that_of_all_processes(tmp_path, monkeypatch):
    """Of a cluster's tasks as well, where one is given; else each has its own."""
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path, "")
    for flags, own, others in ((["--log-level", "info"], "info", "info"), ([], "warning", "")):
        invocation = command.main(["--standalone", *flags, name], standalone_mode=False)
        assert (invocation.log_level, invocation.launch.log_level) == (own, others)


def test_a_chief_without_servers_says_who_it_is(tmp_path, monkeypatch):
    """The errors of a task that only drives are headed by its name, as those of scripts are."""
    monkeypatch.setenv("PS_TIMEOUT_START", "1")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        cluster = {"ps": [address], "worker": ["h:2"], "chief": ["h:3"]}
        tf_config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        done = psworker(cwd=tmp_path, tf_config=tf_config)
    assert done.returncode == 1
    assert done.stderr.startswith(f"psworker: /job:chief/task:0: error: /job:ps/task:0: no answer at {address}")
    assert done.stderr.count("\n") == 1


def test_a_script_sees_that_it_failed_at_exit(tmp_path):
    """What runs at exit finds the error where the interpreter leaves it."""
    text = "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\nraise KeyError('x')"
    done = psworker(write(tmp_path, text), cwd=tmp_path, tf_config=WORKER)
    assert done.stdout == "KeyError('x')\n"


def test_sigterm_is_an_ordinary_exit(tmp_path):
    """Exit code 143, after `finally` and what runs at exit."""
    text = (
        "import atexit, time\natexit.register(print, 'at exit')\n"
        "try:\n    print('ready', flush=True)\n    while True: time.sleep(0.01)\n"
        "finally:\n    print('finally', flush=True)"
    )
    command = [sys.executable, "-m", "psclient", write(tmp_path, text)]
    with forks.Forked[str](command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert out == "finally\nat exit\n"
