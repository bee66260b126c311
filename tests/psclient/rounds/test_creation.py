"""Variables are created in batches: how many calls that takes, what is read, and which lines errors name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from inspect import currentframe

import numpy as np
import pytest

import psclient as ps
from psclient._src.rounds import creation, read_cache
from psclient._src.transport.session import Session
from psserver.transport import grpc_service
from pstesting.in_process import InProcessCluster
from pstesting.processes import QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from pswire.limits import PART_BYTES
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tensor import TensorSpec

COUNT = 120


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    """Two servers, and one worker."""
    with InProcessCluster(2) as found:
        yield found


class Calls:
    """Counts what a cluster's servers were asked for, by server and verb."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.counted: Counter[tuple[int, str]] = Counter()
        for core in cluster.cores:
            core.stimuli.record = lambda stimulus, server=core.server: self._count(server, stimulus)

    def _count(self, server, stimulus):
        first_values = stimulus.name == "push" and stimulus.args[0].first_values
        self.counted[server, "first values" if first_values else stimulus.name] += 1

    def of(self, verb: str) -> list[int]:
        """How often each server was asked for this, since the last look."""
        return [self.counted.pop((server, verb), 0) for server in range(2)]


def lines_on(lines: int) -> str:
    """The place so many lines behind the one that calls it, as errors say it."""
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno + lines}"


def test_many_variables_cost_a_call_of_each_kind(cluster, monkeypatch):
    """For each server one batch, one push of first values and one pull, however many variables it holds."""
    monkeypatch.setattr(creation, "KEPT_SECONDS", float("inf"))  # on a busy machine too
    calls = Calls(cluster)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), ps_strategy="round_robin") as strategy:
        with strategy.scope():
            variables = [ps.Variable(np.full(3, index, "float32")) for index in range(COUNT)]
            assert calls.of("create_batch") == [0, 0]
        assert (calls.of("create_batch"), calls.of("first values")) == ([1, 1], [1, 1])
        assert [v.numpy()[0] for v in variables] == list(range(COUNT))
        assert calls.of("pull") == [1, 1]
        adam = ps.optimizers.Adam(0.5)
        strategy.run(lambda: adam.apply_gradients([(np.ones(3, "float32"), v) for v in variables]))
        assert calls.of("create_batch") == [1, 1]
        assert calls.of("first values") == [1, 2], "its slots, and a copy of the count of steps"
        assert [round(float(v.numpy()[0]), 3) for v in variables[:3]] == [-0.5, 0.5, 1.5]
        assert calls.of("pull") == [1, 0], "for that copy"
        assert [core.status().variables for core in cluster.cores] == [COUNT * 3 + 1] * 2


@pytest.mark.parametrize("elements", [10, PART_BYTES // 4 + 1], ids=["small", "large"])
def test_a_variable_begins_with_what_its_array_was_then(cluster, elements):
    """The script may change the array afterwards, before anything is sent."""
    value = np.ones(elements, "float32")
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        v = ps.Variable(value)
        value[:] = 2
        assert set(v.numpy().tolist()) == {1.0}


def test_little_is_kept(cluster, monkeypatch):
    """What would take too much memory is sent before the next is recorded; a large value is never kept."""
    monkeypatch.setattr(creation, "KEPT_BYTES", 5000)
    monkeypatch.setattr(creation, "KEPT_SECONDS", float("inf"))
    calls = Calls(cluster)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        for _ in range(12):
            ps.Variable(np.zeros(250, "float32"))
        assert calls.of("create_batch")[0] == 2
        ps.Variable(np.zeros(PART_BYTES // 4, "float32"))
        assert calls.of("create_batch")[0] == 1


def test_who_waits_for_a_first_value_does_not_wait_for_long(cluster, monkeypatch):
    """A script that takes its time sends what it has created with the next one."""
    monkeypatch.setattr(creation, "KEPT_SECONDS", -1.0)
    calls = Calls(cluster)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        ps.Variable(1.0)
        assert calls.of("create_batch")[0] == 1


def test_few_bytes_are_read_that_nobody_asked_for(cluster, monkeypatch):
    """Those that come with others count as long as they are not read; then more may come."""
    monkeypatch.setattr(read_cache, "AHEAD_BYTES", 4000)
    calls = Calls(cluster)
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
        first = ps.Variable(np.zeros(250, "float32"))
        with strategy.extended.colocate_vars_with(first):
            others = [ps.Variable(np.zeros(250, "float32")) for _ in range(19)]
        others[18].numpy()
        assert calls.of("pull")[0] == 1
        for v in (first, *others[:3]):  # these came with it
            v.numpy()
        assert calls.of("pull")[0] == 0
        for v in others[3:8]:
            v.numpy()
        assert calls.of("pull")[0] == 1
        for v in (others[17], others[16], others[8]):
            v.numpy()
        assert calls.of("pull")[0] == 2, "the first of these came with four, which left no room for more"


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_loses_nothing(cluster, monkeypatch):
    """What could not be sent is sent when it is needed again; what the script did not get may be created again."""
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        with strategy.scope():
            first = ps.Variable(1.0, name="first")
            with monkeypatch.context() as patch:
                patch.setattr(Session, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ps.Variable(np.zeros(PART_BYTES, "int8"), name="second")
            second = ps.Variable(np.ones(PART_BYTES, "int8"), name="second")
        assert float(first.numpy()) == 1
        assert second.name == "second"
        assert second.numpy()[0] in (0, 1)


def test_no_room_is_told_where_the_variable_is_created():
    """At once, with its line, and the script may go on with a smaller one."""
    with InProcessCluster() as cluster:
        cluster.cores[0].machine.store.memory_limit = 1000
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy, strategy.scope():
            first = ps.Variable(np.zeros(200, "float32"))
            line = lines_on(2)
            with pytest.raises(ps.errors.MemoryLimit, match="--memory-limit") as told:
                ps.Variable(np.zeros(300, "float32"), name="v")
            assert line in str(told.value)
            second = ps.Variable(np.zeros(50, "float32"), name="v")
            assert (first.numpy().sum(), second.numpy().sum(), second.name) == (0, 0, "v")


def differ(where):
    """Worker 1 creates a variable of another shape than worker 0."""
    strategy = ps.ParameterServerStrategy()
    if ME == 1:
        gate("second")
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        w = ps.Variable(np.zeros(4 + ME), name="w")
        x = ps.Variable(np.zeros(4), name="x")
        if where == "read":
            v.numpy()
    say("went on", [w.name, x.name])
    gate("end")


@pytest.mark.parametrize("where", ["read", "end"])
def test_a_mismatch_names_the_line_that_created_the_variable(tmp_path, where):
    """And not the line that read another one, or left the scope; the process does not go on."""
    with ProcessCluster(differ, tmp_path, (where,), ps=2, workers=2, timeouts=QUICK, gates=["second", "end"]) as job:
        job.hear(W0, "went on")
        job.open("second")
        text = (tmp_path / "program.py").read_text(encoding="utf-8")
        number = 1 + text[: text.index('name="w"')].count("\n")
        said = job.hear_error(W1, "creates variable 'w' float64[5] as its number 1")
        assert f"{W0} created 'w' float64[4] as number 1" in said
        assert re.search(rf"created at \S*program\.py:{number}\)", said)
        assert job.exited(W1) != 0
        assert job.said(W1, "went on") == []
        job.open("end")


def test_a_batch_that_failed_is_over(cluster):
    """Later variables have no numbers: to create or read any says why, again."""
    taken = PlacedVariable(0, VariableSpec("taken", TensorSpec("int8", (7,))), (0,))
    with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
        assert cluster.cores[0].create_batch(strategy._session.number, [taken]).error is None
        with pytest.raises(ps.errors.VariableMismatch, match="'taken'"), strategy.scope():
            v, w = ps.Variable(1.0), ps.Variable(2.0)
        for work in (v.numpy, w.numpy, lambda: strategy.run(lambda: add_all([(v, 3.0)]))):
            with pytest.raises(ps.errors.VariableMismatch, match="'taken'"):
                work()
        with pytest.raises(ps.errors.VariableMismatch, match="'taken'"), strategy.scope():
            ps.Variable(1.0)


def test_an_older_server_creates_one_variable_in_a_call(monkeypatch):
    """It knows no batches; what is created there is the same."""
    known = {name: row for name, row in grpc_service.PROMPT.items() if name != "CreateBatch"}
    monkeypatch.setattr(grpc_service, "PROMPT", known)
    with InProcessCluster(2) as cluster:
        calls = Calls(cluster)
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), ps_strategy="round_robin") as strategy:
            with strategy.scope():
                variables = [ps.Variable(np.full(3, index, "float32")) for index in range(6)]
            assert calls.of("create") == [9, 6]
            strategy.run(lambda: add_all([(v, np.ones(3, "float32")) for v in variables]))
            assert [v.numpy()[0] for v in variables] == [1 + index for index in range(6)]
