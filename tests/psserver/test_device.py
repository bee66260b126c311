"""The device of a server. What needs a GPU is in tests/gpu."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psserver.core.core import Core
from psserver.devices import ServerDevice
from pstesting.clock import Clock
from pswire.errors import ConfigError
from tests.kit.contributions import Sending, arrays, full, streaming, zeros
from tests.kit.rig import SOON, WORKERS, Job, JobWithValues, Servers, core, given, sum_into


@pytest.mark.parametrize("text", ["cpu", "CPU:0"])
def test_the_cpu_keeps_arrays_as_they_are(text: str) -> None:
    device = ServerDevice.parse(text)
    array = np.arange(3)
    assert str(device) == "cpu"
    assert device.put(array) is array
    assert device.get(array) is array
    with device.scope():
        assert device.xp.sum(device.xp.asarray(array)) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, "write cpu or gpu:0") for text in ("", "gpu:", "tpu:0", "cpu:1", "gpu:-1", "0")),
        ("gpu:4096", "--device cpu"),  # whatever is missing
    ],
)
def test_what_is_no_device_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    """With an example of one, and how to go on without it; without CuPy with what to install. The CPU needs nothing."""
    with pytest.raises(ConfigError, match=told):
        ServerDevice.parse(text)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[gpu\]. in the clone, or use --device cpu"):
        ServerDevice.parse("gpu")
    assert ServerDevice.parse("cpu").put(1) == 1


class Elsewhere(ServerDevice):
    """Stands in for a GPU: its arrays have to be brought, which must not hold up the core."""

    core: Core
    brought = 0

    def get(self, array: Any) -> Any:
        """The array; nobody holds the core's lock meanwhile."""
        assert not self.core._lock.locked()
        type(self).brought += 1
        return array


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job on a server whose variables are elsewhere, and whose rounds stream."""
    streaming(monkeypatch)
    one = core()
    monkeypatch.setattr(Elsewhere, "core", one, raising=False)
    monkeypatch.setattr(Elsewhere, "brought", 0)
    found = JobWithValues(Servers([one], [one], Clock(), Path("nowhere"), False))
    one.machine.job.store.device = Elsewhere(0)
    return found


def test_a_resend_is_answered_with_values_brought_without_the_lock(job: Job) -> None:
    """All the others can go on meanwhile."""
    (worker,) = job.join(WORKERS[0])
    variable = job.variable(worker, np.zeros(2))
    plan = job.approve(sum_into(variable), worker)
    for _ in range(2):  # the second is a resend
        reply = worker.push(plan, [np.ones(2)], want=(variable.id,)).result(SOON)
        assert [array.tolist() for array in given(reply, plan, 0, (variable,))] == [[1, 1], [1, 1]]
    assert Elsewhere.brought == 1


def test_an_answer_begins_with_values_brought_without_the_lock(job: Job) -> None:
    """Those of variables that the round does not assign."""
    two = job.join(*WORKERS[:2])
    first, second, other = (job.variable(two[0], value) for value in zeros(3))
    plan = job.approve(sum_into(first, second, returned=False), two[0])
    want = (other, first, second)
    sent = [Sending(worker, plan, full(1.0, 2.0), want=tuple(variable.id for variable in want)) for worker in two]
    assert Elsewhere.brought == 1
    begun = sent[0].told()
    assert arrays(begun) == [0.0]
    for one in sent:
        one.come()
    assert [one.reply.result(SOON).payload is begun for one in sent] == [True, True]
    assert arrays(begun) == [0.0, 2.0, 4.0]
