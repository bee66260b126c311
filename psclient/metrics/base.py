"""The base of all metrics, and what its subclasses share."""

from __future__ import annotations

import numpy as np

from psclient._src import context
from psclient._src.arraylike import read
from psclient._src.arrays.devices import AnyArray, Value, as_array, device_of, device_scope, to_numpy
from psclient._src.variables.kinds import read_together
from psclient._src.variables.variable import Variable, VariableAggregation, VariableSynchronization
from psclient.losses.labels import broadcast_weights
from pswire.model.tensor import Array


class Metric:
    """Base of all metrics. Create it inside `strategy.scope()`, in the same way on every process.

    A custom metric creates its sums with `add_variable`, adds to them in `update_state`, and computes `result` from
    `totals()`.

    Args:
        name: prefix of the names of its variables; by default that of its class.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__.lower()
        self.variables: list[Variable] = []
        self._by_name: dict[str, Variable] = {}
        self._strategy = context.get_strategy()

    def add_variable(self, name: str, shape: tuple[int, ...] = ()) -> Variable:
        """Creates a sum of float64 with a separate value in each replica.

        Args:
            name: second part of the variable's name, after the metric's.
            shape: shape of the sum.

        Returns:
            The variable.
        """
        variable: Variable = Variable(
            np.zeros(shape),
            name=f"{self.name}/{name}",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        self.variables.append(variable)
        self._by_name[name] = variable
        return variable

    def _trackable_children(self) -> dict[str, Variable]:
        """Returns what checkpoints save of it: its variables, by the names given to `add_variable`. In any context."""
        return dict(self._by_name)

    def totals(self) -> list[Array]:
        """Returns the values of its variables: in replica context this replica's, else the sums over all replicas.

        In cross-replica context this is one round for all variables, made by every process; with asynchronous workers
        the servers have the sums, and each process may read them independently.
        """
        strategy = self._strategy
        if context.is_default(strategy) or context.local_replica(strategy) is not None:
            return [v.numpy() for v in self.variables]
        whole = read_together(self.variables)
        if whole is not None:
            return whole
        here = strategy.extended.worker_devices[0]
        sums = strategy.extended.batch_reduce_to("sum", [(v, here) for v in self.variables])
        return [to_numpy(total) for total in sums]

    def update_state(self, *values: Value, **keys: Value) -> None:
        """Adds a batch to the metric. In replica context."""
        raise NotImplementedError

    def result(self) -> Value:
        """Returns the metric's value. In the contexts of `totals`."""
        raise NotImplementedError

    def __call__(self, *values: Value, **keys: Value) -> Value:
        """Takes a batch into account, and gives this replica's value. In replica context."""
        self.update_state(*values, **keys)
        return self.result()

    def reset_state(self) -> None:
        """Sets all variables of the metric to zero.

        In replica context it resets this replica's values, in cross-replica context those of all replicas. With
        asynchronous workers the call of one process resets the values of all processes.
        """
        for v in self.variables:
            v.assign(np.zeros(v.shape))

    def reset_states(self) -> None:
        """The older name of `reset_state`. In replica or cross-replica context."""
        self.reset_state()


def ratio(a: Value, b: Value) -> Value:
    """Returns the quotient; 0 where the divisor is 0."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)


def weighted(values: Value, sample_weight: Value) -> tuple[AnyArray, AnyArray]:
    """Returns the values and a weight for each, as float64 on the device of the values.

    Args:
        values: an array of numbers, of any shape.
        sample_weight: a number for each value, for each row of them, or for all; None counts each once.

    Raises:
        ValueError: the weights do not fit the values.
    """
    values = as_array(read(values))
    with device_scope(device_of(values)):
        values = values.astype(np.float64)
        return values, broadcast_weights(sample_weight, values)


def alike(y_true: Value, y_pred: Value) -> tuple[AnyArray, AnyArray]:
    """Returns labels and predictions as arrays.

    Raises:
        ValueError: the shapes differ.
    """
    labels, predictions = as_array(read(y_true)), as_array(read(y_pred))
    if labels.shape != predictions.shape:
        raise ValueError(f"labels of shape {labels.shape} and predictions of shape {predictions.shape} differ")
    return labels, predictions
