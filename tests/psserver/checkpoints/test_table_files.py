"""Tables in files: what is read onto any number of servers, deltas included, is what was saved, bit for bit."""

import json
from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pswire.checkpoint import compaction
from pswire.checkpoint.arrays_of_tables import read_arrays
from pswire.checkpoint.compaction import compact, whole_columns
from pswire.checkpoint.reader import SavedCheckpoint, open_saved
from pswire.checkpoint.safetensors_stream import read_header
from pswire.checkpoint.storage import storage_at
from pswire.errors import CheckpointError, DamagedCheckpoint, VariableMismatch
from pswire.model import tables
from pswire.model.first_values import RowInitializer
from pswire.model.hashing import BUCKETS
from pswire.model.plan import ShardOf
from pswire.model.tensor import TensorSpec
from tests.kit.storage import write_checkpoint
from tests.kit.tables import NAME, SLOTS, Servers

BLOOM = tables.CBFFilter(2, 50_000, 0.05, decay=13)
COUNTING = tables.TableSpec(
    (2,), admission=tables.CounterFilter(2), eviction=tables.GlobalStepEvict(9), initializer=tables.Normal()
)
SPECS = {
    "counter": COUNTING,
    "bloom": tables.TableSpec((2,), "float64", "uint64", admission=BLOOM, eviction=tables.TimeToLive(9.0)),
    "lru": tables.TableSpec((2,), capacity=tables.MIN_CAPACITY, eviction=tables.LRU(), hash_seed=5),
    "lfu": tables.TableSpec(
        (2,), capacity=tables.MIN_CAPACITY, eviction=tables.LFU(0.95), admission=tables.ProbabilityFilter(0.7)
    ),
    "norm": tables.TableSpec((2,), capacity=tables.MIN_CAPACITY, eviction=tables.L2WeightEvict(6.0)),
}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def saved_thrice(root, spec, count=1, **values):
    """A job that has saved a whole checkpoint, "a", and two deltas, "b" and "c"; and its states by these names."""
    job, rng = Servers.made(root, spec, count, **values), np.random.default_rng(0)
    states = {}
    for base, name in (("", "a"), ("a", "b"), ("b", "c")):
        job.train(rng)
        job.save(name, base)
        states[name] = job.state()
    return job, states


def saved_once(root, count=1):
    """A job that has saved a checkpoint, "a"."""
    job = Servers.made(root, COUNTING, count)
    job.train(np.random.default_rng(0))
    job.save("a")
    return job


@pytest.mark.parametrize(
    ("name", "source"), [pytest.param("counter", 1, marks=pytest.mark.ci), *((name, 3) for name in SPECS)]
)
def test_any_number_of_servers_restores_it(tmp_path, name, source):
    """Whole, and with deltas upon it; with all counts, hands and filters; and goes on as if nothing had been."""
    job, states = saved_thrice(tmp_path, SPECS[name], source)
    few = [*zip(states, (3, 1, 2), strict=True)]
    for each, count in product(states, (1, 2, 3)) if (name, source) == ("counter", 3) else few:
        assert job.restored(each, count).state().equals(states[each])
    other = job.restored("c", 2)
    for each in (job, other):
        each.train(np.random.default_rng(1))
    assert other.state().equals(job.state())


def test_safetensors_alone_reads_it(tmp_path):
    """What the files have by one name, one behind another, is the whole, in the order of the hashes."""
    job = saved_once(tmp_path, 3)
    files = [load_file(path) for path in sorted((tmp_path / "a").glob("shard-*"))]
    found = {name: np.concatenate([file[name] for file in files if name in file]) for name in files[0]}
    state = job.state()
    assert found["users/keys"].tolist() == state.keys.tolist()
    assert found["users"].tolist() == state.tensors[0].tolist()
    assert found["adam/users/m"].tolist() == state.tensors[1].tolist()
    assert found["users/count"].tolist() == state.count.tolist()
    assert found["users/rows"].tolist() == np.diff(state.offsets).tolist()
    assert dict(zip(found["users/counted_keys"].tolist(), found["users/counted"].tolist(), strict=True)) == dict(
        zip(state.counted_keys.tolist(), state.counted.tolist(), strict=True)
    )
    assert found["users/clock"].tolist() == [5, -1]
    assert "users/clock" not in files[1]


def test_a_delta_is_small(tmp_path):
    """It has the rows that have changed and the keys that were dropped, and no others."""
    job = Servers.made(tmp_path, tables.TableSpec((2,)))
    job.step(np.arange(20_000))
    whole = job.save("a")
    job.step(np.arange(200))
    job.parts[0].remove(3, np.arange(100, 150))
    delta = job.save("b", "a")
    assert delta.manifest.tensors["users"].spec.shape == (150, 2)
    assert sorted(delta.tensor("users/deleted_keys").tolist()) == list(range(100, 150))
    sizes = [
        sum(each.spec.nbytes for each in saved.manifest.tensors.values() if each.spec.shape[0] != BUCKETS)
        for saved in (whole, delta)
    ]
    assert sizes[1] < 0.01 * sizes[0]


def test_a_part_that_has_forgotten_is_saved_whole(tmp_path, rng):
    """The others of the same delta have changes alone; all of them are restored onto other servers."""
    job, _ = saved_thrice(tmp_path, COUNTING, 3)
    job.train(rng)
    job.parts[1].forget_deletions(job.parts[1].round)
    saved = job.save("d", "c")
    since = saved.tensor("users/since")
    assert (since[:341] > 0).all()
    assert (since[341:682] == -1).all()
    for count in (1, 2, 4):
        assert job.restored("d", count).state().equals(job.state())
    assert compact(saved).manifest.base is None
    assert job.restored("d", 2).state().equals(job.state())


def test_parts_of_which_nothing_is_there(tmp_path):
    """A table without rows, and one of a single key, on several servers."""
    job = Servers.made(tmp_path, COUNTING, 3)
    assert job.save("none").manifest.tensors["users"].spec.shape == (0, 2)
    job.step(np.array([7, 7]))
    saved = job.save("one")
    assert saved.manifest.tensors["users"].spec.shape == (1, 2)
    assert [*saved.verify()] == []
    delta = job.save("same", "one")
    assert delta.manifest.tensors["users"].spec.shape == (0, 2)
    for name in ("one", "same"):
        assert job.restored(name, 2).state().equals(job.state())
    assert len(job.restored("none", 2).state().keys) == 0


def test_tensors_that_one_of_both_does_not_have(tmp_path, rng):
    """What a checkpoint lacks, or what is not asked for, begins with its first value; also what a base lacks."""
    job = Servers.made(tmp_path, tables.TableSpec((2,)), 1, SLOTS[:1])
    job.step(np.arange(100))
    job.save("a")
    job.parts[0].put_beside(SLOTS[1])
    job.step(np.arange(50))
    job.save("b", "a")
    state = job.state()
    found = job.restored("b", 2)
    assert found.state().equals(state)
    anew = job.restored("b", 2, beside={SLOTS[1].name: SLOTS[1].name}).state()
    assert anew.tensors[1].tolist() == [0.5] * 100
    assert anew.tensors[2].tolist() == state.tensors[2].tolist()
    first = job.restored("a", 1, beside={SLOTS[0].name: SLOTS[0].name}).state()
    assert first.tensors[2].tolist() == [[0, 0]] * 100


# ---- Compaction ----


@pytest.mark.parametrize("name", SPECS)
def test_a_delta_is_made_whole(tmp_path, rng, name):
    """Where it is: without its bases it is restored as before, and so are the deltas upon it."""
    job, states = saved_thrice(tmp_path, SPECS[name], 2, w=np.arange(3.0))
    job.train(rng)
    job.save("d", "c")
    states["d"] = job.state()
    before = job.opened("c")
    saved = compact(open_saved(str(tmp_path / "c")))
    assert (saved.manifest.base, saved.manifest.id) == (None, before.manifest.id)
    assert len([*(tmp_path / "c").iterdir()]) == 3
    for path in [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]:
        path.unlink()
    assert [*saved.verify()] == []
    assert saved.tensor("w").tolist() == [0, 1, 2]
    for each in ("c", "d"):
        assert job.restored(each, 3).state().equals(states[each])
    assert compact(saved) is saved
    again = job.save("e")
    full = {column.name: np.concatenate([*column.pieces()]) for column in whole_columns(again)}
    for column in whole_columns(job.opened("d")):
        assert np.concatenate([*column.pieces()]).tolist() == full[column.name].tolist(), column.name


def test_what_stops_in_the_middle_leaves_the_delta(tmp_path, monkeypatch):
    """A compaction that cannot write, or that finds a base damaged, changes nothing."""
    job, states = saved_thrice(tmp_path, COUNTING, 2)
    before = sorted((tmp_path / "c").iterdir())
    write = compaction.write_file

    def fails(place, path, columns):
        return write(place, path, columns) if "00000-of" in path else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "write_file", fails)
        with pytest.raises(ZeroDivisionError):
            compact(job.opened("c"))
    assert sorted((tmp_path / "c").iterdir()) == before
    assert job.restored("c", 1).state().equals(states["c"])
    flip(next((tmp_path / "a").glob("shard-00001*")))
    with pytest.raises(DamagedCheckpoint, match="a/shard-00001"):
        compact(job.opened("c"))
    assert sorted((tmp_path / "c").iterdir()) == before


# ---- Damage ----


def flip(path, at=-1):
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_base_damages_the_delta(tmp_path):
    """Whatever is wrong with it; both are named, and a restore of the directory goes back to what is whole."""
    job, _ = saved_thrice(tmp_path, COUNTING)
    flip(next((tmp_path / "b").glob("shard*")))
    assert [file for file, _ in job.opened("c").verify()] == [f"../b/{next((tmp_path / 'b').glob('shard*')).name}"]
    with pytest.raises(DamagedCheckpoint, match="b/shard"):
        job.restored("c", 1)
    (tmp_path / "b/manifest.json").rename(tmp_path / "b/other")
    with pytest.raises(DamagedCheckpoint, match="'b', which is not in the same directory"):
        job.restored("c", 1)
    place = storage_at(tmp_path)
    found, damaged = SavedCheckpoint.open_whole(place, ".")
    assert (found.name, list(damaged)) == ("a", ["c"])
    (tmp_path / "b/other").rename(tmp_path / "b/manifest.json")
    (tmp_path / "latest").write_text('{"format": 1, "latest": "c"}')
    job.save("b")
    with pytest.raises(DamagedCheckpoint, match="was saved later"):
        job.restored("c", 1)


def test_what_is_left_of_a_base_is_checked(tmp_path):
    """Also where its first row is replaced by a delta: whoever merges the two finds that another row is damaged."""
    job = Servers.made(tmp_path, tables.TableSpec((2,)))
    job.step(np.arange(2000))
    job.save("a")
    job.step(job.state().keys[:1])
    saved = job.save("b", "a")
    (path,) = (tmp_path / "a").glob("shard*")
    with open(path, "rb") as file:
        flip(path, read_header(file, path.stat().st_size)["users"].offset + 8 * 1000)
    with pytest.raises(DamagedCheckpoint, match="'users' has another checksum"):
        [*chain.from_iterable(column.pieces() for column in whole_columns(saved))]


def test_a_delta_has_a_base(tmp_path):
    """One that is not there, or is itself, is refused before the manifest is written."""
    job = saved_once(tmp_path)
    job.rounds["nothing"] = job.rounds["a"]
    for name, base in (("b", "nothing"), ("a", "a")):
        with pytest.raises(CheckpointError, match=r"nothing|itself"):
            job.save(name, base)
    assert not (tmp_path / "b/manifest.json").exists()
    assert job.save("b", "unknown").manifest.base is None  # whole, as nobody knows what has changed


def rewritten(root, name, change):
    """Writes a checkpoint's file anew, with other tensors, and the manifest that fits."""
    (path,) = (root / name).glob("shard*")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    manifest = json.loads((root / name / "manifest.json").read_text())
    manifest["files"][path.name] = path.stat().st_size
    for entry in manifest["tensors"].values():
        entry["checksum"] = ""
    manifest["tensors"] = {n: e | {"shape": tensors[n].shape} for n, e in manifest["tensors"].items() if n in tensors}
    (root / name / "manifest.json").write_text(json.dumps(manifest))


WRONG = {
    "missing": lambda t: t.pop("users/count"),
    "disordered": lambda t: t.update({"users/keys": t["users/keys"][::-1].copy()}),
    "twice": lambda t: np.copyto(t["users/keys"][1:2], t["users/keys"][:1]),
    "miscounted": lambda t: np.add(t["users/rows"][:1], 1, t["users/rows"][:1]),
    "negative": lambda t: np.add(t["users/rows"][:2], [-5, 5], t["users/rows"][:2]),
    "short": lambda t: t.update({"users/last": t["users/last"][1:].copy()}),
    "narrow": lambda t: t.update({"users": t["users"][:, :1].copy()}),
    "few buckets": lambda t: t.update({"users/hands": t["users/hands"][1:].copy()}),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_table_that_cannot_be_is_damaged(tmp_path, change):
    """Though each file is as its manifest says."""
    job = saved_once(tmp_path)
    rewritten(tmp_path, "a", WRONG[change])
    with pytest.raises((DamagedCheckpoint, VariableMismatch), match="users"):
        job.restored("a", 2)


def test_names_that_are_taken(tmp_path, rng):
    """A variable with the name of what is saved beside a table is refused, on one server and on two."""
    for count in (1, 2):
        job = Servers.made(tmp_path, COUNTING, count, **{"users/hands" if count == 1 else "users/clock": np.zeros(2)})
        with pytest.raises(CheckpointError, match="rename the variable"):
            job.save("a")


# ---- Other kinds of variables ----


def test_an_array_becomes_a_table(tmp_path, rng):
    """Its rows have the keys 0 to n - 1, with what was trained beside them."""
    values = {
        "static": rng.normal(size=(3000, 2)).astype("float32"),
        "m": rng.normal(size=3000),
        "v": rng.normal(size=(3000, 2)).astype("float32"),
    }
    write_checkpoint(tmp_path / "old", values)
    job = Servers.made(tmp_path, tables.TableSpec((2,)))
    for count in (1, 3):
        found = job.restored("old", count, saved="static", beside={SLOTS[0].name: "m", SLOTS[1].name: "v"})
        state = found.state()
        assert sorted(state.keys.tolist()) == list(range(3000))
        for tensor, name in zip(state.tensors, values, strict=True):
            assert tensor.tolist() == values[name][state.keys].tolist()
        found.step(np.arange(2990, 3010))
        assert len(found.state().keys) == 3010
    part = job.restored("old", 1, saved="static", beside={}).state()
    assert part.tensors[1].tolist() == [0.5] * 3000


def test_a_table_becomes_an_array(tmp_path, rng):
    """Rows without a key are as they begin; also of deltas, in parts, and cast."""
    job = Servers.made(tmp_path, tables.TableSpec((2,), initializer=tables.Normal()), 2)
    job.step(rng.integers(0, 1000, 500))
    job.save("a")
    job.step(rng.integers(0, 1000, 500))
    for part in job.parts:
        part.remove(3, part.keys()[:20])
    saved = job.save("b", "a")
    state = job.state()
    expected = RowInitializer(job.spec).rows(np.arange(1000))
    expected[state.keys] = state.tensors[0]
    (found,) = read_arrays(saved, [(NAME, TensorSpec("float32", (1000, 2)))])
    assert found.tobytes() == expected.tobytes()
    shard = ShardOf("w", 300, 1000)
    found, momentum = read_arrays(
        saved, [(NAME, TensorSpec("float64", (7, 2))), (SLOTS[0].name, TensorSpec("float64", (7,)))], True, [shard] * 2
    )
    assert found.tolist() == expected[300:307].tolist()
    beside = np.full(1000, 0.5)
    beside[state.keys] = state.tensors[1]
    assert momentum.tolist() == beside[300:307].tolist()
    for spec, told in (
        (TensorSpec("float32", (999, 2)), r"key 999\b.* 999 rows" if 999 in state.keys else r"rows"),
        (TensorSpec("float32", (10, 2)), r"has 10 rows, which are keys 0 to 9"),
        (TensorSpec("float32", (1000, 3)), "not float32"),
        (TensorSpec("float64", (1000, 2)), "not float64"),
    ):
        if spec.shape[0] != 999 or 999 in state.keys:
            with pytest.raises(VariableMismatch, match=told):
                read_arrays(saved, [(NAME, spec)])


@pytest.mark.parametrize(
    ("change", "wanted", "told"),
    [
        ({"key_dtype": "uint64"}, {}, "key_dtype 'int64', .* 'uint64'"),
        ({"hash_seed": 3}, {}, "hash_seed 0, .* 3"),
        ({"shape": (3,)}, {}, r"'users' as float32\[.*,2\], but table 'users' has rows of float32\[3\]"),
        ({"dtype": "float64"}, {}, r"rows of float64\[2\]; restore it with CheckpointOptions"),
        ({}, {"saved": SLOTS[1].name, "beside": {}}, "restore a table together"),
        ({}, {"beside": {SLOTS[0].name: "other"}}, r"no variable 'other'; it has .*adam/users/m, adam/users/v, users$"),
    ],
)
def test_a_table_of_another_kind_is_refused(tmp_path, change, wanted, told):
    """The error names both. So are names that do not belong together: rows, and what lies beside others."""
    job = saved_once(tmp_path)
    with pytest.raises(CheckpointError if "other" in told else VariableMismatch, match=told):
        job.restored("a", 1, replace(COUNTING, **change), **wanted)


def test_a_table_is_cast_and_has_other_policies(tmp_path, rng):
    """What is not of keys and rows may be another: filters and limits are those of the table that is restored."""
    job = saved_once(tmp_path)
    spec = tables.TableSpec((2,), "float64", capacity=tables.MIN_CAPACITY, seed=5)
    found = job.restored("a", 2, spec, cast=True)
    state = job.state()
    assert found.state().keys.tolist() == state.keys.tolist()
    assert found.state().tensors[0].tolist() == state.tensors[0].astype("float64").tolist()
    assert found.state().counted_keys.size == 0 < state.counted_keys.size
    found.train(rng)
