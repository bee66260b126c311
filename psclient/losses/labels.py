"""Labels and weights beside predictions: on their device, of fitting shapes."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from psclient._src.arraylike import read
from psclient._src.arrays.devices import AnyArray, Value, as_array, device_of, namespace, to_device


def beside(predictions: AnyArray, value: Value) -> AnyArray:
    """Returns a value as an array on the device of the predictions."""
    return to_device(read(value), device_of(predictions))


def namespace_of(array: AnyArray) -> ModuleType:
    """Returns the module whose functions take the array: `numpy`, or `cupy`."""
    return namespace(device_of(array))


def pair(y_true: Value, y_pred: Value) -> tuple[AnyArray, AnyArray]:
    """Returns labels and predictions of one shape, on the device of the predictions.

    Where one of them has a last dimension of size 1 that the other has not, the other gets it if it has one dimension,
    and else it goes, as in Keras: labels of shape (N,) are for predictions of shape (N, 1).

    Args:
        y_true: labels, an array.
        y_pred: predictions, an array.

    Raises:
        ValueError: the shapes differ otherwise.
    """
    predictions = as_array(read(y_pred))
    labels = beside(predictions, y_true)
    labels, predictions = _shortened(labels, predictions), _shortened(predictions, labels)
    if labels.shape != predictions.shape:
        raise ValueError(f"labels of shape {labels.shape} and predictions of shape {predictions.shape} differ")
    return labels, predictions


def _shortened(array: AnyArray, other: AnyArray) -> AnyArray:
    if array.ndim == other.ndim + 1 and array.shape[-1] == 1 and other.ndim > 1:
        return array[..., 0]
    return array[..., None] if array.ndim == 1 and other.ndim == 2 and other.shape[-1] == 1 else array


def class_pair(y_true: Value, y_pred: Value) -> tuple[AnyArray, AnyArray]:
    """Returns labels that number classes, and predictions with one dimension more, on the device of the predictions.

    Args:
        y_true: labels, of the predictions' shape without its last dimension, or with 1 there.
        y_pred: predictions, with a number for each class in the last dimension.

    Raises:
        ValueError: the shapes do not fit.
    """
    predictions = as_array(read(y_pred))
    given = labels = beside(predictions, y_true)
    if labels.ndim == predictions.ndim and labels.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if not predictions.ndim or labels.shape != predictions.shape[:-1]:
        raise ValueError(
            f"labels of shape {given.shape} do not match predictions of shape {predictions.shape}; pass one "
            "class number for each row of predictions"
        )
    return labels, predictions


def broadcast_weights(sample_weight: Value, values: AnyArray) -> AnyArray:
    """Returns a weight for each value, in the values' dtype and on their device.

    Args:
        sample_weight: a number for each value, for each row of them, or for all; None is 1 for all.
        values: the values to be weighted.

    Raises:
        ValueError: the weights do not fit the values.
    """
    xp = namespace_of(values)
    weights = beside(values, np.ones(()) if sample_weight is None else sample_weight).astype(values.dtype)
    shape = weights.shape
    if 0 < weights.ndim < values.ndim:
        weights = weights.reshape(shape + (1,) * (values.ndim - weights.ndim))
    try:
        return xp.broadcast_to(weights, values.shape)
    except ValueError:
        raise ValueError(
            f"weights of shape {shape} do not match values of shape {values.shape}; pass one weight for "
            "each value, or for each row of values"
        ) from None


def floating(array: AnyArray) -> AnyArray:
    """Returns the array in the dtype in which losses are computed: float64 as it is, all else as float32."""
    return array if array.dtype == np.float64 else array.astype(np.float32)
