"""psj.TrainState, its arrays and rows: values are those on the servers; memory does not change under an array."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from psclient.jax import arrays
from tests.kit.strategies import opened, refused
from tests.kit.workers import in_threads


def params():
    kernel, scales = np.array([[1, 2], [3, 4]], "f4"), np.array([[1], [2]], "f4")
    return {"dense": {"kernel": kernel, "bias": np.zeros(2, "f4")}, "scales": scales}


def create(strategy, tree=None, tx=None, **more):
    given = {"params": params() if tree is None else tree, "tx": ps.optimizers.SGD(1.0) if tx is None else tx}
    return psj.TrainState.create(**{"apply_fn": None, "strategy": strategy, **given, **more})


def ones(state):
    return jax.tree.map(jnp.ones_like, state.params)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_variables_have_the_names_of_their_paths(strategy):
    """Under one name for all; a leaf alone has that name. The state says what it is and fetches nothing."""
    state = create(strategy, {"dense": {"kernel": np.zeros(2, "f4")}, "scales": [np.zeros(1, "f4")]}, name="net")
    assert jax.tree.map(lambda v: v.name, state.variables) == {
        "dense": {"kernel": "net/dense/kernel"},
        "scales": {"0": "net/scales/0"},
    }
    assert create(strategy, np.zeros(2, "f4"), name="one").variables.name == "one"
    assert repr(create(strategy)) == "TrainState(3 parameters of 8 numbers, SGD)"


def test_only_the_newest_state_makes_steps(strategy):
    """Also in a function given to `run`; an older one keeps values that were seen, and says what to write."""
    state = create(strategy)
    equal(state.params, params())
    after = state.apply_gradients(grads=ones(state))
    equal(after.params, jax.tree.map(lambda x: x - 1, params()))
    equal(state.params, params())
    assert (state.step, after.step) == (0, 1)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(after.params))
    words = r"an outdated state.*state = state\.apply_gradients"
    refused(RuntimeError, words, lambda: state.apply_gradients(grads=ones(after)))
    newest = strategy.run(lambda: after.apply_gradients(grads=ones(after)))
    equal(newest.params, jax.tree.map(lambda x: x - 2, params()))
    assert strategy.run(lambda: newest.step) == 2
    unseen = create(strategy)
    after = unseen.apply_gradients(grads=jax.tree.map(jnp.asarray, params()))
    refused(RuntimeError, "outdated and its parameters were freed", lambda: unseen.params)
    equal(after.params, jax.tree.map(np.zeros_like, params()))


def test_a_state_is_a_pytree(strategy):
    """Compiled functions take it, once for all steps, with the model's function, such as `apply` of a module of Flax
    Linen; what a function of trees makes of it cannot make steps.
    """
    state = create(strategy, apply_fn=lambda params: sum(leaf.sum() for leaf in jax.tree.leaves(params)))
    traces = []

    def total(state, x):
        traces.append(state)
        return state.apply_fn(state.params) + state.step + x

    compiled = jax.jit(total)
    assert float(compiled(state, 1.0)) == 14
    state = state.apply_gradients(grads=ones(state))
    assert float(compiled(state, 1.0)) == 14 + 1 - 8
    assert len(traces) == 1
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[:2] == [".step", ".params['dense']['bias']"]
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert doubled.step == 2
    words = r"made by a pytree function.*state\.replace\(params"
    refused(RuntimeError, words, lambda: doubled.apply_gradients(grads=ones(doubled)))


def test_replaced_parameters_are_assigned(strategy):
    """With them, and what is assigned later, the next step goes on; a step or an optimizer cannot be replaced."""
    state = create(strategy)
    state = state.replace(params=jax.tree.map(lambda x: x + 10, state.params), apply_fn=ones)
    assert state.apply_fn is ones
    state = state.apply_gradients(grads=ones(state))
    equal(state.params, jax.tree.map(lambda x: x + 9, params()))
    with strategy.scope():
        state.variables["scales"].assign([[7.0], [8.0]])
    assert state.params["scales"].tolist() == [[7.0], [8.0]]


@pytest.mark.parametrize("kind", ["mirrored-1", "embedded-1"])
def test_other_strategies_with_one_replica_do_the_same(kind):
    """Without servers, and with one of the process's own; that of the scope where none is given."""
    with opened(kind) as strategy, strategy.scope():
        state = psj.TrainState.create(apply_fn=None, params=params(), tx=psj.optimizers.sgd(1.0))
        state = state.apply_gradients(grads=ones(state))
        equal(state.params, jax.tree.map(lambda x: x - 1, params()))
        assert state.step == 1


def test_a_job_resumes_and_its_weights_are_read_by_others(tmp_path):
    """A checkpoint has parameters, slots and steps; safetensors reads it into a plain tree, which starts a job."""
    files = pytest.importorskip("safetensors.flax")

    def saves(strategy, worker):
        state = create(strategy, tx=psj.optimizers.adam(0.1))
        for _ in range(3):
            state = state.apply_gradients(grads=state.params)
        ps.train.Checkpoint(params=state.variables, tx=state.tx).save("run/ckpt")
        return state.apply_gradients(grads=state.params).params

    def resumes(strategy, worker):
        state = create(strategy, jax.tree.map(np.zeros_like, params()), psj.optimizers.adam(0.1))
        assert not state.params["dense"]["kernel"].any()
        ps.train.Checkpoint(params=state.variables, tx=state.tx).restore("run").assert_consumed()
        assert state.step == 3
        saved = state.params
        state = state.apply_gradients(grads=state.params)
        after = state.params
        ps.train.Checkpoint(state).restore("run").assert_consumed()
        equal(state.params, saved)
        return saved, after

    (expected,) = in_threads(saves, 1, 2, root=tmp_path)
    ((saved, after),) = in_threads(resumes, 1, 1, root=tmp_path)
    equal(after, expected)
    found = {}
    for path in (tmp_path / "run" / "ckpt-1").glob("*.safetensors"):
        found |= files.load_file(path)
    dense = {name: found[f"params/dense/{name}"] for name in ("kernel", "bias")}
    plain = {"dense": dense, "scales": found["params/scales"]}
    equal(plain, saved)
    with opened("embedded-1") as strategy:
        equal(create(strategy, plain).params, saved)


on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX has another default device")


def at(offset, size, dtype="f4"):
    """An array that begins at so many bytes behind a multiple of 64."""
    whole = arrays.empty((size + 16,), np.dtype(dtype))
    return whole[offset // whole.itemsize :][:size]


def is_same_memory(array, moved):
    return moved.unsafe_buffer_pointer() == array.ctypes.data


@on_cpu
@pytest.mark.parametrize("size", [1, 100, 1 << 16])
def test_what_is_aligned_is_not_copied(size):
    """To JAX; what XLA does not take is copied once, and of many the small ones by one call, in their order."""
    array, other = at(0, size), at(16, size)
    array[:], other[:] = 3, 4
    array.flags.writeable = False
    assert is_same_memory(array, arrays.to_jax(array).block_until_ready())
    moved = arrays.to_jax(other).block_until_ready()
    assert not is_same_memory(other, moved)
    assert float(moved[0]) == 4
    given = [at(0, 1 << 15), at(0, 8), at(16, 1 << 15), at(16, 8)]
    for number, each in enumerate(given):
        each[:] = number
    moved = jax.block_until_ready(arrays.all_to_jax(given))
    assert [float(each[0]) for each in moved] == [0, 1, 2, 3]
    assert [is_same_memory(*pair) for pair in zip(given, moved, strict=True)] == [True, False, False, False]


@on_cpu
def test_gradients_are_not_copied():
    """From JAX: what is sent is a view of the memory that JAX has computed in, which nobody may write to."""
    gradient = jnp.ones(1 << 16) + 0
    (view,) = arrays.to_host([gradient])
    assert view.ctypes.data == gradient.unsafe_buffer_pointer()
    assert (view.flags.writeable, view.flags.c_contiguous) == (False, True)


def test_old_parameters_are_free_before_the_new_ones_come(strategy):
    """Nobody holds what a state had whose successor has taken its name: memory has each parameter once."""
    state = create(strategy, np.zeros(1 << 16, "f4"))
    grads = jnp.ones(1 << 16)
    state = state.apply_gradients(grads=grads)
    old = weakref.ref(state.params)
    assert float(old()[0]) == -1
    state = state.apply_gradients(grads=grads)
    assert old() is None
    assert float(state.params[0]) == -2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_are_scaled_in_their_dtype(dtype):
    """By a third, with the rounding errors of that dtype."""
    with jax.enable_x64(dtype == "float64"):
        gradient = jnp.array([1.0, 3.0, 5.0], dtype)
        (found,) = arrays.scaled([gradient], 1 / 3)
        assert found.dtype == dtype
        expected = np.asarray(gradient, np.float64) / 3
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=float(jnp.finfo(dtype).eps))


# ---- Rows of tables ----


FIRST = np.arange(150, dtype="f4").reshape(50, 3) / 100


def static(strategy):
    with strategy.scope():
        return ps.Variable(FIRST, name="table")


def test_lookups_of_different_counts_are_few_compilations(strategy):
    """Of 16 rows, and then each of a quarter more. Those that nobody asked for are zeros: no place leads to them."""
    table, shapes = static(strategy), []

    @jax.jit
    def found(values, inverse):
        shapes.append((len(values), *inverse.shape))
        return values[inverse]

    for ids in ([4, 4, 1, 0], [9, 8, 7, 6], [2, 2, 2, 2], np.arange(16), np.arange(17), np.arange(21)):
        rows = psj.lookup(table, ids)
        np.testing.assert_array_equal(found(rows.values, rows.inverse), FIRST[np.array(ids)])
        assert not rows.values[rows.count :].any()
        assert rows.ids.tolist() == sorted(set(ids))
    assert shapes == [(16, 4), (16, 16), (20, 17), (25, 21)]
    rows = psj.lookup(table, jnp.array([3, 3]), pad=False)
    assert (rows.values.shape, rows.inverse.dtype, rows.inverse.tolist()) == ((1, 3), "int32", [0, 0])


def test_only_tables_may_be_trained(strategy):
    """Without a dense parameter, and with slots that are there from the beginning."""
    table = static(strategy)
    tx = psj.optimizers.adam(0.1)
    state = psj.TrainState.create(apply_fn=None, params={}, tx=tx, strategy=strategy, tables=[table])
    slots = [v.name.partition("/")[2] for v in state.tx.variables]
    assert {f"{table.name}/mu", f"{table.name}/nu"} <= {*slots}
    rows = psj.lookup(table, [1, 1])
    state = state.apply_gradients(grads={}, rows={rows: jnp.ones_like(rows.values)})
    assert (state.step, state.params) == (1, {})
    assert table.numpy()[1] == pytest.approx(FIRST[1] - 0.1, abs=1e-5)
    assert set(state._trackable_children()) == {"params", "tx", "tables"}
