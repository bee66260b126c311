"""Following checkpoints: the newest, then those that come."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from psclient.train import iterator
from psclient.train.iterator import checkpoints_iterator
from tests.kit.internals import ConfigError
from tests.kit.storage import write_checkpoint

VALUES = {"w": np.zeros(2, "float32")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """It looks often."""
    monkeypatch.setattr(iterator, "POLL_SECONDS", 0.01)


def test_the_newest_comes_first_and_those_between_are_excluded(tmp_path):
    """By their numbers, and only complete ones."""
    found = checkpoints_iterator(str(tmp_path), timeout=0)
    for number in (9, 10):
        write_checkpoint(tmp_path / f"ckpt-{number}", VALUES)
    (tmp_path / "ckpt-11").mkdir()
    assert next(found) == f"{tmp_path}/ckpt-10"
    for number in (12, 13):
        write_checkpoint(tmp_path / f"ckpt-{number}", VALUES)
    assert next(found) == f"{tmp_path}/ckpt-13"
    assert list(found) == []


def test_it_waits_for_a_directory_and_a_checkpoint(tmp_path):
    """Neither need be there when it begins."""
    path = tmp_path / "run" / "ckpt-1"
    writer = threading.Timer(0.1, write_checkpoint, (path, VALUES))
    writer.start()
    try:
        assert next(checkpoints_iterator(str(path.parent))) == str(path)
    finally:
        writer.join()


def test_the_first_timeout_ends_it(tmp_path):
    """Not earlier, and where nothing new has come."""
    began = time.monotonic()
    assert list(checkpoints_iterator(str(tmp_path), timeout=0.2)) == []
    assert time.monotonic() - began >= 0.2


def test_a_function_may_go_on_after_a_timeout(tmp_path):
    """It is asked after each, until it says that nothing will come."""
    asked: list[int] = []

    def ended() -> bool:
        asked.append(len(asked))
        if len(asked) == 2:
            write_checkpoint(tmp_path / "ckpt-1", VALUES)
        return len(asked) == 4

    assert list(checkpoints_iterator(str(tmp_path), timeout=0.02, timeout_fn=ended)) == [f"{tmp_path}/ckpt-1"]
    assert asked == [0, 1, 2, 3]


def test_an_interval_is_kept(tmp_path):
    """From when one was yielded, what was done with it included."""
    write_checkpoint(tmp_path / "ckpt-1", VALUES)
    found = checkpoints_iterator(str(tmp_path), min_interval_secs=0.2)
    next(found)
    began = time.monotonic()
    write_checkpoint(tmp_path / "ckpt-2", VALUES)
    next(found)
    assert time.monotonic() - began >= 0.15


def test_a_place_that_nobody_knows_is_told():
    """At once, and not after a timeout."""
    with pytest.raises(ConfigError, match="Protocol not known: nowhere"):
        next(checkpoints_iterator("nowhere://run"))
