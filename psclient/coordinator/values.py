"""What an argument of a scheduled function may refer to, beside what it is: values that are elsewhere."""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar, Literal

from psclient._src.arrays.nest import Nest
from psclient._src.data.adapters import source_of
from psclient._src.options import InputContext
from psclient.coordinator import functions

Kind = Literal["dataset", "iterator"]


class Living:
    """The values of workers that this process refers to: workers forget all others. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._values: weakref.WeakValueDictionary[int, PerWorkerValues] = weakref.WeakValueDictionary()

    def add(self, value: PerWorkerValues) -> int:
        """Adds a value; returns its number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._values[number] = value
            return number

    def told(self) -> dict[str, Any]:
        """Returns the numbers of those that are referred to, and the next number, as JSON."""
        with self._lock:
            return {"living": sorted(self._values), "next": self._next}


LIVING = Living()


class PerWorkerValues:
    """A dataset, or an iterator over one, with a separate value on each worker.

    `ClusterCoordinator.create_per_worker_dataset` makes the dataset, and `iter` of that the iterator. As an argument of
    a scheduled function it is replaced by the value of the worker that runs the function: the worker makes the value
    with the registered function when it first needs it, and again after a restart. The coordinator does not have a
    value.

    Source: `tf.distribute.coordinator.PerWorkerValues`.
    """

    _nest_leaf: ClassVar[bool] = True

    def __init__(
        self, kind: Kind, function: str, of: PerWorkerValues | None = None, context: InputContext | None = None
    ) -> None:
        self.kind = kind
        self.number = LIVING.add(self)
        self._function = function
        self._of = of  # keeps the dataset of an iterator
        self._context = context or InputContext()
        self._spec: Nest = None

    def __iter__(self) -> PerWorkerValues:
        """Returns an iterator of each worker over its dataset, from the beginning."""
        if self.kind == "iterator":
            return self
        return PerWorkerValues("iterator", self._function, self)

    def __next__(self) -> Any:
        raise TypeError(
            "per-worker values exist only on workers; call next(iterator) in a scheduled function that "
            "takes the iterator as an argument"
        )

    @property
    def element_spec(self) -> Nest:
        """The shapes and dtypes of a batch, a nest of `ArraySpec`, for the first worker's dataset.

        Reading it calls the function that makes the dataset once in this process.

        Raises:
            TypeError: the function does not return a dataset with known batches, but for example a generator.
        """
        if self._of is not None:
            return self._of.element_spec
        if self._spec is None:
            made = functions.dataset_of(functions.named(self._function), lambda: self._context)
            self._spec = made.element_spec if hasattr(made, "element_spec") else source_of(made).spec()
        return self._spec

    def __repr__(self) -> str:
        return f"PerWorkerValues({self.kind} {self.number} of {self._function})"

    def _reference(self) -> dict[str, Any]:
        """Returns what a worker has to know to make it, as JSON."""
        dataset = self.number if self._of is None else self._of.number
        return {"kind": self.kind, "number": self.number, "dataset": dataset, "function": self._function}
