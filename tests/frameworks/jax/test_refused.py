"""What is wrong is told in a sentence, before anything is sent: what it is, and what to write instead."""

from __future__ import annotations

from collections import namedtuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from tests.kit.strategies import opened, refused

SIZE, DIM = 50, 3


def created(strategy, params=None, tx=None, **options):
    given = {"dense": {"kernel": np.ones((2, 2), "f4"), "bias": np.zeros(2, "f4")}} if params is None else params
    tx = ps.optimizers.SGD(1.0) if tx is None else tx
    return psj.TrainState.create(apply_fn=None, params=given, tx=tx, strategy=strategy, **options)


def leaf(value):
    return lambda strategy: created(strategy, {"x": value})


def twice(strategy):
    tx = psj.optimizers.adam(0.1)
    return [created(strategy, tx=tx, name=name) for name in ("own", "other")]


DTYPE = "dtype is 'bfloat16', which is not supported; slots have the"
LAMB = r"has no 'lamb'; available are adadelta, adagrad, adam, adamax, adamw, nadam, radam, sgd, with"
FRACTIONS = "which cannot hold fractional steps"
PARAMETERS = [
    (f"params/x is of int32, {FRACTIONS}; keep integers out", ValueError, leaf(np.zeros(2, "int32"))),
    (f"params/x is of bool, {FRACTIONS}", ValueError, leaf(np.zeros(2, bool))),
    ("params/x is of complex64, and servers train real numbers", ValueError, leaf(np.zeros(2, "complex64"))),
    ("x is of float64, but JAX would compute in float32; use float32, or call", ValueError, leaf(np.zeros(2))),
    ("x is of float8_e4m3fn, and parameters must be of", ValueError, leaf(np.zeros(2, ml_dtypes.float8_e4m3fn))),
    ("params/x is a str; parameters must be arrays", TypeError, leaf("a word")),
    ("x is of key<fry>, and parameters must be of float16", ValueError, lambda s: leaf(jax.random.key(0))(s)),
    ("tx is a function; use one of psj.optimizers or ps.optimizers", TypeError, lambda s: created(s, tx=lambda g: g)),
    ("reduction is 'max'; use 'mean' or 'sum'", ValueError, lambda s: created(s, reduction="max")),
    (DTYPE, ValueError, lambda s: psj.optimizers.adam(1e-3, mu_dtype="bfloat16")),
    (DTYPE, ValueError, lambda s: psj.optimizers.sgd(1e-3, 0.9, False, "bfloat16")),
    (LAMB, AttributeError, lambda s: psj.optimizers.lamb),
    ("b1 is 1, and must be at least 0 and less than 1", ValueError, lambda s: psj.optimizers.adam(1e-3, b1=1)),
    (r"tx is the Adam 'adam.*' of another TrainState.*create one optimizer for each", ValueError, twice),
]

Pair = namedtuple("Pair", ["kernel", "bias"])


def gradients(change):
    """A step with gradients that a function makes of the right ones; with these the next step goes on."""

    def step(strategy):
        state = created(strategy)
        right = jax.tree.map(jnp.ones_like, state.params)
        try:
            state.apply_gradients(grads=change(right["dense"]))
        finally:
            after = state.apply_gradients(grads=right)
            assert after.step == 1
            assert after.params["dense"]["bias"].tolist() == [-1.0, -1.0]

    return step


def shorter(d):
    return {"dense": {"kernel": d["kernel"]}}


def longer(d):
    return {"dense": {**d, "bias": jnp.ones(3)}}


def traced(call):
    """A call in a function that is compiled, of a state and the function's argument."""
    return lambda strategy: jax.jit(lambda x: call(created(strategy), x))(jnp.arange(2.0))


def apply(state, x):
    return state.apply_gradients(grads=jax.tree.map(lambda _: x, state.params))


def look_up(state, x):
    return psj.lookup(state.variables["dense"]["kernel"], x.astype(int))


STEPS = [
    ("the gradients lack params/dense/bias.*pass a tree with the structure", ValueError, gradients(shorter)),
    ("the gradients have params/more", ValueError, gradients(lambda d: {"dense": d, "more": d["bias"]})),
    ("in other containers than the parameters", ValueError, gradients(lambda d: {"dense": Pair(**d)})),
    (r"'params/dense/bias.*' has shape \(3,\), but the variable has \(2", ValueError, gradients(longer)),
    (r"replace\(step, tx=\.\.\.\) is not supported; only para", TypeError, lambda s: created(s).replace(step=0, tx=1)),
    ("apply_gradients was called on traced gradients.*outside", TypeError, traced(apply)),
    (r"params/w is traced.*outside of jax\.jit", TypeError, traced(lambda state, x: created(None, {"w": x}))),
    ("row ids of 'params/dense/kernel.*' are traced", TypeError, traced(look_up)),
]


def rows(given):
    """A step with rows, of a function of what was looked up, its gradient and the table."""

    def step(strategy):
        table = ps.Variable(np.ones((SIZE, DIM), "f4"), name="table")
        state, found = created(strategy, {"w": np.ones(DIM, "f4")}, tables=[table]), psj.lookup(table, [1, 2])
        try:
            state.apply_gradients(grads=state.params, rows=given(found, jnp.ones_like(found.values), table))
        finally:
            assert state.step == 0

    return step


PLACES, VALUES = jnp.zeros((2, 3), "int32"), jnp.ones((4, DIM))


def of_two(strategy, ids):
    return psj.lookup(ps.dynamic_embedding.group(["one", "two"], DIM, name="of two"), ids)


def weighted(weights, **options):
    return psj.embedding_bag(PLACES, VALUES, per_sample_weights=weights, **options)


ROWS = [
    (r"a key of rows is a ServerVariable; use rows=\{rows: d\}", TypeError, rows(lambda found, d, t: {t: d})),
    (r"rows of 'table.*' has shape \(2, 3\), but .* \(16, 3\)", ValueError, rows(lambda found, d, t: {found: d[:2]})),
    ("looked up twice for this step; look", ValueError, rows(lambda found, d, t: {found: d, psj.lookup(t, [3]): d})),
    ("in a variable or a table, not in a ndarray", TypeError, lambda s: psj.lookup(np.ones((2, 2)), [1])),
    ("ids for the tables of 'of two' are a list; pass a dict of ids", TypeError, lambda s: of_two(s, [1])),
    ("'third'", KeyError, lambda s: of_two(s, {"third": [1]})),
    ("'one'.*key -1 at position 0 is not from 0", ValueError, lambda s: of_two(s, {"two": [1], "one": [-1]})),
    ("mode is 'least'", ValueError, lambda s: psj.embedding_bag(PLACES, VALUES, mode="least")),
    (r"per_sample_weights of shape \(2, 3\) with mode 'mean'", ValueError, lambda s: weighted(jnp.ones((2, 3)))),
    (r"of shape \(3,\) with mode 'sum', for ids of shape", ValueError, lambda s: weighted(jnp.ones(3), mode="sum")),
    (r"ids of bags have shape \(2, 3\); pass", ValueError, lambda s: psj.embedding_bag(PLACES, VALUES, jnp.array([0]))),
    ("max_norm is 0 and norm_type 2.0; use pos", ValueError, lambda s: psj.embedding(PLACES, VALUES, 0)),
    ("id 50 at index 0 is not a row of 50", ValueError, rows(lambda found, d, t: psj.lookup(t, [SIZE]))),
]


@pytest.mark.parametrize(("words", "error", "call"), [*PARAMETERS, *STEPS, *ROWS])
def test_what_is_wrong_with_jax_is_told(strategy, words, error, call):
    """Parameters and optimizers; gradients, and what is called while JAX traces; rows. Nothing of the step is done."""
    with strategy.scope():
        refused(error, words, lambda: call(strategy))


def test_where_there_is_no_strategy():
    """Or several replicas in this process, for JAX has all its devices: it says so."""
    refused(RuntimeError, r"no strategy is active; pass strategy=ps\.ParameterServerStrategy", lambda: created(None))
    with opened("mirrored-2") as two:
        refused(ValueError, "has 2 replicas in this process, but JAX uses", lambda: created(two))
