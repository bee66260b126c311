"""psj.TrainState and its arrays: values are those on the servers, and memory does not change under an array."""

from __future__ import annotations

import weakref
from collections import namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from psclient.jax import arrays
from pstesting.in_process import InProcessCluster
from tests.kit.strategies import opened


def params():
    kernel, scales = np.array([[1, 2], [3, 4]], "f4"), np.array([[1], [2]], "f4")
    return {"dense": {"kernel": kernel, "bias": np.zeros(2, "f4")}, "scales": scales}


def create(strategy, tree=None, tx=None, **more):
    given = {"params": params() if tree is None else tree, "tx": ps.optimizers.SGD(1.0) if tx is None else tx}
    return psj.TrainState.create(apply_fn=None, strategy=strategy, **given | more)


Pair = namedtuple("Pair", ["kernel", "bias"])


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


def test_each_state_has_an_optimizer_of_its_own(strategy):
    """One that another state has is refused by name: they would share its count."""
    tx = psj.optimizers.adam(0.1)
    state = create(strategy, tx=tx, name="own")
    with pytest.raises(
        ValueError, match=r"tx is the Adam 'adam.*' of another TrainState.*create one optimizer for each"
    ):
        create(strategy, tx=tx, name="other")
    state = state.apply_gradients(grads=ones(state))
    assert state.step == 1


def test_large_parameters_may_be_in_shards():
    """A partitioner of the strategy cuts them, and no bit is another."""

    def train(**keys):
        with (
            InProcessCluster(2) as cluster,
            ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), **keys) as strategy,
        ):
            state = create(strategy, tx=psj.optimizers.adam(0.1))
            for _ in range(3):
                state = state.apply_gradients(grads=ones(state))
            return isinstance(state.variables["dense"]["kernel"], ps.ShardedVariable), state.params

    cut, found = train(variable_partitioner=ps.experimental.partitioners.FixedShardsPartitioner(2))
    whole, expected = train()
    assert (cut, whole) == (True, False)
    equal(found, expected)


def test_only_the_newest_state_makes_steps(strategy):
    """Also in a function given to `run`; an older one keeps values that were seen, and says what to write."""
    state = create(strategy)
    equal(state.params, params())
    after = state.apply_gradients(grads=ones(state))
    equal(after.params, jax.tree.map(lambda x: x - 1, params()))
    equal(state.params, params())
    assert (state.step, after.step) == (0, 1)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(after.params))
    with pytest.raises(RuntimeError, match=r"an outdated state.*state = state\.apply_gradients"):
        state.apply_gradients(grads=ones(after))
    newest = strategy.run(lambda: after.apply_gradients(grads=ones(after)))
    equal(newest.params, jax.tree.map(lambda x: x - 2, params()))
    assert strategy.run(lambda: newest.step) == 2
    unseen = create(strategy)
    after = unseen.apply_gradients(grads=jax.tree.map(jnp.asarray, params()))
    with pytest.raises(RuntimeError, match="outdated and its parameters were freed"):
        _ = unseen.params
    equal(after.params, jax.tree.map(np.zeros_like, params()))


def test_a_state_is_a_pytree(strategy):
    """Compiled functions take it, once for all steps; what a function of trees makes of it cannot make steps."""
    state = create(strategy)
    traces = []

    def total(state, x):
        traces.append(state)
        return sum(leaf.sum() for leaf in jax.tree.leaves(state.params)) + state.step + x

    compiled = jax.jit(total)
    assert float(compiled(state, 1.0)) == 14
    state = state.apply_gradients(grads=ones(state))
    assert float(compiled(state, 1.0)) == 14 + 1 - 8
    assert len(traces) == 1
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths[:2] == [".step", ".params['dense']['bias']"]
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert doubled.step == 2
    with pytest.raises(RuntimeError, match=r"made by a pytree function.*state\.replace\(params"):
        doubled.apply_gradients(grads=ones(doubled))


def test_a_round_is_not_made_in_jit(strategy):
    """Neither a step nor a variable is created while JAX traces, nor is a row looked up."""
    state = create(strategy)
    with pytest.raises(TypeError, match=r"apply_gradients was called on traced gradients.*outside"):
        jax.jit(lambda grads: state.apply_gradients(grads=grads))(state.params)
    with pytest.raises(TypeError, match=r"params/w is traced.*outside of jax\.jit"):
        jax.jit(lambda w: create(strategy, {"w": w}))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"row ids of 'params/dense/kernel.*' are traced"):
        jax.jit(lambda ids: psj.lookup(state.variables["dense"]["kernel"], ids))(jnp.arange(2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_parameters_keep_their_dtype(strategy, dtype):
    """So do their values, to the last bit; with double precision switched on."""
    with jax.enable_x64(dtype == "float64"):
        name = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        start = np.array([1 / 3, -2.0, 1e-3], name)
        state = create(strategy, {"w": start}, ps.optimizers.SGD(0.5))
        assert state.params["w"].dtype == dtype
        np.testing.assert_array_equal(state.params["w"], start)
        state = state.apply_gradients(grads={"w": jnp.array([0, 1, 0], dtype)})
        np.testing.assert_array_equal(state.params["w"], np.array([1 / 3, -2.5, 1e-3], name))


@pytest.mark.parametrize(
    ("leaf", "error", "why"),
    [
        (
            np.zeros(2, "int32"),
            ValueError,
            "params/x is of int32, which cannot hold fractional steps; keep integers out",
        ),
        (np.zeros(2, bool), ValueError, "params/x is of bool, which cannot hold fractional steps"),
        (np.zeros(2, "complex64"), ValueError, "params/x is of complex64, and servers train real numbers"),
        (np.zeros(2), ValueError, "params/x is of float64, but JAX would compute in float32; use float32, or call"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), ValueError, "params/x is of float8_e4m3fn, and parameters must be of"),
        ("a word", TypeError, "params/x is a str; parameters must be arrays"),
        (lambda: jax.random.key(0), ValueError, "params/x is of key<fry>, and parameters must be of float16"),
    ],
)
def test_what_is_no_parameter_is_refused(strategy, leaf, error, why):
    with pytest.raises(error, match=why):
        create(strategy, {"x": leaf() if callable(leaf) else leaf})


def test_gradients_are_like_the_parameters(strategy):
    """What is missing, what is too much, and what has another shape is named; nothing of the step is done."""
    state = create(strategy)
    whole = ones(state)
    dense = whole["dense"]
    for grads, word in (
        ({"dense": dense}, r"the gradients lack params/scales.*pass a tree with the structure"),
        ({**whole, "more": jnp.ones(1)}, "the gradients have params/more"),
        ({**whole, "dense": Pair(**dense)}, "in other containers than the parameters"),
        (
            {**whole, "dense": {**dense, "bias": jnp.ones(3)}},
            r"variable 'params/dense/bias.*' has shape \(3,\), but the variable has \(2",
        ),
    ):
        with pytest.raises(ValueError, match=word):
            state.apply_gradients(grads=grads)
    equal(state.apply_gradients(grads=whole).params, jax.tree.map(lambda x: x - 1, params()))


def test_replaced_parameters_are_assigned(strategy):
    """With them, and what is assigned later, the next step goes on; a step or an optimizer cannot be replaced."""
    state = create(strategy)
    state = state.replace(params=jax.tree.map(lambda x: x + 10, state.params), apply_fn=ones)
    assert state.apply_fn is ones
    state = state.apply_gradients(grads=ones(state))
    equal(state.params, jax.tree.map(lambda x: x + 9, params()))
    with pytest.raises(
        TypeError, match=r"replace\(step, tx=\.\.\.\) is not supported; only params and apply_fn can be replaced"
    ):
        state.replace(step=0, tx=None)
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


def test_what_cannot_be_a_strategy_or_an_optimizer_is_refused(strategy):
    """A process is one replica, for JAX has all its devices; servers run their own optimizers, and two reductions."""
    with opened("mirrored-2") as two, pytest.raises(ValueError, match="has 2 replicas in this process, but JAX uses"):
        create(two)
    with pytest.raises(RuntimeError, match=r"no strategy is active; pass strategy=ps\.ParameterServerStrategy"):
        create(None)
    with pytest.raises(TypeError, match=r"tx is a function; use one of psj\.optimizers or ps\.optimizers"):
        create(strategy, tx=lambda g: g)
    with pytest.raises(ValueError, match="reduction is 'max'; use 'mean' or 'sum'"):
        create(strategy, reduction="max")


def worker(cluster):
    return ps.ParameterServerStrategy(cluster_resolver=cluster.resolver())


def test_a_job_resumes_and_its_weights_are_read_by_others(tmp_path):
    """A checkpoint has parameters, slots and steps; safetensors reads it into a plain tree, which starts a job."""
    files = pytest.importorskip("safetensors.flax")
    with InProcessCluster(2, checkpoint_root=tmp_path) as cluster, worker(cluster) as strategy:
        state = create(strategy, tx=psj.optimizers.adam(0.1))
        for _ in range(3):
            state = state.apply_gradients(grads=state.params)
        ps.train.Checkpoint(params=state.variables, tx=state.tx).save("run/ckpt")
        state = state.apply_gradients(grads=state.params)
        expected = state.params
    with InProcessCluster(1, checkpoint_root=tmp_path) as cluster, worker(cluster) as strategy:
        state = create(strategy, jax.tree.map(np.zeros_like, params()), psj.optimizers.adam(0.1))
        assert not state.params["dense"]["kernel"].any()
        ps.train.Checkpoint(params=state.variables, tx=state.tx).restore("run").assert_consumed()
        assert state.step == 3
        saved = state.params
        state = state.apply_gradients(grads=state.params)
        equal(state.params, expected)
        ps.train.Checkpoint(state).restore("run").assert_consumed()
        equal(state.params, saved)
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
def test_gradients_are_not_copied_and_donation_changes_nobodys_memory():
    """A compiled function that is given a parameter, or a gradient on its way, takes memory of its own."""
    host = at(0, 1 << 16)
    host[:] = 1
    moved = arrays.to_jax(host)
    gradient = jnp.ones(1 << 16) + 0
    (view,) = arrays.to_host([gradient])
    assert view.ctypes.data == gradient.unsafe_buffer_pointer()
    assert (view.flags.writeable, view.flags.c_contiguous) == (False, True)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for array in (moved, gradient):
        assert float(jax.block_until_ready(double(array))[-1]) == 2
    assert (host == 1).all()
    assert (view == 1).all()


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
