"""`tf.compat.v1.distribute` of r2.2 and r2.3: what `StrategyExtended` had besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from psclient._src import context, values
from psclient._src.arraylike import Mirrored
from psclient._src.context import StrategyFace
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.distribute import extended
from psclient._src.distribute.backend import Beside
from psclient._src.options import ReduceOp, ReduceOpName
from psclient._src.variables.variable import Variable


class StrategyExtended(extended.StrategyExtended):
    """The additional methods, with those that only `tf.compat.v1` has.

    Source: `tf.compat.v1.distribute.StrategyExtended`, r2.2 and r2.3.

    Args:
        container_strategy, backend: as `extended.StrategyExtended` has them.
    """

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Mirrors a value that every process has alike. In cross-replica context.

        Args:
            tensor: an array or number.
            destinations: a variable, a worker device, or a list of them.

        Returns:
            A mirrored value with a copy on each device; for one device, or a variable on servers, the array.

        Raises:
            ValueError: a per-replica value is given.
        """
        with self._cross_replica("broadcast_to"):
            if isinstance(tensor, values.DistributedValues) and not isinstance(tensor, Mirrored | Variable):
                raise ValueError("broadcast_to takes one value, and not a per-replica one; reduce it with reduce_to")
            place = self._destination(destinations, tensor)
            return self._bring(tensor, self._backend.group.devices[:1] if isinstance(place, Beside) else place)

    def read_var(self, v: Variable) -> Any:
        """A variable's value; of an ON_READ variable in cross-replica context the aggregate. In any context.

        Raises:
            TypeError: it is no variable.
            ValueError: it is one of another strategy.
        """
        whole = values.container(v)
        if not isinstance(whole, Variable):
            raise TypeError(f"read_var takes a variable, and not a {type(v).__name__}")
        whole.check_strategy(self._strategy)
        return v.read_value()

    def value_container(self, value: Any) -> Any:
        """The variable of which a value is one replica's copy; anything else itself. In any context."""
        return values.container(value)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> ArrayDataset:
        """`StrategyFace.experimental_make_numpy_dataset`; there are no sessions here. In any context."""
        dataset: ArrayDataset = self._strategy.experimental_make_numpy_dataset(numpy_input)
        return dataset

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Runs a function with the next batches of an iterator. In cross-replica context. Deprecated: use `run`.

        Args:
            fn: called as `fn(context, inputs)`, with a `MultiStepContext`; usually it calls `call_for_each_replica`.
            iterator: of a distributed dataset.
            iterations: how many batches.
            initial_loop_values: what `last_step_outputs` holds before the first step.

        Returns:
            The context, with what the last step has set.

        Raises:
            StopIteration: the iterator ended before.
        """
        with self._cross_replica("experimental_run_steps_on_iterator"):
            steps = MultiStepContext(initial_loop_values)
            for _ in range(iterations):
                fn(steps, next(iterator))
            return steps


class MultiStepContext:
    """What a function run by `experimental_run_steps_on_iterator` may set.

    Source: `tf.compat.v1.distribute.StrategyExtended`.

    Args:
        initial_loop_values: the first `last_step_outputs`.

    Attributes:
        last_step_outputs: by name what the last step has set, reduced if it was asked to be.
        non_tensor_outputs: by name what steps have set that is no array.
        run_op: None: the steps have run.
    """

    def __init__(self, initial_loop_values: Mapping[str, Any] | None = None) -> None:
        self.last_step_outputs: dict[str, Any] = dict(initial_loop_values or {})
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op = None

    def set_last_step_output(self, name: str, output: Any, reduce_op: ReduceOp | ReduceOpName | None = None) -> None:
        """Sets an output of this step. In replica context, then with a reduction, or in cross-replica context.

        Args:
            name: what `last_step_outputs` has it under.
            output: an array, or a per-replica value.
            reduce_op: how it is combined over all replicas; None keeps it as it is.

        Raises:
            ValueError: in replica context without a reduction.
        """
        if _across_replicas():
            self._set(context.get_strategy(), name, output, reduce_op)
            return
        if reduce_op is None:
            raise ValueError(f"output {name!r} is set in replica context, where replicas differ; give a reduce_op")
        boxed = context.Box((name, output, reduce_op))
        context.require_replica("set_last_step_output").merge_call(self._set_boxes, (boxed,))

    def _set_boxes(self, strategy: StrategyFace, boxes: Any) -> None:
        name, _, reduce_op = values.local_results(boxes)[0].leaves
        self._set(strategy, name, context.unbox(boxes)[1], reduce_op)

    def _set(self, strategy: StrategyFace, name: str, output: Any, reduce_op: ReduceOp | ReduceOpName | None) -> None:
        alone = reduce_op is None or context.is_default(strategy)
        self.last_step_outputs[name] = output if alone else strategy.reduce(reduce_op, output, axis=None)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output that is no array; in replica context a tuple with that of each local replica is kept."""
        if _across_replicas():
            self.non_tensor_outputs[name] = output
            return
        boxed = context.Box((name, output))
        context.require_replica("set_non_tensor_output").merge_call(self._set_non_tensor, (boxed,))

    def _set_non_tensor(self, strategy: StrategyFace, boxes: Any) -> None:
        given = [box.leaves for box in values.local_results(boxes)]
        self.non_tensor_outputs[given[0][0]] = tuple(output for _, output in given)


def _across_replicas() -> bool:
    """In cross-replica context, or with the default strategy, whose one replica has all there is."""
    return context.in_cross_replica_context() or not context.has_strategy()
