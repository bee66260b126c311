"""Files of a checkpoint that were made to harm who reads them: an error with the file's name, in little memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import psclient as ps
from tests.kit.internals import MAX_MANIFEST, PART_BYTES, Manifest, SavedCheckpoint, storage_at
from tests.kit.rig import WORKERS, Job, serving
from tests.kit.shell import shell
from tests.kit.storage import write_checkpoint
from tests.kit.strategies import opened

pytestmark = pytest.mark.usefixtures("in_tmp_path")

LARGE = 8 << 30
"""Bytes of a file that takes none on the disk."""

LITTLE = 24 << 20
"""Bytes that reading any of these may take: a header or a manifest, and what is made of it."""

VALUES = {"v": np.arange(6.0)}


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


def sparse(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, LARGE)


def put(text: str) -> object:
    return lambda path: path.write_text(text)


MANIFESTS = {
    "brackets": put("[" * 200_000),
    "infinite": put("1e400"),
    "large": sparse,
    "not a number": put('{"format": NaN}'),
    "another type": put('{"format": 2, "round": [], "positions": [], "tensors": {}}'),
}


ONCE_MORE = ("brackets", "infinite", "not a number")
"""Those that are damaged as another one is, for whom it is told to."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in ONCE_MORE else ()) for name in MANIFESTS]
)
def test_a_hostile_manifest_is_told_everywhere(tmp_path: Path, name: str) -> None:
    """By servers, strategies of their own and without, and psctl: in words, as damage, with its path."""
    path = write_checkpoint(tmp_path / "runs/run/ckpt-1", VALUES)
    MANIFESTS[name](path / "manifest.json")  # type: ignore[operator]
    with serving("core", 1, tmp_path / "runs") as servers, little_memory():
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        with pytest.raises(ps.errors.DamagedCheckpoint, match=r"run/ckpt-1/manifest\.json"):
            job.restore(worker, "run/ckpt-1")
    for kind, above in (("mirrored-1", "runs/"), ("embedded-1", "")):
        with opened(kind) as strategy, strategy.scope():
            checkpoint = ps.train.Checkpoint(v=ps.Variable(np.zeros(6), name="v"))
            with pytest.raises(ps.errors.DamagedCheckpoint, match=r"run/ckpt-1/manifest\.json"):
                checkpoint.restore(f"{above}run/ckpt-1")
    for verb, code in (("verify", 1), ("show", 2), ("ls", 0)):
        done = shell(["psctl", "checkpoint", verb, str(path.parent)], tmp_path)
        assert done.code == code
        assert "manifest.json" in done.out + done.err
        assert "Traceback" not in done.err


@pytest.mark.parametrize("name", [*MANIFESTS, "no text"])
def test_a_hostile_word_names_nothing(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The file `latest` is passed over with a warning, whatever it has."""
    write_checkpoint(tmp_path / "ckpt-1", VALUES)
    latest = tmp_path / "latest"
    if name == "no text":
        latest.write_bytes(b"\xff\xfe")
    else:
        MANIFESTS[name](latest)  # type: ignore[operator]
    with little_memory():
        assert SavedCheckpoint.open(storage_at(tmp_path), ".").path == "ckpt-1"
    assert "latest is passed over" in caplog.text


def header(entry: object, length: int | None = None) -> bytes:
    text = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


ENTRY = {"dtype": "F64", "shape": [6], "data_offsets": [0, 48]}
HEADERS = {
    "brackets": header(b"[" * 5000),
    "more brackets": header(b"[" * 200_000),
    "infinite": header(b'{"v": {"dtype": "F64", "shape": [1e400], "data_offsets": [0, 48]}}'),
    "no text": header(b"\xff" * 100),
    "an endless one": header(b"{}", 1 << 62),
    "a long one": header(b'{"v": [' + b"[]," * 1_000_000, 99_000_000),
    "a list": header([1]),
    "no entry": header({"v": 1}),
    "an unknown dtype": header({"v": {**ENTRY, "dtype": "F65"}}),
    "a dtype of numbers": header({"v": {**ENTRY, "dtype": [1]}}),
    "half a number": header({"v": {**ENTRY, "shape": [6.5]}}),
    "less than nothing": header({"v": {**ENTRY, "shape": [-6]}}),
    "too many dimensions": header({"v": {**ENTRY, "shape": [1] * 100}}),
    "too large": header({"v": {**ENTRY, "shape": [1 << 60, 1 << 60]}}),
    "bounds of text": header({"v": {**ENTRY, "data_offsets": ["0", "48"]}}),
    "three bounds": header({"v": {**ENTRY, "data_offsets": [0, 48, 96]}}),
    "backwards": header({"v": {**ENTRY, "data_offsets": [48, 0]}}),
    "before the file": header({"v": {**ENTRY, "data_offsets": [-48, 0]}}),
    "metadata of numbers": header({"__metadata__": [1], "v": ENTRY}),
    "twice": header(b'{"v": 1, "v": {"dtype": "F64", "shape": [6], "data_offsets": [0, 48]}}'),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_damaged(tmp_path: Path, name: str) -> None:
    """Whatever a shard says of itself: who reads it, and who verifies it, says the same."""
    path = write_checkpoint(tmp_path / "ckpt-1", VALUES, shards=1)
    (shard,) = path.glob("shard-*")
    shard.write_bytes(HEADERS[name] + bytes(100))
    if name == "a long one":
        os.truncate(shard, LARGE)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][shard.name] = shard.stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))
    found = SavedCheckpoint.open(storage_at(tmp_path), "ckpt-1")
    with little_memory():
        with pytest.raises(ps.errors.DamagedCheckpoint, match=rf"{shard.name} cannot be read: its header"):
            found.tensor("v")
        assert [file for file, fault in found.verify() if "its header" in fault] == [shard.name]


def test_a_manifest_that_a_server_cannot_tell_is_no_damage(tmp_path: Path) -> None:
    """A strategy without servers may write one that is too long for a message: it is refused by servers before it is
    read, and restored without them."""
    objects = {f"layers/{number}/{'n' * 100}": "v" for number in range(PART_BYTES // 100)}
    path = write_checkpoint(tmp_path / "runs/run/ckpt-1", VALUES, objects=objects)
    with serving("core", 1, tmp_path / "runs") as servers:
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        with pytest.raises(ps.errors.CheckpointError, match="a server can tell its processes 4,190,208") as told:
            job.restore(worker)
    assert not isinstance(told.value, ps.errors.DamagedCheckpoint)
    with opened("mirrored-1") as strategy, strategy.scope():
        v = ps.Variable(np.zeros(6), name="v")
        holder = {next(iter(objects)).rpartition("/")[2]: v}
        ps.train.Checkpoint(layers=[holder]).restore(str(path)).assert_existing_objects_matched()
        assert v.numpy()[5] == 5.0


def test_what_is_too_large_is_not_written(tmp_path: Path) -> None:
    """Nobody would read it again."""
    with opened("mirrored-1") as strategy, strategy.scope():
        v = ps.Variable(0.0, name="v")
        many = {f"{number}{'n' * 1000}": v for number in range(3)}
        assert len(Manifest(0, (), {}, objects=dict.fromkeys(many, "v")).text()) < MAX_MANIFEST
        sampler = Large()
        with pytest.raises(ps.errors.CheckpointError, match=r"bytes, and none may have more than 16,777,216"):
            ps.train.Checkpoint(v=v, sampler=sampler).save("run/ckpt")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Large:
    """A state of many words."""

    def state_dict(self) -> list[str]:
        return ["n" * 1000] * 20_000

    def load_state_dict(self, state: list[str]) -> None:
        raise AssertionError(state)


def test_a_state_that_is_too_deep_is_not_written(tmp_path: Path) -> None:
    """What could not be read again is refused where it is saved."""
    deep: list[object] = []
    for _ in range(200):
        deep = [deep]

    class Deep(Large):
        def state_dict(self) -> list[str]:
            return deep  # type: ignore[return-value]

    with opened("mirrored-1") as strategy, strategy.scope():
        checkpoint = ps.train.Checkpoint(v=ps.Variable(0.0, name="v"), deep=Deep())
        with pytest.raises(TypeError, match=r"state_dict\(\) of 'deep' .*more than 100 deep"):
            checkpoint.save("run/ckpt")
