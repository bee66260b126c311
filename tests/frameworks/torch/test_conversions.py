"""Tensors of PyTorch, wherever this package takes an array."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kit.strategies import WITH_A_PATH, entries, refused

TAKEN = {
    "float16": torch.ones(3, dtype=torch.float16),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "int8": torch.ones(3, dtype=torch.int8),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "with a gradient": torch.ones(3, requires_grad=True) * 1,
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "strided": torch.ones(6)[::2],
    "expanded": torch.ones(1).expand(3),
    "transposed": torch.ones(3, 2).T[0],
}

REFUSED = {
    "sparse": (torch.ones(3).to_sparse(), r"is sparse.*x\.to_dense\(\)"),
    "CSR": (torch.ones(3, 3).to_sparse_csr(), r"is sparse.*x\.to_dense\(\)"),
    "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"x\.dequantize\(\)"),
    "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is nested.*to_padded_tensor"),
    "meta": (torch.ones(3, device="meta"), "on the meta device"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_tensors_are_arrays(strategy, kind):
    """Of any dtype and layout that NumPy or ml_dtypes can have, whether they need a gradient or not."""
    for name, call in entries(strategy).items():
        assert np.asarray(call(TAKEN[kind]), "float32").tolist() == [1.0, 1.0, 1.0], name


def test_lists_of_tensors_are_arrays(strategy):
    """Also of those that NumPy cannot read itself; where a list is a nest, its parts are."""
    calls = entries(strategy)
    for part in (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0, requires_grad=True)):
        for name in ("create", "assign", "step", "metric", "slices", "dataset"):
            assert np.asarray(calls[name]([part] * 3), "float32").tolist() == [1.0, 1.0, 1.0], name


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_are_no_arrays_are_refused(strategy, kind):
    """With the remedy, and the field of a nest."""
    tensor, remedy = REFUSED[kind]
    for name, call in entries(strategy).items():
        refused(TypeError, (r"\['x'\].*" if name in WITH_A_PATH else "") + remedy, lambda call=call: call(tensor))
