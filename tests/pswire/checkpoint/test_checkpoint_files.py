"""A checkpoint's files: the manifest comes last, and goes first; wherever they lie."""

import logging
import os
import shutil
import stat
import tempfile
import uuid
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath

import fsspec
import numpy as np
import pytest

from pswire.checkpoint import writer
from pswire.checkpoint.manifest import LATEST, MANIFEST, latest_text
from pswire.checkpoint.reader import FoundCheckpoint
from pswire.checkpoint.reader import SavedCheckpoint as Saved
from pswire.checkpoint.storage import Directory, RemoteStorage, parted, storage_at
from pswire.checkpoint.writer import Frozen
from pswire.errors import CheckpointError, ConfigError, DamagedCheckpoint, NoCheckpoint, VariableMismatch
from pswire.model.log import Position
from pswire.model.plan import SnapshotOrder
from pswire.model.tensor import TensorSpec, spec_of
from tests.kit.rig import manifest_of
from tests.kit.storage import BUCKET, object_store

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


def each_in_a_directory(name, values):
    """Parametrizes by all values in a directory, and by the first one in the other kinds of places."""
    places = [("directory", value) for value in values] + [("memory", values[0]), ("s3", values[0])]
    return pytest.mark.parametrize(("root", name), places, indirect=["root"])


def frozen(path="run/ckpt-1", value=VALUE, server=0, servers=(0,), name="w", state=""):
    return Frozen(SnapshotOrder(path, servers, 0, state), server, 7, (POSITION,), {name: value})


def write_shard(root, one):
    return writer.write_shard(storage_at(root), one, lambda value: (np.asarray(value),), lambda name: None)


def write(root, *args, **keys):
    return write_shard(root, frozen(*args, **keys))


def save(root, *args, busy=frozenset, spare=(), **keys):
    """Returns the shard's name."""
    one = frozen(*args, **keys)
    text = manifest_of([write_shard(root, one)])
    writer.write_manifest(storage_at(root), one, text, busy, spare)
    return one.file


def read(root, path="run"):
    (found,) = Saved.open(storage_at(root), path).read([("w", SPEC)])
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
    """Values and positions come back, by the checkpoint's path or its directory's; there is no other file. One tensor
    may be two variables: each gets memory of its own, for a round writes into it."""
    shard = save(root)
    for path in ("run", "run/ckpt-1", "./run//ckpt-1"):
        restored = Saved.open(storage_at(root), path)
        assert (restored.path, restored.manifest.positions) == ("run/ckpt-1", (POSITION,))
        one, two = restored.read([("w", SPEC), ("w", SPEC)])
        np.testing.assert_array_equal(one, VALUE)
        one += 1
        np.testing.assert_array_equal(two, VALUE)
    assert files(root) == {f"run/ckpt-1/{name}" for name in ("manifest.json", shard)}
    assert PurePosixPath(shard).match("shard-00000-of-00001-????????.safetensors")
    save(root, "ckpt-1")
    assert Saved.open(storage_at(root), ".").path == "ckpt-1", "its directory is the root's own child"


def test_an_order_says_what_is_the_newest(root):
    """A save does, after the manifest; without that word it stays what it was, until that one is gone, or lies
    elsewhere: it is looked for among those that are complete."""
    save(root, "run/ckpt-5", VALUE + 5)
    save(root, "run/ckpt-2", VALUE + 2, state='{"latest": true}')
    save(root, "run/ckpt-9", VALUE + 9)
    np.testing.assert_array_equal(read(root), VALUE + 2)
    assert {name for name in files(root) if "ckpt-" not in name} == {"run/latest"}
    writer.delete(storage_at(root), PurePosixPath("run/ckpt-5"), "ckpt-2", storage_at(root).listing("run"))
    np.testing.assert_array_equal(read(root), VALUE + 9)
    save(root, "other/ckpt-3")
    write(root, "run/ckpt-6")
    for name in ("ckpt-6", "ckpt-7", "../other/ckpt-3"):
        put(root, "run/latest", latest_text(name).encode())
        assert Saved.open(storage_at(root), "run").path == "run/ckpt-9"


def test_without_a_manifest_there_is_no_checkpoint(root):
    """A directory that a crash left behind is not taken for a checkpoint, nor is a missing one. A broken manifest is no
    missing one: a job that resumes must not silently start anew."""
    write(root)
    words = r"there is no complete checkpoint in .*; save one first, or train from the start"
    for path in ("run", "elsewhere"):
        with pytest.raises(NoCheckpoint, match=words):
            Saved.open(storage_at(root), path)
    put(root, "run/ckpt-1/manifest.json", b"{")
    with pytest.raises(DamagedCheckpoint, match=r"run/ckpt-1/manifest\.json"):
        read(root)


def test_what_is_written_over_is_whole_until_the_new_one_is(root):
    """A save to a path that is taken touches nothing there before its own manifest is written. Another save to that
    path is left alone: its files are not leftovers while it is being written."""
    save(root)
    before = files(root)
    new = frozen(value=VALUE + 1)
    assert f"run/ckpt-1/{new.file}" not in before, "also saves of one plan have names of their own"
    text = manifest_of([write_shard(root, new)])
    np.testing.assert_array_equal(read(root), VALUE)
    assert files(root) == before | {f"run/ckpt-1/{new.file}"}
    between = save(root, value=VALUE + 2, busy=lambda: {"run/ckpt-1"})
    np.testing.assert_array_equal(read(root), VALUE + 2)
    assert files(root) >= {f"run/ckpt-1/{name}" for name in ("manifest.json", new.file, between)}
    writer.write_manifest(storage_at(root), new, text)
    np.testing.assert_array_equal(read(root), VALUE + 1)
    assert files(root) == {"run/ckpt-1/manifest.json", f"run/ckpt-1/{new.file}"}


LARGE = np.arange(5 << 20, dtype="float32")
"""More than an object store takes in one message."""


def test_a_failure_leaves_what_was_to_be_written_over(root):
    """With all its bytes, also where it comes after some of many; what the save has written can be removed. What fails
    at another path is no checkpoint, and leaves nothing. What is no manifest is not written, whatever a chief sends."""
    save(root)
    before = files(root)

    def fail(name):
        raise OSError("no space left")

    for path, value in (("run/ckpt-1", VALUE + 1), ("run/ckpt-2", VALUE + 1), ("run/ckpt-2", LARGE)):
        words = rf"{path}/shard-00000-of-00001-\w{{8}}.safetensors cannot be written: no space left"
        with pytest.raises(CheckpointError, match=words):
            writer.write_shard(storage_at(root), frozen(path, value), lambda value: (np.asarray(value),), fail)
        assert files(root) == before
        np.testing.assert_array_equal(read(root), VALUE)
    for path in ("run/ckpt-1", "run/ckpt-2"):
        other = frozen(path, VALUE + 1)
        write_shard(root, other)
        with pytest.raises(CheckpointError, match="is not a checkpoint manifest"):
            writer.write_manifest(storage_at(root), other, "{}")
        writer.remove_shard(storage_at(root), other)
        writer.remove_shard(storage_at(root), other)  # again, where there is none
    assert files(root) == before
    np.testing.assert_array_equal(read(root), VALUE)
    save(root, value=LARGE)
    (found,) = Saved.open(storage_at(root), "run").read([("w", spec_of(LARGE))])
    np.testing.assert_array_equal(found, LARGE)


class Watched:
    """A place that counts its calls of some names, and calls a function with the count before each."""

    def __init__(self, inner, names, before=lambda count: None):
        self._inner, self._names, self._before = inner, names, before
        self.calls = 0

    def __getattr__(self, name):
        if name in self._names:
            self.calls += 1
            self._before(self.calls)
        return getattr(self._inner, name)


@pytest.mark.parametrize(("path", "steps"), [("run/ckpt-2", 7), ("run/ckpt-3", 6)])
def test_whatever_a_crash_leaves_is_whole(tmp_path, path, steps):
    """Before each single change of a save, to a path that is taken or not: the old one or the new one is the newest,
    and whole; the next save cleans up."""
    said = '{"latest": true, "delete": ["ckpt-1"]}'
    save(tmp_path / "before", "run/ckpt-1")
    save(tmp_path / "before", "run/ckpt-2", state='{"latest": true}')
    write(tmp_path / "before", "run/ckpt-1")  # a leftover in one that is to be deleted
    for step in range(steps + 1):
        root = shutil.copytree(tmp_path / "before", tmp_path / str(step))

        def die(count, step=step):
            if count > step:
                raise KeyboardInterrupt

        new = frozen(path, VALUE + 1, state=said)
        there = Watched(storage_at(root), ("write", "put", "remove"), die)
        with pytest.raises(KeyboardInterrupt) if step < steps else nullcontext():
            text = manifest_of([writer.write_shard(there, new, lambda value: (np.asarray(value),), lambda name: None)])
            writer.write_manifest(there, new, text)
        newest = Saved.open(storage_at(root), "run")
        is_new = new.file in newest.manifest.files
        assert newest.path == (path if is_new else "run/ckpt-2")
        np.testing.assert_array_equal(newest.tensor("w"), VALUE + is_new)
        assert is_new == (step > 1 if path == "run/ckpt-2" else step > 2)
        save(root, "run/ckpt-3", VALUE + 2, state=said)
        np.testing.assert_array_equal(read(root), VALUE + 2)
        assert sorted(file.name for file in (root / "run").iterdir()) == ["ckpt-2", "ckpt-3", "latest"]
        assert not list(Saved.open(storage_at(root), "run/ckpt-2").verify())


def test_what_is_not_there_is_removed(tmp_path):
    """Whatever keeps it from being there; an empty directory goes with it. A file that a manifest names is not: what
    failed may have been the last step, which makes the manifest lasting."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/ckpt-1").write_text("a file")
    writer.remove_shard(storage_at(tmp_path), frozen())
    (tmp_path / "run/ckpt-2").mkdir()
    writer.remove_shard(storage_at(tmp_path), frozen("run/ckpt-2"))
    writer.remove_shard(storage_at(tmp_path), frozen("elsewhere/ckpt-2"))
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "ckpt-1"]
    one = frozen("run/ckpt-3")
    writer.write_manifest(storage_at(tmp_path), one, manifest_of([write_shard(tmp_path, one)]))
    writer.remove_shard(storage_at(tmp_path), one)
    np.testing.assert_array_equal(read(tmp_path), VALUE)


def test_what_was_written_is_let_go_of(root):
    """Variable by variable, in the order of their bytes; none is brought to the host before that."""
    values = {"a": np.zeros(2, "int8"), "b": VALUE, "c": np.zeros((), "float64")}
    told = []

    def get(value):
        told.append(value.dtype)
        return (value,)

    shard = writer.write_shard(storage_at(root), replace(frozen(), values=values), get, told.append)
    assert told == ["float64", "c", "float32", "b", "int8", "a"]
    assert {each.name for each in shard.tensors} == set(values)


@each_in_a_directory("path", ["../up", "..", "", "/etc", "//etc", "a/../../up", "a\0b", "s3://bucket/x", "file:///etc"])
def test_paths_stay_below_the_root(root, path):
    """Neither saving nor restoring leaves the place that the server's operator set; the error says what to write. Nor
    has a checkpoint the name of the file that says which is the newest: it would be in its way."""
    with pytest.raises(CheckpointError, match="such as 'run1'"):
        write(root, path)
    with pytest.raises(CheckpointError, match="such as 'run1'"):
        Saved.open(storage_at(root), path)
    with pytest.raises(CheckpointError, match=r"'run/latest': .*choose another name"):
        write(root, "run/latest")
    assert not files(root)


@pytest.mark.parametrize("name", ["shard", MANIFEST, LATEST])
def test_a_link_is_not_written_through(tmp_path, name):
    """Where a file is to be written there may be a link that leads out: what it leads to stays. Nor does a directory's
    link lead out, nor are files read through one."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    root = tmp_path / "root"
    (root / "run/ckpt-1").mkdir(parents=True)
    (root / "ckpt-1").mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="through a link"):
        write(root, "link/x")
    save(tmp_path, "ckpt-1")
    for file in (tmp_path / "ckpt-1").iterdir():
        (root / "ckpt-1" / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="through a link"):
        Saved.open(storage_at(root), "ckpt-1")
    one = frozen(state='{"latest": true}')
    link = root / "run" / {"shard": f"ckpt-1/{one.file}", MANIFEST: f"ckpt-1/{MANIFEST}", LATEST: LATEST}[name]
    link.symlink_to(victim)
    with pytest.raises(CheckpointError, match="through a link"):
        writer.write_manifest(storage_at(root), one, manifest_of([write_shard(root, one)]))
    assert victim.read_text() == "precious"


@contextmanager
def unprivileged():
    """As somebody who may not do everything."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(uid)


def test_others_may_not_read_it(tmp_path):
    """Whatever the umask allows: neither its files nor its directories; the group may, as far as that says."""
    before = os.umask(0)
    try:
        save(tmp_path / "root", "run/ckpt-1")
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "root").rglob("*")}
    assert found
    assert all(mode == (0o770 if path.is_dir() else 0o660) for path, mode in found.items()), found


def test_what_lies_beside_does_not_matter(caplog):
    """A link out of the root, or a directory that cannot be read, stops neither the newest nor the sweep; said once."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        root = Path(above) / "root"
        save(root, "run/ckpt-1")
        write(root, "run/ckpt-2")  # crashed
        (root / "run/elsewhere").symlink_to(above)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # for who is unprivileged
        (root / "run/secret").mkdir(mode=0o300 if os.geteuid() else 0o700)
        with unprivileged():
            where = storage_at(root)
            assert [FoundCheckpoint.within(where, "run").latest for _ in range(3)] == ["ckpt-1"] * 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert all(f"run/{name}: " in caplog.text for name in ("elsewhere", "secret"))
        save(root, "run/ckpt-3")
        assert sorted(path.name for path in (root / "run").iterdir()) == ["ckpt-1", "ckpt-3", "elsewhere", "secret"]
        (root / "run/secret").chmod(0o700)


def test_a_listing_looks_where_links_lead_and_nowhere_else(tmp_path, monkeypatch):
    """To resolve the paths of thousands of checkpoints, with each save, takes longer than to list them."""
    for number in range(50):
        save(tmp_path, f"run/ckpt-{number}")
    (tmp_path / "run/best").symlink_to("ckpt-7")
    resolve, resolved = Path.resolve, []
    monkeypatch.setattr(Path, "resolve", lambda path, *args: (resolved.append(path), resolve(path, *args))[1])
    listed = storage_at(tmp_path).listing("run")
    assert len(listed) == 51
    assert listed["best"] == listed["ckpt-7"]
    assert {path.name for path in resolved} == {tmp_path.name, "run", "best"}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("run/ckpt-1", ("run", "ckpt-1")),
        ("ckpt-1/", (".", "ckpt-1")),
        ("/data/run/ckpt-1", ("/data/run", "ckpt-1")),
        ("/ckpt-1", ("/", "ckpt-1")),
        ("s3://bucket/run/ckpt-1", ("s3://bucket/run", "ckpt-1")),
        ("s3://bucket/ckpt-1", ("s3://bucket", "ckpt-1")),
        ("file:///data/ckpt-1", ("file:///data", "ckpt-1")),
    ],
)
def test_a_path_has_a_directory_and_a_name(path, parts):
    """The directory is a root for `storage_at`, which says which kind of place: a path or `file://` is a directory;
    another URL is what fsspec makes of it; one that it does not know is told."""
    assert parted(path) == parts
    for root, kind in (("run", Directory), ("file:///run", Directory), ("memory://x", RemoteStorage)):
        assert isinstance(storage_at(root), kind)
    with pytest.raises(ConfigError, match=r"nonsense://x cannot be opened: .*nonsense"):
        storage_at("nonsense://x")


def test_a_variable_that_is_not_what_was_saved(root):
    """Another shape or dtype, or a name that is not there, is said with both sides; a dtype may be cast if asked."""
    save(root)
    restored = Saved.open(storage_at(root), "run")
    with pytest.raises(VariableMismatch, match=r"holds 'w' as float32\[2,3\], not float32\[3\]"):
        restored.read([("w", TensorSpec("float32", (3,)))], cast=True)
    with pytest.raises(CheckpointError, match="has no variable 'v'; it has w"):
        restored.read([("v", SPEC)])
    double = TensorSpec("float64", (2, 3))
    with pytest.raises(VariableMismatch, match=r"float32\[2,3\], not float64\[2,3\]"):
        restored.read([("w", double)])
    (found,) = restored.read([("w", double)], cast=True)
    assert found.dtype == "float64"
    np.testing.assert_array_equal(found, VALUE)


def test_a_flipped_bit_is_told_wherever_it_is(tmp_path):
    """In the header or in the data: the error names the file, and nothing is restored from it."""
    shard = tmp_path / "run/ckpt-1" / save(tmp_path)
    whole = shard.read_bytes()
    harmless = [index for index, byte in enumerate(whole) if byte == ord(" ")]
    for index in set(range(len(whole))) - set(harmless):
        shard.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        with pytest.raises(CheckpointError, match=r"shard-00000-of-00001-\w+.safetensors cannot be read"):
            read(tmp_path)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"'w' has another checksum than when it was saved: xxh3:"):
        read(tmp_path)


def test_only_what_is_wanted_is_read(tmp_path):
    """A server reads no file that has none of its variables: another's may be broken."""
    each = [frozen(server=server, servers=(0, 1), name=name) for server, name in enumerate("wv")]
    writer.write_manifest(storage_at(tmp_path), each[0], manifest_of([write_shard(tmp_path, one) for one in each]))
    (tmp_path / "run/ckpt-1" / each[1].file).unlink()
    np.testing.assert_array_equal(read(tmp_path), VALUE)
    with pytest.raises(CheckpointError, match=rf"{each[1].file} cannot be read"):
        Saved.open(storage_at(tmp_path), "run").read([("v", SPEC)])


def test_a_manifest_has_all_its_files(root):
    """Else servers on several hosts have no common place, and what they saved could not be restored; that is said."""
    each = [frozen(server=server, servers=(0, 1), name=name) for server, name in enumerate("wv")]
    text = manifest_of([write_shard(root, one) for one in each])
    path = f"run/ckpt-1/{each[1].file}"
    for data, said in [(None, "does not exist here"), (b"short", "has 5 bytes")]:
        storage_at(root).remove(path)
        if data:
            put(root, path, data)
        with pytest.raises(CheckpointError, match=rf"{path} {said}, .*. Servers on several hosts need"):
            writer.write_manifest(storage_at(root), each[0], text)
        with pytest.raises(NoCheckpoint):
            read(root)


@each_in_a_directory("text", ["", "{", "null", '["ckpt-1"]', '{"format": 2, "latest": "ckpt-1"}', "\u00ff"])
def test_without_that_word_it_is_the_greatest_number(root, text, caplog):
    """Nothing that is understood is told, and passed over."""
    for number in (1, 2):
        save(root, f"run/ckpt-{number}", VALUE + number)
    put(root, "run/latest", text.encode("latin-1"))
    np.testing.assert_array_equal(read(root), VALUE + 2)
    assert "cannot use run/latest (" in caplog.text
    assert "the checkpoint with the highest number is taken as the newest" in caplog.text


def test_the_newest_may_be_another_one_while_it_is_looked_for(root):
    """The one that was named is gone, for another has taken its place: that one is meant, not one that was given up."""
    said = '{"latest": true}'
    save(root, "run/ckpt-9")  # from which the job went back
    save(root, "run/ckpt-1", state=said)

    def goes_on(count):
        if count == 1:
            save(root, "run/ckpt-2", state='{"latest": true, "delete": ["ckpt-1"]}')

    def goes(count):
        storage_at(root).remove(f"run/ckpt-2/{MANIFEST}")

    for happens, newest in ((goes_on, "ckpt-2"), (goes, "ckpt-9")):
        there = Watched(storage_at(root), ("listing",), happens)
        assert FoundCheckpoint.within(there, "run").latest == newest


def test_a_save_lists_its_directory_once(root):
    """There may be thousands of checkpoints in it, and as many that are to be deleted."""
    for number in range(1, 4):
        save(root, f"run/ckpt-{number}")
    there = Watched(storage_at(root), ("listing",))
    new = frozen("run/ckpt-4", state='{"delete": ["ckpt-1", "ckpt-2", "ckpt-3"]}')
    writer.write_manifest(there, new, manifest_of([write_shard(root, new)]))
    assert there.calls == 1
    assert files(root) == {f"run/ckpt-4/{MANIFEST}", f"run/ckpt-4/{new.file}"}


def test_leftovers_go_with_the_next_save(root):
    """What crashed saves of the same name left, and files of another number of servers; nothing else."""
    kept = {"run/ckpt-1/manifest.json", f"run/ckpt-1/{save(root, 'run/ckpt-1')}"}
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
    shard = save(root, "run/ckpt-5", busy=lambda: {"run/ckpt-3"})
    kept |= {"run/ckpt-5/manifest.json", f"run/ckpt-5/{shard}"}
    assert files(root) == kept


def test_what_somebody_reads_is_spared(root):
    """Neither deleted nor, where another one is written over it, swept: its tensors are wanted later."""
    save(root, "run/ckpt-1")
    kept = Saved.open(storage_at(root), "run/ckpt-1")
    save(root, "run/ckpt-2", state='{"delete": ["ckpt-1"]}', spare={kept.full})
    save(root, "run/ckpt-1", VALUE + 1, spare={kept.full})
    np.testing.assert_array_equal(kept.read([("w", SPEC)])[0], VALUE)
    shard = save(root, "run/ckpt-1", VALUE + 1)
    assert {name for name in files(root) if "ckpt-1" in name} == {"run/ckpt-1/manifest.json", f"run/ckpt-1/{shard}"}


def test_an_order_deletes_checkpoints_and_nothing_else(root):
    """What is complete goes, but for the new one; what is none, and files that no save makes, stay."""
    shards = {name: save(root, f"run/{name}") for name in ("ckpt-1", "ckpt-2")}
    put(root, "run/ckpt-1/notes.txt", b"mine")
    half = write(root, "run/half-1").file
    shards["ckpt-3"] = save(root, "run/ckpt-3", state='{"delete": ["ckpt-1", "half-1", "ckpt-3", "none"]}')
    kept = {"run/ckpt-1/notes.txt", f"run/half-1/{half}"}
    kept |= {f"run/{name}/{file}" for name in ("ckpt-2", "ckpt-3") for file in (shards[name], MANIFEST)}
    assert files(root) == kept


@each_in_a_directory("name", ["../other", "..", ".", "", "/etc", "s3://bucket/x", "other/ckpt-1"])
def test_an_order_deletes_nothing_elsewhere(root, name, caplog):
    """It is refused, whoever has written it, and the others are deleted all the same."""
    save(root, "run/ckpt-1")
    save(root, "other/ckpt-1")
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint in the directory of run/ckpt-2"):
        writer.delete(storage_at(root), PurePosixPath("run/ckpt-2"), name, storage_at(root).listing("run"))
    save(root, "run/ckpt-2", state=f'{{"delete": ["{name}", "ckpt-1"]}}')
    assert "cannot remove old checkpoints in" in caplog.text
    assert {str(PurePosixPath(file).parent) for file in files(root)} == {"run/ckpt-2", "other/ckpt-1"}


def test_what_cannot_be_removed_is_no_failure(tmp_path):
    """The checkpoint is complete all the same, and what comes after it is removed."""
    (tmp_path / "run/ckpt-0/shard-00000-of-00001.safetensors").mkdir(parents=True)
    for number in (1, 2, 3):
        write(tmp_path, f"run/ckpt-{number}")
    save(tmp_path, "run/ckpt-4")
    np.testing.assert_array_equal(read(tmp_path), VALUE)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["ckpt-0", "ckpt-4"]
