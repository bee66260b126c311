"""Losses with a value for each example, on NumPy and CuPy arrays."""

from __future__ import annotations

import numpy as np

from psclient._src.arrays.devices import AnyArray, Value, device_of, device_scope
from psclient.losses.labels import class_pair, floating, namespace_of, pair

EPSILON = 1e-7
"""By how much probabilities are kept away from 0 and 1, as in Keras."""


def mean_squared_error(y_true: Value, y_pred: Value) -> AnyArray:
    """Returns the mean of squared differences over the last dimension. In any context.

    Source: `tf.keras.losses.mean_squared_error`.

    Args:
        y_true: labels, an array of shape (N, ..., D).
        y_pred: predictions, of the same shape; for (N, 1) the labels may be of shape (N,).

    Returns:
        An array of shape (N, ...), float64 for float64 predictions, else float32, on the device of the predictions.

    Raises:
        ValueError: the shapes differ, or there are no dimensions.
    """
    labels, predictions = _floating_pair(y_true, y_pred)
    with device_scope(device_of(predictions)):
        return ((predictions - labels) ** 2).mean(axis=-1)


def binary_crossentropy(
    y_true: Value, y_pred: Value, from_logits: bool = False, label_smoothing: float = 0.0
) -> AnyArray:
    """Returns the mean cross entropy of two classes over the last dimension. In any context.

    Source: `tf.keras.losses.binary_crossentropy`.

    Args:
        y_true: labels between 0 and 1, an array of shape (N, ..., D).
        y_pred: probabilities of class 1, or logits, of the same shape; for (N, 1) the labels may be of shape (N,).
            Probabilities are clipped to be 1e-7 away from 0 and 1.
        from_logits: True if `y_pred` has logits.
        label_smoothing: from 0 to 1, how far labels are moved towards 0.5.

    Returns:
        An array of shape (N, ...), float64 for float64 predictions, else float32, on the device of the predictions.

    Raises:
        ValueError: the shapes differ, there are no dimensions, or the smoothing is out of its range.
    """
    _check_smoothing(label_smoothing)
    labels, predictions = _floating_pair(y_true, y_pred)
    xp = namespace_of(predictions)
    with device_scope(device_of(predictions)):
        labels = labels * (1 - label_smoothing) + 0.5 * label_smoothing
        if from_logits:
            # No exponential of a positive number: it would overflow.
            losses = xp.maximum(predictions, 0) - predictions * labels + xp.log1p(xp.exp(-xp.abs(predictions)))
        else:
            p = xp.clip(predictions, EPSILON, 1 - EPSILON)
            losses = -(labels * xp.log(p) + (1 - labels) * xp.log1p(-p))
        return losses.mean(axis=-1)


def categorical_crossentropy(
    y_true: Value, y_pred: Value, from_logits: bool = False, label_smoothing: float = 0.0
) -> AnyArray:
    """Returns the cross entropy of labels that have a probability for each class. In any context.

    Source: `tf.keras.losses.categorical_crossentropy`.

    Args:
        y_true: labels, such as one-hot ones, an array of shape (N, ..., C).
        y_pred: probabilities, or logits, of the same shape. Probabilities are divided by their sum, and clipped to be
            1e-7 away from 0 and 1.
        from_logits: True if `y_pred` has logits.
        label_smoothing: from 0 to 1, how far labels are moved towards 1 / C.

    Returns:
        An array of shape (N, ...), float64 for float64 predictions, else float32, on the device of the predictions.

    Raises:
        ValueError: the shapes differ, there are no dimensions, or the smoothing is out of its range.
    """
    _check_smoothing(label_smoothing)
    labels, predictions = _floating_pair(y_true, y_pred)
    xp = namespace_of(predictions)
    with device_scope(device_of(predictions)):
        labels = labels * (1 - label_smoothing) + label_smoothing / labels.shape[-1]
        if from_logits:
            logs = _log_softmax(predictions)
        else:
            shares = predictions / predictions.sum(axis=-1, keepdims=True)
            logs = xp.log(xp.clip(shares, EPSILON, 1 - EPSILON))
        # A class that no label has costs nothing, also where its logit is minus infinity.
        return -(labels * xp.where(labels == 0, 0, logs)).sum(axis=-1)


def sparse_categorical_crossentropy(y_true: Value, y_pred: Value, from_logits: bool = False) -> AnyArray:
    """Returns the cross entropy of labels that are class numbers. In any context.

    Source: `tf.keras.losses.sparse_categorical_crossentropy`.

    Args:
        y_true: class numbers from 0 to C - 1, an array of shape (N, ...) or (N, ..., 1).
        y_pred: probabilities, or logits, of shape (N, ..., C). Probabilities are clipped to be 1e-7 away from 0 and 1,
            and divided by their sum.
        from_logits: True if `y_pred` has logits.

    Returns:
        An array of shape (N, ...), float64 for float64 predictions, else float32, on the device of the predictions.

    Raises:
        ValueError: the shapes do not fit, or a label is not a class number.
    """
    labels, predictions = class_pair(y_true, y_pred)
    predictions = floating(predictions)
    xp = namespace_of(predictions)
    with device_scope(device_of(predictions)):
        classes = predictions.shape[-1]
        with np.errstate(invalid="ignore"):  # A NaN is refused below.
            index = labels.astype(np.int64)
        if not bool(((index == labels) & (index >= 0) & (index < classes)).all()):
            raise ValueError(f"a label is not an integer from 0 to {classes - 1}, but there are {classes} classes")
        logits = predictions if from_logits else xp.log(xp.clip(predictions, EPSILON, 1 - EPSILON))
        return -xp.take_along_axis(_log_softmax(logits), index[..., None], axis=-1)[..., 0]


def _floating_pair(y_true: Value, y_pred: Value) -> tuple[AnyArray, AnyArray]:
    labels, predictions = pair(y_true, y_pred)
    if not predictions.ndim:
        raise ValueError("a loss is computed over the last dimension of an example, but got a number; pass arrays")
    predictions = floating(predictions)
    return labels.astype(predictions.dtype), predictions


def _log_softmax(logits: AnyArray) -> AnyArray:
    xp = namespace_of(logits)
    shifted = logits - logits.max(axis=-1, keepdims=True)  # The greatest becomes 0: no exponential overflows.
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing!r}, and must be between 0 and 1")
