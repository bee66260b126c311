"""`psctl vars` of dynamic tables: they have no size, and slots lie beside the part whose keys they have."""

from __future__ import annotations

from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.tables import SlotTensor, TablePart, TableSpec
from pswire.model.tensor import TensorSpec
from pswire.telemetry.views.numbers import shape
from pswire.telemetry.views.variable_list import beside, described, slots, totals


def part(id, name, server, slot=None):
    """Half of a table, or what lies beside it."""
    made = TablePart("users", TableSpec((8,)), 512 * server, 512, slot)
    return PlacedVariable(id, VariableSpec(name, made.tensor, slot is None, part=made), (server,))


M = SlotTensor("adam/users/m", "float32", (8,))
KNOWN = [
    part(0, "users/part_0", 0),
    part(1, "users/part_1", 1),
    PlacedVariable(2, VariableSpec("w", TensorSpec("float32", (2,))), (1,)),
    part(3, "adam/users/m/part_0", 0, M),
    part(4, "adam/users/m/part_1", 1, M),
    PlacedVariable(5, VariableSpec("adam/w/m", TensorSpec("float32", (2,)), False), (1,)),
]


def test_a_slot_is_listed_behind_its_part():
    """And that of a plain variable behind that."""
    primaries = slots(KNOWN)
    assert primaries == {
        "adam/users/m/part_0": "users/part_0",
        "adam/users/m/part_1": "users/part_1",
        "adam/w/m": "w",
    }
    assert [v.id for v in beside(KNOWN, primaries)] == [0, 3, 1, 4, 2, 5]


def test_a_part_has_no_size():
    """Neither rows nor bytes are told, and it counts for none."""
    said = described(KNOWN[0], {})
    assert (said["shape"], said["bytes"]) == ([None, 8], None)
    assert shape(said["shape"]) == "[?,8]"
    assert [server["bytes"] for server in totals(KNOWN)] == [0, 16]
