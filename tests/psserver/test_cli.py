"""The command psserver, as a process."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

import psclient
from psserver.config import ServerConfig, server_config
from pstesting import forks
from pstesting.processes import PS0
from pswire.security.identity import Security
from pswire.telemetry import logging_setup
from tests.kit.shell import free_port

SECONDS = 30
WORKER = '{"cluster": {"ps": ["127.0.0.1:0"], "worker": ["h:1"]}, "task": {"type": "worker", "index": 0}}'
SECOND = '{"cluster": {"ps": ["h:1", "127.0.0.1:0"], "worker": ["h:1"]}, "task": {"type": "ps", "index": 1}}'

JOIN = ["--join", "127.0.0.1:1", "--port", "1"]


@contextmanager
def psserver(*flags: str, cwd: Path | None = None, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = forks.Forked[str](
        [sys.executable, "-m", "psserver", *flags], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe
            pipe.close()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_end(number):
    """One line when it listens; at a signal one line that says what it held, and exit code 0."""
    with psserver("--memory-limit", "1GiB") as process:
        line = first_line(process)
        pattern = r"psserver /job:ps/task:0 listening on 127\.0\.0\.1:(\d+) \(cpu, at most 1 GiB\)\n"
        match = re.fullmatch(pattern, line)
        assert match, line
        socket.create_connection(("127.0.0.1", int(match[1])), timeout=SECONDS).close()
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert out == "psserver /job:ps/task:0 ended; it held 0 variables, 0 bytes of them here, after no round on cpu\n"
    assert "Traceback" not in err


def refused(*flags: str, stdin=subprocess.PIPE, **environ: str) -> str:
    """What a server says that does not start: one line on stderr, with exit code 2 and no traceback."""
    words = [sys.executable, "-m", "psserver", *flags]
    done = forks.run(words, stdin=stdin, capture_output=True, text=True, timeout=SECONDS, env=environ)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("psserver: error: ")
    return done.stderr


@pytest.mark.parametrize("reads", [True, False])
def test_it_does_not_outlive_who_holds_its_lifeline(reads):
    """The end of stdin is a clean end, also when nobody reads its output. Each line is JSON if the log is, those on
    stdout as well: where it listens, where its metrics are, and how it ends."""
    with psserver("--log-format", "json", "--metrics-port", "0", "--lifeline") as process:
        lines = [first_line(process), first_line(process)]
        if reads:
            out, err = process.communicate(timeout=SECONDS)
            said = [logging_setup.read(line) for line in (*lines, *out.splitlines(), *err.splitlines())]
            assert all(said), (lines, out, err)
            for each, told in zip(said, ("listening on", "serves metrics at", "ended; it held"), strict=False):
                assert told in each["message"]
        else:
            process.stdout.close()
            process.stdin.close()
            process.wait(SECONDS)
    assert process.returncode == 0


def test_without_a_lifeline_stdin_does_not_matter():
    """A server in the background, whose stdin is closed, goes on. A ps task of TF_CONFIG needs no flags."""
    with psserver(TF_CONFIG=SECOND) as process:
        assert first_line(process).startswith("psserver /job:ps/task:1 listening on 127.0.0.1:")
        process.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (["--port", "99999"], {}, "99999"),
        (["--device", "tpu"], {}, "write cpu or gpu:0"),
        (["--threads", "0"], {}, "--threads"),
        ([], {"TF_CONFIG": WORKER}, "psworker"),
        ([], {"PS_SESSION_TIMEOUT": "x"}, "PS_SESSION_TIMEOUT"),
        (["--checkpoint-root", __file__], {}, "test_cli.py is a file; name a directory"),
        (["--checkpoint-root", "nonsense://x"], {}, "nonsense://x cannot be opened: Protocol not known"),
        (["--snapshot-limit", "some"], {}, "--snapshot-limit"),
        (
            ["--join", "127.0.0.1:1"],
            {},
            "--join needs --port, because other processes must know where this server listens",
        ),
        (["--join", "here", "--port", "1"], {}, "--join: 'here' is not an address; write host:port"),
        ([*JOIN, "--task", "0"], {}, "--join starts a standby server, which has no task yet; leave --task out"),
        (JOIN, {"TF_CONFIG": SECOND}, "TF_CONFIG names /job:ps/task:1; unset TF_CONFIG"),
        ([*JOIN, "--host", "0.0.0.0"], {}, "give --advertise HOST:PORT"),
        ([*JOIN, "--advertise", "here"], {}, "--advertise: 'here' is not an address"),
        (["--advertise", "h:1"], {}, "--advertise needs --join"),
    ],
)
def test_bad_input_is_one_line(flags, environ, said):
    """What is wrong is said in one line; who joins says where it is, before it asks anybody."""
    assert said in refused(*flags, **environ)


def test_who_joins_waits_for_the_servers_and_ends_at_a_signal():
    """It says so once they do not answer; and ends with an error if they never do, with code 0 at a signal."""
    port = str(free_port())
    flags = "--join", "127.0.0.1:1", "--port", port
    with psserver(*flags, PS_START_TIMEOUT="3", PS_REPORT_INTERVAL="0.2") as process:
        assert first_line(process) == f"psserver 127.0.0.1:{port} is a standby server for 127.0.0.1:1\n"
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (2, "")
    assert "no server answers at 127.0.0.1:1; still trying" in err
    assert err.endswith(
        "no server at 127.0.0.1:1 has answered for 3 s; check that the job runs, and that --join names its "
        "servers in order\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        with psserver(*flags) as process:
            first_line(process)
            process.send_signal(number)
            out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "psserver ended; it was a standby server\n", "")


def test_who_joins_does_not_outlive_who_holds_its_lifeline(tmp_path):
    """While it waits for a place. A file as stdin never ends, so that nobody could tell the server to: it is refused,
    of who joins and of who serves."""
    flags = "--join", "127.0.0.1:1", "--port", str(free_port()), "--lifeline"
    with psserver(*flags) as process:
        first_line(process)
        out, _ = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "psserver ended; it was a standby server\n")
    with (tmp_path / "x").open("w+b") as file:
        assert all("needs a pipe" in refused(*each, stdin=file) for each in (flags, ["--lifeline"]))


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = f"port {port} on 127.0.0.1 is in use by another process; stop it or choose another with --port"
        assert says in refused("--port", str(port))


def test_debug_shows_the_traceback():
    """Who looks for the fault in this package gets it all."""
    with psserver("--debug", "--device", "tpu") as process:
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert "Traceback" in err


def test_the_commands_say_their_version():
    """Each command prints its name and the version of the distribution, which the package has as well."""
    for command, module in (("psserver", "psserver"), ("psworker", "psclient"), ("psctl", "psclient.psctl")):
        words = [sys.executable, "-m", module, "--version"]
        done = forks.run(words, capture_output=True, text=True, timeout=SECONDS)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{command} {version('paramserver')}\n", "")
    assert psclient.__version__ == version("paramserver")


def test_flags_win():
    """A flag is stronger than TF_CONFIG; timeouts come from the environment, as the clients read them."""
    config = server_config(task=0, host="127.0.0.2", port=9, environ={"TF_CONFIG": SECOND, "PS_SESSION_TIMEOUT": "3"})
    assert (config.task.index, config.host, config.port, config.timeouts.session_timeout) == (0, "127.0.0.2", 9, 3.0)


@pytest.mark.parametrize(("security", "said"), [(Security(), ""), (Security(certificate=b"x"), ", TLS")])
def test_a_server_says_whether_it_uses_tls(security, said):
    """In its first line, after its device and its memory limit."""
    assert ServerConfig(PS0, security=security).describe() == "cpu, no memory limit" + said
