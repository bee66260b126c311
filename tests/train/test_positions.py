"""Positions of datasets in checkpoints: which datasets go on from them, and in which loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import psclient as ps

ROWS, PATH = 10, "run/ckpt"
SAVED = 2
"""Batches of pass 1 that are done in the checkpoint; a pass has five."""

REST = [[4, 5], [6, 7], [8, 9]]
WHOLE = [[0, 1], [2, 3], *REST]


@pytest.fixture(params=["mirrored", "servers"])
def opened(request, in_tmp_path):
    """Opens a strategy with one number in a checkpoint: returns it, and makes the checkpoint of what it is given."""
    made = []

    def open(**tracked):
        strategy = ps.MirroredStrategy(["cpu:0"]) if request.param == "mirrored" else ps.ParameterServerStrategy()
        made.append(strategy)
        with strategy.scope():
            v = ps.Variable(0.0, name="v")
        return strategy, lambda **more: ps.train.Checkpoint(v=v, **tracked, **more)

    yield open
    for strategy in made:
        strategy.close()


def arrays(rows=ROWS, first=0, batch=2):
    return ps.ArrayDataset(np.arange(first, first + rows)).batch(batch)


def listed(last=9):
    return [np.array([row, row + 1]) for row in (0, 2, 4, 6)] + [np.array([8, last])]


def distributed(strategy, make):
    if make is from_function:
        return strategy.distribute_datasets_from_function(lambda _: arrays())
    return strategy.experimental_distribute_dataset(make())


def from_function():
    """In place of a dataset: one that each worker makes by itself."""


def seen(batches):
    return [np.asarray(batch).tolist() for batch in batches]


def save(opened, make, tracks=False):
    """Saves within pass 1, after two of its batches."""
    strategy, checkpoint = opened()
    data = distributed(strategy, make)
    saved = checkpoint(data=data) if tracks else checkpoint()
    for epoch in data.epochs(9):
        for index, _ in enumerate(data, 1):
            if (epoch, index) == (1, SAVED):
                saved.save(PATH)
                saved.sync()
                return


def restore(opened, make, tracks=False):
    strategy, checkpoint = opened()
    data = distributed(strategy, make)
    made = checkpoint(data=data) if tracks else checkpoint()
    made.restore(f"{PATH}-1").expect_partial()
    return data, made


@pytest.mark.parametrize("make", [arrays, listed, from_function])
def test_a_loop_over_epochs_goes_on_where_the_same_dataset_was_saved(opened, caplog, make):
    """In the middle of a pass, of every front end; nothing is said that would be a warning."""
    save(opened, make)
    data, _ = restore(opened, make)
    assert [(epoch, seen(data)) for epoch in data.epochs(3)] == [(1, REST), (2, WHOLE)]
    assert not caplog.records


@pytest.mark.parametrize("make", [arrays, listed])
def test_a_script_may_make_another_dataset_before(opened, caplog, make):
    """A test set, which has the number that the other one had: each is known by its examples. A checkpoint that is
    saved between the loops has the place of both, and so have workers that join then."""
    save(opened, make)
    strategy, checkpoint = opened()
    tests, data = distributed(strategy, lambda: arrays(rows=4, first=50)), distributed(strategy, make)
    made = checkpoint()
    made.restore(f"{PATH}-1").expect_partial()
    assert [len(seen(tests)) for _ in range(2)] == [2, 2]
    between = made.save("between/ckpt")
    made.sync()
    made.restore(between).expect_partial()
    assert [(epoch, seen(data)) for epoch in data.epochs(3)] == [(1, REST), (2, WHOLE)]
    assert not caplog.records


@pytest.mark.parametrize("make", [arrays, listed, from_function])
def test_a_loop_that_does_not_ask_for_it_gets_each_batch(opened, make):
    """As often as it goes over the dataset, whatever was restored, and once more after each restore."""
    save(opened, make)
    data, made = restore(opened, make)
    assert [seen(data), seen(data)] == [WHOLE, WHOLE]
    made.restore(f"{PATH}-1").expect_partial()
    assert seen(data) == WHOLE


OTHERS = {
    "other examples": lambda: arrays(first=1),
    "fewer examples": lambda: arrays(rows=8),
    "larger batches": lambda: arrays(batch=5),
    "shuffled": lambda: ps.ArrayDataset(np.arange(ROWS)).shuffle(1).batch(2),
    "mapped": lambda: ps.ArrayDataset(np.arange(ROWS)).map(lambda x: x + 1).batch(2),
    "repeated": lambda: ps.ArrayDataset(np.arange(ROWS)).repeat(2).batch(2),
    "of another type": lambda: ps.ArrayDataset(np.arange(ROWS, dtype="float32")).batch(2),
    "a list": listed,
    "of a function": from_function,
    "a list with another end": lambda: listed(last=7),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_dataset_begins_anew_and_says_so(opened, caplog, other):
    """Once, with what to write if it is to go on all the same. The last batch of a list tells."""
    save(opened, listed if other == "a list with another end" else arrays)
    data, _ = restore(opened, OTHERS[other])
    whole = seen(data.epochs(2))
    assert whole == [0, 1]
    (record,) = caplog.records
    assert "dataset 0 starts from the beginning, because the checkpoint has the position of a dataset" in record.message
    assert "data=dataset" in record.message


@pytest.mark.parametrize("loop", ["plain", "iterator"])
def test_a_dataset_in_the_checkpoint_goes_on_in_any_loop(opened, loop):
    """By the user's word, though its examples are others now; so does an iterator."""
    save(opened, arrays, tracks=True)
    strategy, checkpoint = opened()
    data = strategy.experimental_distribute_dataset(arrays(first=20))
    strategy.experimental_distribute_dataset(arrays())
    given = data if loop == "plain" else iter(data)
    checkpoint(data=given).restore(f"{PATH}-1").expect_partial()
    assert seen(given) == [[24, 25], [26, 27], [28, 29]]
    assert seen(data) == [[row, row + 1] for row in range(20, 30, 2)]


def test_a_dataset_that_another_object_has_is_not_in_the_checkpoint(opened):
    """It begins anew in a loop that does not ask: a script's object has its test set as well. An iterator goes on."""

    class Script:
        """Has a dataset, and an iterator over another one."""

        def __init__(self, strategy):
            self.data = strategy.experimental_distribute_dataset(arrays())
            self.other = strategy.experimental_distribute_dataset(arrays(first=20))
            self.iterator = iter(self.other)

    strategy, checkpoint = opened()
    script = Script(strategy)
    assert [seen([next(iter(script.data))]), next(script.iterator).tolist()] == [[[0, 1]], [20, 21]]
    made = checkpoint(script=script)
    made.save(PATH)
    made.sync()
    strategy, checkpoint = opened()
    script = Script(strategy)
    checkpoint(script=script).restore(f"{PATH}-1").expect_partial()
    assert seen(script.data) == WHOLE
    assert seen(script.iterator) == [[row, row + 1] for row in range(22, 30, 2)]


def test_passes_that_are_all_done_are_told(opened, caplog):
    """A loop over them makes none, and says why."""
    save(opened, arrays)
    data, _ = restore(opened, arrays)
    assert list(data.epochs(1)) == []
    assert "all 1 epochs of dataset 0, so no batches are left" in caplog.text


def test_a_loop_over_epochs_goes_back_with_a_restore_within(opened):
    """The values are those of an earlier step, and so is the next pass."""
    save(opened, arrays)
    data, made = restore(opened, arrays)
    found = []
    for epoch in data.epochs(4):
        if epoch == 3:
            made.restore(f"{PATH}-1").expect_partial()
        found.append(seen(data))
    assert found == [REST, WHOLE, REST]


def test_checkpoints_of_before_have_no_digests(opened, caplog):
    """They cannot tell one dataset from another: the loop that asks goes on."""
    save(opened, arrays)
    (manifest,) = [*Path().rglob("manifest.json")]
    said = json.loads(manifest.read_text())
    del said["positions"][0]["source"]
    manifest.write_text(json.dumps(said))
    data, _ = restore(opened, arrays)
    assert [seen(data) for _ in data.epochs(2)] == [REST]
    assert not caplog.records
