"""How a process is told what it shows: by flags, the environment, a file, each stronger than the one after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kit.certificates import Certificates, options
from tests.kit.internals import (
    Cluster,
    ConfigError,
    Security,
    SecurityOptions,
    Task,
    Timeouts,
    security_from,
    server_config,
)
from tests.kit.internals import psserver_command as psserver
from tests.kit.internals import psworker_command as command

FILE = """
workers: 2
server:
  max_sessions: 7
security:
  tls_cert: file/{task}/tls.crt
  tls_key: file/{task}/tls.key
"""


def launched(monkeypatch: pytest.MonkeyPatch, *args: str, **environ: str) -> Cluster:
    """A cluster as psworker would start it."""
    monkeypatch.setattr(os, "environ", dict(environ))
    invocation = command.main(list(args), standalone_mode=False)
    return Cluster(invocation.launch)


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag wins over the file, the file over the environment."""
    (tmp_path / "x.yaml").write_text(FILE)
    (tmp_path / "x.py").touch()
    files = str(tmp_path / "x.yaml"), str(tmp_path / "x.py")
    cluster = launched(monkeypatch, "--config", files[0], "--tls-cert", "flag.crt", files[1])
    assert cluster.config.security == SecurityOptions("flag.crt", "file/{task}/tls.key")
    assert cluster.config.server.max_sessions == 7


def test_a_server_reads_its_own(certificates: Certificates) -> None:
    """In a path {task} is the server's own; flags win over the environment."""
    environ = options(certificates.out).variables()
    config = server_config(environ, task=1)
    assert config.security == certificates.of("ps-1")
    assert not config.insecure
    other = str(certificates.out / "ps-0" / "tls.crt")
    with pytest.raises(ConfigError, match="ps-0's, and not of this process, ps-1"):
        server_config(environ, task=1, tls_cert=other)
    assert server_config({}).security == Security()
    assert server_config({"PS_INSECURE": "1"}).insecure
    assert not server_config({"PS_INSECURE": "0"}).insecure
    with pytest.raises(ConfigError, match="PS_INSECURE must be 1 or 0, not 'false'"):
        server_config({"PS_INSECURE": "false"})


def test_a_client_reads_its_own(certificates: Certificates) -> None:
    """The same for the tasks that connect."""
    environ = options(certificates.out).variables()
    for name in ("worker-1", "chief-0", "admin"):
        assert security_from(name, environ) == certificates.of(name)


def test_a_file_beats_the_token_of_the_environment(certificates: Certificates) -> None:
    """Where both are there, as for a process whose launcher drew one, the file counts."""
    environ = options(certificates.out).variables() | {"PS_TOKEN": "0123456789abcdef"}
    assert security_from("worker-0", environ).token == certificates.of("worker-0").token


def test_a_cluster_keeps_its_token() -> None:
    """One that is given is used; one is drawn where none is, and each cluster draws another."""
    given = Cluster(security=SecurityOptions(token="0123456789abcdef"), timeouts=Timeouts())
    assert given.security(Task("worker", 0)).token == "0123456789abcdef"
    drawn = {Cluster(security=SecurityOptions()).security(Task("worker", 0)).token for _ in range(3)}
    assert len(drawn) == 3
    assert all(len(token) == 64 for token in drawn)


def test_a_token_is_no_flag() -> None:
    """Other users see command lines."""
    for given in (command, psserver):
        assert "--token" not in {name for parameter in given.params for name in parameter.opts}
