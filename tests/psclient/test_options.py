"""What a script says about its input, and what it is told."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest

import psclient as ps
from psclient._src.options import Async, AutoShardPolicy, InputContext, InputOptions, RunOptions, Sync, ValueContext


def test_an_input_context_shares_out_a_batch() -> None:
    """Equally, or not at all."""
    assert InputContext(2, 1, 4).get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match="cannot be shared equally by 4 replicas"):
        InputContext(2, 1, 4).get_per_replica_batch_size(6)


def test_contexts_say_what_they_are() -> None:
    """As text, with TensorFlow's defaults."""
    assert str(InputContext()) == "ps.InputContext(input pipeline id 0, total: 1)"
    assert str(InputContext(3, 1, 6)) == "ps.InputContext(input pipeline id 1, total: 3)"
    assert InputContext() == InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    assert str(ValueContext(2, 4)) == "ps.ValueContext(replica id 2, total replicas in sync: 4)"
    assert ValueContext() == ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)


def test_options_have_the_names_and_defaults_of_tensorflow() -> None:
    """A policy may be its number, too; another one is refused. DYNAMIC is none of TensorFlow's."""
    assert InputOptions() == InputOptions(True, AutoShardPolicy.AUTO)
    assert InputOptions(auto_shard_policy=-1).auto_shard_policy is AutoShardPolicy.OFF  # type: ignore[arg-type]
    assert [policy.value for policy in AutoShardPolicy] == [-1, 0, 1, 2, 3, 4]
    assert [policy.name for policy in AutoShardPolicy] == ["OFF", "AUTO", "FILE", "DATA", "HINT", "DYNAMIC"]
    with pytest.raises(ValueError, match="AutoShardPolicy"):
        InputOptions(auto_shard_policy=7)  # type: ignore[arg-type]
    assert RunOptions() == RunOptions(
        experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False
    )


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None])
def test_backup_workers_are_a_whole_number(wrong: object) -> None:
    """Anything else is refused where it is said."""
    with pytest.raises(TypeError, match=f"backup_workers={wrong!r} is no number of workers; give a whole number"):
        Sync(backup_workers=wrong)  # type: ignore[arg-type]


def test_backup_workers_that_cannot_be() -> None:
    """Fewer than none, or where each server decides by itself; who waits for nobody has none."""
    with pytest.raises(ValueError, match="backup_workers=-1 is negative; 0 waits for every worker"):
        Sync(backup_workers=-1)
    with pytest.raises(ValueError, match="backup_workers=1 needs whole rounds"):
        Sync(whole_rounds=False, backup_workers=1)
    assert (Sync().backup_workers, Sync(backup_workers=2).mode, Async().backup_workers) == (0, "whole", 0)


@pytest.mark.parametrize(
    ("k", "error"),
    [
        (-1, ValueError),
        (2**31, ValueError),
        (True, TypeError),
        (np.True_, TypeError),
        (3.0, TypeError),
        ("3", TypeError),
    ],
)
def test_a_bound_of_staleness_is_a_number_of_rounds(k: Any, error: type[Exception]) -> None:
    """Anything else is refused, and the message has it, with the name of the argument."""
    with pytest.raises(error, match=f"BoundedStaleness has k={re.escape(repr(k))}; give a number of rounds"):
        ps.BoundedStaleness(k)


def test_a_bound_of_staleness_may_be_numpys() -> None:
    """It is kept as a Python integer, and travels as one."""
    assert type(ps.BoundedStaleness(cast(Any, np.int64(3))).k) is int
    assert ps.BoundedStaleness(0) == ps.BoundedStaleness(k=0, nonfinite="apply")
    with pytest.raises(ValueError, match="unknown nonfinite 'never'"):
        ps.BoundedStaleness(1, nonfinite=cast(Any, "never"))
