"""Gradients of some rows: reductions, lazy updates, what is said of whole ones and refused; and of tables."""

from __future__ import annotations

import itertools
import logging
from functools import partial

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing import diagnostics
from psclient._src.tracing.update_function import UpdateFunction
from tests.kit.cases import once
from tests.kit.references import KEYS, OPTIMIZERS, SHAPE, O, some_rows, whole
from tests.kit.strategies import by_replica, in_replicas, kind_of, kinds, merged, refused, replicas, variable


def table_slices(replica):
    return ps.IndexedSlices(np.full((2, 3), replica + 1, "float32"), [replica % 7, 4], SHAPE)


def reduced(count, mean):
    found = np.zeros(SHAPE, "float32")
    for replica in range(count):
        np.add.at(found, [replica % 7, 4], np.float32(replica + 1))
    return found / np.float32(count) if mean else found


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_every_reduction_takes_rows(strategy, op):
    """It gives rows, each place once and in order, or what is made a whole array of them. Arrays and rows come back
    together in one answer, whichever was reduced first."""
    count, mean = replicas(strategy), op == "MEAN"
    expected, v = reduced(count, mean), variable(strategy, np.zeros(SHAPE, "float32"))
    op = ps.ReduceOp[op]
    found = [
        strategy.reduce(op, by_replica(strategy, table_slices), axis=None),
        merged(strategy, lambda s, g: s.reduce(op, g, axis=None), by_replica(strategy, table_slices)),
    ]
    in_replicas(strategy, lambda replica: found.append(ps.get_replica_context().all_reduce(op, table_slices(replica))))
    for value in found:
        assert isinstance(value, ps.IndexedSlices)
        assert np.asarray(value.indices).tolist() == sorted({replica % 7 for replica in range(count)} | {4})
        np.testing.assert_array_equal(np.asarray(value), expected)

    def update(s, *gradients):
        pairs = [(g, v) for g in gradients]
        for g in s.extended.batch_reduce_to(op, pairs):
            s.extended.update(v, lambda v, g: v.assign_add(g), (g,))

    merged(strategy, update, by_replica(strategy, table_slices), by_replica(strategy, table_slices))
    np.testing.assert_array_equal(v.numpy(), 2 * expected)
    whole_of = by_replica(strategy, lambda replica: np.full(SHAPE, replica + 5, "float32"))
    few = by_replica(strategy, lambda replica: np.full(3, replica + 7, "float32"))
    given = by_replica(strategy, table_slices)
    with strategy.scope():
        found = strategy.extended.batch_reduce_to(op, [(value, v) for value in (given, whole_of, given, few)])
    averaged = lambda first: (count * first + count * (count - 1) / 2) / (count if mean else 1)  # noqa: E731
    wanted = expected, np.full(SHAPE, averaged(5)), expected, np.full(3, averaged(7))
    for value, one in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(value), one)


def test_an_update_of_whole_arrays_is_told_once(strategy, caplog, monkeypatch):
    """On servers, by the names of the variables; where the copies are here nothing travels, and nothing is said."""
    monkeypatch.setattr(diagnostics, "_warned", set())  # each line is said once in a process
    v, u = (variable(strategy, np.ones(SHAPE, "float32")) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        for optimizer in (O.SGD(1.0), O.SGD(1.0, clipnorm=2.0), O.Lamb(1.0), O.SGD(1.0, momentum=0.5, sparse="dense")):
            for step in (0, 2):
                in_replicas(
                    strategy,
                    lambda r, s=step, o=optimizer: o.apply_gradients([(some_rows(s, r), v), (some_rows(s, r), u)]),
                )
    said = [record.getMessage() for record in caplog.records if "creates an array" in record.getMessage()]
    on_servers = kind_of(strategy) == "embedded"
    assert len(said) == 2 * on_servers
    assert all(any(repr(each.name) in line for line in said) for each in (v, u) if on_servers)
    for line in said:
        assert "creates an array of 84 bytes from a few rows" in line
        assert "If that is too slow, use another optimizer" in line
        assert "lazily" not in line


def test_lazily_is_said_of_what_could_be_lazy(shared, caplog, monkeypatch):
    """Of a function that is not elementwise it is not; of an optimizer it is an option. A function that the script
    makes anew in each step is the same update to its reader, and not told again."""
    strategy = shared("servers-2x2")
    monkeypatch.setattr(diagnostics, "_warned", set())

    class Looks(O.Optimizer):
        slots = ("pull",)

        def update(self, v, gradient, iterations, *slots):
            v.assign_sub(gradient + 0.5 * slots[0])

    v, u, w = (variable(strategy, np.ones(SHAPE, "float32")) for _ in range(3))
    optimizer = Looks(0.5)
    with caplog.at_level(logging.WARNING), strategy.scope():
        strategy.extended.update(v, lambda v, g: v.assign(g / np.sum(g)), (some_rows(0, 0)._with_shape(SHAPE),))
        in_replicas(strategy, lambda r: optimizer.apply_gradients([(some_rows(0, r), u)]))
        for _ in range(3):
            given = (some_rows(0, 0)._with_shape(SHAPE),)
            strategy.extended.update(w, lambda v, g: v.assign(0.5 * v + g), given)
    fn, rule, plain = (record.getMessage() for record in caplog.records)
    assert "lazily" not in fn
    assert "Use elementwise operations" in fn
    assert rule.endswith("To change only the given rows, use sparse='lazy' in the optimizer")
    assert plain.count("pass ps.lazy_update(fn)") == 1


def test_an_optimizer_of_wholes_is_not_lazy(strategy):
    """Lamb says so when it is built, and at a step if it was made lazy since; nothing has changed."""
    v = variable(strategy, np.ones(SHAPE, "float32"))
    words = f"a Lamb cannot train {v.name!r} with sparse='lazy'"
    step = lambda: in_replicas(strategy, lambda r: optimizer.apply_gradients([(some_rows(0, r), v)]))  # noqa: E731
    with strategy.scope():
        optimizer = O.Lamb(0.5, sparse="lazy")
        refused(ValueError, words, lambda: optimizer.build([v]))
    refused(ValueError, words, step)
    assert optimizer.variables == []
    optimizer.sparse = "dense"
    step()
    before = v.numpy()
    optimizer.sparse = "lazy"
    refused(ValueError, words, step)
    assert (v.numpy() == before).all()
    assert (before != 1).any()


def test_too_large_a_whole_array_is_refused(shared, monkeypatch):
    """Before anything is sent; the update of rows goes on."""
    strategy = shared("servers-2x2")
    monkeypatch.setattr(diagnostics, "WHOLE_BYTES", 80)
    v = variable(strategy, np.ones(SHAPE, "float32"))
    gradient = lambda r: some_rows(0, r)  # noqa: E731
    with pytest.raises(ps.errors.ProgramError, match=f"update of '{v.name}'.*at most 80 bytes are allowed.*dense'$"):
        in_replicas(strategy, lambda r: O.Lamb(1.0).apply_gradients([(gradient(r), v)]))
    assert (v.numpy() == 1).all()
    in_replicas(strategy, lambda r: O.SGD(1.0).apply_gradients([(gradient(r), v)]))
    np.testing.assert_array_equal(v.numpy(), 1 - whole(0, 0) - whole(0, 1))


BAD = {
    "too large": (np.ones((2, 3), "float32"), [0, 7], None, "id 7 at index 1 is not a row of 7"),
    "negative": (np.ones((2, 3), "float32"), [-1, 0], None, "id -1 at index 0 is not a row of 7"),
    "another shape": (np.ones((2, 3), "float32"), [0, 1], (8, 3), r"dense_shape is \(8, 3\), but must be \(7, 3\)"),
    "other rows": (np.ones((2, 2), "float32"), [0, 1], None, r"each row has shape \(2,\), but must have \(3,\)"),
}


@pytest.mark.parametrize("bad", BAD)
def test_rows_that_do_not_fit_are_refused(strategy, bad):
    """With the names of the variable and of who gave them; nothing changes, the dense variable neither."""
    *rows, why = BAD[bad]
    v, dense = variable(strategy, np.ones(SHAPE, "float32")), variable(strategy, np.ones(2, "float32"))
    optimizer, last = O.SGD(1.0), replicas(strategy) - 1

    def step(replica, bad=-1):
        mine = ps.IndexedSlices(*rows) if replica == bad else some_rows(0, replica)
        optimizer.apply_gradients([(np.ones(2, "float32"), dense), (mine, v)])

    with pytest.raises(ValueError, match=why) as caught:
        in_replicas(strategy, lambda replica: step(replica, last))
    task = strategy.extended.worker_devices[last].rpartition("/")[0]
    assert repr(v.name) in str(caught.value)
    assert task in str(caught.value) or kind_of(strategy) == "default"
    assert [float(x.numpy().min()) for x in (v, dense)] == [float(x.numpy().max()) for x in (v, dense)] == [1.0] * 2
    in_replicas(strategy, step)
    assert dense.numpy().tolist() == [1.0 - replicas(strategy)] * 2


# ---- Rows of dynamic tables ----

de = ps.dynamic_embedding
TABLES = kinds("servers-2x2", soak=["embedded-1"])
numbers = itertools.count()


def table_of(strategy, **options):
    """A table whose name no other has; its rows begin with zeros, as the plain variable's."""
    with strategy.scope():
        return de.get_variable(f"table{next(numbers)}", **{"dim": 3, "initializer": 0, **options})


def state_of(optimizer, table):
    """What has a row of a table, and of its slots, by their keys."""
    slots = [slot for slot in optimizer._state.of(table).slots if slot.ndim == table.ndim]
    return [each.lookup(KEYS).numpy() for each in (table, *slots)]


@TABLES
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
    before = [*state_of(optimizer, table), dense.numpy()]
    step(2, np.inf)
    for one, other in zip([*state_of(optimizer, table), dense.numpy()], before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (float(optimizer.loss_scale), int(optimizer.skipped_steps), int(optimizer.iterations)) == (2.0, 1, 1)
    step(3)
    assert (dense.numpy() != before[-1]).all()


@kinds("servers-1x1")
def test_a_table_of_one_part_is_measured(strategy):
    """One server has all of it: the norm of two rows of length 5 is sqrt(50)."""
    table, dense = table_of(strategy), variable(strategy, np.zeros(2, "float32"))
    rows = ps.IndexedSlices(np.array([[3, 4, 0], [0, 4, 3]], "float32"), KEYS[:2])
    optimizer = O.SGD(1.0, global_clipnorm=1.0)
    strategy.run(lambda: optimizer.apply_gradients([(rows, table), (np.zeros(2, "float32"), dense)]))
    np.testing.assert_allclose(table.lookup(KEYS[:2]).numpy()[0], np.array([-3, -4, 0]) / np.sqrt(50), rtol=1e-6)


class Counted(O.Optimizer):
    """One that assigns a number in the update of its variable."""

    slots = ("count",)

    def initial_slot(self, slot, v):
        return np.zeros(())

    def update(self, v, gradient, iterations, *slots):
        slots[0].assign_add(1)
        v.assign_sub(self.learning_rate * gradient)


class Uneven(O.Adagrad):
    def initial_slot(self, slot, v):
        return np.arange(3.0).reshape(1, 3)


REFUSED = {
    "accumulation": (OPTIMIZERS["SGD, accumulated"], "cannot train table '{}'.*gradient_accumulation_steps=2"),
    "averages": (OPTIMIZERS["SGD, averaged"], "cannot train table '{}'.*use_ema=True"),
    "the whole": (OPTIMIZERS["Lamb"], "cannot train table '{}'.*a table has no size"),
    "dense": (partial(O.Adam, 0.1, sparse="dense"), "sparse='dense': a table has no size"),
    "uneven slots": (partial(Uneven, 0.5), "is a slot of table"),
}


@TABLES
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_table_cannot_have_is_refused(strategy, what):
    """With a sentence that says what to do, before anything is created."""
    (make, words), table = REFUSED[what], table_of(strategy)
    with strategy.scope():
        optimizer = make()
    refused(
        ValueError,
        words.format(table.name),
        lambda: optimizer.build([table]),
        lambda: in_replicas(
            strategy, lambda replica: optimizer.apply_gradients([(some_rows(0, replica, True), table)])
        ),
    )
    assert optimizer.variables == [] or what == "uneven slots"
    with pytest.raises(ps.errors.ProgramError, match=f"table {table.name!r} must run on.*not scalars"):
        in_replicas(strategy, lambda replica: Counted(0.5).apply_gradients([(some_rows(0, replica, True), table)]))


GIVEN = {
    "an array": (lambda: np.ones((3, 3), "float32"), "is a ndarray; pass rows.gradient"),
    "None": (lambda: None, "is None"),
    "another width": (
        lambda: ps.IndexedSlices(np.ones((1, 2), "float32"), [1]),
        r"row has shape \(2,\), but must have \(3,\)",
    ),
    "complex": (lambda: ps.IndexedSlices(np.ones((1, 3), "complex64"), [1]), "complex"),
}


@TABLES
@pytest.mark.parametrize("what", GIVEN)
def test_gradients_of_tables_that_are_none(strategy, what):
    """Each is an error that names the table, and changes nothing; what is one may be given in cross-replica context."""
    (make, words), table, optimizer = GIVEN[what], table_of(strategy), O.SGD(1.0)
    with pytest.raises(ValueError, match=words) as caught:
        in_replicas(strategy, lambda replica: optimizer.apply_gradients([(make(), table)]))
    assert repr(table.name) in str(caught.value)
    assert table.size() == 0
    given = by_replica(strategy, lambda replica: some_rows(3, replica, True))
    with strategy.scope():
        optimizer.apply_gradients([(given, table)])
    assert table.size() > 0
    assert set(table.keys().tolist()) <= set(KEYS.tolist())


@TABLES
def test_slots_begin_with_what_the_optimizer_says(strategy):
    """It is asked for one row; a row of a slot is there where the table has one. Slots of float16 tables are float32,
    as a variable's."""
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
    half, adam = table_of(strategy, value_dtype="float16", initializer=1.0), O.Adam(0.5)
    rows = ps.IndexedSlices(np.ones((1, 3), "float16"), [4])
    in_replicas(strategy, lambda replica: adam.apply_gradients([(rows, half)]))
    assert [slot.dtype for slot in adam._state.of(half).slots] == [np.float32] * 2
    assert half.lookup([4]).numpy().tolist() == [[0.5] * 3]


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
