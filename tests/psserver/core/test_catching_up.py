"""Catching up: a server that is back votes in rounds, and makes them once it has its variables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from psserver.plans import backlog
from pswire.errors import PSError
from pswire.model.log import EpochClosed, Return
from tests.kit.contributions import Mail
from tests.kit.rig import SOON, WORKERS, checkpoint, core, eventually, sum_into
from tests.psserver.core.test_digests import ONE, Copies, lose

ROUNDS = 5


class Back(Copies):
    """Servers one of which is back, and has not read its variables.

    Attributes:
        new: that one.
        held: the values of its variables when they were handed over, by number.
        returning, saving: plans of rounds that return what they reduce, and that save.
    """

    def __init__(self, root):
        super().__init__(root)
        self.returning = self.job.approve(sum_into(*self.variables), self.worker)
        self.saving = self.job.approve(checkpoint("run/ckpt-1", (0, 1)), self.worker)
        self.rounds(2)
        lose(self, 1)
        self.new = new = core(1, 777, 0, root, self.clock)
        new.others = Mail(1, self.votes)
        number = self.job.epoch.number + 1
        epoch = replace(self.job.epoch, number=number, returns=Return(1, 777, number, True, self.worker.round))
        first = self.cores[0]
        self.held = {id: value.copy() for id, value in first.machine.store.values().items()}
        for one in (first, new):
            have = one.status().log
            one.approve(self.job.token, have, [*first.machine.log.entries[have:], EpochClosed(epoch)])
        new.open(WORKERS[0], 1, self.worker.session, False, "whole", "", 0, 0, 0)
        self.cores[1] = self.job.verbs[1] = new
        self.worker.epoch, self.job.epoch = number, epoch

    def read(self):
        """The new server has read its variables."""
        self.new.machine.store.commit(self.held)
        self.new.machine.rounds.backlog.has_read(self.job.epoch.number)
        self.new.tick()

    def values(self, server):
        """The values of all variables on a server."""
        return [value.tolist() for _, value in sorted(self.cores[server].machine.store.values().items())]


@pytest.fixture
def back(tmp_path):
    return Back(tmp_path)


def test_rounds_are_made_once_the_variables_are_there(back):
    """Each once, in order; their members were answered before."""
    last = back.worker.round + ROUNDS
    back.rounds(last)
    status = back.new.status()
    assert (status.round, status.catching_up) == (last, True)
    assert not back.new.machine.store.values()
    back.read()
    eventually(lambda: not back.new.status().catching_up)
    back.rounds(last + 1)
    assert back.values(1) == back.values(0) == [[last + 2.0] * 2] * 2


def test_what_a_round_returns_of_reductions_it_has_at_once(back):
    """Each server returns one of the two."""
    futures = [back.worker.push(back.returning, [ONE, ONE], server=n) for n in (0, 1)]
    back.hear()
    first, second = (b"".join(data for _, data in future.result(SOON).payload.chunks) for future in futures)
    assert first == second == ONE.tobytes()


def test_a_save_waits_for_the_variables(back):
    """And with it its round; then both have the same."""
    futures = [back.worker.push(back.saving, [], server=n) for n in (0, 1)]
    back.hear()
    assert not futures[1].done()
    back.read()
    eventually(lambda: back.hear() or all(future.done() for future in futures))
    assert back.values(1) == back.values(0)


def test_a_backlog_has_an_end(back, monkeypatch):
    """Rounds wait then, and are made when there is room."""
    monkeypatch.setattr(backlog, "BACKLOG_BYTES", 2 * 2 * 16)
    back.rounds(back.worker.round + 1)
    futures = [back.worker.push(back.plan, [ONE, ONE], server=n) for n in (0, 1)]
    back.hear()
    assert not any(future.done() for future in futures)
    back.read()
    eventually(lambda: back.hear() or all(future.done() for future in futures))
    assert back.values(1) == back.values(0)


def test_a_read_waits_for_the_rounds(back):
    """Of a variable that is not here yet, too; one that nobody knows is refused then."""
    back.rounds(back.worker.round + 1)
    ids = [variable.id for variable in back.variables]
    known, unknown = (back.new.pull(back.worker.session, names, back.worker.round - 1) for names in (ids, [99]))
    assert not known.done()
    back.read()
    eventually(known.done)
    assert np.frombuffer(known.result().payload.chunks[0][1], "float32")[0] == back.values(0)[0][0]
    with pytest.raises(PSError):
        unknown.result(SOON)
