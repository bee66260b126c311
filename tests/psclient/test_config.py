"""What the environment says."""

from __future__ import annotations

import pytest

from psclient._src.config import aggregation_from, child_environ, task_config, timeouts_from
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts

TF_CONFIG = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}'


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
    timeouts = Timeouts(lease=3.25, round=9.75, beat=1e-3)
    assert timeouts_from(timeouts.environ()) == timeouts
    assert timeouts_from({}) == Timeouts()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PS_TIMEOUT_LEESE": "1"}, "PS_TIMEOUT_LEASE"),
        ({"PS_TIMEOUT_LEASE": "soon"}, "'soon' must be a positive number"),
        ({"PS_TIMEOUT_LEASE": "5", "PS_TIMEOUT_ROUND": "14.9"}, "PS_TIMEOUT_ROUND=14.9 is below 3 leases of 5 s"),
        ({"PS_TIMEOUT_LEASE": "-1"}, "positive"),
        ({"PS_TIMEOUT_LEASE": "nan"}, "positive"),
        ({"PS_TIMEOUT_LEASE": "inf"}, "positive"),
    ],
)
def test_bad_timeouts_are_named(environ, said):
    """An error names the variable, and for an unknown one the nearest known."""
    with pytest.raises(ConfigError, match=said):
        timeouts_from(environ)


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


def test_aggregation_comes_from_the_environment():
    assert (aggregation_from({}), aggregation_from({"PS_AGGREGATION": ""})) == ("none", "none")
    assert aggregation_from({"PS_AGGREGATION": "host"}) == "host"
    with pytest.raises(ConfigError, match="aggregation hots is unknown; did you mean host"):
        aggregation_from({"PS_AGGREGATION": "hots"})
