"""Gradients of some rows: reductions, lazy updates, what is said of whole ones, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import psclient as ps
from psclient._src.tracing import diagnostics
from tests.kit.references import O
from tests.kit.strategies import by_replica, in_replicas, kind_of, merged, replicas, variable

SHAPE = (7, 3)
STEPS = 3


def slices(step, replica):
    """Rows of one replica in one step, of integers; some come twice, and one replica has none in one step."""
    rng = np.random.default_rng(10 * step + replica)
    count = 0 if (step, replica) == (1, 1) else 5  # then rows of the other alone
    ids = rng.integers(0, SHAPE[0], count)
    return ps.IndexedSlices(rng.integers(-3, 4, (count, SHAPE[1])).astype("float32"), ids)


def whole(step, replica):
    """The same as a whole array."""
    given, found = slices(step, replica), np.zeros(SHAPE, "float32")
    np.add.at(found, np.asarray(given.indices), np.asarray(given.values))
    return found


def test_all_copies_are_equal(strategy):
    """However many there are."""
    v = variable(strategy, np.ones(SHAPE, "float32"))
    with strategy.scope():
        optimizer = O.Adam(0.5)
    for step in range(STEPS):
        in_replicas(strategy, lambda replica, step=step: optimizer.apply_gradients([(slices(step, replica), v)]))
    copies = strategy.experimental_local_results(v)
    assert all((np.asarray(copy) == v.numpy()).all() for copy in copies)
    assert (v.numpy() != 1).any()


# ---- Reductions ----


def table_slices(replica):
    return ps.IndexedSlices(np.full((2, 3), replica + 1, "float32"), [replica % 7, 4], SHAPE)


def reduced(count, mean):
    found = np.zeros(SHAPE, "float32")
    for replica in range(count):
        np.add.at(found, [replica % 7, 4], np.float32(replica + 1))
    return found / np.float32(count) if mean else found


def test_arrays_and_rows_come_back_together(strategy):
    """In one answer, whichever was reduced first."""
    count = replicas(strategy)
    v = variable(strategy, np.zeros(SHAPE, "float32"))
    whole_of = by_replica(strategy, lambda replica: np.full(SHAPE, replica + 5, "float32"))
    few = by_replica(strategy, lambda replica: np.full(3, replica + 7, "float32"))
    given = by_replica(strategy, table_slices)
    with strategy.scope():
        values = [given, whole_of, given, few]
        found = strategy.extended.batch_reduce_to("SUM", [(value, v) for value in values])
    same = np.testing.assert_array_equal
    same(np.asarray(found[0]), reduced(count, mean=False))
    same(np.asarray(found[1]), np.full(SHAPE, sum(n + 5 for n in range(count))))
    same(np.asarray(found[2]), reduced(count, mean=False))
    same(np.asarray(found[3]), np.full(3, sum(n + 7 for n in range(count))))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_every_reduction_takes_rows(strategy, op):
    """It gives rows, each place once and in order, or what is made a whole array of them."""
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


# ---- Lazily ----


def decayed(v, m, g, rate=0.5):
    m.assign(rate * m + g)
    v.assign(v - rate * m - 0.25 * v)


def test_a_lazy_update_is_for_the_given_rows_alone(strategy):
    """As a loop in NumPy over the rows that are touched, step after step; all others stay."""
    start = np.arange(21, dtype="float32").reshape(SHAPE)
    v = variable(strategy, start)
    m = variable(strategy, np.ones(SHAPE, "float32"), beside=v)
    table, moment = start.copy(), np.ones(SHAPE, "float32")

    def step(s, g):
        total = s.extended.reduce_to("sum", g, v)
        s.extended.update(v, ps.lazily(decayed), (m, total))

    for number in range(STEPS):
        merged(strategy, step, by_replica(strategy, lambda replica, n=number: slices(n, replica)))
        given = [slices(number, replica) for replica in range(replicas(strategy))]
        touched = sorted({int(id) for one in given for id in one.indices})
        total = sum(whole(number, replica) for replica in range(replicas(strategy)))
        for id in touched:
            moment[id] = np.float32(0.5) * moment[id] + total[id]
            table[id] = table[id] - np.float32(0.5) * moment[id] - np.float32(0.25) * table[id]
    np.testing.assert_array_equal(v.numpy(), table)
    np.testing.assert_array_equal(m.numpy(), moment)


def test_a_lazy_update_needs_rows(strategy):
    """Of one gradient: of a whole one, or of two, it is refused, and changes nothing."""
    v = variable(strategy, np.ones(SHAPE, "float32"))
    one, other = (ps.IndexedSlices(np.ones((1, 3), "float32"), [n], SHAPE) for n in range(2))
    for args in ((np.ones(SHAPE, "float32"),), (one, other)):
        with (
            strategy.scope(),
            pytest.raises(
                ps.errors.ProgramError, match=r"a lazy update takes the rows of one gradient|cannot run lazily"
            ),
        ):
            strategy.extended.update(v, ps.lazily(lambda v, *gs: v.assign(sum(gs, 2 * v))), args)
    assert (v.numpy() == 1).all()


def test_two_gradients_of_rows_are_whole_in_an_update(strategy):
    """Their product is that of the whole arrays."""
    v = variable(strategy, np.ones(SHAPE, "float32"))

    def step(s, g, h):
        args = tuple(s.extended.batch_reduce_to("sum", [(g, v), (h, v)]))
        s.extended.update(v, lambda v, g, h: v.assign_add(g * h), args)

    merged(strategy, step, *(by_replica(strategy, lambda r, n=n: slices(n, r)) for n in (0, 2)))
    total = [sum(whole(n, replica) for replica in range(replicas(strategy))) for n in (0, 2)]
    np.testing.assert_array_equal(v.numpy(), 1 + total[0] * total[1])


# ---- What is said ----


@pytest.fixture
def nothing_said(monkeypatch):
    """Each line is said once in a process; it has not been said yet."""
    monkeypatch.setattr(diagnostics, "_warned", set())


@pytest.mark.usefixtures("nothing_said")
def test_an_update_of_whole_arrays_is_told_once(strategy, caplog):
    """On servers, by the names of the variables; where the copies are here nothing travels, and nothing is said."""
    v, u = (variable(strategy, np.ones(SHAPE, "float32")) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        for optimizer in (O.SGD(1.0), O.SGD(1.0, clipnorm=2.0), O.Lamb(1.0), O.SGD(1.0, momentum=0.5, sparse="dense")):
            for step in (0, 2):
                in_replicas(
                    strategy, lambda r, s=step, o=optimizer: o.apply_gradients([(slices(s, r), v), (slices(s, r), u)])
                )
    said = [record.getMessage() for record in caplog.records if "makes an array" in record.getMessage()]
    on_servers = kind_of(strategy) == "embedded"
    assert len(said) == 2 * on_servers
    assert all(any(repr(each.name) in line for line in said) for each in (v, u) if on_servers)
    for line in said:
        assert "makes an array of 84 bytes of some rows" in line
        assert "Take another optimizer where that is too much" in line
        assert "lazily" not in line


@pytest.mark.usefixtures("nothing_said")
def test_an_update_that_is_traced_again_is_not_told_again(shared, caplog):
    """A function that the script makes anew in each step is the same update to its reader."""
    strategy = shared("servers-2x2")
    v = variable(strategy, np.ones(SHAPE, "float32"))
    with caplog.at_level(logging.WARNING), strategy.scope():
        for _ in range(3):
            strategy.extended.update(v, lambda v, g: v.assign(0.5 * v + g), (slices(0, 0).with_shape(SHAPE),))
    assert [record.getMessage().count("pass ps.lazily(fn)") for record in caplog.records] == [1]


@pytest.mark.usefixtures("nothing_said")
def test_lazily_is_said_of_what_could_be_lazy(shared, caplog):
    """Of a function that is not elementwise it is not; of an optimizer it is an option."""
    strategy = shared("servers-2x2")

    class Looks(O.Optimizer):
        slots = ("pull",)

        def update(self, v, gradient, iterations, *slots):
            v.assign_sub(gradient + 0.5 * slots[0])

    v, u = (variable(strategy, np.ones(SHAPE, "float32")) for _ in range(2))
    optimizer = Looks(0.5)
    with caplog.at_level(logging.WARNING), strategy.scope():
        strategy.extended.update(v, lambda v, g: v.assign(g / np.sum(g)), (slices(0, 0).with_shape(SHAPE),))
        in_replicas(strategy, lambda r: optimizer.apply_gradients([(slices(0, r), u)]))
    fn, rule = (record.getMessage() for record in caplog.records)
    assert "lazily" not in fn
    assert "Write it of elementwise operations" in fn
    assert rule.endswith("Where only the given rows shall change, give the optimizer sparse='lazy'")


def test_an_optimizer_of_wholes_is_not_lazy(strategy):
    """Lamb says so when it is built, and at a step if it was made lazy since; nothing has changed."""
    v = variable(strategy, np.ones(SHAPE, "float32"))
    words = f"a Lamb cannot train {v.name!r} with sparse='lazy'"
    step = lambda: in_replicas(strategy, lambda r: optimizer.apply_gradients([(slices(0, r), v)]))  # noqa: E731
    with strategy.scope():
        optimizer = O.Lamb(0.5, sparse="lazy")
        with pytest.raises(ValueError, match=words):
            optimizer.build([v])
    with pytest.raises(ValueError, match=words):
        step()
    assert optimizer.variables == []
    optimizer.sparse = "dense"
    step()
    before = v.numpy()
    optimizer.sparse = "lazy"
    with pytest.raises(ValueError, match=words):
        step()
    assert (v.numpy() == before).all()
    assert (before != 1).any()


def test_too_large_a_whole_array_is_refused(shared, monkeypatch):
    """Before anything is sent; the update of rows goes on."""
    strategy = shared("servers-2x2")
    monkeypatch.setattr(diagnostics, "WHOLE_BYTES", 80)
    v = variable(strategy, np.ones(SHAPE, "float32"))
    gradient = lambda r: slices(0, r)  # noqa: E731
    with pytest.raises(ps.errors.ProgramError, match=f"update of '{v.name}'.*is refused"):
        in_replicas(strategy, lambda r: O.Lamb(1.0).apply_gradients([(gradient(r), v)]))
    assert (v.numpy() == 1).all()
    in_replicas(strategy, lambda r: O.SGD(1.0).apply_gradients([(gradient(r), v)]))
    np.testing.assert_array_equal(v.numpy(), 1 - whole(0, 0) - whole(0, 1))


BAD = {
    "too large": (lambda: ps.IndexedSlices(np.ones((2, 3), "float32"), [0, 7]), "id 7 at place 1 is no row of 7"),
    "negative": (lambda: ps.IndexedSlices(np.ones((2, 3), "float32"), [-1, 0]), "id -1 at place 0 is no row of 7"),
    "another shape": (
        lambda: ps.IndexedSlices(np.ones((2, 3), "float32"), [0, 1], (8, 3)),
        r"dense_shape is \(8, 3\), and must be \(7, 3\)",
    ),
    "other rows": (
        lambda: ps.IndexedSlices(np.ones((2, 2), "float32"), [0, 1]),
        r"each row has shape \(2,\), and must have \(3,\)",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_rows_that_do_not_fit_are_refused(strategy, bad):
    """With the names of the variable and of who gave them; nothing changes, the dense variable neither."""
    make, why = BAD[bad]
    v, dense = variable(strategy, np.ones(SHAPE, "float32")), variable(strategy, np.ones(2, "float32"))
    optimizer = O.SGD(1.0)
    last = replicas(strategy) - 1

    def step(replica):
        mine = make() if replica == last else slices(0, replica)
        optimizer.apply_gradients([(np.ones(2, "float32"), dense), (mine, v)])

    with pytest.raises(ValueError, match=why) as caught:
        in_replicas(strategy, step)
    task = strategy.extended.worker_devices[last].rpartition("/")[0]
    assert repr(v.name) in str(caught.value)
    assert task in str(caught.value) or kind_of(strategy) == "default"
    assert (v.numpy() == 1).all()
    assert (dense.numpy() == 1).all()
    in_replicas(strategy, lambda r: optimizer.apply_gradients([(np.ones(2, "float32"), dense), (slices(0, r), v)]))
    assert dense.numpy().tolist() == [1.0 - replicas(strategy)] * 2
