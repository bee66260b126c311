"""Optimizers over layouts: gradients of rows, variables in shards, dynamic tables, and several workers.

Whatever the layout, the steps are those that one process makes of whole gradients and whole variables.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import psclient as ps
from tests.kit.references import KEYS, MORE, OPTIMIZERS, SHAPE, some_rows, v1, whole
from tests.kit.strategies import SHARDS, by_replica, in_replicas, kinds, refused, replicas

O = ps.optimizers  # noqa: E741
de = ps.dynamic_embedding
STEPS = 3

ALL = OPTIMIZERS | MORE
LAZY = ("Adam, lazy", "LazyAdam")
ROWS = [name for name in ALL if not name.startswith("v1") and name not in LAZY]
SHARDED = [name for name in ALL if name != "Lamb"]
TABLES = sorted({*OPTIMIZERS, *LAZY} - {"SGD, accumulated", "SGD, averaged", "Lamb"})

CHOSEN = {
    ("mirrored-2", "plain", "rows"): ROWS,
    ("servers-2x2", "plain", "rows"): [
        *("SGD", "SGD, clipped by value", "SGD, clipped by norm", "SGD, clipped by all", "Adagrad", "Adadelta"),
        *("Adam", "Adam, dense", "Adam, AMSGrad", "Lamb", "Ftrl", "AdamW", "Nadam", "Adam, dynamically scaled"),
        *("SGD, momentum", "SGD, accumulated", "Adagrad by rows"),
    ],
    ("sharded-2x2", "sharded", "rows"): [
        *("SGD, averaged", "SGD, clipped by norm and accumulated", "Adagrad by rows", "RMSprop"),
        *("AdamW", "Adam, lazy", "Lion", "v1 Adam"),
    ],
    ("sharded-2x2", "sharded", "whole"): [
        *("SGD, accumulated", "SGD, by a schedule", "SGD, clipped by all", "Nadam", "Ftrl"),
        *("Adam, dynamically scaled", "v1 proximal Adagrad"),
    ],
    ("servers-2x2", "table", "rows"): [
        *("SGD, momentum", "SGD, clipped by norm", "SGD, clipped by all", "Adagrad by rows"),
        *("RMSprop", "Ftrl", "Nadam", "Adam, dynamically scaled", "Adam, lazy"),
    ],
}
"""Each optimizer on some servers, by the forms of its slots and its scratch."""
PRODUCT = [
    *itertools.product(("default", "mirrored-2", "servers-2x2"), ("plain",), ("rows",), ROWS),
    *itertools.product(("sharded-1x1", "sharded-2x2", "sharded-3x1"), ("sharded",), ("rows", "whole"), SHARDED),
    *itertools.product(("embedded-1", "servers-2x2"), ("table",), ("rows",), TABLES),
]


FORMS = {"rows": some_rows, "whole": whole, "keys": functools.partial(some_rows, keyed=True)}


def trained(strategy, make, form, layout="plain", start=1):
    """All that an optimizer makes of two tables, and of a dense variable, in some steps.

    Args:
        start: the least value in a table at first; 0 for nothing else.

    Returns:
        Rows of tables in between and at last, and of slots, by their ids or keys; then all else that is kept.
    """
    first = np.random.default_rng(0).integers(start, 8 * start + 1, SHAPE).astype("float32")
    ids = KEYS if layout == "table" else np.arange(SHAPE[0])
    with strategy.scope():
        if layout == "table":
            names = [f"{next(numbers)} {n}" for n in range(2)]
            tables = [de.get_variable(each, dim=SHAPE[1], initializer=0) for each in names]
        else:
            tables = [ps.Variable(first + n * start, name=f"table {n}") for n in range(2)]
        dense = ps.Variable(np.ones(2, "float32"), name="dense")
        optimizer = make()
    seen = []
    for step in range(STEPS):

        def replica_fn(replica, step=step):
            pairs = [(form(step + 5 * n, replica), v) for n, v in enumerate(tables)]
            optimizer.apply_gradients([*pairs, (np.full(2, replica + 1.0, "float32"), dense)])

        in_replicas(strategy, replica_fn)
        if step == 1:
            seen += [v.lookup(ids).numpy() for v in tables]
    sharded = all(isinstance(v, ps.ShardedVariable) and len(v.variables) == SHARDS for v in tables)
    assert sharded == (layout == "sharded")
    kept = optimizer.variables() if isinstance(optimizer, v1.Optimizer) else optimizer.variables
    kept = [v for v in kept if not v.name.endswith(("_staged", ".copy"))]
    seen += [v.lookup(ids).numpy() for v in (*tables, *kept) if len(v.shape) == 2]
    numbers_of = [] if layout == "table" else [v.numpy() for v in kept if len(v.shape) < 2]
    return [*seen, dense.numpy(), *numbers_of]


numbers = itertools.count()


@functools.cache
def locally(name, count, form, start=1):
    """What so many replicas of this process make without servers."""
    with ps.MirroredStrategy(devices=[f"cpu:{n}" for n in range(count)]) as strategy:
        return trained(strategy, ALL[name], form, start=start)


@pytest.mark.parametrize(
    ("strategy", "layout", "form", "name"),
    [
        pytest.param(*where, name, marks=[pytest.mark.soak] * (name not in CHOSEN.get(where, ())))
        for *where, name in PRODUCT
        for where in [tuple(where)]
    ],
    indirect=["strategy"],
    scope="module",
)
def test_a_layout_makes_the_steps_of_whole_variables(strategy, layout, form, name):
    """Bit for bit, on variables and all that the optimizer keeps, at last and in between; beside a dense variable."""
    start = int(layout != "table")
    given = FORMS["keys" if layout == "table" else form]
    found = trained(strategy, ALL[name], given, layout, start)
    expected = locally(name, replicas(strategy), FORMS[form] if name in LAZY else whole, start)
    # Sums of shards' sums of squares are rounded otherwise than one sum.
    rtol = 1e-6 if layout == "sharded" and ("norm" in name or "by all" in name) else 0
    for one, other in zip(found, expected if layout != "table" else expected[: len(found)], strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol)
    assert (found[0] != found[1]).any()


@kinds("servers-2x2")
def test_closed_forms_are_of_tables_too(strategy):
    """A row of a table has what a row of a variable has; the last bit depends on when it was made up."""
    make = functools.partial(O.Adam, 0.01, catch_up="closed_form")
    found = [trained(strategy, make, FORMS[form], layout, 0) for form, layout in (("keys", "table"), ("rows", "plain"))]
    for one, other in zip(found[0], found[1][: len(found[0])], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


SHARDED_ON = kinds("sharded-2x2", soak=["sharded-1x1", "sharded-3x1"])


@SHARDED_ON
def test_slots_and_averages_lie_beside_their_shards(strategy):
    """And have the names and shapes of a plain variable's; averages are of the whole. Decay is left out by the name of
    the whole. Lamb's steps have lengths of whole variables: it is refused, and nothing is done."""
    with strategy.scope():
        tables = [ps.Variable(np.ones(SHAPE, "float32"), name=f"excluded {n}") for n in range(3)]
        optimizer = O.Nadam(0.5, use_ema=True)
        decayed = O.SGD(0.5, weight_decay=0.1)
    table = tables[0]
    in_replicas(strategy, lambda replica: optimizer.apply_gradients([(whole(0, replica), table)]))
    places = [x.place for x in table.variables]
    m, v, product, *_ = optimizer._state.of(table).slots
    for slot in (m, v, optimizer.average(table)):
        assert isinstance(slot, ps.ShardedVariable)
        assert [x.place for x in slot.variables] == places
    assert [x.name.rpartition("/")[0] for x in (m, v, product)] == [f"nadam/{table.name}"] * 3
    assert (product.shape, [x.place for x in product.variables]) == ((), places)
    assert len({float(x.numpy()) for x in product.variables}) == 1
    in_replicas(strategy, lambda replica: optimizer.apply_gradients([(whole(2, replica), table)]))
    expected = optimizer.average(table).numpy()
    optimizer.finalize_variable_values([table])
    np.testing.assert_array_equal(table, expected)
    assert not np.array_equal(expected, np.ones(SHAPE))
    decayed.exclude_from_weight_decay([table], [f"{tables[1].name}$"])
    decayed.apply_gradients([(by_replica(strategy, lambda _: np.zeros(SHAPE, "float32")), v) for v in tables])
    np.testing.assert_array_equal(table, expected)
    assert [float(v[0, 0]) == 1 for v in tables[1:]] == [True, False]
    refused(ValueError, "Lamb needs the whole variable", lambda: O.Lamb(0.5).apply_gradients([(np.ones(SHAPE), table)]))
    np.testing.assert_array_equal(table, expected)


@SHARDED_ON
def test_a_shard_may_be_trained_alone(strategy):
    """Gradients by the shards, as TensorFlow's optimizers take them; bit for bit the same."""
    with strategy.scope():
        one, other = (ps.Variable(np.ones(SHAPE, "float32")) for _ in range(2))
        optimizer = O.Adam(0.5)

    def step(replica):
        gradient = whole(0, replica)
        parts = [gradient[rows] for rows in other.sharding.bounds]
        optimizer.apply_gradients([(gradient, one), *zip(parts, other.variables, strict=True)])

    in_replicas(strategy, step)
    np.testing.assert_array_equal(one, other)
