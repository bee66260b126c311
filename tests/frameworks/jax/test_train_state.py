"""psj.TrainState, its arrays, rows and bags, and modules of Flax: values are those on the servers, and memory does not
change under an array."""

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
    names = jax.tree.map(lambda v: v.name, state.variables)
    assert names == {"dense": {"kernel": "net/dense/kernel"}, "scales": {"0": "net/scales/0"}}
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
    Linen; what a function of trees makes of it cannot make steps."""
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


# ---- Modules of Flax NNX, whose parameters are attributes; `examples/keras_jax.py` has one of Keras ----

STEPS = 20
X = np.random.default_rng(0).normal(size=(32, 4)).astype("f4")
Y = np.sin(X[:, :1])


def make_net(nnx, seed=0):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 8, use_bias=False, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))

    return Net(nnx.Rngs(seed))


def test_a_module_of_nnx_is_trained_in_place(in_tmp_path):
    """As by `nnx.Optimizer`: parameters are those of the servers after each step, statistics are the module's own. What
    a checkpoint restores comes into a module, of any seed, when it is refreshed."""
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    @nnx.jit
    def gradients(module, x, y):
        return nnx.value_and_grad(lambda module: jnp.mean((module(x) - y) ** 2))(module)

    bound, alone = make_net(nnx), make_net(nnx)
    with opened("embedded-1") as strategy:
        ours = psj.Optimizer(bound, psj.optimizers.adam(1e-3), strategy=strategy)
        theirs = nnx.Optimizer(alone, optax.adam(1e-3), wrt=nnx.Param)
        assert ours.state.variables["layers"]["0"]["kernel"].name == "params/layers/0/kernel"
        for _ in range(STEPS):
            for module, optimizer in ((bound, ours), (alone, theirs)):
                _, grads = gradients(module, X, Y)
                optimizer.update(module, grads)
        assert ours.step == STEPS
        assert np.any(bound.norm.mean[...])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), nnx.state(bound), nnx.state(alone))
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(bound, nnx.Param)), ours.state.params)
        ps.train.Checkpoint(ours).save("run/ckpt")
    with opened("embedded-1") as strategy:
        module = make_net(nnx, seed=1)
        again = psj.Optimizer(module, psj.optimizers.adam(1e-3), strategy=strategy)
        ps.train.Checkpoint(again).restore("run").assert_consumed()
        again.refresh(module)
        assert again.step == STEPS
        np.testing.assert_array_equal(module.layers[0].kernel[...], bound.layers[0].kernel[...])


# ---- Bags of looked-up rows, and rows of a group of tables, in compiled functions ----

SIZE, DIM = 9, 3
BAGGED = np.random.default_rng(1).normal(size=(SIZE, DIM)).astype("f4")
IDS = np.array([[1, 2, 1], [8, 0, 3]])
WEIGHTS = np.array([[1.0, 0.5, 2.0], [0.0, 3.0, 1.0]], "f4")
RAGGED, OFFSETS = np.array([4, 4, 7, 2, 1]), np.array([0, 2, 2])
BAGS = [RAGGED[:2], RAGGED[2:2], RAGGED[2:]]


def table_of(strategy, name="table"):
    with strategy.scope():
        return ps.Variable(BAGGED, name=name)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("sqrtn", False), ("sqrtn", True)]
)
def test_bags_are_those_of_lookups(strategy, mode, weighted, max_norm):
    """Values and gradients, in a compiled function; with bags of one size, and with offsets and an empty bag."""
    table = table_of(strategy)
    d = np.arange(3.0 * DIM, dtype="f4").reshape(3, DIM)
    given = [
        (IDS, None, WEIGHTS if weighted else None, [*IDS], [*WEIGHTS]),
        (RAGGED, OFFSETS, WEIGHTS.ravel()[:5] if weighted else None, BAGS, np.split(WEIGHTS.ravel()[:5], [2, 2])),
    ]
    for ids, offsets, weights, bags, own in given:

        @jax.jit
        def pooled(values, inverse, offsets=offsets, weights=weights):
            options = {"max_norm": max_norm, "mode": mode, "per_sample_weights": weights}
            return psj.embedding_bag(inverse, values, None if offsets is None else jnp.asarray(offsets), **options)

        rows = psj.lookup(table, ids)
        theirs = ps.nn.embedding_lookup_sparse(table, bags, own if weighted else None, mode, max_norm)
        found, backward = jax.vjp(lambda values, rows=rows, pooled=pooled: pooled(values, rows.inverse), rows.values)
        np.testing.assert_allclose(found, np.asarray(theirs), rtol=1e-5, atol=1e-6)
        gradient, expected = rows.gradient(backward(d[: len(bags)])[0]), theirs.gradient(d[: len(bags)])
        assert gradient.indices.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(gradient.values, expected.values, rtol=1e-5, atol=1e-6)


def test_the_greatest_of_a_bag(strategy):
    """Zeros for an empty one; the offsets may have the end."""
    rows = psj.lookup(table_of(strategy), RAGGED)
    for offsets, last in ((OFFSETS, False), (np.array([0, 2, 2, 5]), True)):
        found = psj.embedding_bag(rows.inverse, rows.values, jnp.asarray(offsets), mode="max", include_last_offset=last)
        expected = [BAGGED[own].max(axis=0) if len(own) else np.zeros(DIM) for own in BAGS]
        np.testing.assert_allclose(found, np.array(expected), rtol=1e-6)


def test_rows_of_a_norm_and_of_zeros_have_gradients(strategy):
    """Padding is zeros, whose norm has no gradient."""
    rows = psj.lookup(table_of(strategy), IDS)
    found, d = jax.value_and_grad(lambda values: psj.embedding(rows.inverse, values, 1.0, 1.0).sum())(rows.values)
    norms = np.abs(BAGGED[IDS]).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, (BAGGED[IDS] / np.maximum(norms, 1)).sum(), rtol=1e-5)
    assert np.isfinite(np.asarray(d)).all()


def test_tables_of_a_group_are_looked_up_together(strategy):
    """One array of rows to differentiate by, with the places of each table's ids, and one gradient for the step."""
    with strategy.scope():
        tables = ps.dynamic_embedding.group(["user", "item", "other"], DIM, initializer=1.0)
    params, tx = {"w": np.ones(DIM, "f4")}, psj.optimizers.sgd(1.0)
    state = psj.TrainState.create(apply_fn=None, params=params, tx=tx, strategy=strategy, tables=[*tables.values()])
    ids = {"item": np.array([[5, 5], [2**48 - 1, 0]]), "user": jnp.array([5])}

    @jax.jit
    def gradients(params, values, inverse):
        def loss(params, values):
            items = psj.embedding_bag(inverse["item"], values, mode="sum")
            return ((items + psj.embedding(inverse["user"], values)) * params["w"]).sum()

        return jax.grad(loss, argnums=(0, 1))(params, values)

    tables.prefetch({name: np.asarray(own) for name, own in ids.items()})
    for _ in range(2):
        rows = psj.lookup(tables, ids)
        assert rows.count == 4
        assert {name: own.shape for name, own in rows.inverse.items()} == {"item": (2, 2), "user": (1,)}
        grads, d = gradients(params, rows.values, rows.inverse)
        state = state.apply_gradients(grads=grads, rows={rows: d})
    found = {name: table.gather([0, 5, 2**48 - 1])[:, 0].tolist() for name, table in tables.items()}
    assert found == {"user": [1, -3, 1], "item": [-1, -3, -1], "other": [1, 1, 1]}
    assert psj.lookup(tables, {}).count == 0
