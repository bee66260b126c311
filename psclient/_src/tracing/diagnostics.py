"""Mistakes in the functions that users write: at which line of theirs they are, and what to write instead.

`fail` raises at the user's line that is running. The others are for what Python does not tell: a function that did not
run though it was called, a step that assigns nothing, noise in a function that is traced once, arrays that would
better be variables.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, NoReturn

from psclient._src.arrays import nest
from psclient._src.tracing.guards import Surroundings
from pswire.errors import ProgramError
from pswire.model.tensor import Array
from pswire.sizes import human

log = logging.getLogger("psclient")

LARGE = 1 << 20
"""Bytes of an array that a function brings along, from which on it is said that they travel at each call."""

_NOT_THE_USERS = frozenset({"psclient", "numpy", "cupy", "cupyx", "torch", "jax"})
_VALUE = "the update function is being traced and this value is not known yet; keep it an array"
_SHAPE = "only reductions and broadcasting change shapes in an update function; create the variable in another shape"
_SPREAD = "np.mean(np.square(x - np.mean(x)))"
_CAST = "write x.astype(dtype)"

_INSTEAD: dict[str, str] = {
    **dict.fromkeys(("item", "numpy", "tolist", "get", "cpu", "detach", "tobytes", "data"), _VALUE),
    **dict.fromkeys(("T", "mT", "transpose", "reshape", "flatten", "ravel", "squeeze", "view", "resize"), _SHAPE),
    **dict.fromkeys(("to", "float", "double", "half", "int", "long", "bool", "type", "cuda"), _CAST),
    "std": f"write np.sqrt({_SPREAD})",
    "var": f"write {_SPREAD}",
    **dict.fromkeys(("assign", "assign_add", "assign_sub"), "variables are assigned, not values; write x = value"),
    **dict.fromkeys(("value", "read_value"), "it is already a value"),
    "norm": "write np.linalg.norm(x)",
    "fill": "write v.assign(value)",
    "real": "there are no complex values in update functions",
    "imag": "there are no complex values in update functions",
}


@dataclass(frozen=True, eq=False)
class Brought:
    """An array or a number that an update function took from elsewhere, and not from its arguments.

    Attributes:
        value: the object itself; anything that NumPy makes an array of.
        array: a copy of it, as an array.
        line: the line of the user's code that combined it with a traced value.
        function: name of the function that has this line.
    """

    value: object
    array: Array
    line: str
    function: str

    @classmethod
    def here(cls, value: object, array: Array) -> Brought:
        """At the user's line that is running."""
        return cls(value, array, *_place(users_frame()))

    @property
    def is_number(self) -> bool:
        """True if it is a Python number."""
        return isinstance(self.value, int | float | complex)

    def same(self, other: Brought) -> bool:
        """Returns whether two calls brought the same."""
        if self.is_number:
            return repr(self.value) == repr(other.value)
        return (str(self), self.array.tobytes()) == (str(other), other.array.tobytes())

    def __str__(self) -> str:
        return f"{self.array.dtype}[{','.join(map(str, self.array.shape))}]"


class UnknownAttribute(ProgramError, AttributeError):
    """An attribute that arrays have and tracers do not: `hasattr` is False for it."""


class WrongDtype(ProgramError, TypeError):
    """A value of another kind, or none of numbers: a `TypeError` as well, as where variables are in this process."""


def instead_of(name: str, functions: Sequence[str]) -> str:
    """Returns what to write in place of an attribute that tracers do not have.

    Args:
        name: the attribute's name.
        functions: the names of NumPy's functions that tracers support.
    """
    if name in functions:
        return f"write np.{name}(x)"
    return _INSTEAD.get(name, "write NumPy functions or ps.ops")


def users_frame() -> FrameType | None:
    """The innermost frame that runs outside of this package and NumPy; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and not _is_users(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=1024)
def _is_users(module: object) -> bool:
    return str(module).partition(".")[0] not in _NOT_THE_USERS


def users_line() -> str:
    """Returns where the user's code is: "file:line", or "" if none runs."""
    frame = users_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def users_function() -> str:
    """The name of the user's function that runs, with its class's; "" if none does."""
    return _place(users_frame())[1]


def _place(frame: FrameType | None) -> tuple[str, str]:
    """The line of a frame, and its function's name; both "" without one."""
    return (f"{frame.f_code.co_filename}:{frame.f_lineno}", _short(frame.f_code.co_qualname)) if frame else ("", "")


def fail(message: str, kind: type[ProgramError] = ProgramError, at: str = "") -> NoReturn:
    """Raises an error at the user's line.

    Args:
        message: the fault, and the remedy.
        kind: the class of the error.
        at: the line to name, where it is not the innermost one that runs outside of this package and NumPy.
    """
    where = at or users_line()
    raise kind(f"{where}: {message}" if where else message)


def refuse_result(fn: Callable[..., object], result: object) -> None:
    """Raises `ProgramError` if a call of an update function has run nothing of it: a generator or a coroutine."""
    if not isinstance(result, GeneratorType | CoroutineType | AsyncGeneratorType):
        return
    if isinstance(result, CoroutineType):
        result.close()  # Or Python says that it was never awaited.
    name, line = _named(fn)
    fail(
        f"{name} returns a {type(result).__name__}, so its body was not run; use a plain function without "
        "`yield` and `async` that returns values, not a generator expression",
        at=line,
    )


def refuse_slots(optimizer: Any) -> None:
    """Raises an error if an optimizer's slots are not names, or its `update` does not take them.

    Raises:
        TypeError: `slots` is one word, of which each letter would be a name, or has a name twice.
        ProgramError: at the line of `update`, what it would be called with.
    """
    slots = optimizer.slots
    if isinstance(slots, str) or len(set(slots)) < len(slots):
        raise TypeError(
            f"slots of {type(optimizer).__name__} is {slots!r}, and must be a tuple of different names; for "
            'one name use slots = ("momentum",)'
        )
    taken = ("v", "gradient", "iterations", *slots)
    try:
        inspect.signature(optimizer.update).bind(*taken)
    except TypeError as error:
        name, line = _named(optimizer.update)
        fail(f"{name} is called with ({', '.join(taken)}): {error}; accept these arguments, or change slots", at=line)


def refuse_step(optimizer: Any, returned: object, variables: Sequence[object], assigned: bool) -> None:
    """Raises `ProgramError` if an optimizer's `update` returns something, which is lost, or assigns nothing.

    Args:
        optimizer: the optimizer with this `update`.
        returned: the result of `update`; variables, and None, are nothing.
        variables: the variables that it could assign.
        assigned: True if it has assigned the variable that it is to update.
    """
    name, line = _named(optimizer.update)
    if not all(any(leaf is known for known in (None, *variables)) for leaf in nest.flatten(returned)):
        refuse_result(optimizer.update, returned)
        fail(
            f"{name} returns a value, which is not used; assign it, as in v.assign(value), and return nothing", at=line
        )
    if not assigned:
        fail(f"{name} does not assign its variable, so a step changes nothing; write v.assign_sub(step)", at=line)


def refuse_changing(brought: Sequence[Brought], again: Sequence[Brought]) -> None:
    """Raises `ProgramError` if a function that is to be traced once brings something else along in another call.

    Args:
        brought: the values of the first of two calls that should do the same.
        again: the values of the second call.
    """
    for one, other in zip(brought, again, strict=False):
        if not one.same(other):
            what = "a number" if one.is_number else f"an array ({one})"
            fail(
                f"{one.function} makes {what} that differs in each call, such as noise; the function is "
                "traced once and would reuse the first one, so pass it as an argument, or add it to the "
                "gradient",
                at=one.line,
            )


def warn_of_large(brought: Iterable[Brought], fn: Callable[..., object], around: Surroundings | None) -> None:
    """Says of large arrays, once for each, that they travel to the servers in each call.

    Args:
        brought: arrays and numbers that a function took from elsewhere.
        fn: the traced function.
        around: the names that it reads, where they are known.
    """
    for one in brought:
        if one.array.nbytes >= LARGE and hasattr(one.value, "nbytes"):  # A list may be an argument.
            name = (around or Surroundings([fn])).name_of(one.value) or "an array"
            _warn_once(
                f"{one.line}: {one.function} uses {name} ({one}, {one.array.nbytes / 2**20:.0f} MiB), which "
                "is sent to the servers in each call; make it a variable with colocate_vars_with, and pass "
                "that"
            )


@functools.lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    log.warning(message)


def _short(name: str) -> str:
    return name.rpartition("<locals>.")[2]


def _named(fn: Callable[..., object]) -> tuple[str, str]:
    """A function's name, and the line where it begins."""
    own = inspect.unwrap(getattr(fn, "func", fn))
    code = getattr(own, "__code__", None)
    line = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""
    return _short(getattr(own, "__qualname__", "") or repr(own)), line


def refuse_whole_update(table: str, why: str | None) -> NoReturn:
    """Raises `ProgramError`: an update of a dynamic table does not run on the rows of a gradient alone.

    Args:
        table: the table's name.
        why: the reason why it cannot; None if it would change rows without a gradient.
    """
    reason = why or (
        "it changes rows without a gradient, as momentum and decay do; pass ps.exact_update(fn) to update "
        "such rows when they are used again, or ps.lazy_update(fn) to skip them"
    )
    fail(f"an update of table {table!r} must run on the rows of one gradient, because a table has no size: {reason}")


WHOLE_BYTES = 1 << 30
"""Largest array that an update makes of rows; a larger one is refused."""

_INSTEAD_OF_WHOLE = {
    (False, True): "To change only the given rows, pass ps.lazy_update(fn) to update",
    (False, False): "Use elementwise operations and sums along each row to run it on rows only",
    (True, True): "To change only the given rows, use sparse='lazy' in the optimizer",
    (True, False): "If that is too slow, use another optimizer",
}
"""What to do, by whether it is an optimizer's step, and whether it could be lazy."""

_SILENCED = "; sparse='dense' silences this warning"

_warned: set[tuple[str, ...]] = set()


def refuse_lazy_update(names: Sequence[str], why: str) -> NoReturn:
    """Raises `ProgramError`: an update that shall be lazy does not run on the rows of a gradient alone.

    Args:
        names: names of the variables that it is given.
        why: the reason why it cannot.
    """
    which = ", ".join(map(repr, names)) or "nothing"
    raise ProgramError(f"the update of {which} cannot run on given rows only (lazy): {why}")


def warn_of_whole(
    names: Sequence[str], nbytes: int, why: str | None, of_optimizer: bool = False, may_be_lazy: bool = True
) -> None:
    """Says once of each update that it makes a whole array of rows.

    Args:
        names: names of the variables that it assigns.
        nbytes: size of the array.
        why: the reason why it cannot run on rows; None if it would change rows without a gradient.
        of_optimizer: True if it is an optimizer's step, and no function of the script.
        may_be_lazy: True if it could be lazy.

    Raises:
        ProgramError: the array is too large.
    """
    which = ", ".join(map(repr, names)) or "nothing"
    reason = why or "it changes rows without a gradient, as momentum and decay do"
    update, array = f"the update of {which}", f"an array of {human(nbytes)} from a few rows in each step"
    remedy = _INSTEAD_OF_WHOLE[of_optimizer, may_be_lazy]
    silent = of_optimizer and not may_be_lazy
    if nbytes > WHOLE_BYTES:
        remedy = "Use another optimizer, or sparse='dense'" if silent else remedy
        raise ProgramError(
            f"{update} would create {array}, and at most {human(WHOLE_BYTES)} are allowed: {reason}. {remedy}"
        )
    if tuple(names) not in _warned:
        _warned.add(tuple(names))
        log.warning("%s", f"{update} creates {array}: {reason}. {remedy}{_SILENCED if silent else ''}")
