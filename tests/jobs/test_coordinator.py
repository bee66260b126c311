"""Scripts with a coordinator, as users run them: the example, workers that import a module, and what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import psclient as ps
from tests.kit.shell import shell

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "coordinator_digits.py")
CLUSTER = ("psworker", "--standalone", "--workers", "2")

CLOSURES = """
import sys
import numpy as np
import psclient as ps

strategy = ps.ParameterServerStrategy(consistency=ps.Async())
with strategy.scope():
    v = ps.Variable(np.zeros(2), name="v")
    optimizer = ps.optimizers.SGD(1.0)


@ps.coordinator.function
def add(amount):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(2, -amount), v)]))
    return sys.argv[1:]
"""
MAIN = """
import psclient as ps
from package.closures import add, strategy, v

coordinator = ps.coordinator.ClusterCoordinator(strategy)
results = [coordinator.schedule(add, args=(float(n),)) for n in range(10)]
coordinator.join()
print(v.numpy(), results[3].fetch())
"""


def test_a_coordinator_trains_digits(examples, tmp_path):
    """Scheduled steps learn, fetched results are the loss and the accuracy, and all processes end cleanly."""
    done = shell([*CLUSTER, "--chief-runs-script", str(examples / "coordinator_digits.py"), "--epochs", "2"], tmp_path)
    assert (done.code, done.left) == (0, ()), done.err
    losses = [float(loss) for loss in re.findall(r"epoch +\d+/2 +loss (\S+)", done.out)]
    assert len(losses) == 2
    assert losses[-1] < losses[0] * 0.7
    ((accuracy, steps),) = re.findall(r"test accuracy (\S+) after (\d+) steps", done.out)
    assert float(accuracy) > 0.6
    assert int(steps) == 2 * 23


def test_workers_import_a_module(tmp_path):
    """The chief alone runs the script; both have the script's arguments."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "closures.py").write_text(CLOSURES, encoding="utf-8")
    (tmp_path / "main.py").write_text(MAIN, encoding="utf-8")
    done = shell(
        ["psworker", "--standalone", "--workers", "2", "--module", "package.closures", "main.py", "--x"], tmp_path
    )
    assert (done.code, done.left) == (0, ()), done.err
    assert "[45. 45.] ['--x']" in done.out
    config = {"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    done = shell(["psworker", "--module", "package.others", "main.py"], tmp_path, TF_CONFIG=json.dumps(config))
    assert done.code == 2
    assert "there is no module 'package.others' in" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--module", "m"], "m is for workers of a cluster; set TF_CONFIG, or add --standalone"),
        (["--standalone", "--no-chief", "--module", "m", EXAMPLE], "workers import m, and nobody would run the script"),
    ],
)
def test_a_module_is_for_workers(tmp_path, words, said):
    """Where there is no cluster, or nobody who would run the script, that is said."""
    done = shell(["psworker", *words], tmp_path)
    assert done.code == 2
    assert said in done.err


def test_who_coordinates():
    """The chief; and a process without a cluster, which is told how to start one."""
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    for task, coordinates in (("chief", True), ("worker", False)):
        resolver = ps.SimpleClusterResolver(ps.ClusterSpec(cluster), task_type=task, task_id=0)
        assert ps.coordinator.is_coordinator(resolver) is coordinates
    assert ps.coordinator.is_coordinator()
    alone = ps.ParameterServerStrategy(consistency=ps.Async())
    with (
        alone,
        pytest.raises(ps.errors.ConfigError, match=r"there is no cluster, whose workers .* --chief-runs-script"),
    ):
        ps.coordinator.ClusterCoordinator(alone)
    with pytest.raises(TypeError, match="takes a ParameterServerStrategy, not MirroredStrategy"):
        ps.coordinator.ClusterCoordinator(ps.MirroredStrategy(["cpu:0"]))
