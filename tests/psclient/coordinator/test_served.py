"""Workers that serve a coordinator: when they begin, and what they say of errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import until
from tests.kit.workers import SECONDS, coordinated, here


def counter():
    return {"v": ps.Variable(0.0, name="v")}


def count():
    here().v.assign_add(1.0)


@pytest.mark.parametrize("came", [0, 1], ids=["none has come", "one has come"])
def test_a_coordinator_may_end_before_its_workers_have_come(came):
    """It has nothing to schedule, and leaves; workers that come later end well, too, as there is nothing to do."""
    with coordinated(counter, count, workers=2, started=came) as job:
        assert job.coordinator.done()
        ends = threading.Thread(target=job.strategy.close)
        ends.start()
        sessions = lambda: job.cluster.cores[0].status().sessions  # noqa: E731
        left = lambda: any(each.state != "open" and each.member.task.job == "chief" for each in sessions())  # noqa: E731
        until(left, SECONDS, lambda: f"{sessions()}")
        for worker in range(came, 2):
            job.start(worker)
        ends.join(SECONDS)


def no_more():
    return next(iter(ps.ArrayDataset(np.zeros(0)).batch(4)))


def no_more_in_replicas():
    ps.get_strategy().run(lambda: next(iter(())))


def no_more_of_a_loop():
    next(batch for batch in [1, 2] if batch > 2)


def checks():
    raise AssertionError


def no_text():
    raise ValueError


def blank():
    raise LookupError("  \n")


def ends_with_words():
    raise StopIteration("page 7 was the last")


def begins_with_a_bracket():
    raise KeyError((1, 2))


TEXTS = {
    no_more: "StopIteration: the iterator has ended, because its dataset has no more batches",
    no_more_in_replicas: "StopIteration: the iterator has ended, because its dataset has no more batches",
    no_more_of_a_loop: "StopIteration: the iterator has ended, because its dataset has no more batches",
    checks: "AssertionError: in `raise AssertionError`",
    no_text: "ValueError: in `raise ValueError`",
    blank: "LookupError: in `raise LookupError",
    ends_with_words: "StopIteration: page 7 was the last",
    begins_with_a_bracket: r"KeyError: \(1, 2\)",
}


@pytest.fixture(scope="module")
def job():
    """A coordinator with a worker."""
    with coordinated(counter, count, *TEXTS) as job:
        yield job


@pytest.mark.parametrize("fn", TEXTS, ids=lambda fn: fn.__name__)
def test_a_failed_function_says_what_happened_and_where(job, fn):
    """Where an error has no text, as StopIteration or an assert, the text is what it means, or the line's code."""
    job.coordinator.schedule(fn)
    with pytest.raises(ps.errors.ClosureError, match=rf"{fn.__name__} failed: {TEXTS[fn]}.* \(test_served.py:\d+\)$"):
        job.coordinator.join()
    assert job.run(count) is None
