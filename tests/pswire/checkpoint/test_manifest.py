"""The manifest of a checkpoint, descriptions of tables in it, and which of several checkpoints is the newest."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.checkpoint import manifest as manifests
from pswire.checkpoint import strict_json
from pswire.checkpoint.manifest import Manifest, Saved, Slice
from pswire.checkpoint.strict_json import Malformed
from pswire.checkpoint.table_specs import slots_from_json, slots_to_json, spec_from_json, spec_to_json
from pswire.encoding.calls import CALLS
from pswire.errors import CheckpointError, DamagedCheckpoint, InvalidRequest
from pswire.model.log import Examples, Position
from pswire.model.saved import RestoreReply, SavedTable
from pswire.model.tables import LFU, CBFFilter, CounterFilter, SlotTensor, TableSpec
from pswire.model.tensor import DTYPES, TensorSpec
from tests.kit import samples

GRPC_MESSAGE = 4 << 20
"""Bytes: more does not travel in one message, where nobody has raised the limit."""

SUM = "xxh3:" + "0f" * 16
SHARD = "shard-00000-of-00001.safetensors"
TENSORS = {
    **{dtype: Saved(SHARD, TensorSpec(dtype, (2, 0, 3)), SUM) for dtype in DTYPES},
    "no / \u00fcml\u00e4ut\n": Saved(SHARD, TensorSpec("float32", ()), ""),
}
SLICES = tuple(Slice(SHARD, f"w/part_{n}", 3 * n, 3, SUM) for n in range(2))
TABLE = SavedTable("users", TableSpec((2,), admission=CounterFilter(2)), (SlotTensor("m", "int8", ()),), 3, 5)
MANIFESTS = {
    2: Manifest(
        1 << 40,
        (Position(0, 1, 2, (Examples(1, 0, 3),)), Position(9, 9, 1 << 40)),
        TENSORS,
        {SHARD: 1 << 50},
        {"model/w": "float32"},
        {"s": [1, {"t": None}], "\u00e4": "\u00fc"},
        1e9 + 0.1,
        "something 1.0",
    ),
    3: Manifest(1, (), {"w": Saved("", TensorSpec("int8", (6, 2)), "", SLICES)}, library="x"),
    4: Manifest(3, (), {}, library="x", tables={"users": TABLE}, id="0" * 16, base=manifests.Base("ckpt-1", "1" * 16)),
}
"""By their format: of tensors, of one that is cut, and of a table of which only what has changed is there."""


@pytest.mark.parametrize("format", MANIFESTS)
def test_what_is_written_is_read(format):
    """Its text is JSON and says all of it."""
    manifest = MANIFESTS[format]
    assert json.loads(manifest.text())["format"] == format
    assert Manifest.parse(manifest.text(), "here") == manifest


def test_many_variables_travel():
    """The manifest of ten thousand variables, tracked by long paths, fits in one message."""
    tensors = {f"encoder/layers/{n:05d}/attention/projection/kernel": "w" for n in range(10_000)}
    entry = Saved("shard-00000-of-00002.safetensors", TensorSpec("float32", (512, 512)), "xxh3:" + "0f" * 16)
    manifest = Manifest(0, (), dict.fromkeys(tensors, entry), {}, {f"model/{name}": name for name in tensors})
    assert len(manifest.text().encode()) < GRPC_MESSAGE


def whole():
    """What a manifest says, as JSON."""
    tensors = {"w": Saved("shard-0", TensorSpec("int8", (2, 3)), "xxh3:" + "0f" * 16)}
    at = Position(0, 1, 2, (Examples(1, 0, 3),))
    return json.loads(Manifest(3, (at,), tensors, {"shard-0": 80}, {"model/w": "w"}, {"s": [1, {"t": None}]}).text())


def of_a_delta():
    """What that of a delta says."""
    return json.loads(MANIFESTS[4].text())


def places(value, path=()):
    """The paths of all values in a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


STRANGE = [None, True, -1, 7, 1.5, 10**30, "x", "\ud800", [], [[]], {}, {"a": 1}, {"\ud800": 1}, [1] * 40, "n" * 9000]


def replaced(value, path, other):
    if not path:
        return other
    made = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = replaced(value[path[0]], path[1:], other)
    return made


@pytest.mark.parametrize(
    ("make", "path"),
    [(make, path) for make in (whole, of_a_delta) for path in places(make())],
    ids=lambda value: value.__name__ if callable(value) else "/".join(map(str, value)) or "all",
)
def test_each_field_has_its_type(make, path):
    """Whatever else is in its place, it is refused by name or is as good as what was there: it can be sent, and
    written again."""
    for other in (*STRANGE, "..", "a/b", "0" * 16):
        text = json.dumps(replaced(make(), path, other))
        refused = refusal(text)
        if refused is None:
            found = Manifest.parse(text, "run/manifest.json")
            reply = CALLS["Restore"].reply(RestoreReply("run", found.positions, text)).SerializeToString()
            assert CALLS["Restore"].answer_from(reply, "").positions == found.positions
            assert Manifest.parse(found.text(), "again") == found
            assert found.base is None or "/" not in found.base.name
        else:
            newer = path == ("format",) and other == 7
            assert type(refused) is (CheckpointError if newer else DamagedCheckpoint)
            assert str(refused).startswith("run/manifest.json ")
            assert len(str(refused)) < 1000


def refusal(text):
    """Why a text is no manifest; None if it is one."""
    try:
        Manifest.parse(text, "run/manifest.json")
    except CheckpointError as error:
        return error
    return None


HOSTILE = {
    "brackets": "[" * 200_000,
    "braces": '{"a":' * 200_000,
    "infinite": "1e400",
    "an infinite field": json.dumps(whole()).replace('"round": 3', '"round": 1e400'),
    "no number": json.dumps(whole()).replace('"round": 3', '"round": NaN'),
    "no number in a state": json.dumps(whole()).replace("null", "NaN"),
    "an infinite state": json.dumps(whole()).replace("null", "-1e400"),
    "many digits": json.dumps(whole()).replace('"round": 3', f'"round": {"9" * 5000}'),
    "a huge format": json.dumps(whole()).replace('"format": 2', f'"format": {"9" * 400}'),
    "a key twice": json.dumps(whole()).replace('"round": 3', '"round": 3, "round": 4'),
    "a tensor twice": json.dumps(whole()).replace('"tensors": {', '"tensors": {"w": 1, '),
    "deep state": json.dumps(whole()).replace("null", "[" * 300 + "]" * 300),
    "deeper state": json.dumps(whole()).replace("null", "[" * 5000 + "]" * 5000),
    "nothing": "",
    "half of it": json.dumps(whole())[:99],
    "a list": "[]",
    "NUL": "\0" * 100,
    "a file with NUL": json.dumps(whole()).replace('"shard-0"', '"shard\\u0000"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_damaged(name):
    """Whatever JSON can do to who parses it: an error of ours that names the file, in few words."""
    with pytest.raises(DamagedCheckpoint, match=r"^run/manifest\.json ") as told:
        Manifest.parse(HOSTILE[name], "run/manifest.json")
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_files_are_beside_it(name):
    """Neither a tensor nor a slice nor a size is of a file elsewhere."""
    spec = TensorSpec("int8", (4,))
    sliced = Saved("", spec, "", (Slice(name, "w", 0, 4),))
    wrong = [Manifest(0, (), {"w": Saved(name, spec)}), Manifest(0, (), {}, {name: 1}), Manifest(0, (), {"w": sliced})]
    for manifest in wrong:
        with pytest.raises(DamagedCheckpoint, match="outside of its directory"):
            Manifest.parse(manifest.text(), "here")


@pytest.mark.parametrize(("name", "parts"), [
    ("ckpt-12", ("ckpt", 12)), ("a-b-3", ("a-b", 3)), ("best", ("best", -1)), ("-3", ("", 3)),
    ("ckpt-²", ("ckpt-²", -1)), ("ckpt--1", ("ckpt-", 1)), ("ckpt-" + "9" * 5000, ("ckpt-" + "9" * 5000, -1)),
])  # fmt: skip
def test_names_have_numbers(name, parts):
    """What is no plain number is part of the name. The newest has the greatest; those without are the oldest."""
    assert manifests.number(name) == parts
    order = ["best", "ckpt", "ckpt-", "a-0", "ckpt-0", "ckpt-2", "ckpt-10", "ckpt-011"]
    assert sorted(order, key=manifests.rank) == order


@given(st.text())
def test_what_names_the_newest_is_read(name):
    """Whatever its name is."""
    text = manifests.latest_text(name)
    assert json.loads(text) == {"format": 1, "latest": name}
    assert manifests.latest_in(text) == name


def test_what_is_set_aside_has_no_number():
    """It is never the newest, nor older than another one; and two have two names."""
    first = manifests.aside("ckpt-7", ())
    second = manifests.aside("ckpt-7", {first})
    assert (first, second) == ("ckpt-7.damaged", "ckpt-7.damaged.2")
    for name in (first, second):
        assert manifests.is_aside(name)
        assert manifests.number(name) == (name, -1)
    assert not any(map(manifests.is_aside, ["ckpt-7", "damaged", "ckpt.damaged-7", "ckpt.damaged.x"]))


BAD_SLICES = {
    "a gap": [(0, 2), (3, 1)], "an overlap": [(0, 2), (1, 2)], "too few": [(0, 2)], "too many": [(0, 2), (2, 3)],
    "another order": [(2, 2), (0, 2)], "none": [], "an empty one": [(0, 0), (0, 4)],
    "a negative one": [(0, 5), (5, -1)],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SLICES)
def test_slices_that_do_not_make_the_whole_are_told(name):
    """Whoever has written them: a reader would take rows that nobody has saved."""
    slices = tuple(Slice("x", "w", first, rows) for first, rows in BAD_SLICES[name])
    said = Manifest(1, (), {"w": Saved("", TensorSpec("int8", (4, 2)), "", (Slice("x", "w", 0, 4),))}).text()
    text = json.loads(said)
    text["tensors"]["w"]["slices"] = [vars(one) for one in slices]
    with pytest.raises(DamagedCheckpoint, match=r"slice|not an integer"):
        Manifest.parse(json.dumps(text), "here")
    assert Manifest.parse(said, "here").tensors["w"].slices


# ---- Descriptions of tables ----

SLOTS = [SlotTensor("m / \u00fc", "float64", (), 0.1 + 0.2), SlotTensor("v", "int8", (2, 3), -1.0)]


@pytest.mark.parametrize("spec", [samples.USERS, samples.ITEMS, samples.TAGS, samples.COUNTS, samples.TIMES])
def test_what_is_written_of_a_table_is_read(spec):
    """To the last bit, by way of a text: every kind of first values, filters and policies."""
    assert spec_from_json(strict_json.parse(json.dumps(spec_to_json(spec)))) == spec
    assert slots_from_json(strict_json.parse(json.dumps(slots_to_json(SLOTS)))) == tuple(SLOTS)


SPEC = TableSpec((3,), admission=CBFFilter(2), eviction=LFU(), capacity=1 << 15)


@pytest.mark.parametrize("path", list(places(spec_to_json(SPEC))), ids=lambda path: "/".join(map(str, path)) or "all")
def test_each_field_of_a_table_has_its_type(path):
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
