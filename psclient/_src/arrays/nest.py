"""Nests: tuples, lists, mappings, named tuples and dataclasses, to any depth. All else is a leaf, None too.

Mappings keep the order of the first structure; the others need the same keys in any order. A dataclass
takes part with the fields of its constructor; one whose class says `_nest_leaf = True` is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

T = TypeVar("T")

Nest = Any
"""A nest of leaves; written for the reader, since Python's types cannot say it."""

Leaf = Any
"""What is no container; of the type that the reader knows it to have."""

IsLeaf = Callable[[Nest], bool]
"""Returns True for a container that counts as a leaf."""


@dataclass(frozen=True)
class _Nest:
    """One container, taken apart.

    Attributes:
        keys: the keys or indices of the children.
        children: the values below it, in the order of `keys`.
        build: makes a container of the same kind from other children.
        step: format of a key in a path.
    """

    keys: tuple[object, ...]
    children: tuple[Nest, ...]
    build: Callable[[Sequence[Nest]], Nest]
    step: str = "[{!r}]"


_Opener = Callable[[Nest], _Nest]


def _open_mapping(value: Mapping[object, Nest]) -> _Nest:
    def build(children: Sequence[Nest]) -> Nest:
        if not isinstance(value, MutableMapping):  # a mappingproxy, a FrozenDict: made of a dict, as all of them are
            return type(value)(dict(zip(value, children, strict=True)))  # type: ignore[call-arg]
        filled = copy.copy(value)  # keeps what subclasses carry, such as a default factory
        for key, child in zip(value, children, strict=True):  # `update` means something else to a Counter
            filled[key] = child
        return filled

    return _Nest(tuple(value), tuple(value.values()), build)


def _open_named(value: Nest) -> _Nest:
    return _Nest(value._fields, tuple(value), type(value)._make, ".{}")


def _open_sequence(value: Sequence[Nest]) -> _Nest:
    return _Nest(tuple(range(len(value))), tuple(value), partial(_call, type(value)))


def _call(kind: Callable[[Sequence[Nest]], Nest], children: Sequence[Nest]) -> Nest:
    return kind(children)


def _open_dataclass(value: Nest) -> _Nest:
    names = tuple(field.name for field in dataclasses.fields(value) if field.init)

    def build(children: Sequence[Nest]) -> Nest:
        return dataclasses.replace(value, **dict(zip(names, children, strict=True)))

    return _Nest(names, tuple(getattr(value, name) for name in names), build, ".{}")


_KINDS: tuple[tuple[Callable[[type], bool], _Opener], ...] = (
    (lambda kind: issubclass(kind, Mapping) and not hasattr(kind, "_nest_leaf"), _open_mapping),
    (lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _open_named),
    (lambda kind: issubclass(kind, tuple | list), _open_sequence),
    (
        lambda kind: hasattr(kind, "__dataclass_fields__") and not hasattr(kind, "_nest_leaf"),
        _open_dataclass,
    ),
)


def _find_opener(kind: type) -> _Opener | None:
    return next((opened for matches, opened in _KINDS if matches(kind)), None)


# Nests of arguments are taken apart for each variable and round.
_opener: Callable[[type], _Opener | None] = lru_cache(maxsize=1024)(_find_opener)


def _open(value: Nest) -> _Nest | None:
    opener = _opener(type(value))
    return opener(value) if opener else None


def _find_children(kind: type) -> Callable[[Nest], Iterable[Nest]] | None:
    opener = _opener(kind)
    if opener is None:
        return None
    if opener is _open_sequence:
        return iter
    return dict.values if issubclass(kind, dict) else lambda value: opener(value).children


children_of: Callable[[type], Callable[[Nest], Iterable[Nest]] | None] = lru_cache(maxsize=1024)(_find_children)
"""Returns a function that gives the children of a container of a type, in order; None for a leaf's type."""


def flatten(nest: Nest) -> list[Leaf]:
    """Returns the leaves of a nest, in order; for a leaf a list of itself."""
    leaves: list[Leaf] = []
    entered = [iter((nest,))]  # no recursion, which costs a call for each container
    while entered:
        for child in entered[-1]:
            children = children_of(type(child))
            if children is not None:
                entered.append(iter(children(child)))
                break
            leaves.append(child)
        else:
            entered.pop()
    return leaves


def paths(nest: Nest, path: str = "", is_leaf: IsLeaf | None = None) -> Iterator[tuple[str, Leaf]]:
    """Yields the leaves of a nest with their paths, such as `['image'][0]`; that of a nest which is a leaf is empty.

    Args:
        nest: to be taken apart.
        path: of the nest itself.
        is_leaf: containers to treat as leaves.
    """
    node = None if is_leaf is not None and is_leaf(nest) else _open(nest)
    if node is None:
        yield path, nest
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from paths(child, path + node.step.format(key), is_leaf)


def map_leaves(fn: Callable[[Leaf], T], nest: Nest, is_leaf: IsLeaf | None = None) -> list[T]:
    """Returns what a function gives for each leaf, in the order of `flatten`.

    Args:
        fn: called with a leaf.
        nest: to be taken apart.
        is_leaf: containers to treat as leaves.

    Raises:
        TypeError: the function has refused a leaf; the message begins with the path of that.
    """
    found: list[T] = []
    for path, leaf in paths(nest, is_leaf=is_leaf):
        try:
            found.append(fn(leaf))
        except TypeError as error:
            if not path:
                raise
            raise TypeError(f"at {path}: {error}") from error
    return found


def pack_sequence_as(structure: Nest, leaves: Sequence[object]) -> Nest:
    """Returns a nest like `structure` with other leaves, given in the order of `flatten`.

    Raises:
        ValueError: the number of leaves is not that of the structure.
    """
    count = len(flatten(structure))
    if len(leaves) != count:
        raise ValueError(f"the structure has {count} leaves, but {len(leaves)} values were passed")
    rest = iter(leaves)
    return map_structure(lambda _: next(rest), structure)


def map_structure(fn: Callable[..., object], *structures: Nest, is_leaf: IsLeaf | None = None) -> Nest:
    """Calls `fn` on the leaves of nests of the same structure, leaf by leaf.

    Args:
        fn: takes as many leaves as there are structures.
        structures: at least one.
        is_leaf: containers of the first structure to treat as leaves.

    Returns:
        A nest like the first structure, of what `fn` returned.

    Raises:
        ValueError: the structures differ; the message names the path where they do.
    """
    if len(structures) == 1:
        return _map_one(fn, structures[0], is_leaf)
    return _map(fn, structures, "", is_leaf)


def _map_one(fn: Callable[..., object], value: Nest, is_leaf: IsLeaf | None) -> Nest:
    """As `_map` of one structure, which differs from none: arguments are taken apart for each replica and round."""
    opener = _opener(type(value))
    if opener is None or (is_leaf is not None and is_leaf(value)):
        return fn(value)
    if opener is _open_sequence:
        # A leaf is not worth another call: most are in a sequence of leaves.
        mapped = [_map_one(fn, child, is_leaf) if _opener(type(child)) else fn(child) for child in value]
        return mapped if type(value) is list else type(value)(mapped)
    node = opener(value)
    return node.build([_map_one(fn, child, is_leaf) for child in node.children])


def _map(
    fn: Callable[..., object],
    structures: Sequence[Nest],
    path: str,
    is_leaf: IsLeaf | None = None,
) -> Nest:
    if is_leaf and is_leaf(structures[0]):
        return fn(*structures)
    node = _open(structures[0])
    columns = [_matching(node, structures[0], other, path) for other in structures[1:]]
    if node is None:
        return fn(*structures)
    rows = zip(node.keys, zip(node.children, *columns, strict=True), strict=True)
    return node.build([_map(fn, row, path + node.step.format(key), is_leaf) for key, row in rows])


def _matching(node: _Nest | None, first: Nest, other: Nest, path: str) -> Sequence[Nest]:
    """Returns the children of `other` in the order of `node`, which is `first` taken apart."""
    found = _open(other)
    if node is None and found is None:
        return ()
    both_map = isinstance(first, Mapping) and isinstance(other, Mapping)
    if node and found and (type(first) is type(other) or both_map):
        by_key = dict(zip(found.keys, found.children, strict=True))
        if by_key.keys() == set(node.keys):
            return [by_key[key] for key in node.keys]
    where = f" at {path}" if path else ""
    raise ValueError(f"structures differ{where}: {_describe(first)} and {_describe(other)}")


def _describe(value: Nest) -> str:
    node, name = _open(value), type(value).__name__
    if node is None:
        return "None" if value is None else f"a leaf ({name})"
    if isinstance(value, Mapping):
        return f"a {name} with keys {list(node.keys)}"
    return f"a {name} of {len(node.children)}"
