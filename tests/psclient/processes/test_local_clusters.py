"""The files by which psctl finds the clusters of this machine: their owner's alone, and of living launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from psclient._src.processes import local_clusters
from psclient._src.processes.local_clusters import choose, find_clusters, register, started_at
from pswire.errors import ConfigError

SERVERS = ["127.0.0.1:1", "127.0.0.1:2"]
CLUSTER = {"ps": SERVERS, "worker": ["127.0.0.1:0"]}
SECRET = {"PS_TOKEN": "t" * 32}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where the files lie; it is not there yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "paramserver"


def test_a_cluster_is_found_as_it_was_told(directory):
    """By its name, or as the only one; nobody else may read the file, or its directory."""
    path = register("dir/train.py", SERVERS, CLUSTER, SECRET)
    assert path is not None
    assert (path.stat().st_mode & 0o777, directory.stat().st_mode & 0o777) == (0o600, 0o700)
    (found,) = find_clusters()
    assert found == choose("") == choose(f"train-{os.getpid()}")
    assert (found.servers, found.cluster, found.security) == (tuple(SERVERS), CLUSTER, SECRET)
    assert "t" * 32 not in repr(found)


def test_without_one_or_with_several_it_is_said(directory):
    """Their names are there to choose from."""
    assert find_clusters() == []
    with pytest.raises(ConfigError, match=r"psworker --standalone starts one"):
        choose("")
    for _ in range(2):
        register("train.py", SERVERS, CLUSTER, SECRET)
    name = f"train-{os.getpid()}"
    assert [each.name for each in find_clusters()] == [name, f"{name}-2"]
    with pytest.raises(ConfigError, match=rf"2 clusters .*{name}, {name}-2; write --local=NAME"):
        choose("")
    with pytest.raises(ConfigError, match=f"no cluster is named 'x'; there is {name}"):
        choose("x")
    assert choose(f"{name}-2").name == f"{name}-2"


def test_a_launcher_that_is_gone_counts_for_nothing(directory):
    """Nor does another process that has its number now; the file is removed."""
    path = register("train.py", SERVERS, CLUSTER, SECRET)
    assert path is not None
    said = json.loads(path.read_text())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = {"pid": child.pid, "started": started_at(child.pid)}
        path.write_text(json.dumps(said | other))
        assert [each.pid for each in find_clusters()] == [child.pid]
        path.write_text(json.dumps(said | other | {"started": other["started"] - 1}))
        assert find_clusters() == []
        assert not path.exists()
        register("train.py", SERVERS, CLUSTER, SECRET)
        path.write_text(json.dumps(said | other))
        child.communicate(b"\n")
    assert find_clusters() == []
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_file_that_others_may_open_is_passed_over(directory, mode):
    """Who could write it could name servers of his own."""
    path = register("train.py", SERVERS, CLUSTER, SECRET)
    assert path is not None
    path.chmod(mode)
    assert find_clusters() == []
    assert path.exists()


def test_a_link_is_passed_over(directory, tmp_path):
    """It may lead anywhere."""
    path = register("train.py", SERVERS, CLUSTER, SECRET)
    assert path is not None
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert find_clusters() == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"servers": 7}', '{"servers": [], "cluster": 1}', "[" * 9999])
def test_a_file_of_something_else_is_passed_over(directory, text):
    """Whatever it has."""
    path = register("train.py", SERVERS, CLUSTER, SECRET)
    assert path is not None
    path.write_text(text)
    assert find_clusters() == []


@pytest.mark.parametrize("kind", ["open to others", "a file", "a link", "another user's"])
def test_a_directory_that_is_not_ours_alone_is_not_used(directory, tmp_path, monkeypatch, kind):
    """Neither to write a token there, nor to read one."""
    if kind == "a file":
        directory.write_text("")
    elif kind == "a link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
    else:
        directory.mkdir(mode=0o700)
        if kind == "open to others":
            directory.chmod(0o755)
        else:
            monkeypatch.setattr(local_clusters.os, "getuid", lambda: 12345)
    assert register("train.py", SERVERS, CLUSTER, SECRET) is None
    with pytest.raises(ConfigError, match="mode 0700"):
        find_clusters()
