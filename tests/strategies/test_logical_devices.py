"""Logical devices: the documents give them to TPUs alone; with one for a replica arguments are checked."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kit.strategies import in_replicas, replicas, variable


def test_the_only_logical_device_is_the_replica_s_own(strategy):
    """The documents' examples with one device each: the same tensor comes back, in every context."""

    def step_fn(_):
        output = np.ones((4, 2, 8, 3)) + 1
        assigned = strategy.experimental_assign_to_logical_device(output, 0)
        split = strategy.experimental_split_to_logical_devices(assigned, [1, 1, 1, 1])
        return output is strategy.experimental_replicate_to_logical_devices(split)

    assert in_replicas(strategy, step_fn) == (True,) * replicas(strategy)
    assert step_fn(0)
    with strategy.scope():
        assert step_fn(0)


def test_all_that_has_a_shape_is_taken(strategy):
    """Variables, lists and numbers too."""
    v = variable(strategy)
    assert strategy.experimental_split_to_logical_devices(v, (1,)) is v
    assert strategy.experimental_split_to_logical_devices([[1, 2], [3, 4]], [1, 1]) == [[1, 2], [3, 4]]
    assert strategy.experimental_split_to_logical_devices(3.0, []) == 3.0


@pytest.mark.parametrize("device", [1, -1, 7])
def test_there_is_no_other_logical_device(strategy, device):
    """The error says how many there are, and who has more."""
    with pytest.raises(ValueError, match=rf"logical device {device} of one.*TPUStrategy"):
        strategy.experimental_assign_to_logical_device(np.ones(3), device)


@pytest.mark.parametrize(
    ("shape", "parts", "says"),
    [
        ((4, 6), [1], r"need one number for each dimension of shape \(4, 6\)"),
        ((4, 6), [1, 1, 1], r"need one number for each dimension of shape \(4, 6\)"),
        ((), [1], r"need one number for each dimension of shape \(\)"),
        ((4, 6), [1, 4], "a dimension of 6 cannot be split into 4 equal parts"),
        ((4, 6), [0, 1], "a dimension of 4 cannot be split into 0 equal parts"),
        ((4, 6), [2, 3], r"ask for 6 logical devices, and a replica has one here.*TPUStrategy"),
    ],
)
def test_a_split_fits_the_tensor_and_the_devices(strategy, shape, parts, says):
    """One number for each dimension, which divides it; their product is the number of logical devices."""
    with pytest.raises(ValueError, match=says):
        strategy.experimental_split_to_logical_devices(np.ones(shape), parts)
