"""Steps of dynamic tables: what each optimizer makes of a row is what it makes of a row of a plain variable."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing.update_function import UpdateFunction
from tests.kit.cases import once
from tests.kit.references import OPTIMIZERS, O
from tests.kit.strategies import by_replica, in_replicas, kinds, replicas, variable

pytestmark = kinds("servers-2x2", soak=["embedded-1"])
de = ps.dynamic_embedding
KEYS = np.array([5, -9, 1 << 62, 0, 77, -(1 << 63), (1 << 63) - 1])
SHAPE = (len(KEYS), 3)
STEPS = 12
REFUSED = {
    "SGD, accumulated": "gradient_accumulation_steps=2",
    "SGD, averaged": "use_ema=True",
    "Lamb": "a table has no whole",
}
LAZY = sorted({*OPTIMIZERS} - {*REFUSED, "AdamW"})
numbers = itertools.count()


def table_of(strategy, **options):
    """A table whose name no other has; its rows begin with zeros, as the plain variable's."""
    with strategy.scope():
        return de.get_variable(f"table{next(numbers)}", **{"dim": SHAPE[1], "initializer": 0, **options})


def slices(step, replica, keyed):
    """Rows of one replica in one step, of integers: some come twice, and few in each step."""
    rng = np.random.default_rng(10 * step + replica)
    count = 0 if (step, replica) == (1, 1) else 3
    ids = rng.integers(0, SHAPE[0], count)
    values = rng.integers(-3, 4, (count, SHAPE[1])).astype("float32")
    return ps.IndexedSlices(values, KEYS[ids] if keyed else ids)


def state_of(optimizer, v, keyed):
    """What has a row of a variable or a table, and of its slots, by their places or keys."""
    own = [v, *(slot for slot in optimizer._state.of(v).slots if slot.ndim == v.ndim)]
    return [each.lookup(KEYS if keyed else np.arange(SHAPE[0])).numpy() for each in own]


def trained(strategy, make, v, keyed):
    """All that an optimizer made of a variable in some steps."""
    with strategy.scope():
        optimizer, seen = make(), []
    for step in range(STEPS):

        def replica_fn(replica, step=step):
            optimizer.apply_gradients([(slices(step, replica, keyed), v)])

        in_replicas(strategy, replica_fn)
        if step % 5 == 3:
            seen += state_of(optimizer, v, keyed)
    return [*seen, *state_of(optimizer, v, keyed)]


@pytest.mark.parametrize("name", ["AdamW", *(pytest.param(n, marks=pytest.mark.soak) for n in LAZY)])
def test_a_row_of_a_table_makes_lazy_steps(strategy, name):
    """Those of a row of a variable, bit for bit, slots as well."""

    def make():
        optimizer = OPTIMIZERS[name]()
        optimizer.sparse = "lazy"
        return optimizer

    plain = trained(strategy, make, variable(strategy, np.zeros(SHAPE, "float32")), keyed=False)
    for one, other in zip(trained(strategy, make, table_of(strategy), keyed=True), plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_closed_forms_are_of_tables_too(strategy):
    """A row of a table has what a row of a variable has; the last bit depends on when it was made up."""
    make = partial(O.Adam, 0.01, settle="closed")
    plain = trained(strategy, make, variable(strategy, np.zeros(SHAPE, "float32")), keyed=False)
    for one, other in zip(trained(strategy, make, table_of(strategy), keyed=True), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@kinds("servers-1x1")
def test_a_table_of_one_part_is_measured(strategy):
    """One server has all of it: the norm of two rows of length 5 is sqrt(50)."""
    table, dense = table_of(strategy), variable(strategy, np.zeros(2, "float32"))
    rows = ps.IndexedSlices(np.array([[3, 4, 0], [0, 4, 3]], "float32"), KEYS[:2])
    with strategy.scope():
        optimizer = O.SGD(1.0, global_clipnorm=1.0)
    strategy.run(lambda: optimizer.apply_gradients([(rows, table), (np.zeros(2, "float32"), dense)]))
    np.testing.assert_allclose(table.lookup(KEYS[:2]).numpy()[0], np.array([-3, -4, 0]) / np.sqrt(50), rtol=1e-6)


def test_an_infinite_row_skips_the_step(strategy):
    """Of one replica, among finite ones: no row, slot or count changes, and the scale falls."""
    table, dense = table_of(strategy), variable(strategy, np.ones(2, "float32"))
    with strategy.scope():
        optimizer = O.Adam(0.1, loss_scale_factor=O.DynamicLossScale(4.0))

    def step(number, bad=1.0):
        def replica_fn(replica):
            value = bad if replica == replicas(strategy) - 1 else 1.0
            rows = ps.IndexedSlices(np.full((1, 3), value, "float32"), KEYS[:1] + replica)
            optimizer.apply_gradients([(rows, table), (np.full(2, number, "float32"), dense)])

        in_replicas(strategy, replica_fn)

    step(1)
    before = [*state_of(optimizer, table, True), dense.numpy()]
    step(2, np.inf)
    for one, other in zip([*state_of(optimizer, table, True), dense.numpy()], before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps), int(optimizer.iterations)) == (2.0, 1, 1)
    step(3)
    assert (dense.numpy() != before[-1]).all()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_needs_the_whole_is_refused(strategy, name):
    """With a sentence that says what to do, before anything is created."""
    table = table_of(strategy)
    with strategy.scope():
        optimizer = OPTIMIZERS[name]()
    with pytest.raises(ValueError, match=f"cannot train table {table.name!r}.*{REFUSED[name]}"):
        optimizer.build([table])
    with pytest.raises(ValueError, match="cannot train table"):
        in_replicas(strategy, lambda replica: optimizer.apply_gradients([(slices(0, replica, True), table)]))
    assert optimizer.variables == []


class Counted(O.Optimizer):
    """One that assigns a number in the update of its variable."""

    slots = ("count",)

    def initial_slot(self, slot, v):
        return np.zeros(())

    def update(self, v, gradient, iterations, *slots):
        slots[0].assign_add(1)
        v.assign_sub(self.learning_rate * gradient)


def test_a_step_that_assigns_a_number_is_refused(strategy):
    """A table's servers would each have another one."""
    table = table_of(strategy)
    with strategy.scope():
        optimizer = Counted(0.5)
    with pytest.raises(ps.errors.ProgramError, match=f"table {table.name!r} has to run on.*and no scalar"):
        in_replicas(strategy, lambda replica: optimizer.apply_gradients([(slices(0, replica, True), table)]))


def test_a_table_is_never_dense(strategy):
    """It has no whole that could be made."""
    table = table_of(strategy)
    with strategy.scope():
        optimizer = O.Adam(0.1, sparse="dense")
    with pytest.raises(ValueError, match="sparse='dense': a table has no whole"):
        optimizer.build([table])


BAD = {
    "an array": (lambda rows: np.ones((3, 3), "float32"), "is a ndarray; give rows.gradient"),
    "None": (lambda rows: None, "is None"),
    "another width": (
        lambda rows: ps.IndexedSlices(np.ones((1, 2), "float32"), [1]),
        r"each row has shape \(2,\), and must have \(3,\)",
    ),
    "complex": (lambda rows: ps.IndexedSlices(np.ones((1, 3), "complex64"), [1]), "complex"),
}


@pytest.mark.parametrize("what", BAD)
def test_gradients_that_are_none(strategy, what):
    """Each is an error that names the table, and changes nothing."""
    make, words = BAD[what]
    table = table_of(strategy)
    with strategy.scope():
        optimizer = O.SGD(0.1)
    with pytest.raises(ValueError, match=words) as caught:
        in_replicas(strategy, lambda replica: optimizer.apply_gradients([(make(None), table)]))
    assert repr(table.name) in str(caught.value)
    assert table.size() == 0


def test_slots_begin_with_what_the_optimizer_says(strategy):
    """It is asked for one row; a row of a slot is there where the table has one."""
    asked = []

    class Own(O.Adagrad):
        def initial_slot(self, slot, v):
            asked.append((slot, v.name, v.shape, v.dtype))
            return super().initial_slot(slot, v)

    table = table_of(strategy)
    with strategy.scope():
        optimizer = Own(0.5, initial_accumulator_value=4.0)
        optimizer.build([table])
    (slot,) = optimizer._state.of(table).slots
    assert asked == [("accumulator", table.name, (1, 3), np.float32)]
    assert slot.name == f"own/{table.name}/accumulator"
    assert slot.lookup([3]).numpy().tolist() == [[4.0] * 3]
    rowwise = O.RowwiseAdagrad(0.5)
    rowwise.build([table])
    assert rowwise._state.of(table).slots[0].dim == 1
    assert table.size() == slot.size() == 0


class Uneven(O.Adagrad):
    def initial_slot(self, slot, v):
        return np.arange(3.0).reshape(1, 3)


def test_slots_that_begin_unevenly_are_refused(strategy):
    """A slot begins with one number for each key."""
    table = table_of(strategy)
    with strategy.scope():
        optimizer = Uneven(0.5)
    with pytest.raises(ValueError, match="begins with a row of different values"):
        optimizer.build([table])


def test_half_precision(strategy):
    """Slots of float16 tables are float32, as a variable's."""
    table = table_of(strategy, value_dtype="float16", initializer=1.0)
    with strategy.scope():
        optimizer = O.Adam(0.5)
    rows = lambda replica: ps.IndexedSlices(np.ones((1, 3), "float16"), [4])  # noqa: E731
    in_replicas(strategy, lambda replica: optimizer.apply_gradients([(rows(replica), table)]))
    assert [slot.dtype for slot in optimizer._state.of(table).slots] == [np.float32] * 2
    assert table.lookup([4]).numpy().tolist() == [[0.5] * 3]


# ---- Steps that are like the last one ----


@once(strategy=["servers-2x2", "async-2x1"], name=["Adam", "Adagrad by rows", "SGD"])
def test_steady_steps_are_not_recorded_again(strategy, calls_of, name):
    """However many keys each has; and the plan is the same, so that nothing has to be approved."""
    table, other, dense = table_of(strategy), table_of(strategy), variable(strategy, np.ones(2, "float32"))
    with strategy.scope():
        optimizer = OPTIMIZERS[name]()
    sent = calls_of("send", strategy.backend._exchange)

    def step(keys):
        rows = table.lookup(keys)
        pairs = [(rows.gradient(np.ones_like(rows.values)), table), (np.ones(2, "float32"), dense)]
        optimizer.apply_gradients([*pairs, (ps.IndexedSlices(np.ones((len(keys), 3), "float32"), keys), other)])

    strategy.run(step, (KEYS[:2],))
    calls = calls_of("call", UpdateFunction)
    sent.clear()
    for count in (3, 7, 0, 1):
        strategy.run(step, (KEYS[:count],))
    assert table.size() == other.size() == len(KEYS)
    assert calls == []
    assert len({out.plan.id for out, *_ in sent}) == 1


def test_gradients_are_given_in_cross_replica_context(strategy):
    """One for each replica."""
    table = table_of(strategy)
    optimizer = O.SGD(1.0)
    given = by_replica(strategy, lambda replica: slices(3, replica, keyed=True))
    with strategy.scope():
        optimizer.apply_gradients([(given, table)])
    assert set(table.keys().tolist()) <= set(KEYS.tolist())
    assert table.size() > 0
