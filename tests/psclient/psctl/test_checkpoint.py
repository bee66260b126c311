"""`psctl checkpoint`: what it says of checkpoints, of dynamic tables and deltas too, and when it cannot."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import ml_dtypes
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.numpy import load_file

from psclient.psctl.checkpoint_diff import CHUNK, compare
from pswire.checkpoint import compaction
from pswire.checkpoint.manifest import latest_text
from pswire.checkpoint.reader import open_saved
from pswire.checkpoint.storage import Directory
from pswire.errors import CheckpointError
from pswire.model.tables import CounterFilter, TableSpec
from pswire.model.tensor import Array
from tests.kit.storage import write_checkpoint
from tests.kit.strategies import refused
from tests.kit.tables import Servers

SHARD0, SHARD1 = (f"shard-{place:05d}-of-00002.safetensors" for place in range(2))

VALUES: dict[str, Array] = {
    "w": np.arange(6, dtype="float32").reshape(2, 3),
    "b": np.array([1.5, -2.0], "float64"),
    "step": np.array(7, "int64"),
    "half": np.array([0.5, 3.0], ml_dtypes.bfloat16),
    "z": np.array([1 + 2j, 3 - 4j], "complex128"),
    "mask": np.array([True, False]),
    "none": np.zeros((0, 4), "uint8"),
}


@pytest.fixture
def run(call):
    return lambda *args: call("checkpoint", *args)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of all kinds of values."""
    return write_checkpoint(
        tmp_path / "run" / "ckpt-1", VALUES, objects={"model/w": "w"}, state={"sampler": {"seed": 3}}
    )


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(data)


def same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- ls and show ----


def test_checkpoints_are_listed_by_their_numbers(run, saved, tmp_path):
    """Oldest first, 10 after 9; a directory without a manifest is incomplete; to have saved none yet is no error. The
    newest is marked, by the file that says so, else by the numbers; it is what a directory stands for."""
    for number in (10, 9):
        write_checkpoint(saved.parent / f"ckpt-{number}", {"w": VALUES["w"]}, round=number)
    (saved.parent / "ckpt-11").mkdir()
    for text, name, round in ((None, "ckpt-10", 10), (latest_text("ckpt-1"), "ckpt-1", 7)):
        if text:
            (saved.parent / "latest").write_text(text)
        done, said = run("ls", saved.parent), run("ls", "--json", saved.parent).json
        lines = [line for line in done.out.splitlines() if line.startswith("ckpt")]
        assert [line.split()[0] for line in lines] == ["ckpt-1", "ckpt-9", "ckpt-10", "ckpt-11"]
        assert [line.split()[0] for line in lines if "latest" in line] == [name]
        assert (done.code, said["latest"], "incomplete" in lines[-1]) == (0, name, True)
        assert run("show", "--json", saved.parent).json["round"] == round
    assert [each["round"] for each in said["checkpoints"]] == [7, 9, 10]
    assert said["checkpoints"][0]["nbytes"] == sum(value.nbytes for value in VALUES.values())
    assert said["incomplete"] == ["ckpt-11"]
    (tmp_path / "empty").mkdir()
    assert run("ls", tmp_path / "empty") == (0, f"there is no checkpoint in {tmp_path / 'empty'}\n", "")


def test_a_checkpoint_is_shown(run, saved):
    """All its variables, whose objects they are, positions and state; of a directory the newest."""
    for path in (saved, saved.parent):
        done = run("show", path)
        assert done.code == 0
        assert all(name in done.out for name in VALUES)
        assert "model/w" in done.out
        assert "dataset 0: epoch 1, index 5" in done.out
        assert 'state of sampler: {"seed": 3}' in done.out
    assert run("show", "--json", saved).json["state"] == {"sampler": {"seed": 3}}


# ---- verify ----


def test_a_whole_checkpoint_is_verified(run, saved, tmp_path):
    """Exit code 0, and JSON without faults; what cannot be verified is not passed over in silence. It may be elsewhere
    than in this file system."""
    files = fsspec.filesystem("memory")
    files.put(str(saved), "/psctl/run/ckpt-1", recursive=True)
    assert run("verify", "memory://psctl/run").code == 0
    files.rm("/psctl", recursive=True)
    done = run("verify", saved)
    assert (done.code, done.out) == (0, f"{saved} is complete: {len(VALUES)} variables\n")
    said = run("verify", "--json", saved).json
    assert said == {"path": str(saved), "whole": True, "without_checksum": 0, "faults": []}
    path = write_checkpoint(tmp_path / "ckpt-1", VALUES, checksums=False)
    done = run("verify", path)
    assert done.code == 0
    assert f"{len(VALUES)} of them have no checksum" in done.out


def longer(path: Path) -> None:
    with (path / SHARD0).open("ab") as file:
        file.write(b"\0")


def tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes what the manifest says of the tensors."""

    def changed(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest["tensors"])
        (path / "manifest.json").write_text(json.dumps(manifest))

    return changed


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("has another checksum than when it was saved: xxh3:", lambda path: overwrite(path / SHARD0, -1, b"\xff")),
    ("bytes, but had", longer),
    ("truncated", lambda path: os.truncate(path / SHARD0, (path / SHARD0).stat().st_size - 1)),
    ("the file is missing", lambda path: (path / SHARD0).unlink()),
    ("its header is damaged", lambda path: overwrite(path / SHARD0, 8, b"}")),
    ("its header is damaged", lambda path: overwrite(path / SHARD0, 0, b"\xff" * 8)),
    ("it contains 'b', which the manifest does not list", tensors(lambda all: all.pop("b"))),
    ("it holds 'b' as float64[2], not float64[3]", tensors(lambda all: all["b"].update(shape=[3]))),
    ("it does not contain 'b', which the manifest lists", tensors(lambda all: all["b"].update(file=SHARD1))),
]


@pytest.mark.parametrize(("said", "damage"), DAMAGE)
def test_damage_is_found(run, saved, said, damage):
    """Whatever is wrong, the file is named, and the exit code is 1."""
    damage(saved)
    done, report = run("verify", saved), run("verify", "--json", saved)
    assert done.code == report.code == 1
    assert all(words in done.out for words in ("is damaged", said, SHARD0))
    assert not report.json["whole"]
    assert any(said in fault["fault"] for fault in report.json["faults"])


# ---- diff ----


def test_differences_are_told(run, saved, tmp_path):
    """Names, dtypes, shapes, values, positions, state; exit code 1; an infinite one is a text in JSON. However many
    files equal ones have, they do not differ; numbers that are none are the same."""
    values = VALUES | {"b": np.array([np.nan, np.inf])}
    done = run("diff", *(write_checkpoint(tmp_path / f"{n} files", values, shards=n) for n in (1, 3)))
    assert (done.code, done.out.splitlines()[-1]) == (0, f"{len(values)} of {len(values)} variables are the same")
    other = VALUES | {
        "w": VALUES["w"] + np.eye(2, 3, dtype="float32") * 2,
        "b": VALUES["b"].astype("float32"),
        "mask": ~VALUES["mask"],
        "new": np.zeros(2),
    }
    del other["z"]
    b = write_checkpoint(tmp_path / "b", other, objects={"model/w": "w"}, positions=())
    done = run("diff", saved, b)
    assert done.code == 1
    assert "3 of 8 variables are the same" in done.out
    assert "positions differ" in done.out
    assert "state differ" in done.out
    assert "objects differ" not in done.out
    said = {each["name"]: each for each in run("diff", "--json", saved, b).json["tensors"]}
    assert set(said) == {"w", "b", "mask", "new", "z"}
    assert (said["w"]["count"], said["w"]["largest"]) == (2, 2.0)
    assert (said["mask"]["count"], said["mask"]["largest"]) == (2, None)
    assert (said["b"]["a"]["dtype"], said["b"]["b"]["dtype"]) == ("float64", "float32")
    assert said["new"]["a"] is None
    assert said["z"]["b"] is None
    finite, infinite = (write_checkpoint(tmp_path / str(value), {"v": np.array([value])}) for value in (1.0, np.inf))
    assert run("diff", "--json", finite, infinite).json["tensors"][0]["largest"] == "inf"


@given(st.data(), st.sampled_from(["float32", "int64", "complex64", "bool", "uint8"]))
def test_what_is_counted_is_what_differs(data, dtype):
    """Also of arrays that are compared in pieces."""
    large, changed = np.zeros((2, CHUNK + 3), "float32")
    changed[[0, -1]] = 1, -4
    assert compare(large, changed) == (2, 4.0)
    shape = data.draw(array_shapes(min_dims=1, max_dims=1, max_side=4))
    a, b = (data.draw(arrays(dtype, shape)) for _ in range(2))
    pairs = [(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True) if x != y and (x == x or y == y)]
    count, largest = compare(a, b)
    assert count == len(pairs)
    assert (largest is None) == (dtype == "bool")
    if dtype in ("int64", "uint8"):
        assert largest == pytest.approx(max((abs(x - y) for x, y in pairs), default=0))


# ---- export ----


def test_one_file_has_all(run, saved, tmp_path):
    """As safetensors and NumPy read it: complex128 in one dimension more; without pickles, bfloat16 as float32."""
    out = tmp_path / "all.safetensors"
    assert run("export", saved, out).code == 0
    found = load_file(out)
    assert set(found) == set(VALUES)
    assert same(found.pop("z").view("complex128")[..., 0], VALUES["z"])
    assert all(same(np.asarray(value), VALUES[name]) for name, value in found.items())
    out = tmp_path / "all.npz"
    done = run("export", saved, out)
    assert done.code == 0
    assert done.err == "NumPy files cannot hold bfloat16; saved as float32, without loss: half\n"
    with np.load(out, allow_pickle=False) as found:
        assert set(found) == set(VALUES)
        assert same(found["half"], VALUES["half"].astype("float32"))
        assert all(same(found[name], VALUES[name]) for name in VALUES if name != "half")
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    # One that fails leaves neither half a file nor one beside it; what was there stays.
    (saved / SHARD0).unlink()
    before = out.read_bytes()
    done = run("export", "--force", saved, out)
    assert (done.code, SHARD0 in done.err, out.read_bytes() == before) == (2, True, True)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "all.safetensors", "all.npz"}


# ---- Wrong use; more is in test_views.py ----


def test_what_cannot_be_read_is_named(run, saved, monkeypatch):
    """A broken manifest, also where the newest is looked for; an object store, whose library has errors of its own."""
    (saved / "manifest.json").write_text("{")
    for path in (saved, saved.parent):
        done = run("show", path)
        assert done.code == 2
        assert f"{saved}/manifest.json is not a checkpoint manifest" in done.err

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    done = run("show", "memory://bucket/run")
    assert done.code == 2
    assert done.err == "psctl: error: memory://bucket/run cannot be read: RuntimeError('no credentials')\n"


# ---- Dynamic tables, and deltas of them ----


@pytest.fixture
def job(tmp_path):
    """One whole checkpoint and two deltas, in three files each, with a variable beside."""
    job = Servers.made(tmp_path, TableSpec((2,), admission=CounterFilter(2)), 3, w=np.arange(3.0))
    rng = np.random.default_rng(0)
    for name, base in (("c-1", ""), ("c-2", "c-1"), ("c-3", "c-2")):
        job.train(rng)
        job.save(name, base)
    return job


def test_deltas_are_listed_and_shown(run, job):
    """With their bases, rows and bytes, and what has changed. What is known of each row is no variable. A delta is
    verified with its bases: a fault of a base is a fault; the file says where."""
    listed = run("ls", "--json", job.root).json["checkpoints"]
    found = [(each["name"], each["base"], each["tensors"]) for each in listed]
    assert found == [("c-1", None, 4), ("c-2", "c-1", 4), ("c-3", "c-2", 4)]
    assert "changes to" in run("ls", job.root).out
    code, out, _ = run("show", job.root / "c-1")
    rows = job.opened("c-1").manifest.tensors["users"].spec.shape[0]
    assert code == 0
    assert f"table users: {rows:,} rows, " in out
    assert "as of its round 5" in out
    assert "users/keys" not in out
    delta = job.opened("c-3").manifest.tensors["users"].spec.shape[0]
    assert f"table users: {delta:,} rows changed and 0 dropped since c-2, " in run("show", job.root).out
    assert run("show", "--json", job.root).json["tables"]["users"]["round"] == 15
    code, out, _ = run("verify", job.root)
    assert (code, "c-3 is complete: 4 variables, together with its bases: c-2, c-1" in out) == (0, True)
    shard = next((job.root / "c-1").glob("shard-00001*"))
    overwrite(shard, -1, bytes([shard.read_bytes()[-1] ^ 1]))
    code, out, _ = run("verify", "--json", job.root)
    assert (code, [each["file"] for each in json.loads(out)["faults"]]) == (1, [f"../c-1/{shard.name}"])


def test_tables_are_compared_by_their_keys(run, job):
    """Rows of both, and keys that one of both does not have; a delta is compared as the whole that it is."""
    job.save("whole")
    assert run("diff", job.root / "c-3", job.root / "whole").code == 0
    job.step(np.array([10**6, 10**6]))
    job.parts[0].arrays[0][0] += 0.5
    job.save("other")
    code, out, _ = run("diff", "--json", job.root / "c-3", job.root / "other")
    found = {each["name"]: (each["count"], each["largest"]) for each in json.loads(out)["tensors"]}
    assert code == 1
    assert found["users"] == (2 + 2, 0.5)
    assert found["users/keys"] == (1, None)
    assert found["users/count"] == (1, 0.0)
    assert "w" not in found
    job.save("same")
    assert run("diff", job.root / "other", job.root / "same").code == 0


def test_a_delta_is_compacted(run, job, tmp_path):
    """A path, or the newest of a directory; what is whole stays. A delta is exported as the whole that it is."""
    expected = job.state()
    for ending in ("safetensors", "npz"):
        assert run("export", job.root / "c-3", tmp_path / f"delta.{ending}").code == 0
    code, out, _ = run("compact", job.root)
    assert (code, "c-3 is now complete, " in out, "it no longer needs c-2, c-1" in out) == (0, True, True)
    assert run("compact", job.root / "c-3") == (0, f"{job.root}/c-3 is already complete\n", "")
    assert run("verify", job.root).code == 0
    assert run("export", job.root / "c-3", tmp_path / "whole.safetensors").code == 0
    delta, whole = (load_file(tmp_path / f"{name}.safetensors") for name in ("delta", "whole"))
    assert delta.keys() == whole.keys() >= {"users", "users/keys", "adam/users/m", "w"}
    assert all(delta[name].tobytes() == whole[name].tobytes() for name in delta)
    with np.load(tmp_path / "delta.npz") as found:
        assert found["users"].tobytes() == delta["users"].tobytes()
    for path in (*(job.root / "c-1").iterdir(), *(job.root / "c-2").iterdir()):
        path.unlink()
    assert job.restored("c-3", 2).state().equals(expected)
    assert run("ls", "--json", job.root).json["checkpoints"][0]["base"] is None


def test_of_two_compactions_at_a_time_one_changes_nothing(run, job, monkeypatch):
    """Each would remove the files of the other one."""
    directory, write, expected = str(job.root / "c-3"), compaction.write_file, job.state()

    def overtaken(*args):
        written = write(*args)
        if "-00002-of-00003" in args[1]:  # the last of them
            monkeypatch.undo()
            compaction.compact(open_saved(directory))
        return written

    monkeypatch.setattr(compaction, "write_file", overtaken)
    refused(CheckpointError, "another process has compacted", lambda: compaction.compact(open_saved(directory)))
    assert run("verify", directory).code == 0
    assert job.restored("c-3", 2).state().equals(expected)


@pytest.mark.parametrize("after", ["shard being written", "shard", "manifest"])
def test_a_killed_compaction_leaves_nothing_once_another_has_ended(run, job, monkeypatch, after):
    """Wherever it was killed: the next one removes what is not part of the checkpoint, which is whole as ever."""
    expected, directory = job.state(), job.root / "c-3"

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "suppress", lambda *_: nullcontext())
        patch.setattr(Directory, "remove", killed)
        if after == "shard being written":
            patch.setattr(os, "replace", killed)
            patch.setattr(Path, "unlink", lambda *_, **__: None)
        else:
            patch.setattr(compaction, "_check_alone" if after == "shard" else "_sweep", killed)
        refused(Killed, "", lambda: compaction.compact(open_saved(str(directory))))
    left = {path.name for path in directory.iterdir()}
    assert run("verify", directory).code == 0
    assert run("compact", directory).code == 0
    whole = {path.name for path in directory.iterdir()}
    assert whole == {"manifest.json", *open_saved(str(directory)).manifest.shards}
    assert left - whole, "it had left nothing"
    assert job.restored("c-3", 2).state().equals(expected)


def test_names_in_a_checkpoint_steer_no_terminal(run, tmp_path):
    """Of tensors, objects, the library and the directory, in each command; a table is as wide as what it shows."""
    evil = "\x1b]0;title\x07\x1b[2J"
    name = f"{evil}v"
    path = write_checkpoint(tmp_path / "run" / f"{evil}-1", {name: VALUES["w"]}, objects={f"m/{evil}": name})
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"library": f"{evil}library"}))
    for command in (["show", path], ["ls", path.parent], ["verify", path], ["diff", path, path], ["show", path / "x"]):
        done = run(*command)
        assert not {"\x1b", "\x07"} & {*done.out, *done.err}, command
        assert "\\x1b]0;title\\x07\\x1b[2J" in done.out + done.err, command
