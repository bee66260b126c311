"""Losses of examples, and their average over the global batch: values only, there is no automatic differentiation.

    def step(x, labels):                                    # given to strategy.run
        per_example = ps.losses.sparse_categorical_crossentropy(labels, logits(x), from_logits=True)
        return ps.losses.compute_average_loss(per_example)

    loss = strategy.reduce("sum", strategy.run(step, args=batch), axis=None)

Names and formulas are those of `tf.nn` and of `tf.keras.losses` with `reduction="none"`.

averages    sums over examples, divided by the size of the global batch
examples    a loss for each example
labels      labels and weights beside predictions: devices, shapes, dtypes
"""

from psclient.losses.averages import compute_average_loss, scale_regularization_loss
from psclient.losses.examples import (
    binary_crossentropy,
    categorical_crossentropy,
    mean_squared_error,
    sparse_categorical_crossentropy,
)

__all__ = [
    "binary_crossentropy",
    "categorical_crossentropy",
    "compute_average_loss",
    "mean_squared_error",
    "scale_regularization_loss",
    "sparse_categorical_crossentropy",
]
