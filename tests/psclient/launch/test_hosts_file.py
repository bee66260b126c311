"""The file of `psworker --hosts`: what it says, and which line is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from psclient._src.launch.hosts_file import Host, load_hosts
from pswire.errors import ConfigError


def read(directory: Path, text: str) -> tuple[Host, ...]:
    path = directory / "hosts"
    path.write_text(text, encoding="utf-8")
    return load_hosts(path)


def test_hosts_and_their_tasks(tmp_path: Path) -> None:
    """In the order of the lines; slots are workers, and a host without a number has one worker, as for MPI."""
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


def test_ssh_is_told_user_and_port() -> None:
    """Each only where it is said."""
    assert Host("node1").target == ["node1"]
    assert Host("node1", "me", 2222).target == ["-p", "2222", "me@node1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a ps=1\n\na worker=1", "line 3: host a is in line 1 as well; write all of its tasks there"),
        ("a ps=1\n-oProxyCommand=x worker=1", "line 2: '-oProxyCommand=x' is no host; write node1"),
        ("a:70000 ps=1", "line 1: 'a:70000' is no host"),
        ("a:b@c ps=1", "line 1: 'a:b@c' is no host"),
        ("a ps=1 wroker=1", "line 1: key.*wroker.*worker"),
        ("a ps", "line 1: 'ps' has no value; write ps=1"),
        ("a ps=1 address=", "line 1: 'address=' has no value; write address=ADDRESS"),
        ("a ps=one", "line 1: ps must be a whole number from 0 to 1000, not 'one'"),
        ("a ps=-1", "line 1: ps must be a whole number"),
        ("a ps=1 worker=1 slots=1", "line 1: worker is said twice"),
        ("a\nb", "no host has a server; write ps=1 behind one of them"),
        ("# nothing", "no host has a server"),
        ("localhost ps=1\nnode2", "line 1: the other hosts cannot reach servers at localhost, .*; write address=NAME"),
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    """And what to write in its place."""
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Is named, and so is one that is no text."""
    with pytest.raises(ConfigError, match=r"cannot read .*none: No such file"):
        load_hosts(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary is no text"):
        load_hosts(tmp_path / "binary")
