"""Descriptions of tables in a manifest: what is written is read, and nothing else."""

import json

import pytest

from pswire.checkpoint import strict_json
from pswire.checkpoint.strict_json import Malformed
from pswire.checkpoint.table_specs import slots_from_json, slots_to_json, spec_from_json, spec_to_json
from pswire.errors import InvalidRequest
from pswire.model.tables import LFU, CBFFilter, SlotTensor, TableSpec
from tests.kit import samples
from tests.pswire.checkpoint.test_manifest import STRANGE, places, replaced

SLOTS = [SlotTensor("m / \u00fc", "float64", (), 0.1 + 0.2), SlotTensor("v", "int8", (2, 3), -1.0)]


@pytest.mark.parametrize("spec", [samples.USERS, samples.ITEMS, samples.TAGS, samples.COUNTS, samples.TIMES])
def test_what_is_written_is_read(spec):
    """To the last bit, by way of a text: every kind of first values, filters and policies."""
    assert spec_from_json(strict_json.parse(json.dumps(spec_to_json(spec)))) == spec
    assert slots_from_json(strict_json.parse(json.dumps(slots_to_json(SLOTS)))) == tuple(SLOTS)


SPEC = TableSpec((3,), admission=CBFFilter(2), eviction=LFU(), capacity=1 << 15)


@pytest.mark.parametrize("path", list(places(spec_to_json(SPEC))), ids=lambda path: "/".join(map(str, path)) or "all")
def test_each_field_has_its_type(path):
    """Whatever else is in its place is refused in few words, or is a table as well."""
    for other in STRANGE:
        found, refused = read(replaced(spec_to_json(SPEC), path, other))
        assert len(refused) < 1000
        assert found is None or spec_from_json(spec_to_json(found)) == found


def read(said):
    """A table, or why it is none."""
    try:
        return spec_from_json(said), ""
    except (Malformed, InvalidRequest) as error:
        return None, str(error)


@pytest.mark.parametrize("path", [(), ("admission", "CBFFilter")])
def test_all_keys_and_no_others(path):
    """Neither of a table nor of a policy."""
    whole = spec_to_json(SPEC)
    inner = whole
    for key in path:
        inner = inner[key]
    for name in inner:
        with pytest.raises(Malformed, match="are not the keys"):
            spec_from_json(replaced(whole, path, {key: value for key, value in inner.items() if key != name}))
    with pytest.raises(Malformed, match="are not the keys"):
        spec_from_json(replaced(whole, path, inner | {"more": 1}))


@pytest.mark.parametrize("name", ["SlotTensor", "LRU", "cbffilter", ""])
def test_a_policy_is_one_that_is_known(name):
    """In its place: no other class is made of a name."""
    with pytest.raises(Malformed, match="is not one of CounterFilter, CBFFilter, ProbabilityFilter"):
        spec_from_json(spec_to_json(SPEC) | {"admission": {name: {}}})


def test_a_slot_that_cannot_be():
    """By its dtype, its shape, or a value that it cannot hold."""
    (good,) = slots_to_json([SlotTensor("m", "int8", (2,), 1.0)])
    for change in ({"dtype": "word"}, {"shape": [0]}, {"value": 1000.0}, {"value": True}, {"name": 3}, {"more": 0}):
        with pytest.raises((Malformed, InvalidRequest)):
            slots_from_json([good | change])
