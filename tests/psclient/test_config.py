"""What the environment and the files in configs/ say."""

from __future__ import annotations

from pathlib import Path

import pytest

from psclient.config import (
    LaunchConfig,
    ServerOptions,
    child_environ,
    load_launch_config,
    task_config,
    timeouts_from,
)
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts

ROOT = Path(__file__).resolve().parents[2]
TF_CONFIG = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_tf_config_is_read_at_each_call(monkeypatch):
    """A process that sets TF_CONFIG after the import is in that cluster."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert task_config() is None
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    config = task_config()
    assert config is not None
    assert config.task == Task("worker", 0)


def test_timeouts_travel():
    """What a launcher hands on is what a child reads."""
    timeouts = Timeouts(lease=3.25, round=1e-3)
    assert timeouts_from(timeouts.environ()) == timeouts
    assert timeouts_from({}) == Timeouts()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PS_TIMEOUT_LEESE": "1"}, "PS_TIMEOUT_LEASE"),
        ({"PS_TIMEOUT_LEASE": "soon"}, "'soon' must be a positive number"),
        ({"PS_TIMEOUT_LEASE": "-1"}, "positive"),
        ({"PS_TIMEOUT_LEASE": "nan"}, "positive"),
        ({"PS_TIMEOUT_LEASE": "inf"}, "positive"),
    ],
)
def test_bad_timeouts_are_named(environ, said):
    """An error names the variable, and for an unknown one the nearest known."""
    with pytest.raises(ConfigError, match=said):
        timeouts_from(environ)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_committed_files_are_clusters(path):
    """Every file in configs/ can be read, and names a script that exists."""
    config = load_launch_config(path)
    assert config.ps >= 1
    assert not config.script or (ROOT / config.script).exists()


def test_a_file_says_everything(tmp_path):
    """Each key of the file is an attribute of the cluster."""
    path = written(
        tmp_path,
        "ps: 3\nworkers: 4\nchief: none\nrestarts: 2\nscript: a.py\nargs: [--epochs, 3]\n"
        "server: {device: 'gpu:1', memory_limit: 4GiB, checkpoint_root: /tmp/x}\ntimeouts: {lease: 5}\n",
    )
    assert load_launch_config(path) == LaunchConfig(
        ps=3,
        workers=4,
        chief="none",
        restarts=2,
        script="a.py",
        args=("--epochs", "3"),
        server=ServerOptions("gpu:1", "4GiB", "/tmp/x"),
        timeouts=Timeouts(lease=5.0),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wokers: 2", "key wokers is unknown; did you mean workers"),
        ("zebra: 2", "known are args, chief"),
        ("server: {memory: 1}", "key of server memory is unknown; did you mean memory_limit"),
        ("timeouts: {leese: 1}", "did you mean lease"),
        ("timeouts: {lease: soon}", "timeouts.lease='soon' must be a positive number"),
        ("ps: two", "ps must be of type int, not str"),
        ("ps: true", "ps must be of type int, not bool"),
        ("ps: 0", "at least one"),
        ("workers: -1", "from 0"),
        ("chief: maybe", "driver, script, none"),
        ("args: --resume", "args must be a list"),
        ("server: 3", "must be a mapping"),
        ("- 3", "must be a mapping"),
        ("a: [", "is no YAML"),
        ("log_level: loud", "log_level loud is unknown; known are debug, error, info, warning"),
        ("{workers: 0, script: a.py}", "nobody would run a.py"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, said):
    """One line says which key is wrong, and what to write."""
    with pytest.raises(ConfigError) as error:
        load_launch_config(written(tmp_path, text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    """A path that is not there is an error about that path."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load_launch_config(tmp_path / "none.yaml")


def test_children_keep_what_the_user_set(monkeypatch):
    """The launcher gives defaults for threads and the allocator, never instead of the user's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    environ = child_environ(tasks=1000, timeouts=None)
    assert environ["OMP_NUM_THREADS"] == "7"
    assert environ["GLIBC_TUNABLES"] == "glibc.malloc.check=0"
    assert environ["OPENBLAS_NUM_THREADS"] == "1"
    assert "TF_CONFIG" not in environ
