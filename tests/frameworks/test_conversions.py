"""Arrays of PyTorch and JAX, wherever this package takes an array; and what becomes of those that are given away."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import WITH_A_PATH, entries, refused

ONES = [
    "torch.ones(3, dtype=torch.float16)",
    "torch.ones(3, dtype=torch.bfloat16)",
    "torch.ones(3, dtype=torch.int8)",
    "torch.ones(3, dtype=torch.uint16)",
    "torch.ones(3, requires_grad=True) * 1",
    "torch.nn.Parameter(torch.ones(3))",
    "torch.conj(torch.full((3,), -1j)).imag",
    "torch.ones(6)[::2]",
    "torch.ones(1).expand(3)",
    "torch.ones(3, 2).T[0]",
    "jax.numpy.ones(3, 'float16')",
    "jax.numpy.ones(3, 'bfloat16')",
    "jax.numpy.ones(3, 'float32')",
    "jax.numpy.ones(3, 'int8')",
    "jax.numpy.ones(3, 'uint16')",
]
"""Arrays of three ones."""

REFUSED = {
    "torch.ones(3).to_sparse()": r"is sparse.*x\.to_dense\(\)",
    "torch.ones(3, 3).to_sparse_csr()": r"is sparse.*x\.to_dense\(\)",
    "torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)": r"x\.dequantize\(\)",
    "torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])": "is nested.*to_padded_tensor",
    "torch.ones(3, device='meta')": "on the meta device",
    "jax.numpy.ones(3).deleted()": "was deleted, because it was donated",
    "jax.traced()": "is traced.*return it from the compiled function",
    "jax.random.split(jax.random.key(0), 3)": r"jax\.random\.key_data",
}
"""What is no array, and the remedy."""


def made(text, need):
    """The array of a text of this module."""
    framework = text.partition(".")[0]
    need(framework)
    if text == "jax.traced()":
        return traced()
    if text.endswith(".deleted()"):
        array = made(text.removesuffix(".deleted()"), need)
        array.delete()
        return array
    return eval(text, {framework: import_module(framework)})


def traced():
    found, jax = [], import_module("jax")
    jax.jit(lambda x: found.append(x))(jax.numpy.ones(3))
    return found[0]


@pytest.mark.parametrize("text", ONES)
def test_arrays_of_frameworks_are_arrays(strategy, need, text):
    """Of any dtype and layout that NumPy or ml_dtypes can have, whether they need a gradient or not."""
    array = made(text, need)
    for name, call in entries(strategy).items():
        assert np.asarray(call(array), "float32").tolist() == [1.0, 1.0, 1.0], name


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_array_is_refused(strategy, need, text):
    """With the remedy, and the field of a nest."""
    array = made(text, need)
    for name, call in entries(strategy).items():
        words = (r"\['x'\].*" if name in WITH_A_PATH else "") + REFUSED[text]
        refused(TypeError, words, lambda call=call: call(array))


@pytest.mark.parametrize("part", ["torch.tensor(1.0)", "torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)"])
def test_lists_of_tensors_are_arrays(strategy, need, part):
    """Also of those that NumPy cannot read itself; where a list is a nest, its parts are."""
    calls, tensors = entries(strategy), [made(part, need)] * 3
    for name in ("create", "assign", "step", "metric", "slices", "dataset"):
        assert np.asarray(calls[name](tensors), "float32").tolist() == [1.0, 1.0, 1.0], name


def test_torch_takes_what_was_reduced(strategy, need):
    """As a number or an array of NumPy: in tensors that are made of it, and beside tensors with gradients."""
    need("torch")
    torch = import_module("torch")
    for value in (np.float32(2.5), np.arange(3, dtype="float64")):
        reduced = strategy.reduce("SUM", value, axis=None)
        for make in (torch.tensor, torch.as_tensor, torch.asarray):
            made = make(reduced)
            assert made.tolist() == value.tolist()
            made.fill_(7)  # is torch's own
            assert np.asarray(reduced).tolist() == value.tolist()
        weight = torch.ones(3, requires_grad=True)
        for found in (weight * reduced, reduced * weight, weight + reduced):
            assert isinstance(found, torch.Tensor)
            assert found.dtype is (torch.float32 if value.ndim == 0 else torch.float64)
        (weight * reduced).sum().backward()
        assert weight.grad.tolist() == np.broadcast_to(value, 3).tolist()


# ---- Arrays of JAX that are given away ----


@pytest.fixture
def jax(need):
    need("jax")
    found = import_module("jax")
    donates = found.jit(lambda x: x * 0 - 5, donate_argnums=0)
    return SimpleNamespace(numpy=found.numpy, donate=lambda array: donates(array).block_until_ready())


@pytest.mark.parametrize("size", [1_000, 3_000_000], ids=["small", "streamed"])
def test_a_donated_array_leaves_its_memory_to_what_was_given_it(strategy, jax, size):
    """Donated gradients were sent as they were, and donated parameters change no variable."""
    psj = import_module("psclient.jax")
    params, tx = {"w": np.ones(size, "float32")}, psj.optimizers.sgd(1.0)
    state = psj.TrainState.create(apply_fn=None, params=params, tx=tx, strategy=strategy, name=f"donated{size}")
    for step in range(3):
        gradients = {"w": jax.numpy.ones(size) * 2}
        state = state.apply_gradients(grads=gradients)
        jax.donate(gradients["w"])  # its memory may be the result's
        values = state.params["w"]
        assert np.unique(np.array(values)).tolist() == [-1.0 - 2 * step]
        jax.donate(values)
        assert np.unique(state.variables["w"].numpy()).tolist() == [-1.0 - 2 * step]


def test_a_value_of_jax_stays_what_it_was(strategy, jax):
    """A variable that was made of an array, or assigned one, keeps its value when the array is donated."""
    first, second = jax.numpy.ones(100_000), jax.numpy.full(100_000, 2.0)
    with strategy.scope():
        v = ps.Variable(first, name="kept")
    jax.donate(first)
    assert np.unique(v.numpy()).tolist() == [1.0]
    v.assign(second)
    jax.donate(second)
    assert np.unique(v.numpy()).tolist() == [2.0]
