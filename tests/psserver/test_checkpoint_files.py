"""A checkpoint's files: the manifest comes last, and goes first; wherever they lie."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import PurePosixPath

import fsspec
import numpy as np
import pytest
from objects import BUCKET, object_store
from rig import manifest_of

from psserver import checkpoint
from psserver.checkpoint import Frozen, Restored
from psserver.places import Directory, Remote, place
from pswire.errors import CheckpointError, ConfigError, NoCheckpoint, VariableMismatch
from pswire.log import Position
from pswire.manifest import MANIFEST, Manifest
from pswire.spec import SnapshotOrder
from pswire.tensor import TensorSpec, spec_of

POSITION = Position(0, 2, 5)
VALUE = np.arange(6, dtype="float32").reshape(2, 3)
SPEC = spec_of(VALUE)


@pytest.fixture(scope="module")
def bucket():
    """An S3 bucket."""
    with object_store():
        yield f"s3://{BUCKET}"


@pytest.fixture(params=["directory", "memory", "s3"])
def root(request, tmp_path):
    """The root of checkpoints: each kind of place."""
    if request.param == "directory":
        return str(tmp_path)
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}"
    return f"{request.getfixturevalue('bucket')}/{uuid.uuid4()}"


def frozen(path="run/ckpt-1", value=VALUE, server=0, servers=(0,), name="w"):
    return Frozen(SnapshotOrder(path, servers), server, 7, (POSITION,), {name: value})


def write(root, *args, **keys):
    return checkpoint.write_shard(place(root), frozen(*args, **keys), np.asarray, lambda name: None)


def save(root, *args, busy=(), **keys):
    text = manifest_of([write(root, *args, **keys)])
    checkpoint.write_manifest(place(root), frozen(*args, **keys), text, busy)


def read(root, path="run"):
    (found,) = Restored.open(place(root), path).read([("w", SPEC)])
    return found


def files(root):
    """All files below the root."""
    fs, path = fsspec.url_to_fs(root, use_listings_cache=False)
    return {key.removeprefix(path).strip("/") for key in fs.find(path)}


def put(root, path, data):
    fs, above = fsspec.url_to_fs(root)
    fs.makedirs(f"{above}/{path}".rpartition("/")[0], exist_ok=True)
    fs.pipe_file(f"{above}/{path}", data)


def test_what_is_saved_is_read(root):
    """Values and positions come back, by the checkpoint's path or its directory's; there is no other file."""
    save(root)
    for path in ("run", "run/ckpt-1", "./run//ckpt-1"):
        restored = Restored.open(place(root), path)
        assert (restored.path, restored.manifest.positions) == ("run/ckpt-1", (POSITION,))
        np.testing.assert_array_equal(restored.read([("w", SPEC)])[0], VALUE)
    assert files(root) == {f"run/ckpt-1/{name}" for name in ("manifest.json", "shard-00000-of-00001.safetensors")}


def test_a_checkpoint_may_lie_at_the_root(root):
    """Its directory is then the root's own child."""
    save(root, "ckpt-1")
    assert Restored.open(place(root), ".").path == "ckpt-1"


def test_the_newest_has_the_greatest_number(root):
    """Whenever it was written, and wherever it was copied from: no clock says which."""
    for number in (9, 10, 8):
        save(root, f"run/ckpt-{number}", VALUE + number)
    save(root, "run/best")
    np.testing.assert_array_equal(read(root), VALUE + 10)


def test_without_a_manifest_there_is_no_checkpoint(root):
    """A directory that a crash left behind is not taken for a checkpoint, nor is a missing one."""
    write(root)
    for path in ("run", "elsewhere"):
        with pytest.raises(NoCheckpoint, match=r"there is no complete checkpoint in .*; save one first, or train anew"):
            Restored.open(place(root), path)


def test_a_checkpoint_that_is_overwritten_is_none(root):
    """From the first new shard on: a crash before the manifest must not leave a mixture of two saves."""
    save(root)
    write(root, value=VALUE + 1)
    with pytest.raises(NoCheckpoint):
        read(root)
    save(root, value=VALUE + 1)
    np.testing.assert_array_equal(read(root), VALUE + 1)


def test_a_failure_leaves_the_one_before(root):
    """What fails half way is no checkpoint, and leaves nothing that is taken for one."""
    save(root)

    def fail(name):
        raise OSError("no space left")

    with pytest.raises(CheckpointError, match=r"run/ckpt-2/shard-00000-of-00001.safetensors cannot be written: no sp"):
        checkpoint.write_shard(place(root), frozen("run/ckpt-2", VALUE + 1), np.asarray, fail)
    np.testing.assert_array_equal(read(root), VALUE)
    assert not {name for name in files(root) if name.startswith("run/ckpt-2/")}


def test_large_tensors(root):
    """More than an object store takes in one message; one that fails after some of it leaves nothing, too."""
    large = np.arange(5 << 20, dtype="float32")
    spec = spec_of(large)
    save(root, value=large)
    (found,) = Restored.open(place(root), "run").read([("w", spec)])
    np.testing.assert_array_equal(found, large)

    def fail(name):
        raise OSError("no space left")

    with pytest.raises(CheckpointError, match="no space left"):
        checkpoint.write_shard(place(root), frozen("run/ckpt-2", large), np.asarray, fail)
    assert not {name for name in files(root) if name.startswith("run/ckpt-2/")}


def test_what_was_written_is_let_go_of(root):
    """Variable by variable, in the order of their bytes; none is brought to the host before that."""
    values = {"a": np.zeros(2, "int8"), "b": VALUE, "c": np.zeros((), "float64")}
    told = []

    def get(value):
        told.append(value.dtype)
        return value

    shard = checkpoint.write_shard(place(root), replace(frozen(), values=values), get, told.append)
    assert told == ["float64", "c", "float32", "b", "int8", "a"]
    assert {name for name, *_ in shard.tensors} == set(values)


@pytest.mark.parametrize("path", ["", "/etc", "../up", "a/../../up", "a\0b", "s3://bucket/x", "file:///etc"])
def test_paths_stay_below_the_root(root, path):
    """Neither saving nor restoring leaves the place that the server's operator set; the error says what to write."""
    with pytest.raises(CheckpointError, match="such as 'run1'"):
        write(root, path)
    with pytest.raises(CheckpointError, match="such as 'run1'"):
        Restored.open(place(root), path)
    assert not files(root)


def test_links_do_not_lead_out(tmp_path):
    """Nor does a link that lies below the root: neither a directory's, nor a file's."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="through a link"):
        write(root, "link/x")
    save(tmp_path, "ckpt-1")
    (root / "ckpt-1").mkdir()
    for file in (tmp_path / "ckpt-1").iterdir():
        (root / "ckpt-1" / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="through a link"):
        Restored.open(place(root), "ckpt-1")


def test_a_link_is_not_written_through(tmp_path):
    """Where a file is to be written there may be a link that leads out: what it leads to stays."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "root"
    (root / "run/ckpt-1").mkdir(parents=True)
    (root / "run/ckpt-1/shard-00000-of-00001.safetensors").symlink_to(victim)
    with pytest.raises(CheckpointError, match="through a link"):
        save(root)
    assert victim.read_text() == "precious"


def test_a_root_says_which_place(tmp_path):
    """A path or `file://` is a directory; another URL is what fsspec makes of it; one that it does not know is told."""
    assert isinstance(place(tmp_path), Directory)
    assert isinstance(place(f"file://{tmp_path}"), Directory)
    assert isinstance(place("memory://x"), Remote)
    with pytest.raises(ConfigError, match=r"--checkpoint-root nonsense://x: .*nonsense"):
        place("nonsense://x")


def test_a_variable_that_is_not_what_was_saved(root):
    """Another shape or dtype, or a name that is not there, is said with both sides; a dtype may be cast if asked."""
    save(root)
    restored = Restored.open(place(root), "run")
    with pytest.raises(VariableMismatch, match=r"has 'w' as float32\[2,3\], not float32\[3\]"):
        restored.read([("w", TensorSpec("float32", (3,)))], cast=True)
    with pytest.raises(CheckpointError, match="has no variable 'v'; it has w"):
        restored.read([("v", SPEC)])
    double = TensorSpec("float64", (2, 3))
    with pytest.raises(VariableMismatch, match=r"float32\[2,3\], not float64\[2,3\]"):
        restored.read([("w", double)])
    (found,) = restored.read([("w", double)], cast=True)
    assert found.dtype == "float64"
    np.testing.assert_array_equal(found, VALUE)


def test_one_tensor_may_be_two_variables(root):
    """Each gets memory of its own: a round writes into it."""
    save(root)
    one, two = Restored.open(place(root), "run").read([("w", SPEC), ("w", SPEC)])
    one += 1
    np.testing.assert_array_equal(two, VALUE)


@pytest.mark.parametrize(
    "manifest", ["{", "[]", '{"format": 3}', '{"format": 1, "tensors": {"w": {"file": "../x"}}, "positions": []}']
)
def test_a_broken_manifest_is_an_error(root, manifest):
    """It is not taken for a missing one: a job that resumes must not silently start anew."""
    save(root)
    put(root, "run/ckpt-1/manifest.json", manifest.encode())
    with pytest.raises(CheckpointError, match=r"run/ckpt-1/manifest\.json") as caught:
        read(root)
    assert not isinstance(caught.value, NoCheckpoint)


def test_a_flipped_bit_is_told_wherever_it_is(tmp_path):
    """In the header or in the data: the error names the file, and nothing is restored from it."""
    save(tmp_path)
    shard = tmp_path / "run/ckpt-1/shard-00000-of-00001.safetensors"
    whole = shard.read_bytes()
    harmless = [index for index, byte in enumerate(whole) if byte == ord(" ")]
    for index in set(range(len(whole))) - set(harmless):
        shard.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        with pytest.raises(CheckpointError, match=r"shard-00000-of-00001.safetensors cannot be read"):
            read(tmp_path)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"the bytes of 'w' are not those that were saved: xxh3:"):
        read(tmp_path)


def test_the_first_format_is_read(tmp_path):
    """It has no checksums and no sizes."""
    save(tmp_path)
    path = tmp_path / "run/ckpt-1/manifest.json"
    text = Manifest.parse(path.read_text(), "here").text()
    bare = replace(Manifest.parse(text, "here"), files={})
    bare = replace(bare, tensors={name: replace(saved, checksum="") for name, saved in bare.tensors.items()})
    path.write_text(bare.text().replace('"format": 2', '"format": 1'))
    np.testing.assert_array_equal(read(tmp_path), VALUE)


def test_only_what_is_wanted_is_read(tmp_path):
    """A server reads no file that has none of its variables: another's may be broken."""
    shards = [write(tmp_path, server=server, servers=(0, 1), name=name) for server, name in enumerate("wv")]
    checkpoint.write_manifest(place(tmp_path), frozen(servers=(0, 1)), manifest_of(shards))
    (tmp_path / "run/ckpt-1/shard-00001-of-00002.safetensors").unlink()
    np.testing.assert_array_equal(read(tmp_path), VALUE)
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002\.safetensors cannot be read"):
        Restored.open(place(tmp_path), "run").read([("v", SPEC)])


def test_leftovers_go_with_the_next_save(root):
    """What crashed saves of the same name left, and files of another number of servers; nothing else."""
    save(root, "run/ckpt-1")
    kept = {"run/ckpt-1/manifest.json", "run/ckpt-1/shard-00000-of-00001.safetensors"}
    write(root, "run/ckpt-2")  # crashed
    for path in (
        "run/other-2/shard-00000-of-00001.safetensors",  # another job's, perhaps
        "run/ckpt-9/shard-00000-of-00001.safetensors",  # a later one
        "run/ckpt-3/shard-00000-of-00001.safetensors",  # one that is being written
        "run/ckpt-4/notes.txt",  # not ours
        "run/notes.txt",
    ):
        put(root, path, b"x")
        kept.add(path)
    put(root, "run/ckpt-5/shard-00004-of-00005.safetensors", b"x")
    put(root, "run/ckpt-5/.manifest.json.123", b"x")
    save(root, "run/ckpt-5", busy={"run/ckpt-3"})
    kept |= {"run/ckpt-5/manifest.json", "run/ckpt-5/shard-00000-of-00001.safetensors"}
    assert files(root) == kept


def test_an_order_deletes_checkpoints_and_nothing_else(root):
    """What is complete goes, but for the new one; what is none, and files that no save makes, stay."""
    for path in ("run/ckpt-1", "run/ckpt-2", "run/ckpt-3"):
        save(root, path)
    put(root, "run/ckpt-1/notes.txt", b"mine")
    write(root, "run/half-1")
    order = {"delete": ["run/ckpt-1", "run/half-1", "run/ckpt-3", "run/none"]}
    checkpoint.delete(place(root), PurePosixPath("run/ckpt-3"), json.dumps(order))
    shard = "shard-00000-of-00001.safetensors"
    kept = {"run/ckpt-1/notes.txt", f"run/half-1/{shard}"}
    kept |= {f"run/{name}/{file}" for name in ("ckpt-2", "ckpt-3") for file in (shard, MANIFEST)}
    assert files(root) == kept


@pytest.mark.parametrize("path", ["../up", "/etc", "s3://bucket/x"])
def test_an_order_deletes_nothing_outside(root, path):
    """It is refused, whoever has written it."""
    with pytest.raises(CheckpointError):
        checkpoint.delete(place(root), PurePosixPath("run/ckpt-3"), json.dumps({"delete": [path]}))


def test_what_cannot_be_removed_is_no_failure(tmp_path):
    """The checkpoint is complete all the same."""
    (tmp_path / "run/ckpt-0").mkdir(parents=True)
    (tmp_path / "run/ckpt-0/shard-00000-of-00001.safetensors").mkdir()
    save(tmp_path)
    np.testing.assert_array_equal(read(tmp_path), VALUE)


def test_a_manifest_that_is_none_is_not_written(root):
    """What a chief sends becomes no checkpoint that cannot be read."""
    write(root)
    with pytest.raises(CheckpointError, match="is no manifest"):
        checkpoint.write_manifest(place(root), frozen(), "{}")
    with pytest.raises(NoCheckpoint):
        read(root)
