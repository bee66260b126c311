"""Descriptions of dynamic tables as JSON of a manifest: all that a reader needs to know of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, get_args

from pswire.checkpoint import strict_json
from pswire.checkpoint.strict_json import Malformed
from pswire.model.tables import Admission, Eviction, Initializer, SlotTensor, TableSpec

_MAX_SEED = (1 << 64) - 1


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    """Returns a table as an object; a policy is one with a single key, the policy's name."""
    said: dict[str, Any] = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    said["shape"] = list(spec.shape)
    for name in _POLICIES:
        policy = said[name]
        said[name] = policy and {type(policy).__name__: dataclasses.asdict(policy)}
    return said


def spec_from_json(data: Any) -> TableSpec:
    """Reads what `spec_to_json` gave.

    Raises:
        Malformed: it is nothing such.
        InvalidRequest: there can be no such table.
    """
    said = _fields(data, [field.name for field in dataclasses.fields(TableSpec)])
    read: dict[str, Any] = {"shape": _shape(said["shape"])}
    read |= {name: strict_json.text(said[name]) for name in ("dtype", "key_dtype", "refused")}
    read |= {name: _policy(kinds, said[name]) for name, kinds in _POLICIES.items()}
    read |= {name: strict_json.integer(said[name]) for name in ("capacity", "memory_limit")}
    read |= {name: strict_json.integer(said[name], _MAX_SEED) for name in ("seed", "hash_seed")}
    return TableSpec(**read).check()


def slots_to_json(slots: Sequence[SlotTensor]) -> list[dict[str, Any]]:
    """Returns the tensors beside the rows as a list of objects."""
    return [{**vars(slot), "shape": list(slot.shape)} for slot in slots]


def slots_from_json(data: Any) -> tuple[SlotTensor, ...]:
    """Reads what `slots_to_json` gave; raises as `spec_from_json`."""
    return tuple(_slot(each) for each in strict_json.items(data))


def _slot(data: Any) -> SlotTensor:
    said = _fields(data, [field.name for field in dataclasses.fields(SlotTensor)])
    name, dtype = strict_json.text(said["name"]), strict_json.text(said["dtype"])
    return SlotTensor(name, dtype, _shape(said["shape"]), strict_json.real(said["value"])).check()


_POLICIES: Mapping[str, UnionType] = {
    "initializer": Initializer,
    "admission": Admission | None,
    "eviction": Eviction | None,
}
"""Fields of a table, and the kinds of policy of each."""


def _policy(kinds: UnionType, data: Any) -> Any:
    known = {kind.__name__: kind for kind in get_args(kinds) if kind is not NoneType}
    if data is None and NoneType in get_args(kinds):
        return None
    said = strict_json.fields(data)
    if len(said) != 1 or not said.keys() <= known.keys():
        raise Malformed(f"{str(data)[:80]} is not one of {', '.join(known)}")
    ((name, values),) = said.items()
    types = {field.name: field.type for field in dataclasses.fields(known[name])}
    given = _fields(values, list(types))
    return known[name](
        **{
            field: strict_json.integer(given[field]) if kind == "int" else strict_json.real(given[field])
            for field, kind in types.items()
        }
    )


def _fields(data: Any, names: Sequence[str]) -> dict[str, Any]:
    """An object with these keys and no others; raises `Malformed` for any other."""
    said = strict_json.fields(data)
    if said.keys() != {*names}:
        raise Malformed(f"{sorted(said)[:16]} are not the keys {sorted(names)}")
    return said


def _shape(data: Any) -> tuple[int, ...]:
    return tuple(map(strict_json.integer, strict_json.items(data)))
