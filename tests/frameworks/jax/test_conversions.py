"""Arrays of JAX, wherever this package takes an array; and what becomes of those that are given away."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from tests.kit.strategies import WITH_A_PATH, entries, refused


def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


def traced():
    found = []
    jax.jit(lambda x: found.append(x))(jnp.ones(3))
    return found[0]


REFUSED = {
    "deleted": (deleted, "was deleted, because it was donated"),
    "traced": (traced, "is traced.*return it from the compiled function"),
    "random keys": (lambda: jax.random.split(jax.random.key(0), 3), r"jax\.random\.key_data"),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint16"])
def test_arrays_of_jax_are_arrays(strategy, dtype):
    """Of each dtype that variables have."""
    for name, call in entries(strategy).items():
        assert np.asarray(call(jnp.ones(3, dtype)), "float32").tolist() == [1.0, 1.0, 1.0], name


@pytest.mark.parametrize("kind", REFUSED)
def test_arrays_of_jax_without_values_are_refused(strategy, kind):
    """Each with its remedy, and the field of a nest."""
    make, remedy = REFUSED[kind]
    for name, call in entries(strategy).items():
        refused(TypeError, (r"\['x'\].*" if name in WITH_A_PATH else "") + remedy, lambda call=call: call(make()))


@pytest.mark.parametrize("size", [1_000, 3_000_000], ids=["small", "streamed"])
def test_a_donated_array_leaves_its_memory_to_what_was_given_it(strategy, size):
    """Donated gradients were sent as they were, and donated parameters change no variable."""
    donates = jax.jit(lambda x: x * 0 - 5, donate_argnums=0)
    params = {"w": np.ones(size, "float32")}
    state = psj.TrainState.create(
        apply_fn=None, params=params, tx=psj.optimizers.sgd(1.0), strategy=strategy, name=f"donated{size}"
    )
    for step in range(3):
        gradients = {"w": jnp.ones(size) * 2}
        state = state.apply_gradients(grads=gradients)
        donates(gradients["w"]).block_until_ready()  # its memory may be the result's
        values = state.params["w"]
        seen = np.array(values)
        assert np.unique(seen).tolist() == [-1.0 - 2 * step]
        donates(values).block_until_ready()
        assert np.unique(state.variables["w"].numpy()).tolist() == [-1.0 - 2 * step]


def test_a_value_of_jax_stays_what_it_was(strategy):
    """A variable that was made of an array, or assigned one, keeps its value when the array is donated."""
    donates = jax.jit(lambda x: x * 0 - 5, donate_argnums=0)
    first, second = jnp.ones(100_000), jnp.full(100_000, 2.0)
    with strategy.scope():
        v = ps.Variable(first, name="kept")
    donates(first).block_until_ready()
    assert np.unique(v.numpy()).tolist() == [1.0]
    v.assign(second)
    donates(second).block_until_ready()
    assert np.unique(v.numpy()).tolist() == [2.0]
