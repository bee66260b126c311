"""Objects that NumPy reads as arrays: variables, and values that live on the servers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from psclient._src import context
from psclient._src.arrays import nest
from psclient._src.arrays.conversions import is_torch, to_dlpack, to_torch
from psclient._src.arrays.devices import AnyArray, Device, Value, as_array, to_device, to_numpy
from psclient._src.values import DistributedValues
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of

_CPU_OF_DLPACK = (1, 0)  # kDLCPU, and its number


class HostArray(np.ndarray[Any, np.dtype[Any]]):
    """A reduced value in host memory: NumPy's array, which also has the method that all reduced values have."""

    def numpy(self) -> Array:
        """The same as a plain array of NumPy."""
        return self.view(np.ndarray)

    def __repr__(self) -> str:
        return repr(self.numpy())

    def __array_wrap__(self, array: Array, context: Any = None, return_scalar: bool = False) -> Any:
        # What is computed with it is what NumPy makes of plain arrays, scalars included.
        plain = array.view(np.ndarray)
        return plain[()] if return_scalar else plain


def reduced_array(value: Any, device: Device) -> AnyArray:
    """A reduced value on a device, as an object of its own: of several replicas on the host each gets one."""
    array = to_device(value, device)
    return array.view(HostArray) if isinstance(array, np.ndarray) else array


class Readable(np.lib.mixins.NDArrayOperatorsMixin):
    """Behaves as the array that it holds, and fetches that when it is looked at.

    On a replica that is an array of its device. In an update function it is a tracer: what can be recorded
    is, and all else raises the tracer's own errors.
    """

    __array_priority__ = 1000  # CuPy's operators then leave the operation to us.

    spec: TensorSpec
    """Dtype and shape."""

    def _fetch(self) -> Array:
        """The value on the host."""
        raise NotImplementedError

    def _copy_on(self, device: Device) -> AnyArray:
        return to_device(self._fetch(), device)

    def _on_host(self) -> Value:
        lift = context.THREAD.entries[-1].lift
        return self._fetch() if lift is None else lift(self)

    # ---- What it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype, as NumPy has it."""
        return DTYPES[self.spec.dtype]

    # ---- Its value ----

    def read_value(self) -> Value:
        """Returns its value: a read-only array on the replica's device; in an update function a stand-in for it."""
        device = context.replica_device()
        return self._on_host() if device is None else self._copy_on(device)

    def numpy(self) -> Array:
        """Its value on the host, read-only."""
        lift = context.THREAD.entries[-1].lift
        return np.asarray(self._fetch() if lift is None else lift(self))

    def astype(self, dtype: npt.DTypeLike) -> Value:
        """Returns its value in another dtype."""
        return self.read_value().astype(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return to_dlpack(self.numpy(), **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU_OF_DLPACK

    @classmethod
    def __torch_function__(cls, func: Callable[..., Value], types: object, args: Any = (), kwargs: Any = None) -> Value:
        # Beside a tensor a number is a number, as one of NumPy is, and an array is a tensor.
        def theirs(leaf: Value) -> Value:
            if not isinstance(leaf, Readable):
                return leaf
            return leaf.numpy().item() if not leaf.shape else to_torch(np.array(leaf.numpy()))

        return func(*nest.map_structure(theirs, args), **nest.map_structure(theirs, kwargs or {}))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: Any) -> Value:
        if any(isinstance(out, Readable) for out in kwargs.get("out", ())):
            _refuse_in_place(self, f"np.{ufunc.__name__}")
        return getattr(ufunc, method)(*map(read, inputs), **kwargs)

    def __array_function__(self, func: Callable[..., Value], types: object, args: object, kwargs: object) -> Value:
        return func(*nest.map_structure(read, args), **nest.map_structure(read, kwargs))

    def __cupy_override_elementwise_kernel__(
        self, kernel: Callable[..., Value], *args: object, **kwargs: object
    ) -> Value:
        return kernel(*map(read, args), **kwargs)

    def __getitem__(self, key: object) -> Value:
        return self.read_value()[key]

    def __iter__(self) -> Iterator[Value]:
        return iter(self.read_value())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len() of {self!r}, which has no dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self._on_host())

    def __int__(self) -> int:
        return int(self._on_host())

    def __float__(self) -> float:
        return float(self._on_host())

    def __complex__(self) -> complex:
        return complex(self._on_host())

    def __index__(self) -> int:
        return operator.index(self._on_host())

    def __format__(self, spec: str) -> str:
        return format(self._on_host(), spec) if spec else str(self)


class LazyArray(Readable):
    """A value that comes when it is looked at, and then behaves as a `HostArray`, whose methods it has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(HostArray, name):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}, and NumPy arrays do not have it either"
            )
        return getattr(self.numpy(), name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, and what another process gets, is the value: the round is this process's.
        return np.asarray, (self.numpy(),)

    def __repr__(self) -> str:
        return repr(self.numpy())

    def __str__(self) -> str:
        return str(self.numpy())


class LazyCopy(LazyArray):
    """One replica's own object of a value that all of them have.

    Args:
        source: the value.
    """

    def __init__(self, source: LazyArray) -> None:
        self.spec = source.spec
        self.source = source

    def _fetch(self) -> Array:
        return self.source._fetch()


class Mirrored(Readable, DistributedValues):
    """A value that is the same on every replica. In cross-replica context it behaves as the first replica's."""

    @property
    def spec(self) -> TensorSpec:  # type: ignore[override]
        """Dtype and shape."""
        first = self.values[0]
        return first.spec if isinstance(first, Readable) else spec_of(as_array(first))

    def _mine(self) -> Any:
        index = context.local_replica(context.get_strategy()) or 0
        return self.values[index if index < len(self.values) else 0]

    def _fetch(self) -> Array:
        return to_numpy(read(self._mine()))

    def _copy_on(self, device: Device) -> AnyArray:
        return to_device(read(self._mine()), device)


def read(value: Any) -> Any:
    """The value of what is read as an array; anything else is itself."""
    return value.read_value() if isinstance(value, Readable) else value


def _refuse_in_place(value: Readable, op: str) -> NoReturn:
    raise TypeError(
        f"{op} cannot change {getattr(value, 'name', value)!r} in place, because the strategy replaces its "
        "value; for a variable use w.assign_add(1.0) or w.assign(w * 2.0)"
    )


def _operators() -> None:
    """Python's operators on values: the mixin would ask NumPy's ufuncs, which do not take CuPy arrays and variables."""

    def beside(apply: Callable[..., Value], reflected: bool) -> Callable[[Readable, Any], Value]:
        # To a tensor of PyTorch the operation is left: it asks `__torch_function__`.
        if reflected:
            return lambda self, other: NotImplemented if is_torch(other) else apply(read(other), read(self))
        return lambda self, other: NotImplemented if is_torch(other) else apply(read(self), read(other))

    names = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift lt le eq ne gt ge"
    for name in names.split():
        apply = getattr(operator, f"__{name}__")
        setattr(Readable, f"__{name}__", beside(apply, False))
        setattr(Readable, f"__r{name}__", beside(apply, True))
        if hasattr(Readable, f"__i{name}__"):
            setattr(Readable, f"__i{name}__", lambda self, other, name=name: _refuse_in_place(self, f"i{name}"))
            change = getattr(operator, f"__i{name}__")
            setattr(LazyArray, f"__i{name}__", lambda self, other, change=change: change(self.numpy(), read(other)))
    Readable.__hash__ = object.__hash__  # type: ignore[method-assign]


_operators()
