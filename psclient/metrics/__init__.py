"""Metrics that all replicas update and that are combined when they are read: their state is ON_READ variables.

    mean = ps.metrics.Mean()                 # in strategy.scope()
    mean.update_state(losses)                # in the function given to strategy.run
    mean.result()                            # outside of it: over all replicas of all workers, asynchronous ones too

Names and meanings are those of `tf.keras.metrics`; sums are float64, so that they stay exact in long epochs.

base          `Metric`, and what its subclasses share
averages      sums and means of values, of squared errors
accuracies    how often predictions meet labels
thresholds    counts of predictions above thresholds: curves, precision, recall
"""

from psclient.metrics.accuracies import Accuracy, BinaryAccuracy, SparseCategoricalAccuracy
from psclient.metrics.averages import Mean, MeanSquaredError, RootMeanSquaredError, Sum
from psclient.metrics.base import Metric
from psclient.metrics.thresholds import AUC, Precision, Recall

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "Mean",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "Sum",
]
