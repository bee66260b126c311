"""R19: absurd tables and hostile checkpoint files are refused in words, and nothing is allocated for them."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import psclient as ps
from tests.kit import internals as inside
from tests.kit.internals import pb
from tests.kit.rig import SOON, WORKERS, Job, Worker, serving
from tests.kit.shell import shell
from tests.kit.storage import write_checkpoint
from tests.kit.strategies import opened

LIMIT = 1 << 28
SOME = 32 << 20
"""Bytes of memory that a refusal may take, and less than a thousandth of what is announced."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Worker]]:
    """A job on a server with a memory limit, and who is in it."""
    with serving("grpc", 1, tmp_path_factory.mktemp("root"), LIMIT) as servers:
        job = Job(servers)
        yield job, job.join(WORKERS[0])[0]


def table(**more: object) -> inside.TablePart:
    return inside.TablePart("users", inside.TableSpec(**{"shape": (4,)} | more), 0, inside.BUCKETS)  # type: ignore[arg-type]


def beside(**more: object) -> inside.TablePart:
    spec = {"name": "m", "dtype": "float32", "shape": (4,)} | more
    return inside.TablePart("users", inside.TableSpec((4,)), 0, inside.BUCKETS, inside.SlotTensor(**spec))  # type: ignore[arg-type]


ABSURD: dict[str, tuple[inside.TablePart, str]] = {
    "a filter of 2**36 keys": (table(admission=inside.CBFFilter(2, 1 << 36)), "613.4 GiB for its filter"),
    "one that never errs": (table(admission=inside.CBFFilter(2, 1 << 36, 1e-9)), "TiB for its filter"),
    "rows of many dimensions": (table(shape=(1,) * 100_000), "100001 dimensions"),
    "2 MiB beside each row": (beside(shape=(1 << 19,)), "invalid shape"),
}
OF_MEMORY = ("a filter of 2**36 keys", "one that never errs")


def refused(job: Job, worker: Worker, request: pb.CreateBatchRequest) -> inside.PSError:
    """Why a batch is refused, or a variable of it, for which no memory was taken; the job goes on."""
    process, (server,) = psutil.Process(), job.verbs
    before, memory = server.status(), process.memory_info().rss
    request.session = worker.session
    try:
        reply = inside.messages.MAPPER.pairs[inside.CreateBatchReply].from_pb(
            inside.parse(pb.CreateBatchReply, server._send(inside.VERBS["CreateBatch"], request.SerializeToString()))
        )  # type: ignore[attr-defined]
        assert (reply.count, reply.initialized) == (0, ())
        error = reply.error
    except inside.PSError as raised:
        error = raised
    assert error is not None
    after = server.status()
    assert (after.variables, after.variable_bytes, after.log) == (before.variables, before.variable_bytes, before.log)
    assert process.memory_info().rss - memory < SOME
    return error


def encoded(job: Job, part: inside.TablePart) -> pb.Variable:
    """A part as the next variable of a job; the rest of the message makes sense."""
    spec = inside.VariableSpec("users/part_0", part.tensor, part=part)
    return inside.messages.MAPPER.pairs[inside.PlacedVariable].to_pb(
        inside.PlacedVariable(len(job.variables), spec, (0,))
    )


@pytest.mark.parametrize("case", ABSURD)
def test_an_absurd_table(attacked: tuple[Job, Worker], case: str) -> None:
    """What it has of too much is named; what else may be wrong with one `test_tables` says."""
    part, words = ABSURD[case]
    error = refused(*attacked, pb.CreateBatchRequest(variables=[encoded(attacked[0], part)]))
    assert type(error) is (inside.MemoryLimit if case in OF_MEMORY else inside.InvalidRequest)
    assert words in str(error)


def test_the_widest_rows_cost_nothing_until_they_are_there(tmp_path: Path) -> None:
    """Programs see 16 TiB of each such table. As many as there may be take little memory, and a part of the address
    space; more are refused, and so is what is asked of them beyond the limit."""
    process, wide = psutil.Process(), inside.TableSpec((1 << 18,))
    parts = [inside.TablePart(f"w{number}", wide, 0, inside.BUCKETS) for number in range(inside.MAX_PARTS)]
    specs = [inside.VariableSpec(part.table, part.tensor, part=part) for part in parts]
    with serving("grpc", 1, tmp_path, LIMIT) as servers:
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        (server,), before = job.verbs, process.memory_info()
        placed = [inside.PlacedVariable(n, spec, (0,)) for n, spec in enumerate(specs)]
        reply = server.create_batch(worker.session, placed)
        assert (reply.error, reply.count) == (None, inside.MAX_PARTS)
        now = process.memory_info()
        assert now.rss - before.rss < 3 * SOME
        assert now.vms - before.vms < 33 << 40
        assert server.status().variable_bytes == 0
        job.variables += placed
        error = refused(job, worker, pb.CreateBatchRequest(variables=[encoded(job, table())]))
        assert f"the limit of {inside.MAX_PARTS} tables on server 0" in str(error)
        with pytest.raises(inside.MemoryLimit, match="take 300 MiB, and the limit is 256 MiB"):
            server.pull(worker.session, [], -1, [inside.RowRead(0, bytes(8 * 300))]).result(SOON)
        rows = server.pull(worker.session, [], -1, [inside.RowRead(0, bytes(8 * 2))]).result(SOON)
        assert rows.payload.size == inside.TensorSpec("float32", (2, 1 << 18)).nbytes


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


def damaged(path: str) -> Any:
    return pytest.raises(ps.errors.DamagedCheckpoint, match=path)


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


@pytest.mark.parametrize("name", ["large", "another type"])
def test_a_hostile_manifest_is_told_everywhere(tmp_path: Path, name: str) -> None:
    """By servers, strategies of their own and without, and psctl: in words, as damage, with its path."""
    path = write_checkpoint(tmp_path / "runs/run/ckpt-1", VALUES)
    MANIFESTS[name](path / "manifest.json")  # type: ignore[operator]
    with serving("core", 1, tmp_path / "runs") as servers, little_memory():
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        with damaged(r"run/ckpt-1/manifest\.json"):
            job.restore(worker, "run/ckpt-1")
    for kind, above in (("mirrored-1", "runs/"), ("embedded-1", "")):
        with opened(kind) as strategy, strategy.scope():
            checkpoint = ps.train.Checkpoint(v=ps.Variable(np.zeros(6), name="v"))
            with damaged(r"run/ckpt-1/manifest\.json"):
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
        assert inside.SavedCheckpoint.open(inside.storage_at(tmp_path), ".").path == "ckpt-1"
    assert "cannot use ./latest" in caplog.text


def header(entry: object, length: int | None = None) -> bytes:
    text = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


ENTRY = {"dtype": "F64", "shape": [6], "data_offsets": [0, 48]}
HEADERS = {
    "nothing": header(b""),
    "half a brace": header(b"{"),
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
    "more than there is": header({"v": {**ENTRY, "data_offsets": [0, 49]}}),
    "behind the data": header({"v": {**ENTRY, "data_offsets": [80, 128]}}),
    "fewer numbers": header({"v": {**ENTRY, "shape": [5]}}),
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
    found = inside.SavedCheckpoint.open(inside.storage_at(tmp_path), "ckpt-1")
    with little_memory():
        with damaged(rf"{shard.name} cannot be read: its header"):
            found.tensor("v")
        assert [file for file, fault in found.verify() if "its header" in fault] == [shard.name]


def test_a_manifest_that_a_server_cannot_tell_is_no_damage(tmp_path: Path) -> None:
    """A strategy without servers may write one that is too long for a message: it is refused by servers before it is
    read, and restored without them."""
    objects = {f"layers/{number}/{'n' * 100}": "v" for number in range(inside.PART_BYTES // 100)}
    path = write_checkpoint(tmp_path / "runs/run/ckpt-1", VALUES, objects=objects)
    with serving("core", 1, tmp_path / "runs") as servers:
        job = Job(servers)
        (worker,) = job.join(WORKERS[0])
        with pytest.raises(ps.errors.CheckpointError, match="a server can send at most 4,190,208") as told:
            job.restore(worker)
    assert not isinstance(told.value, ps.errors.DamagedCheckpoint)
    with opened("mirrored-1") as strategy, strategy.scope():
        v = ps.Variable(np.zeros(6), name="v")
        holder = {next(iter(objects)).rpartition("/")[2]: v}
        ps.train.Checkpoint(layers=[holder]).restore(str(path)).assert_existing_objects_matched()
        assert v.numpy()[5] == 5.0


class State:
    def __init__(self, words: object) -> None:
        self._words = words

    def state_dict(self) -> object:
        return self._words

    def load_state_dict(self, state: object) -> None:
        raise AssertionError(state)


def nested(depth: int) -> list[object]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (["n" * 1000] * 20_000, ps.errors.CheckpointError, r"bytes, but the maximum is 16,777,216"),
        (nested(200), TypeError, r"state_dict\(\) of 'state' .*more than 100 levels deep"),
    ],
    ids=["too large", "too deep"],
)
def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, state: object, error: type[Exception], words: str
) -> None:
    with opened("mirrored-1") as strategy, strategy.scope():
        v = ps.Variable(0.0, name="v")
        many = {f"{number}{'n' * 1000}": v for number in range(3)}
        assert len(inside.Manifest(0, (), {}, objects=dict.fromkeys(many, "v")).text()) < inside.MAX_MANIFEST
        with pytest.raises(error, match=words):
            ps.train.Checkpoint(v=v, state=State(state)).save("run/ckpt")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
