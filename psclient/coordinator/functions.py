"""The functions that may be scheduled: every process registers the same ones, by name, as it imports them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from psclient._src.options import InputContext
from pswire.limits import MAX_FUNCTIONS, MAX_NAME

F = TypeVar("F", bound=Callable[..., Any])

_registered: dict[str, Callable[..., Any]] = {}


@overload
def function(fn: F) -> F: ...
@overload
def function(*, name: str) -> Callable[[F], F]: ...
def function(fn: Any = None, *, name: str = "") -> Any:
    """Registers a function that a coordinator may schedule, or that makes a dataset on each worker. A decorator.

    The coordinator sends the function's name and its arguments; the worker calls the function with that name that it
    has imported itself. So every process must register the same functions; a job with different ones does not start.

    Args:
        fn: the function, which is not changed.
        name: the name; by default the function's own.

    Returns:
        The function.

    Raises:
        TypeError: `fn` is not a function, or has no name of its own.
        ValueError: another function, at another place of the program, has the name; or there are too many functions.
    """
    if fn is None:
        return lambda fn: _register(fn, name)
    return _register(fn, name)


def _register(fn: F, name: str) -> F:
    if not callable(fn):
        raise TypeError(f"ps.coordinator.function takes a function, not {type(fn).__name__}")
    name = name or getattr(fn, "__name__", "")
    if not name or "<" in name or len(name) > MAX_NAME:
        raise TypeError(
            f"{fn!r} has no name that is the same in every process; use ps.coordinator.function(name='...')"
        )
    other = _registered.get(name)
    if other is not None and _place(other) != _place(fn):
        raise ValueError(
            f"two functions are registered as {name!r}: {_place(other)} and {_place(fn)}; give one of them another name"
        )
    if other is None and len(_registered) >= MAX_FUNCTIONS:
        raise ValueError(
            f"{MAX_FUNCTIONS} functions are registered, which is the limit; schedule one function with "
            "different arguments instead"
        )
    _registered[name] = fn
    return fn


def _place(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', repr(fn))}"


def name_of(fn: object, taker: str = "schedule") -> str:
    """Returns the name of a registered function; raises `TypeError` if it is none, for the method that takes it."""
    for name, registered in _registered.items():
        if registered is fn:
            return name
    if not callable(fn):
        what = f"{taker} takes a function, not {type(fn).__name__}"
        if hasattr(fn, "__iter__") and not isinstance(fn, str | bytes):
            what += (
                ": data are never sent; let a function with @ps.coordinator.function return the dataset, and give that "
                "to create_per_worker_dataset, so that each worker makes its own"
            )
        raise TypeError(what)
    raise TypeError(
        f"{getattr(fn, '__qualname__', fn)!r} is not registered; decorate it with @ps.coordinator.function, "
        "in a module that every process imports"
    )


def named(name: str) -> Callable[..., Any]:
    """Returns the function with a name; raises `KeyError` if there is none."""
    return _registered[name]


def dataset_of(fn: Callable[..., Any], context: Callable[[], InputContext]) -> Any:
    """Returns the dataset that a function makes, which takes nothing, or the context of a worker."""
    return fn(context()) if inspect.signature(fn).parameters else fn()


def registry() -> tuple[str, ...]:
    """Returns the names and parameters of all functions, in order: what all processes must have alike."""
    return tuple(f"{name}{_parameters(fn)}" for name, fn in sorted(_registered.items()))


def _parameters(fn: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin may have none to show
        return "(...)"
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(each.kind, '') + each.name for each in parameters)})"[:MAX_NAME]
