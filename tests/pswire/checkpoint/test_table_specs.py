"""Descriptions of tables in a manifest: what is written is read, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.checkpoint import strict_json
from pswire.checkpoint.strict_json import Malformed
from pswire.checkpoint.table_specs import slots_from_json, slots_to_json, spec_from_json, spec_to_json
from pswire.errors import InvalidRequest
from pswire.model.tables import (
    LFU,
    LRU,
    CBFFilter,
    Constant,
    CounterFilter,
    GlobalStepEvict,
    L2WeightEvict,
    Normal,
    ProbabilityFilter,
    SlotTensor,
    TableSpec,
    TimeToLive,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from tests.pswire.checkpoint.test_manifest import STRANGE, places, replaced

reals = st.floats(-1e30, 1e30)
positive = st.floats(0, 1e30)
shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
seeds = st.integers(0, (1 << 64) - 1)
specs = st.builds(
    TableSpec,
    shapes,
    st.sampled_from(["float32", "bfloat16", "float64"]),
    st.sampled_from(["int64", "uint64"]),
    st.one_of(
        st.just(Zeros()),
        st.builds(Constant, reals),
        st.builds(Normal, reals, positive),
        st.builds(TruncatedNormal, reals, positive),
        st.tuples(reals, reals).map(sorted).map(lambda pair: Uniform(*pair)),
    ),
    st.one_of(
        st.none(),
        st.builds(CounterFilter, st.integers(1, 1000)),
        st.builds(ProbabilityFilter, st.floats(0, 1)),
        st.builds(CBFFilter, st.integers(1, 255), st.integers(1, 1 << 36), st.floats(1e-9, 0.5), st.integers(0, 9)),
    ),
    st.one_of(
        st.none(),
        st.just(LRU()),
        st.builds(LFU, st.floats(0, 1)),
        st.builds(GlobalStepEvict, st.integers(1, 1000)),
        st.builds(L2WeightEvict, positive),
        st.builds(TimeToLive, positive),
    ),
    st.integers(1 << 14, 1 << 30),
    st.sampled_from([0, 1 << 40]),
    st.sampled_from(["initial", "zeros"]),
    seeds,
    seeds,
)
slots = st.builds(SlotTensor, st.text(min_size=1, max_size=9), st.just("float64"), shapes, reals)


@given(specs, st.lists(slots, max_size=3))
def test_what_is_written_is_read(spec, beside):
    """To the last bit, by way of a text."""
    spec = spec.check()
    assert spec_from_json(strict_json.parse(json.dumps(spec_to_json(spec)))) == spec
    assert slots_from_json(strict_json.parse(json.dumps(slots_to_json(beside)))) == tuple(beside)


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
