"""Workers with bounded staleness as real processes: never too far ahead, and nobody waits for who is gone."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import psclient as ps
from psclient._src.transport.remote_server import RemoteServer
from psserver.config import ServerConfig
from psserver.transport import grpc_service
from psserver.transport.server import ServerThread
from pstesting.processes import CALM, PS0, QUICK, W0, W1, W2, ProcessCluster
from pstesting.script import ME, add_all, gate, say
from pswire.encoding import messages
from pswire.encoding.protocol import PROTOCOL
from pswire.errors import ConfigError
from tests.kit.rig import core


def history(rounds, k, slow, seconds):
    """Each worker counts its pushes in an element of its own: what a step reads says how far all are.

    Says the least difference between what it reads before its round and that round, and how often it waited for it.
    """
    strategy = ps.ParameterServerStrategy(consistency=ps.BoundedStaleness(k))
    with strategy.scope():
        v = ps.Variable(np.zeros(3, "int64"), name="v")
    mine = np.zeros(3, "int64")
    mine[ME] = 1
    worst, ahead = 0, 0
    while strategy.round < rounds:
        if slow == ME:
            time.sleep(seconds)
        number = strategy.round

        def step():
            seen = v.numpy()
            add_all([(v, mine)])
            return seen

        seen = strategy.run(step)
        worst = max(worst, number - int(seen.min()))
        ahead = max(ahead, int(seen.max()) - int(seen.min()))
    say("worst", worst)
    say("ahead", ahead)
    say("done", strategy.round)
    gate("end")
    say("sum", v.numpy().tolist())


def check_history(tmp_path, rounds, k, seconds):
    """Three workers, one of them slow; nobody computes from what lacks a push of more than k rounds ago."""
    keys = {"ps": 1, "workers": 3, "chief": "driver", "gates": ["end"], "timeouts": CALM}
    with ProcessCluster(history, tmp_path, (rounds, k, 2, seconds), **keys) as job:
        for task in (W0, W1, W2):
            job.hear(task, "done", rounds)
            assert job.said(task, "worst")[0] <= k
            assert job.said(task, "ahead")[0] <= k + 1  # one push more is applied, and its answer held
        assert job.said(W0, "worst") == [k]  # the bound was met: it is no accident that nobody went further
        job.open("end")
        for task in (W0, W1, W2):
            assert job.hear(task, "sum") == [rounds] * 3
        job.finish()


@pytest.mark.parametrize(("k", "rounds"), [(2, 334), (0, 50)])
def test_the_history_never_shows_a_greater_gap(tmp_path, k, rounds):
    """In 1,000 rounds with a straggler; with k = 0 all keep step."""
    check_history(tmp_path, rounds, k, 0.004)


@pytest.mark.soak
def test_the_history_of_10_000_rounds(tmp_path):
    """The same, with a straggler four times slower than the others are alone."""
    check_history(tmp_path, 3334, 3, 0.008)


def push_bounded(k, rounds, stops):
    """As the pushes of asynchronous workers are tested: digits of a sum count pushes by worker."""
    strategy = ps.ParameterServerStrategy(consistency=ps.BoundedStaleness(k))
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    while strategy.round < rounds:
        if [ME, strategy.round] in stops:
            say("at", strategy.round)
            gate(f"go{ME}")
        strategy.run(lambda: add_all([(v, np.full(4, 1000.0**ME)), (u, np.full(4, 1000.0**ME))]))
        say("did", strategy.round - 1)
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist(), u.numpy().tolist()])


def total(*pushes):
    """What both variables are after so many pushes of each worker."""
    return [[sum(count * 1000.0**worker for worker, count in enumerate(pushes))] * 4] * 2


def test_a_killed_straggler_releases_the_others_and_comes_back(tmp_path):
    """The others stand k rounds ahead of it, go on within its lease, and its next process begins where they are."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["go0", "go1", "end"], "timeouts": QUICK}
    stops = [[1, 4], [0, 60]]
    with ProcessCluster(push_bounded, tmp_path, (2, 80, stops), **keys) as job, job.server(PS0) as first:
        job.hear(W1, "at", 4)
        job.hear(W0, "did", 5)
        job.until(lambda: any(one.missing == (W1,) for one in first.status().waiting))
        assert job.said(W0, "did") == list(range(6))
        assert first.status().gap == 3  # one push more is applied, whose answer is held
        began = time.monotonic()
        job.kill(W1)
        job.hear(W0, "at", 60)
        assert time.monotonic() - began < 2 * QUICK.lease + 5
        job.open("go1")
        job.start(W1)
        # It begins where the other is, and gets two rounds ahead of it.
        job.hear(W1, "did", 61)
        assert job.said(W1, "did") == [*range(4), 60, 61]
        job.open("go0")
        job.hear(W0, "done", 80)
        job.hear(W1, "done", 80)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == total(80, 4 + 20)
        job.finish()


def push_apart(rounds):
    """Each worker pushes to a server of its own."""
    strategy = ps.ParameterServerStrategy(consistency=ps.BoundedStaleness(0), ps_strategy="round_robin")
    with strategy.scope():
        both = [ps.Variable(np.zeros(2), name=f"v{server}") for server in (0, 1)]
    for _ in range(rounds):
        strategy.run(lambda: add_all([(both[ME], np.ones(2))]))
    say("done", strategy.round)
    gate("end")
    say("sums", [v.numpy().tolist() for v in both])


def test_workers_on_different_servers_keep_step(tmp_path):
    """A server that a worker's rounds do not touch is told of each: at once, and not with the next beat."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "gates": ["end"], "timeouts": CALM}
    with ProcessCluster(push_apart, tmp_path, (50,), **keys) as job:
        for task in (W0, W1):
            job.hear(task, "done", 50)
        job.open("end")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [[50.0] * 2] * 2
        job.finish()


def learn_bounded(sizes):
    """Each worker has data of its own, of another length; the one with less then waits for the other."""
    strategy = ps.ParameterServerStrategy(consistency=ps.BoundedStaleness(1))
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")

    def mine(context):
        return ps.ArrayDataset(np.ones(sizes[context.input_pipeline_id])).batch(1)

    for batch in strategy.distribute_datasets_from_function(mine):
        strategy.run(lambda batch=batch: add_all([(v, batch.sum())]))
    say("done", strategy.round)
    gate("end")
    strategy.run(lambda: add_all([(v, 100.0)]))
    say("after", strategy.round)
    gate("over")
    say("sum", float(v.numpy()))


def test_who_has_no_data_left_is_not_waited_for(tmp_path):
    """It rests until its next round, which is one of those that the others are at."""
    keys = {"workers": 2, "chief": "driver", "gates": ["end", "over"], "timeouts": QUICK}
    with ProcessCluster(learn_bounded, tmp_path, ([30, 4],), **keys) as job:
        job.hear(W1, "done", 4)
        job.hear(W0, "done", 30)
        job.open("end")
        job.hear(W0, "after", 31)
        assert job.hear(W1, "after") >= 30
        job.open("over")
        for task in (W0, W1):
            assert job.hear(task, "sum") == 234.0
        job.finish()


def hang(k):
    """Worker 1 beats, and makes no round."""
    strategy = ps.ParameterServerStrategy(consistency=ps.BoundedStaleness(k))
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")
    strategy.run(lambda: add_all([(v, 1.0)]))
    if ME:
        gate("go1")
    for _ in range(9):
        strategy.run(lambda: add_all([(v, 1.0)]))
    say("done", strategy.round)


@pytest.mark.soak
def test_who_hangs_is_left_out(tmp_path):
    """It holds the others up for as long as a round may take, and no longer."""
    timeouts = replace(QUICK, lease=2.0, round=6.0)
    keys = {"workers": 2, "chief": "driver", "gates": ["go1"], "timeouts": timeouts}
    with ProcessCluster(hang, tmp_path, (1,), **keys) as job:
        job.hear(W0, "done", 10)
        job.open("go1")
        assert job.exited(W1) == 1
        assert "held up a round for longer than PS_TIMEOUT_ROUND" in job.errors(W1)
        assert job.exited(W0) == 0


def test_all_processes_have_one_bound(tmp_path):
    """Who has another is told so, with both, and does not begin."""

    def differ():
        if ME:
            gate("go1")
        ps.ParameterServerStrategy(consistency=ps.BoundedStaleness(ME + 2))
        say("open")
        gate("end")

    with ProcessCluster(differ, tmp_path, (), workers=2, gates=["go1", "end"]) as job:
        job.hear(W0, "open")
        job.open("go1")
        assert job.exited(W1) == 2
        words = f"{W1} runs with ps.BoundedStaleness(3), and {W0} with ps.BoundedStaleness(2); give every process"
        assert words in job.errors(W1)


@pytest.mark.parametrize("how", ["it says so", "it knows no such mode"])
def test_an_older_server_is_refused(monkeypatch, how):
    """Both are named: one that says that it speaks protocol 2, and one that refuses the mode, as those do."""
    if how == "it says so":
        monkeypatch.setattr(grpc_service, "spoken_with", lambda spoken: 2)
    else:
        monkeypatch.setattr(messages, "MODES", _Older(messages.MODES))
    one = core(clock=time.monotonic)
    with ServerThread(one, ServerConfig(one.task, port=0), grace=0.0) as thread:
        server = RemoteServer(thread.address, one.task)
        try:
            with pytest.raises(ConfigError) as refused:
                server.open(W0, 1, 0, False, "bounded", staleness=3)
        finally:
            server.close()
    assert refused.value.message.startswith(
        f"{PS0} speaks protocol 2, which has no bounded staleness, and {W0}, which speaks {PROTOCOL}, runs with "
        "ps.BoundedStaleness(3); install the same version"
    )


class _Older:
    """The modes as a server knew them that has no bounded staleness; clients know all."""

    def __init__(self, modes):
        self.numbers, self._modes = modes.numbers, modes

    def __getitem__(self, number):
        return self._modes[99 if self._modes[number] == "bounded" else number]
