"""The variables of a job as people read them: each with what optimizers keep beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pswire.cluster import Task
from pswire.model.plan import PlacedVariable
from pswire.telemetry.views.numbers import shape, short


def slots(variables: Iterable[PlacedVariable]) -> dict[str, str]:
    """For each variable that an optimizer keeps beside another the name of that one: `adam/w/m` is beside `w`."""
    names = {v.spec.name: v for v in variables}
    rows = {(part.table, part.first): name for name, v in names.items() if (part := v.spec.part) and part.slot is None}
    found = {name: _primary(name, names) for name, v in names.items() if not (v.spec.trainable or v.spec.part)}
    found |= {
        name: rows.get((part.table, part.first), "")
        for name, v in names.items()
        if (part := v.spec.part) and part.slot is not None
    }
    return {name: primary for name, primary in found.items() if primary}


def _primary(name: str, names: Mapping[str, PlacedVariable]) -> str:
    """The longest name of another variable that stands between an optimizer's name and a slot's; "" for none."""
    words = name.split("/")[:-1]
    inner = ("/".join(words[first:]) for first in range(1, len(words)))
    return next((each for each in inner if each in names), "")


def beside(variables: Sequence[PlacedVariable], primaries: Mapping[str, str]) -> Iterator[PlacedVariable]:
    """All variables in the order of their creation, but each slot after the variable that it belongs to."""
    slots: dict[str, list[PlacedVariable]] = {}
    for variable in variables:
        if primary := primaries.get(variable.spec.name):
            slots.setdefault(primary, []).append(variable)
    for variable in variables:
        if variable.spec.name not in primaries:
            yield variable
            yield from slots.get(variable.spec.name, ())


def totals(variables: Iterable[PlacedVariable]) -> list[dict[str, Any]]:
    """Returns how many variables, and of how many bytes, each server holds of these."""
    held: dict[int, list[int]] = {}
    for variable in variables:
        for server in variable.servers:
            held.setdefault(server, []).append(variable.spec.nbytes)
    return [
        {"task": str(Task("ps", server)), "variables": len(sizes), "bytes": sum(sizes)}
        for server, sizes in sorted(held.items())
    ]


def described(variable: PlacedVariable, primaries: Mapping[str, str]) -> dict[str, Any]:
    """A variable by the keys of `psctl vars --json`; `primaries` is what `slots` returns."""
    spec = variable.spec
    return {
        "id": variable.id,
        "name": spec.name,
        "dtype": spec.tensor.dtype,
        "shape": [None, *spec.tensor.shape[1:]] if spec.part else list(spec.tensor.shape),
        "bytes": None if spec.part else spec.nbytes,
        "servers": [str(Task("ps", server)) for server in variable.servers],
        "trainable": spec.trainable,
        "slot_of": primaries.get(spec.name),
        "consistency": "async" if spec.alone else None,
    }


def name_of(said: Mapping[str, Any]) -> str:
    """The name of a variable as a list shows it: a slot stands below its variable."""
    apart = f" ({said['consistency']})" if said["consistency"] else ""
    return f"{'  ' * bool(said['slot_of'])}{said['name']}{apart}"


def row_of(said: Mapping[str, Any]) -> dict[str, str]:
    """A variable that `described` gives as a row of a table, by heading."""
    return {
        "variable": name_of(said),
        "shape": shape(said["shape"]),
        "dtype": said["dtype"],
        "bytes": "-" if said["bytes"] is None else f"{said['bytes']:,}",
        "servers": ", ".join(map(short, said["servers"])),
    }
