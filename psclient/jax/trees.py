"""Pytrees of parameters: the name of each leaf, its dtype, and what differs between two trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from psclient._src.variables.variable import Variable
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that a parameter may have."""

Tree = Any
"""A pytree of arrays."""


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree of parameters.

    Attributes:
        path: its keys in the tree, as texts.
        name: name of its variable, such as "params/dense/kernel".
        value: the leaf itself; None where only its place is of account.
    """

    path: tuple[str, ...]
    name: str
    value: Any = None

    def without_value(self) -> Leaf:
        """Returns the leaf's place alone."""
        return Leaf(self.path, self.name)


def leaves_of(tree: Tree, prefix: str) -> tuple[list[Leaf], Any]:
    """Returns the leaves of a tree, in order, and its structure.

    Args:
        tree: a pytree.
        prefix: the first part of each name.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for keys, value in found:
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        leaves.append(Leaf(path, "/".join([prefix, *path]), value))
    return leaves, structure


def first_value(leaf: Leaf) -> Array:
    """Returns a parameter's value on the host.

    Raises:
        TypeError: it is no array of numbers, or a tracer.
        ValueError: it is of a dtype that is not trained, or that JAX would change.
    """
    if is_traced(leaf.value):
        raise InvalidType(
            f"{leaf.name} is traced, but variables are created on servers; create the state outside of jax.jit"
        )
    value = leaf.value if hasattr(leaf.value, "dtype") else _number(leaf)
    name = str(value.dtype)
    if name not in FLOATS:
        raise InvalidArgument(f"{leaf.name} is of {name}, {_WHY.get(_kind(value), _ELSE)}")
    if name == "float64" and jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        raise InvalidArgument(
            f"{leaf.name} is of float64, but JAX would compute in float32; use float32, or call "
            "jax.config.update('jax_enable_x64', True) first"
        )
    return np.asarray(value)


_WHY = {
    "c": "and servers train real numbers; make two parameters of its real and imaginary part",
    "i": "which cannot hold fractional steps; keep integers out of the parameters, and pass them as another argument",
}
_WHY |= dict.fromkeys("ub", _WHY["i"])
_ELSE = f"and parameters must be of {', '.join(FLOATS[:-1])} or {FLOATS[-1]}; keep it in a separate tree"


def _kind(value: Any) -> str:
    """Returns the kind of a value's dtype, as NumPy has it; "" for those that only JAX has, such as random keys."""
    return value.dtype.kind if isinstance(value.dtype, np.dtype) else ""


def _number(leaf: Leaf) -> Any:
    if not isinstance(leaf.value, int | float | complex):
        raise InvalidType(f"{leaf.name} is a {type(leaf.value).__name__}; parameters must be arrays of floating dtype")
    return jax.numpy.asarray(leaf.value)


def is_traced(value: object) -> bool:
    """Returns whether a value is what a function sees that JAX traces, such as in `jax.jit`."""
    return isinstance(value, jax.core.Tracer)


def check_alike(given: Tree, names: Iterable[str], structure: Any, prefix: str, what: str) -> list[Any]:
    """Returns the leaves of a tree that has the structure of the parameters.

    Args:
        given: the tree.
        names: the names of all parameters.
        structure: their structure.
        prefix: the first part of these names.
        what: a word for the tree, for messages.

    Raises:
        ValueError: it has another structure; what is missing, and what is too much, is named.
    """
    leaves: list[Any] = jax.tree_util.tree_leaves(given)
    found = jax.tree_util.tree_structure(given)
    if found == structure:
        return leaves
    known, there = set(names), {leaf.name for leaf in leaves_of(given, prefix)[0]}
    differences = (("lack", known - there), ("have", there - known))
    parts = [f"{what} {verb} {', '.join(sorted(some))}" for verb, some in differences if some]
    raise InvalidArgument(
        f"{' and '.join(parts) or f'{what} are in other containers than the parameters: {found}'}; pass a "
        f"tree with the structure of the parameters, {structure}"
    )


def nested(leaves: Iterable[tuple[tuple[str, ...], Variable]]) -> Any:
    """Returns dicts of dicts that have variables at their paths; of a tree that is one leaf the variable."""
    made: dict[str, Any] = {}
    for path, variable in leaves:
        if not path:
            return variable
        inner = made
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = variable
    return made
