"""Pairs of a gradient and a variable: which an optimizer takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from psclient._src import values
from psclient._src.arrays.conversions import is_torch
from psclient._src.arrays.devices import Coming, as_array
from psclient._src.distribute.reduction import Absent
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.lookup import place_of
from psclient._src.variables.tables import TableVariable
from psclient._src.variables.variable import Variable


def check_variables(variables: Sequence[Any]) -> None:
    """Raises unless an optimizer can train these variables together.

    Raises:
        ValueError: there are none, or one is not trainable, or of integers, or given twice, or of another strategy.
        TypeError: one of them is no variable.
    """
    if not variables:
        raise ValueError("the optimizer got no variables; pass at least one, with its gradient")
    for v in variables:
        if not isinstance(v, Variable):
            raise TypeError(
                f"expected a variable, but got a {type(v).__name__}; pass (gradient, variable) pairs, with "
                "the same variables in all replicas"
            )
        if not v.trainable:
            raise ValueError(f"variable {v.name!r} is not trainable; create it with trainable=True, or leave it out")
        if v.dtype.kind in "iub":
            raise ValueError(
                f"variable {v.name!r} is of {v.dtype}, which cannot hold fractional steps; use a floating dtype"
            )
        v._check_strategy(variables[0].strategy)
    if len(set(map(id, variables))) < len(variables):
        raise ValueError("a variable is in several pairs; add up its gradients first")


def check_tables(optimizer: Any, tables: Sequence[TableVariable]) -> None:
    """Raises `ValueError`, which says what to do, where an optimizer cannot train dynamic tables.

    Args:
        optimizer: the optimizer, with its options.
        tables: the tables among the variables that it is given.
    """
    if not tables:
        return
    which = f"a {type(optimizer).__name__} cannot train table {tables[0].name!r}"
    for option, refuses, why in _NOT_FOR_TABLES:
        if refuses(getattr(optimizer, option)):
            raise ValueError(f"{which} with {option}={getattr(optimizer, option)!r}: {why}")
    if not optimizer._by_row:
        raise ValueError(f"{which}: its steps need the whole variable, but a table has no size; use another optimizer")


def check_lazy(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises `ValueError` where an optimizer whose `sparse` is "lazy" needs all of a variable for each step."""
    if not optimizer._by_row:
        name = getattr(variables[0], "name", None) if variables else None
        raise ValueError(
            f"a {type(optimizer).__name__} cannot train {name!r} with sparse='lazy', because its steps need "
            "the whole variable; use 'exact' or 'dense', or another optimizer"
        )


_NOT_FOR_TABLES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("use_ema", bool, "the average of a row would begin with the row's first value, but slots start with one number"),
    (
        "gradient_accumulation_steps",
        bool,
        "rows without a gradient in the last of these calls would miss the step; make the batch larger",
    ),
    ("sparse", lambda sparse: sparse == "dense", "a table has no size; use 'exact' or 'lazy'"),
)
"""Options that tables do not have, with a test of their values, and the reason."""


def has_rows(gradient: object) -> bool:
    """Returns whether a gradient of all replicas is of some rows, `IndexedSlices`."""
    own = gradient.like if isinstance(gradient, Absent) else gradient
    return any(isinstance(each, IndexedSlices) for each in values.local_results(own))


def check_gradients(gradients: Sequence[object], variables: Sequence[Variable]) -> None:
    """Raises unless all replicas' gradients can be steps of the variables.

    Raises:
        ValueError: a gradient is None, or of another shape, or complex where the variable is not.
    """
    for gradient, v in zip(gradients, variables, strict=True):
        if isinstance(gradient, Absent | Coming):
            continue
        if not (type(gradient) is np.ndarray and gradient.shape == v.spec.shape and gradient.dtype.kind in "fiub"):
            _check_gradient(gradient, v)


def _check_gradient(gradient: object, v: Variable) -> None:
    for own in values.local_results(gradient):
        if isinstance(v, TableVariable) and own is not None and not isinstance(own, IndexedSlices):
            raise ValueError(
                f"the gradient of table {v.name!r} is a {type(own).__name__}; pass rows.gradient(d) for "
                "rows that were looked up, or ps.IndexedSlices(rows, keys)"
            )
        if isinstance(own, IndexedSlices):
            own = own._with_shape(v.shape, lambda: f"the gradient of {place_of(v)}")
        if own is None:
            raise ValueError(f"the gradient of variable {v.name!r} is None; pass zeros, or leave the pair out")
        if is_torch(own) or not hasattr(own, "dtype"):
            try:
                own = as_array(own)
            except TypeError as error:
                raise TypeError(f"the gradient of variable {v.name!r} is not an array: {error}") from error
        shape = tuple(own.shape)
        if shape != v.shape:
            raise ValueError(f"the gradient of variable {v.name!r} has shape {shape}, but the variable has {v.shape}")
        if np.iscomplexobj(own) and v.dtype.kind != "c":
            raise ValueError(
                f"the gradient of variable {v.name!r} is complex, but the variable is {v.dtype}; pass gradient.real"
            )


class Exclusions:
    """Variables that are left out, themselves or by their names.

    Attributes:
        count: of both together, which only grows.
    """

    def __init__(self) -> None:
        self.count = 0
        self._variables: dict[int, Variable] = {}  # by the id of one that is in it
        self._names: set[str] = set()

    def add(self, variables: Iterable[Variable], names: Iterable[str]) -> None:
        """Leaves out more.

        Args:
            variables: the variables to leave out.
            names: regular expressions; variables whose name has one in it.

        Raises:
            TypeError: the names are one word, of which each letter would be a name.
        """
        if isinstance(names, str):
            raise TypeError(f"var_names is {names!r}, but must be a list of names; use var_names=[{names!r}]")
        self._variables |= {id(v): v for v in variables}
        self._names |= {re.compile(name).pattern for name in names}
        self.count = len(self._variables) + len(self._names)

    def __contains__(self, v: Variable) -> bool:
        return id(v) in self._variables or any(re.search(name, v.name) for name in self._names)
