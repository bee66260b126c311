"""Local steps over workers and servers: the same bits as a loop in one process, schedules, weights, failures."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from psclient.optimizers.local_steps.cadence import Cadence
from psclient.optimizers.local_steps.schedule import Schedule, balanced
from pswire.cluster import Task
from pswire.model import status
from pswire.model.log import Member
from tests.kit.cases import pairwise
from tests.kit.references import LocalWorker, Nesterov, first, sgd, simulated
from tests.kit.strategies import refused
from tests.kit.workers import in_threads


def exchanged(count, *schedule, workers=2, tokens=None, rule=sgd, servers=2, options=None, **given):
    """The parameters of each worker, and the outer ones of each, after so many local steps."""

    def work(strategy, worker):
        made = LocalWorker(strategy, worker, rule, *schedule, **given)
        merged = [made.step(tokens and tokens(worker, number)) for number in range(count)]
        return made.own, made.outer(), merged

    return in_threads(work, workers, servers, **(options or {}))


def same(found, expected):
    assert all(a.tobytes() == np.asarray(b).tobytes() for a, b in zip(found, expected, strict=True)), (found, expected)


def of_worker(worker, step):
    """How many tokens a worker has in a step."""
    return 3.0 + 4 * worker + step % 3


@pairwise(
    dtype=[np.float64, np.float32],
    schedule=[(4,), (4, 2), (8, 4, 1), (6, 2, 2), (3, 1, 2), (1,)],
    alpha=[0.0, 0.5],
    tokens=[None, of_worker],
)
def test_workers_do_what_a_loop_in_one_process_does(dtype, schedule, alpha, tokens):
    """To the last bit: fragments, exchanges that overlap with steps, mixed parameters, and weights."""
    found = exchanged(17, *schedule, tokens=tokens, dtype=dtype, alpha=alpha)
    own, outer = simulated(2, 17, *schedule, alpha=alpha, tokens=tokens, dtype=dtype)
    for worker, (mine, theirs, _) in enumerate(found):
        same(theirs, outer)
        same(mine, own[worker])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_exchanged_in_single(dtype):
    """Large weights are not too large for it."""
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    (_, outer, _), (own, other, _) = exchanged(
        4, 4, tokens=lambda worker, step: 1e6, dtype=dtype, rule=partial(sgd, 1.0, 0.0)
    )
    expected = simulated(2, 4, 4, rule=lambda: Nesterov(1.0, 0.0))[1]
    same(outer, other)
    same(own, other)
    assert all(np.abs(p.astype("f8") - q).max() < 0.05 for p, q in zip(outer, expected, strict=True))


def test_three_workers_on_one_server():
    """With `deterministic=True`, in the order of their tasks."""
    found = exchanged(8, 4, workers=3, servers=1, tokens=of_worker, options={"deterministic": True})
    own, outer = simulated(3, 8, 4, tokens=of_worker)
    for worker, (mine, theirs, merged) in enumerate(found):
        same(theirs, outer)
        same(mine, own[worker])
        assert merged == [False, False, False, True] * 2


@pytest.mark.parametrize("rule", ["Adam(0.1)", "SGD(1.0)", "Adagrad(0.5)", "DelayedNesterov(0.7, 0.9, 2)"])
def test_any_rule_of_the_servers_is_an_outer_optimizer(rule):
    """Fragments have slots and counts of their own."""
    made = partial(eval, f"ps.optimizers.{rule}", {"ps": ps})
    (_, outer, _), (_, other, _) = exchanged(8, 4, 2, rule=made)
    same(outer, other)
    assert all((a != b).all() for a, b in zip(outer, first(), strict=True))


def test_a_worker_without_tokens_counts_nothing():
    """And where no worker has any, nothing changes."""
    tokens = lambda worker, step: float(worker and step < 4)  # noqa: E731
    (_, outer, _), _ = exchanged(8, 4, tokens=tokens)
    _, alone = simulated(2, 4, 4, tokens=tokens)
    same(outer, alone)


def test_an_exchange_waits_once_and_is_sent_while_steps_are_made():
    """The values of a fragment come with the answer to the round that sends it."""

    def work(strategy, worker):
        made = LocalWorker(strategy, worker, sgd, 4, 1, 3)
        for _ in range(8):
            made.step()
        before, rounds = strategy.blocking_waits, strategy.round
        under_way = [made.step() for _ in range(6)]  # what step 8 has sent is merged after step 11
        return strategy.blocking_waits - before, strategy.round - rounds, under_way

    for waits, rounds, merged in in_threads(work, 2, 1):
        assert (waits, rounds, merged) == (1, 1, [False, False, True, False, False, False])


def test_compressed_exchanges_lose_nothing_for_good():
    """What int8 leaves over of a pseudo-gradient comes with the next one."""

    def work(strategy, worker):
        made = LocalWorker(strategy, worker, partial(sgd, 1.0, 0.0), 4)
        return [made.step() for _ in range(40)] and made.outer()

    plain = in_threads(work, 2, 1)[0]
    found = in_threads(work, 2, 1, compression=ps.compression.Int8())[0]
    assert all(np.abs(a - b).max() < 0.05 for a, b in zip(plain, found, strict=True))


# ---- Asynchronous workers ----


@pytest.mark.parametrize("consistency", [ps.Async(), ps.BoundedStaleness(2)])
def test_an_asynchronous_worker_continues_from_its_own_exchange(consistency):
    """One worker alone does what a loop of one worker does; its tokens are nothing to it."""
    tokens = lambda worker, step: 7.0 + step  # noqa: E731, whose sums are no powers of two
    options = {"consistency": consistency}
    found = exchanged(9, 3, workers=1, rule=partial(sgd, 0.5, 0.0), tokens=tokens, options=options)
    own, outer = simulated(1, 9, 3, rule=lambda: Nesterov(0.5, 0.0))
    same(found[0][1], outer)
    same(found[0][0], own[0])


@pytest.mark.parametrize("consistency", [ps.Async(), ps.BoundedStaleness(1)])
def test_delayed_nesterov_converges_where_nesterov_does_not(consistency, caplog):
    """Four asynchronous workers, whose exchanges are stale; a warning names the remedy."""

    def work(rule, strategy, worker):
        made = LocalWorker(strategy, worker, rule, 5, name=f"{rule.func.__name__}")
        for number in range(150):
            made.step(count=number % 5)
        return max(float(np.abs(p).max()) for p in made.outer())

    stable = partial(ps.optimizers.DelayedNesterov, 0.7, 0.9, 4)
    options = {"consistency": consistency}
    assert max(in_threads(partial(work, stable), 4, 1, **options)) < 5
    assert "DelayedNesterov" not in caplog.text
    in_threads(lambda strategy, worker: LocalWorker(strategy, worker, sgd, 5) and None, 2, 1, **options)
    assert "use ps.optimizers.DelayedNesterov" in caplog.text


def test_a_slow_worker_exchanges_after_fewer_steps():
    """Dynamic local updates: heartbeats tell the speed of each worker to the others."""
    known, over = threading.Event(), threading.Event()

    def is_known(status):
        return any(each.pace.local is not None and each.pace.local.rate > 20 for each in status.sessions)

    def work(strategy, worker):
        made = LocalWorker(strategy, worker, partial(sgd, 0.5, 0.0), 4, dynamic=True)
        if worker == 0:
            merged = [made.step() for _ in range(8)]
            while not is_known(strategy.backend.group.session.log_status()):
                made.step()  # beside other work a few steps may take long
            known.set()
            over.wait(60)
            return merged
        assert known.wait(60)
        merged = [time.sleep(0.2) or made.step() for _ in range(8)]
        over.set()
        return merged

    fast, slow = in_threads(work, 2, 1, consistency=ps.Async())
    assert fast == [False, False, False, True] * 2
    assert sum(slow) > 2, slow


@pytest.mark.parametrize(("own", "delay", "every"), [(4.0, 0, 6), (1.0, 0, 2), (0.1, 0, 1), (0.1, 3, 4), (40.0, 0, 12)])
def test_a_worker_makes_as_many_steps_as_it_can_while_the_fastest_makes_its_own(monkeypatch, own, delay, every):
    """Workers that have gone are no measure; the fastest one makes `sync_every`."""
    now = [100.0]
    monkeypatch.setattr("psclient.optimizers.local_steps.cadence.time.monotonic", lambda: now[0])

    def of(rate, state):
        local = rate and status.LocalProgress(rate=rate)
        return status.SessionState(Member(Task("worker", 1), 7, 1), state, "", 0.0, pace=status.Pace(local=local))

    sessions = [of(8.0, "open"), of(99.0, "lost"), of(None, "open")]
    ask = lambda: SimpleNamespace(sessions=sessions)  # noqa: E731
    cadence, sent, step = Cadence(Schedule(12, 1, delay, dynamic=True), ask), [], 0
    while len(sent) < 3:
        step += 1
        now[0] += 1 / own
        if cadence.sent_at(step) is not None:
            sent.append(step)
            now[0] += 50.0  # of an exchange
            cadence.merged(step)
    assert [sent[0], *np.diff(sent)] == [12, every, every]
    assert cadence.rate == pytest.approx(own)


# ---- Checkpoints ----


def test_a_checkpoint_continues_with_the_same_bits(tmp_path):
    """Outer parameters, the outer optimizer, and the count of steps, as of an exchange of all."""

    def work(resumes, strategy, worker):
        made = LocalWorker(strategy, worker, sgd, 4)
        saved = made.steps.saved(lambda: made.steps.take_all(made._merge))
        outer = [each.rule for each in made.steps.fragments]
        checkpoint = ps.train.Checkpoint(model=made.variables, outer=outer, steps=saved)
        if resumes:
            checkpoint.restore("ckpt")
            assert made.steps.step == 8
            same(made.own, made.outer())
        else:
            [made.step() for _ in range(8)]
            checkpoint.save("ckpt/one")
            checkpoint.sync()
        [made.step() for _ in range(8)]
        return made.outer()

    before, after = (in_threads(partial(work, resumes), 2, 2, root=tmp_path) for resumes in (False, True))
    same(after[0], before[0])
    same(before[0], simulated(2, 16, 4)[1])


def test_values_that_change_otherwise_are_taken():
    """A local step after an assignment begins with what was assigned."""
    with ps.ParameterServerStrategy() as strategy:
        made = LocalWorker(strategy, 0, sgd, 4)
        made.step()
        with strategy.scope():
            for v in made.variables:
                v.assign(np.zeros(v.shape))
        made.step()
        same(made.own, [np.zeros(p.shape) for p in made.own])


# ---- Bad inputs ----


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((0,), "sync_every is 0"),
        ((4.0,), "sync_every is 4.0"),
        ((4, 3), "not divisible by the number of fragments"),
        ((4, 0), "fragments is 0"),
        ((4, 2, 2), "use at most 1"),
        ((4, 1, -1), "sync_delay is -1"),
        ((4, 2, 0, 0.0, True), "dynamic=True with 2 fragments"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given, why):
    refused(ValueError, why, lambda: Schedule(*given))


def test_the_schedule_is_that_of_streaming_diloco():
    """Fragment p of P after each step t with (t - p * H / P) % H == 0."""
    when = Schedule(12, 4)
    assert {t: when.sent_at(t) for t in range(1, 25) if when.sent_at(t) is not None} == {
        3 * n: n % 4 for n in range(1, 9)
    }


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([100, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 100], 2, [3, 1]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([5, 5, 5, 5, 5], 1, [5]),
    ],
)
def test_fragments_are_balanced(sizes, parts, expected):
    assert list(map(len, balanced(sizes, parts))) == expected
    assert [place for part in balanced(sizes, parts) for place in part] == [*range(len(sizes))]


def test_workers_with_different_schedules_are_refused():
    """Before the first step. Asynchronous workers may have a number of steps each."""
    with pytest.raises(ValueError, match="another one has sync_every="):
        in_threads(lambda strategy, worker: LocalWorker(strategy, worker, sgd, 4 + worker) and None, 2, 1)
    different = lambda strategy, worker: LocalWorker(strategy, worker, partial(sgd, 0.5, 0.0), 4 + worker).step()  # noqa: E731
    in_threads(different, 2, 1, consistency=ps.Async())


def test_bad_arguments_are_refused():
    refused(ValueError, "cannot be cut into 3 fragments", lambda: balanced([1, 2], 3))
    with ps.ParameterServerStrategy() as strategy:
        refused(ValueError, "dynamic=True, but synchronous", lambda: LocalWorker(strategy, 0, sgd, 2, dynamic=True))
        for alpha, error in ((-0.1, ValueError), (1.5, ValueError), ("x", TypeError)):
            with pytest.raises(error, match="alpha is"):
                LocalWorker(strategy, 0, sgd, 2, alpha=alpha)
        made = LocalWorker(strategy, 0, sgd, 2, name="q")
        for tokens in (-1, np.nan, np.inf):
            with pytest.raises(ValueError, match="finite number that is not negative"):
                made.step(tokens)
        refused(TypeError, "use a number", lambda: made.step("many"))
        made.step(3)
        refused(ValueError, "with tokens and without", made.step)


def test_nan_in_a_pseudo_gradient_follows_the_policy():
    """With "skip" the outer parameters stay as they are, and all workers begin with them again."""

    def work(strategy, worker):
        made = LocalWorker(strategy, worker, sgd, 2)
        made.step()
        if worker:
            made.own[0][:] = np.nan
        made.step()
        return made.own

    for own in in_threads(work, 2, 1, consistency=ps.Sync(nonfinite="skip")):
        same(own, first())
