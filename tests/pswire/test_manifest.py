"""The manifest of a checkpoint, and which of several checkpoints is the newest."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pswire.errors import CheckpointError
from pswire.log import Position
from pswire.manifest import Manifest, Saved, latest_in, latest_text, number, rank
from pswire.tensor import DTYPES, TensorSpec

GRPC_MESSAGE = 4 << 20
"""Bytes: more does not travel in one message, where nobody has raised the limit."""

names = st.text(min_size=1, max_size=8)
saved = st.builds(
    Saved,
    st.just("shard-00000-of-00001.safetensors"),
    st.builds(TensorSpec, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    st.sampled_from(["", "xxh3:" + "0f" * 16]),
)
manifests = st.builds(
    Manifest,
    st.integers(0, 1 << 40),
    st.lists(st.builds(Position, *[st.integers(0, 9)] * 3), max_size=2).map(tuple),
    st.dictionaries(names, saved, max_size=3),
    st.dictionaries(st.just("shard-00000-of-00001.safetensors"), st.integers(0, 1 << 50)),
    st.dictionaries(names, names, max_size=3),
    st.dictionaries(names, st.recursive(st.none() | st.integers() | names, st.lists), max_size=2),
    st.floats(0, 1e10),
    st.just("something 1.0"),
)


@given(manifests)
def test_what_is_written_is_read(manifest):
    """Its text is JSON and says all of it."""
    assert json.loads(manifest.text())["format"] == 2
    assert Manifest.parse(manifest.text(), "here") == manifest


def test_many_variables_travel():
    """The manifest of ten thousand variables, tracked by long paths, fits in one message."""
    tensors = {f"encoder/layers/{n:05d}/attention/projection/kernel": "w" for n in range(10_000)}
    entry = Saved("shard-00000-of-00002.safetensors", TensorSpec("float32", (512, 512)), "xxh3:" + "0f" * 16)
    manifest = Manifest(0, (), dict.fromkeys(tensors, entry), {}, {f"model/{name}": name for name in tensors})
    assert len(manifest.text().encode()) < GRPC_MESSAGE


def test_every_cut_is_told():
    """A manifest that ends early, wherever, is told with the file's name."""
    text = Manifest(1, (Position(0, 0, 0),), {"w": Saved("x", TensorSpec("int8", ()))}).text().rstrip()
    for size in range(len(text)):
        with pytest.raises(CheckpointError, match=r"run/manifest\.json is no manifest"):
            Manifest.parse(text[:size], "run/manifest.json")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ""])
def test_files_are_beside_it(name):
    """Neither a tensor nor a size is of a file elsewhere."""
    for manifest in (Manifest(0, (), {"w": Saved(name, TensorSpec("int8", ()))}), Manifest(0, (), {}, {name: 1})):
        with pytest.raises(CheckpointError, match="outside of its directory"):
            Manifest.parse(manifest.text(), "here")


def test_the_newest_has_the_greatest_number():
    """Then the name says; those without a number are older than all that have one."""
    order = ["best", "ckpt", "ckpt-", "a-0", "ckpt-0", "ckpt-2", "ckpt-10", "ckpt-011"]
    assert sorted(order, key=rank) == order


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ckpt-12", ("ckpt", 12)),
        ("a-b-3", ("a-b", 3)),
        ("best", ("best", -1)),
        ("-3", ("", 3)),
        ("ckpt-²", ("ckpt-²", -1)),
        ("ckpt--1", ("ckpt-", 1)),
        ("ckpt-" + "9" * 5000, ("ckpt-" + "9" * 5000, -1)),
    ],
)
def test_names_have_numbers(name, parts):
    """What is no plain number is part of the name."""
    assert number(name) == parts


@given(st.text())
def test_what_names_the_newest_is_read(name):
    """Whatever its name is."""
    assert json.loads(latest_text(name)) == {"format": 1, "latest": name}
    assert latest_in(latest_text(name)) == name
