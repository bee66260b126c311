"""Between NumPy and JAX on a CPU: what is not copied, and that nobody's memory changes under an array."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import psclient as ps
import psclient.jax as psj
from psclient.jax import arrays
from tests.kit.strategies import opened

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX has another default device")


def at(offset, size, dtype="f4"):
    """An array that begins at so many bytes behind a multiple of 64."""
    whole = arrays.empty((size + 16,), np.dtype(dtype))
    return whole[offset // whole.itemsize :][:size]


def is_same_memory(array, moved):
    return moved.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("size", [1, 100, 1 << 16])
def test_what_is_aligned_is_not_copied(size):
    """To JAX; what is not aligned, which XLA does not take, is copied once."""
    array = at(0, size)
    array[:] = 3
    array.flags.writeable = False
    assert is_same_memory(array, arrays.to_jax(array).block_until_ready())
    other = at(16, size)
    other[:] = 4
    moved = arrays.to_jax(other).block_until_ready()
    assert not is_same_memory(other, moved)
    assert float(moved[0]) == 4


def test_large_parameters_are_not_copied_and_small_ones_by_one_call():
    """Both have their values, in their order."""
    given = [at(0, 1 << 15), at(0, 8), at(16, 1 << 15), at(16, 8)]
    for number, array in enumerate(given):
        array[:] = number
    moved = jax.block_until_ready(arrays.all_to_jax(given))
    assert [float(array[0]) for array in moved] == [0, 1, 2, 3]
    assert [is_same_memory(*pair) for pair in zip(given, moved, strict=True)] == [True, False, False, False]


def test_gradients_are_not_copied():
    """From JAX: the array is a view of the memory that JAX has computed in."""
    gradient = jnp.arange(1000.0) * 2
    (host,) = arrays.to_host([gradient])
    assert host.ctypes.data == gradient.unsafe_buffer_pointer()
    assert not host.flags.writeable
    assert host.flags.c_contiguous


def test_donation_changes_nobodys_memory():
    """A compiled function that is given a parameter, or a gradient that is on its way, takes memory of its own."""
    host = at(0, 1 << 16)
    host[:] = 1
    moved = arrays.to_jax(host)
    gradient = jnp.ones(1 << 16) + 0
    (view,) = arrays.to_host([gradient])
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for array in (moved, gradient):
        assert float(jax.block_until_ready(double(array))[-1]) == 2
    assert (host == 1).all()
    assert (view == 1).all()


def test_old_parameters_are_free_before_the_new_ones_come():
    """Nobody holds what a state had whose successor has taken its name: memory has each parameter once."""
    with opened("embedded-1") as strategy:
        state = psj.TrainState.create(
            apply_fn=None, params=np.zeros(1 << 16, "f4"), tx=ps.optimizers.SGD(1.0), strategy=strategy
        )
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
