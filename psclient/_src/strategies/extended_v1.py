"""`tf.compat.v1.distribute` of r2.2 and r2.3: what `StrategyExtended` had besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from psclient._src import context, values
from psclient._src.arraylike import Mirrored
from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Leaf, Nest
from psclient._src.context import StrategyFace
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.distribute import extended
from psclient._src.distribute.destinations import OnWorkers, to_devices
from psclient._src.options import ReduceOp, ReduceOpName
from psclient._src.variables.variable import Variable


class StrategyExtended(extended.StrategyExtended):
    """The additional methods of a strategy, with those that only `tf.compat.v1` has.

    Source: `tf.compat.v1.distribute.StrategyExtended`, r2.2 and r2.3.

    Args:
        container_strategy: as in `extended.StrategyExtended`.
        backend: as in `extended.StrategyExtended`.
    """

    def broadcast_to(self, tensor: Value, destinations: object) -> Value:
        """Mirrors a value that is the same in every process. In cross-replica context.

        Args:
            tensor: an array or number.
            destinations: a variable, a worker device, or a list of them.

        Returns:
            A mirrored value with a copy on each device; for one device, or a variable on servers, the array.

        Raises:
            ValueError: `tensor` is a per-replica value.
        """
        with context.across_replicas(self._strategy, "broadcast_to"):
            if isinstance(tensor, values.DistributedValues) and not isinstance(tensor, Mirrored | Variable):
                raise ValueError("broadcast_to takes one value, not a per-replica value; reduce it with reduce_to")
            place = self._destination(destinations, tensor)
            return to_devices(
                tensor, place.devices if isinstance(place, OnWorkers) else self._backend.group.devices[:1]
            )

    def read_var(self, v: Variable) -> Any:
        """Returns a variable's value; for an ON_READ variable in cross-replica context the aggregate. In any context.

        Args:
            v: a variable of this strategy.

        Raises:
            TypeError: `v` is not a variable.
            ValueError: the variable belongs to another strategy.
        """
        whole = values.container(v)
        if not isinstance(whole, Variable):
            raise TypeError(f"read_var takes a variable, not a {type(v).__name__}")
        whole._check_strategy(self._strategy)
        return v.read_value()

    def value_container(self, value: Leaf) -> Leaf:
        """Returns the variable that a value is a replica's copy of; else the value itself. In any context."""
        return values.container(value)

    def experimental_make_numpy_dataset(self, numpy_input: object, session: None = None) -> ArrayDataset:
        """Returns `StrategyFace.experimental_make_numpy_dataset`'s dataset; sessions do not exist here.

        In any context.
        """
        dataset: ArrayDataset = self._strategy.experimental_make_numpy_dataset(numpy_input)
        return dataset

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], object],
        iterator: Iterator[object],
        iterations: int = 1,
        initial_loop_values: Mapping[str, object] | None = None,
    ) -> MultiStepContext:
        """Runs a function with the next batches of an iterator. In cross-replica context. Deprecated: use `run`.

        Args:
            fn: called as `fn(context, inputs)`, with a `MultiStepContext`; usually it calls `call_for_each_replica`.
            iterator: an iterator over a distributed dataset.
            iterations: the number of batches.
            initial_loop_values: `last_step_outputs` before the first step.

        Returns:
            The context, with the values that the last step has set.

        Raises:
            StopIteration: the iterator ended before `iterations` batches.
        """
        with context.across_replicas(self._strategy, "experimental_run_steps_on_iterator"):
            steps = MultiStepContext(initial_loop_values)
            for _ in range(iterations):
                fn(steps, next(iterator))
            return steps


class MultiStepContext:
    """Outputs of the function that `experimental_run_steps_on_iterator` runs.

    Source: `tf.compat.v1.distribute.StrategyExtended`.

    Args:
        initial_loop_values: the first `last_step_outputs`.

    Attributes:
        last_step_outputs: by name what the last step has set, reduced if it was asked to be.
        non_tensor_outputs: by name what steps have set that is no array.
        run_op: None: the steps have run.
    """

    def __init__(self, initial_loop_values: Mapping[str, object] | None = None) -> None:
        self.last_step_outputs: dict[str, Nest] = dict(initial_loop_values or {})
        self.non_tensor_outputs: dict[str, Nest] = {}
        self.run_op = None

    def set_last_step_output(self, name: str, output: object, reduce_op: ReduceOp | ReduceOpName | None = None) -> None:
        """Sets an output of this step. In replica context, then with a reduction, or in cross-replica context.

        Args:
            name: its key in `last_step_outputs`.
            output: an array, or a per-replica value.
            reduce_op: the reduction over all replicas; None keeps it as it is.

        Raises:
            ValueError: `reduce_op` is None in replica context.
        """
        if _across_replicas():
            self._set(context.get_strategy(), name, output, reduce_op)
            return
        if reduce_op is None:
            raise ValueError(
                f"output {name!r} was set in replica context, where replicas may have different values; pass a "
                "reduce_op"
            )
        boxed = context.Box((name, output, reduce_op))
        context.require_replica("set_last_step_output").merge_call(self._set_boxes, (boxed,))

    def _set_boxes(self, strategy: StrategyFace, boxes: Nest) -> None:
        name, _, reduce_op = values.local_results(boxes)[0].leaves
        self._set(strategy, name, context.unbox(boxes)[1], reduce_op)

    def _set(
        self, strategy: StrategyFace, name: str, output: object, reduce_op: ReduceOp | ReduceOpName | None
    ) -> None:
        if reduce_op is not None and not context.is_default(strategy):
            output = strategy.reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: object) -> None:
        """Sets an output that is no array; in replica context a tuple with that of each local replica is kept."""
        if _across_replicas():
            self.non_tensor_outputs[name] = output
            return
        boxed = context.Box((name, output))
        context.require_replica("set_non_tensor_output").merge_call(self._set_non_tensor, (boxed,))

    def _set_non_tensor(self, strategy: StrategyFace, boxes: Nest) -> None:
        given = [box.leaves for box in values.local_results(boxes)]
        self.non_tensor_outputs[given[0][0]] = tuple(output for _, output in given)


def _across_replicas() -> bool:
    """Returns True in cross-replica context, and with the default strategy, whose one replica has all there is."""
    return context.crosses_replicas() or not context.has_strategy()
