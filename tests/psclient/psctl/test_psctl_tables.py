"""`psctl checkpoint` with dynamic tables, and deltas of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from psclient import psctl
from pswire.model.tables import CounterFilter, TableSpec
from tests.kit.tables import Servers


@pytest.fixture
def run(capsys):
    """Runs `psctl checkpoint`."""

    def ran(*args):
        with pytest.raises(SystemExit) as ended:
            psctl.main(["checkpoint", *map(str, args)])
        return ended.value.code, capsys.readouterr().out

    return ran


@pytest.fixture
def job(tmp_path):
    """One whole checkpoint and two deltas, in three files each, with a variable beside."""
    job = Servers.made(tmp_path, TableSpec((2,), admission=CounterFilter(2)), 3, w=np.arange(3.0))
    rng = np.random.default_rng(0)
    for name, base in (("c-1", ""), ("c-2", "c-1"), ("c-3", "c-2")):
        job.train(rng)
        job.save(name, base)
    return job


def test_a_directory_tells_what_needs_what(run, job):
    """`ls` has the base of each."""
    code, out = run("ls", "--json", job.root)
    assert code == 0
    assert [(each["name"], each["base"], each["tensors"]) for each in json.loads(out)["checkpoints"]] == [
        ("c-1", None, 4), ("c-2", "c-1", 4), ("c-3", "c-2", 4)
    ]  # fmt: skip
    assert "changes to" in run("ls", job.root)[1]


def test_a_table_is_shown_with_its_rows(run, job):
    """And its bytes; of a delta what has changed. What is known of each row is no variable."""
    code, out = run("show", job.root / "c-1")
    rows = job.opened("c-1").manifest.tensors["users"].spec.shape[0]
    assert code == 0
    assert f"table users: {rows:,} rows, " in out
    assert "as of its round 5" in out
    assert "users/keys" not in out
    delta = job.opened("c-3").manifest.tensors["users"].spec.shape[0]
    assert f"table users: {delta:,} rows changed and 0 dropped since c-2, " in run("show", job.root)[1]
    assert json.loads(run("show", "--json", job.root)[1])["tables"]["users"]["round"] == 15


def test_a_delta_is_verified_with_its_bases(run, job):
    """A fault of a base is a fault; the file says where."""
    code, out = run("verify", job.root)
    assert (code, "c-3 is whole: 4 variables, with what it has the changes to: c-2, c-1" in out) == (0, True)
    shard = next((job.root / "c-1").glob("shard-00001*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, out = run("verify", "--json", job.root)
    assert (code, [each["file"] for each in json.loads(out)["faults"]]) == (1, [f"../c-1/{shard.name}"])


def test_tables_are_compared_by_their_keys(run, job):
    """Rows of both, and keys that one of both does not have; a delta is compared as the whole that it is."""
    job.save("whole")
    assert run("diff", job.root / "c-3", job.root / "whole")[0] == 0
    job.step(np.array([10**6, 10**6]))
    job.parts[0].arrays[0][0] += 0.5
    job.save("other")
    code, out = run("diff", "--json", job.root / "c-3", job.root / "other")
    found = {each["name"]: (each["count"], each["largest"]) for each in json.loads(out)["tensors"]}
    assert code == 1
    assert found["users"] == (2 + 2, 0.5)
    assert found["users/keys"] == (1, None)
    assert found["users/count"] == (1, 0.0)
    assert "w" not in found
    job.save("same")
    assert run("diff", job.root / "other", job.root / "same")[0] == 0


def test_a_delta_is_exported_whole(run, job, tmp_path):
    """Into one file, as the whole would be."""
    job.save("whole")
    for ending in ("safetensors", "npz"):
        for name in ("c-3", "whole"):
            assert run("export", job.root / name, tmp_path / f"{name}.{ending}")[0] == 0
    a, b = (load_file(tmp_path / f"{name}.safetensors") for name in ("c-3", "whole"))
    assert a.keys() == b.keys() >= {"users", "users/keys", "adam/users/m", "w"}
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    with np.load(tmp_path / "c-3.npz") as found:
        assert found["users"].tobytes() == a["users"].tobytes()


def test_a_delta_is_compacted(run, job):
    """A path, or the newest of a directory; what is whole stays."""
    expected = job.state()
    code, out = run("compact", job.root)
    assert (code, "c-3 is whole, " in out, "it does not need c-2, c-1 any more" in out) == (0, True, True)
    assert run("compact", job.root / "c-3") == (0, f"{job.root}/c-3 is whole already\n")
    assert run("verify", job.root)[0] == 0
    for path in (*(job.root / "c-1").iterdir(), *(job.root / "c-2").iterdir()):
        path.unlink()
    assert job.restored("c-3", 2).state().equals(expected)
    assert json.loads(run("ls", "--json", job.root)[1])["checkpoints"][0]["base"] is None
