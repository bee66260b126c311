"""The manifests that are written are those that the document describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import numpy as np
import pytest

import psclient as ps
from tests.kit.internals import DTYPES, FORMAT, MANIFEST, Examples, Manifest, Position

de = ps.dynamic_embedding
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


def schema() -> Any:
    block = re.search(r"^```json\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block
    return json.loads(block[1])


def strict(text: str) -> Any:
    """As JSON, which knows neither NaN nor infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Sampler:
    """Has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"seed": [1, 2.5, None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def cutting():
    """A strategy whose variables of two or more rows are in slices."""
    return ps.ParameterServerStrategy(variable_partitioner=ps.experimental.partitioners.FixedShardsPartitioner(2))


@pytest.mark.parametrize("kind", [ps.ParameterServerStrategy, ps.MirroredStrategy, cutting])
def test_a_manifest_is_as_documented(kind, in_tmp_path):
    """Of a checkpoint with all that one can have, written by servers and without them."""
    with kind() as strategy, strategy.scope():
        layers = [ps.Variable(np.zeros((2, 3), dtype), name=f"v-{name}") for name, dtype in DTYPES.items()]
        optimizer = ps.optimizers.Adam()
        weight = ps.Variable(np.ones(3, "float32"), name="w")
        optimizer.build([weight])
        batches = strategy.experimental_distribute_dataset([np.zeros(4), np.ones(4)])
        next(iter(batches))
        checkpoint = ps.train.Checkpoint(layers=layers, w=weight, opt=optimizer, sampler=Sampler())
        manager = ps.train.CheckpointManager(checkpoint, "run", max_to_keep=2, keep_checkpoint_every_n_hours=1)
        path = manager.save()
        manager.sync()
    (found,) = in_tmp_path.rglob(MANIFEST)
    assert found.parent.name == Path(path).name
    manifest = strict(found.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(manifest, schema())
    assert {entry["dtype"] for entry in manifest["tensors"].values()} == set(DTYPES)
    assert manifest["state"]["sampler"] == {"seed": [1, 2.5, None]}
    assert manifest["objects"]["w"] == "w"
    assert manifest["format"] == (3 if kind is cutting else 2)
    assert ("slices" in manifest["tensors"]["w"]) == (kind is cutting)
    for name, size in manifest["files"].items():
        assert (found.parent / name).stat().st_size == size


POLICIES = [(None, None), (de.CounterFilter(2), de.TTL("7d")), (de.CBFFilter(2, 1 << 12), de.LFU())]


@pytest.mark.parametrize(("admission", "eviction"), POLICIES)
def test_a_manifest_of_tables_is_as_documented(in_tmp_path, admission, eviction):
    """Of a whole checkpoint and of a delta, with all kinds of policies."""
    with ps.ParameterServerStrategy() as strategy, strategy.scope():
        table = de.get_variable("users", 3, admission=admission, eviction=eviction, capacity=1 << 15)
        optimizer = ps.optimizers.Adagrad()
        optimizer.build([table])
        checkpoint = ps.train.Checkpoint(table=table, optimizer=optimizer)
        manager = ps.train.CheckpointManager(checkpoint, "run", max_to_keep=2, full_every=2)
        for _ in range(2):
            table.scatter_add(ps.IndexedSlices(np.ones((2, 3), "float32"), [5, 6]))
            manager.save()
        manager.sync()
    manifests = [strict(path.read_text(encoding="utf-8")) for path in sorted(in_tmp_path.rglob(MANIFEST))]
    for manifest in manifests:
        jsonschema.validate(manifest, schema())
        assert manifest["format"] == FORMAT
    assert [manifest["tables"]["users"]["since"] for manifest in manifests] == [-1, 1]
    assert manifests[1]["base"] == {"name": "ckpt-1", "id": manifests[0]["id"]}


def test_the_schema_is_that_of_this_format():
    """Its number, its dtypes, and nothing beside what it names."""
    properties = schema()["properties"]
    assert properties["format"]["enum"] == [*range(2, FORMAT + 1)]
    assert set(properties["tensors"]["additionalProperties"]["properties"]["dtype"]["enum"]) == set(DTYPES)
    assert set(schema()["required"]) == set(properties) - {"tables", "id", "base"}


def test_examples_that_have_come_back_are_as_documented():
    """Where there are none, nothing is said of them, as by versions that know none."""
    for returned in ((), (Examples(1, 0, 3), Examples(2, 3, 6))):
        found = Manifest(3, (Position(0, 1, 2, returned),), {})
        said = strict(found.text())
        jsonschema.validate(said, schema())
        assert ("returned" in said["positions"][0]) == bool(returned)
        assert Manifest.parse(found.text(), "here").positions == found.positions
