"""Updates are put off in rows that a gradient does not have; whoever looks finds the bits of the whole update."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import psclient as ps
from psserver.programs.kernels.closed_forms import ClosedForm
from tests.kit.strategies import USUAL, by_replica, in_replicas, kinds, merged, opened, refused, replicas, variable

pytestmark = kinds("servers-2x2")

O = ps.optimizers  # noqa: E741
SHAPE = (23, 5)
STEPS = 18


def gradient(step, replica):
    """Few rows, mostly the same ones, so that some are missed for long; in some steps none."""
    rng = np.random.default_rng(1000 * step + replica)
    ids = np.minimum(rng.geometric(0.25, rng.integers(0, 4)) - 1, SHAPE[0] - 1)
    return ps.IndexedSlices(rng.normal(size=(len(ids), SHAPE[1])).astype("float32"), ids)


CLOSED = {
    "SGD": partial(O.SGD, 0.5, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": partial(O.Adam, 1e-2),
    "AdamW": partial(O.AdamW, O.schedules.ExponentialDecay(0.1, 10, 0.9)),
    "RMSprop": partial(O.RMSprop, 1e-2, momentum=0.9, centered=True),
    "Nadam": partial(O.Nadam, 1e-2),
    "Adam, amsgrad": partial(O.Adam, 1e-2, amsgrad=True),
}


@pytest.mark.parametrize(
    "name",
    ["Adam", "Adam, amsgrad", *(pytest.param(n, marks=pytest.mark.soak) for n in ("SGD", "AdamW", "RMSprop", "Nadam"))],
)
def test_closed_forms_lead_to_the_same_values(strategy, name, calls_of):
    """Within a few millionths, when it is looked at and later; with the same bits where there is no form."""
    used, found = calls_of("numbers_of", ClosedForm), []
    for word in ("replay", "closed_form"):
        assert not used
        _, steps = job(strategy, partial(CLOSED[name], catch_up=word))
        found.append(steps(0, 12) + steps(12, STEPS))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert bool(used) == (name != "Adam, amsgrad")
    assert used or all(map(np.array_equal, *found))


@kinds(*USUAL)
@pytest.mark.parametrize("name", ["LazyAdam", "momentum", "AdamW", "Nadam"])
def test_a_lazy_optimizer_leaves_other_rows_alone(strategy, name):
    """It is as if the rows that a step has were all there is; all copies are equal."""
    start = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    v = variable(strategy, start)
    with strategy.scope():
        optimizer = lazily(name)
    for step in range(10):
        before = [x.numpy() for x in (v, *slots_of(optimizer, v))]
        in_replicas(strategy, lambda replica, step=step: optimizer.apply_gradients([(gradient(step, replica), v)]))
        given = {int(id) for replica in range(replicas(strategy)) for id in gradient(step, replica).indices}
        rest = sorted({*range(SHAPE[0])} - given)
        for old, new in zip(before, (v, *slots_of(optimizer, v)), strict=False):
            np.testing.assert_array_equal(new.numpy()[rest], old[rest])
        assert not given or (v.numpy()[sorted(given)] != before[0][sorted(given)]).any()
    copies = [np.asarray(copy) for copy in strategy.experimental_local_results(v)]
    assert all((copy == v.numpy()).all() for copy in copies)


def slots_of(optimizer, v):
    """Those that have a row for each row of the variable."""
    return [slot for slot in optimizer._state.of(v).slots if slot.ndim] if optimizer._state.has(v) else []


@pytest.mark.parametrize("word", ["Exact", None, 1, ""])
def test_another_word_is_refused(word):
    """When an optimizer is made, and when it is changed."""
    refused(ValueError, "use 'exact', 'lazy' or 'dense'", lambda: O.Adam(0.5, sparse=word))
    optimizer = O.Adam(0.5)
    with pytest.raises(ValueError, match="use 'exact', 'lazy' or 'dense'"):
        optimizer.sparse = word
    assert optimizer.sparse == "exact"
    with pytest.raises(ValueError, match="use 'replay' or 'closed_form'"):
        optimizer.catch_up = word
    refused(ValueError, "use 'replay' or 'closed_form'", lambda: ps.exact_update(print, catch_up=word))


def test_a_function_of_one_s_own_is_made_up(strategy):
    """`ps.exact_update`: reads find what the plain update makes; one that reads a table it does not assign is whole."""
    start = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    wholes = [variable(strategy, start) for _ in range(2)]
    tables = [(v, variable(strategy, np.ones(SHAPE, "float32"), beside=v)) for v in wholes]

    def decay(v, g, m):
        m.assign(0.5 * m + g)
        v.assign_sub(0.25 * m + 0.125 * v)

    def reads(v, g, m):
        v.assign_sub(g + 0.25 * m)

    def update(s, g, fn, v, m):
        s.extended.update(v, fn, (s.extended.reduce_to("sum", g, v), m))

    for step in range(12):
        for fn in (decay, reads) if step % 4 == 3 else (decay,):
            for number, (v, m) in enumerate(tables):
                given = by_replica(strategy, lambda replica, step=step: gradient(step, replica))
                merged(strategy, partial(update, fn=ps.exact_update(fn) if number else fn, v=v, m=m), given)
        for one, other in zip(*tables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
    refused(TypeError, "exact_update takes an update function", lambda: ps.exact_update(3))


def job(strategy, make, path=""):
    """A table that is trained by an optimizer, from a checkpoint if there is one; what makes steps, and gives all."""
    with strategy.scope():
        v = ps.Variable(np.random.default_rng(0).normal(size=SHAPE).astype("float32"), name="v")
        optimizer = make()
        optimizer.build([v])
    checkpoint = ps.train.Checkpoint(v=v, optimizer=optimizer)
    if path:
        checkpoint.restore(path).assert_consumed()

    def steps(first, stop):
        for step in range(first, stop):
            strategy.run(lambda step=step: optimizer.apply_gradients([(gradient(step, 0), v)]))
        return [x.numpy() for x in (v, *optimizer.variables)]

    return checkpoint, steps


@pytest.mark.parametrize(("before", "after"), [("servers-1x1", "servers-2x1"), ("servers-2x1", "default")])
def test_a_checkpoint_has_the_values_of_whole_updates(before, after, in_tmp_path):
    """Rows that are behind are saved as they would be; the steps after the save change nothing of it."""
    with opened(before) as strategy:
        checkpoint, steps = job(strategy, partial(O.SGD, 0.1, momentum=0.9))
        steps(0, 12)
        path = checkpoint.save("ckpt")
        expected = steps(12, 20)
    with opened(after) as strategy:
        found = str(in_tmp_path / "runs" / path) if after == "default" else path
        _, steps = job(strategy, partial(O.SGD, 0.1, momentum=0.9, sparse="dense"), found)
        found = steps(12, 20)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- A step of several calls, lazily ----

CALLS = {
    "SGD": (partial(O.SGD, 0.5), 2),
    "momentum": (partial(O.SGD, 0.5, momentum=0.5, nesterov=True), 3),
    "Adam": (partial(O.Adam, 0.1, amsgrad=True), 3),
    "LazyAdam": (partial(O.LazyAdam, 0.1), 2),
    "AdamW": (partial(O.AdamW, 0.1, weight_decay=0.1), 2),
    "Nadam": (partial(O.Nadam, 0.1), 3),
    "Adagrad": (partial(O.Adagrad, 0.1), 2),
    "RMSprop": (partial(O.RMSprop, 0.1, centered=True, momentum=0.5), 2),
    "Ftrl": (partial(O.Ftrl, 0.1), 3),
    "Lion": (partial(O.Lion, 0.1), 2),
    "averaged": (partial(O.SGD, 0.5, use_ema=True), 2),
    "clipped by norm": (partial(O.SGD, 0.5, momentum=0.9, clipnorm=0.2), 3),
    "clipped by all": (partial(O.SGD, 0.5, momentum=0.9, global_clipnorm=0.2), 2),
    "dynamically scaled": (partial(O.Adam, 0.1, loss_scale_factor=O.DynamicLossScale(4.0)), 2),
}
"""Optimizers, and how many calls make a step."""


def lazily(name, **options):
    """One of them that updates the rows of a gradient alone."""
    return CALLS[name][0](**options, **({} if name == "LazyAdam" else {"sparse": "lazy"}))


WHERE = {
    "servers-2x2": ["momentum", "Adam", "LazyAdam", "averaged", "clipped by norm", "dynamically scaled"],
    "sharded-3x1": ["AdamW", "clipped by all"],
    "mirrored-2": ["SGD", "momentum", "Nadam", "Adagrad", "RMSprop", "Ftrl", "Lion", "dynamically scaled"],
    "default": ["Adam"],
}


def slices_of(step, calls, replica):
    """The gradient of one call, or what those of several make together: they have other rows, and some the same."""
    rows = [gradient(10 * step + call, replica) for call in calls]
    return ps.IndexedSlices(np.concatenate([one.values for one in rows]), np.concatenate([one.indices for one in rows]))


@pytest.mark.parametrize(
    ("strategy", "name"), [(where, name) for where, names in WHERE.items() for name in names], indirect=["strategy"]
)
def test_a_lazy_step_of_several_calls_is_for_the_rows_of_all_of_them(strategy, name):
    """It is the lazy step of their average: rows of the first calls take part, also where the last has others."""
    count = CALLS[name][1]
    start = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    v, once = variable(strategy, start), variable(strategy, start)
    with strategy.scope():
        accumulates, at_once = lazily(name, gradient_accumulation_steps=count), lazily(name)
    for step in range(4):
        for call in range(count):
            in_replicas(
                strategy, lambda replica, at=(step, [call]): accumulates.apply_gradients([(slices_of(*at, replica), v)])
            )

        def whole(replica, step=step):
            given = slices_of(step, range(count), replica)
            at_once.apply_gradients([(ps.IndexedSlices(given.values / np.float32(count), given.indices), once)])

        in_replicas(strategy, whole)
        np.testing.assert_allclose(v.numpy(), once.numpy(), rtol=2e-4, atol=1e-6, err_msg=f"step {step}")
    assert (v.numpy() == start).any()
    assert (v.numpy() != start).any()


def test_whole_gradients_among_those_of_rows_are_of_every_row(strategy):
    """In a step of several calls, one of which has a whole gradient; what one has for a row may be readmitted."""
    v = variable(strategy, np.zeros((3, 1), "float32"))
    with strategy.scope():
        optimizer = O.SGD(1.0, momentum=0.5, sparse="lazy", gradient_accumulation_steps=2)

    def call(given):
        in_replicas(strategy, lambda replica: optimizer.apply_gradients([(given, v)]))
        return (v.numpy() / replicas(strategy)).ravel().tolist()

    def row(place, value):
        return ps.IndexedSlices(np.full((1, 1), value, "float32"), [place])

    assert [call(row(0, 2.0)), call(row(2, 2.0))] == [[0, 0, 0], [-1, 0, -1]]
    assert [call(row(1, 2.0)), call(row(1, -2.0))][1] == [-1, 0, -1]
    assert [call(row(0, 4.0)), call(row(0, -4.0))][1] == [-1.5, 0, -1]  # its momentum goes on
    assert [call(np.zeros((3, 1), "float32")), call(row(1, 2.0))][1] == [-1.75, -1, -1.5]  # and here that of all


def test_a_checkpoint_between_the_calls_of_a_step_has_their_rows(in_tmp_path):
    """What goes on from there makes the step that the job makes which was saved; `sparse` stays what it was. It is
    restored by paths: the optimizer's name is another one."""
    make = partial(O.Adam, 0.1, sparse="lazy", gradient_accumulation_steps=2)
    with opened("servers-1x1") as strategy:
        checkpoint, calls = job(strategy, make)
        calls(3, 6)
        path = checkpoint.save("ckpt")
        expected = calls(6, 9)[0]
        with pytest.raises(AttributeError, match="sparse of this Adam is 'lazy' and cannot be changed"):
            checkpoint.optimizer.sparse = "exact"
    for kind, found in (("servers-2x1", path), ("default", str(in_tmp_path / "runs" / path))):
        with opened(kind) as strategy:
            _, calls = job(strategy, partial(make, name="of now"), found)
            np.testing.assert_array_equal(calls(6, 9)[0], expected)
