"""The variables of a job as people read them: each with what optimizers keep beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pswire.cluster import Task
from pswire.model.plan import PlacedVariable
from pswire.telemetry.views.columns import column
from pswire.telemetry.views.numbers import shape, short, size


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


@dataclass(frozen=True)
class ServerTotal:
    """The variables of a list that one server holds.

    Attributes:
        task: the server.
        variables, bytes: number and bytes of its variables.
    """

    task: str = column("server", lambda v: short(v.task))
    variables: int = column("variables")
    bytes: int = column("bytes", lambda v: size(v.bytes))


def totals(variables: Iterable[PlacedVariable]) -> list[ServerTotal]:
    """Returns how many variables, and of how many bytes, each server holds of these."""
    held: dict[int, list[int]] = {}
    for variable in variables:
        for server in variable.servers:
            held.setdefault(server, []).append(variable.spec.nbytes)
    return [ServerTotal(str(Task("ps", server)), len(sizes), sum(sizes)) for server, sizes in sorted(held.items())]


@dataclass(frozen=True)
class VariableView:
    """A variable of a job.

    Attributes:
        id: its number.
        name, dtype, shape: its name, dtype and shape; the first size of a dynamic table is null.
        bytes: bytes of its value; null for a dynamic table.
        servers: the servers that hold it.
        trainable: true if optimizers update it.
        slot_of: the variable that it is a slot of, or null.
        consistency: `"async"` or null.
    """

    id: int
    trainable: bool
    slot_of: str | None
    consistency: str | None
    name: str = column("variable", lambda v: v.shown)
    shape: tuple[int | None, ...] = column("shape", lambda v: shape(v.shape))
    dtype: str = column("dtype")
    bytes: int | None = column("bytes", lambda v: "-" if v.bytes is None else f"{v.bytes:,}")
    servers: tuple[str, ...] = column("servers", lambda v: ", ".join(map(short, v.servers)))

    @property
    def shown(self) -> str:
        """Its name as a list shows it: a slot stands below its variable."""
        apart = f" ({self.consistency})" if self.consistency else ""
        return f"{'  ' * bool(self.slot_of)}{self.name}{apart}"

    @classmethod
    def of(cls, variable: PlacedVariable, primaries: Mapping[str, str]) -> VariableView:
        """The view of a variable; `primaries` is what `slots` returns."""
        spec = variable.spec
        return cls(
            id=variable.id,
            name=spec.name,
            shape=(None, *spec.tensor.shape[1:]) if spec.part else spec.tensor.shape,
            dtype=spec.tensor.dtype,
            bytes=None if spec.part else spec.nbytes,
            servers=tuple(str(Task("ps", server)) for server in variable.servers),
            trainable=spec.trainable,
            slot_of=primaries.get(spec.name),
            consistency="async" if spec.alone else None,
        )
