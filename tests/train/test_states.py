"""What objects keep beside variables: it comes back as it was, or saving says that it cannot."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import psclient as ps
from psclient.train.backend import Content
from psclient.train.states import of_json, to_json
from tests.kit.strategies import opened

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(), st.just("$")
)
STATES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.sampled_from("cba"), inner),
        st.dictionaries(st.sampled_from(["$", "$tuple", "$$", "a"]), inner),
        st.dictionaries(KEYS, inner).map(collections.OrderedDict),
        st.builds(collections.deque, st.lists(inner), st.one_of(st.none(), st.integers(0, 3))),
    ),
    max_leaves=12,
)


def alike(one, other):
    """Equal, with the same types and orders all the way down; NaN is like NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(alike, one.items(), other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, collections.deque):
        return one.maxlen == other.maxlen and alike([*one], [*other])
    if isinstance(one, complex):
        return alike((one.real, one.imag), (other.real, other.imag))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def through(state):
    """What is read of a state that was written."""
    return of_json(json.loads(Content({}, {"thing": to_json("thing", state)}).order())["state"]["thing"])


@given(STATES)
def test_a_state_comes_back_as_it_was(state):
    """Types, keys, orders, infinities and signs of zero with it."""
    assert alike(through(state), state)


ODD = [
    collections.Counter({2: 1, 7: 3}),
    {1: "a", "1": "b"},
    {3, 1, 2},
    frozenset({(1, "a")}),
    np.float32(0.1),
    np.arange(6, dtype="int16").reshape(2, 3),
    np.zeros((0, 2), "complex64"),
]


@pytest.mark.parametrize("state", ODD, ids=lambda state: type(state).__name__)
def test_types_of_libraries_come_back(state):
    """Counters of schedulers, keys that are numbers, sets, and small arrays and scalars of NumPy."""
    found = through([state])[0]
    assert type(found) is type(state)
    assert np.array_equal(found, state)
    assert getattr(found, "dtype", None) == getattr(state, "dtype", None)


class Colour(enum.IntEnum):
    """An integer that is more than that."""

    RED = 1


REFUSED = {
    r"at \['a'\]\[1\]: an instance of object cannot be restored": {"a": [0, object()]},
    "an instance of Colour cannot be restored": Colour.RED,
    "an instance of defaultdict cannot be restored": collections.defaultdict(list),
    r"at \['big'\]: an array float64\[10000\] .* larger than 65536 bytes": {"big": np.zeros(10_000)},
    r"an array object\[1\] cannot be restored": np.array([None]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_not_come_back_is_refused(text):
    """With its place in the state, and what to do."""
    with pytest.raises(TypeError, match=rf"state_dict\(\) of 'thing' cannot be saved: {text}.*; keep arrays in"):
        to_json("thing", REFUSED[text])


def test_a_type_of_a_later_version_is_told():
    """It is not taken for a dict of the user's."""
    with pytest.raises(ValueError, match="a state of type 'matrix', which this version does not support"):
        of_json({"a": {"$matrix": []}})


# ---- What an object leads to ----


@dataclasses.dataclass(slots=True)
class Slotted:
    """Attributes in slots, in those of a base class too."""

    w: object


@dataclasses.dataclass(slots=True)
class Below(Slotted):
    """As above."""

    items: object


def saved_and_restored(v, changes, *, root):
    """Restores what was saved of a root after it was changed."""
    checkpoint = ps.train.Checkpoint(root=root)
    path = checkpoint.save("run/ckpt")
    checkpoint.sync()
    changes()
    checkpoint.restore(path).assert_consumed()
    return v.numpy()


@pytest.mark.parametrize(
    "around", [lambda v: Below(v, 0), lambda v: Below(0, [v]), lambda v: collections.deque([0, v])]
)
def test_variables_in_slots_and_deques_are_saved(in_tmp_path, around):
    """As those of other attributes and lists are."""
    with opened("mirrored-1") as strategy, strategy.scope():
        v = ps.Variable(5.0, name="v")
        assert saved_and_restored(v, lambda: v.assign(0.0), root=around(v)) == 5


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_random_generators_go_on(in_tmp_path, make):
    """With the numbers that would have come next."""
    with opened("mirrored-1") as strategy, strategy.scope():
        v = ps.Variable(5.0, name="v")
        generator = make(3)
        following = []
        saved_and_restored(v, lambda: following.append(generator.random()), root=[v, generator])
        assert generator.random() == following[0]


def test_what_has_no_name_of_its_own_is_refused(in_tmp_path):
    """Keys that are the same in words, and objects in a set."""
    with opened("mirrored-1") as strategy, strategy.scope():
        v, w = (ps.Variable(0.0, name=name) for name in "vw")
        with pytest.raises(ValueError, match="'model' has two keys that become the same name '1' in a path"):
            ps.train.Checkpoint(model={1: v, "1": w}).save("run/ckpt")
        with pytest.raises(ValueError, match="'model/parts' is a set, whose items have no names"):
            ps.train.Checkpoint(model={"parts": {v}}).save("run/ckpt")
        ps.train.Checkpoint(model=[v, {"a word"}]).save("run/ckpt")
