"""What a script says about its input, and what it is told."""

from __future__ import annotations

import pytest

from psclient._src.options import AutoShardPolicy, InputContext, InputOptions, RunOptions, ValueContext


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
    """A policy may be its number, too; another one is refused."""
    assert InputOptions() == InputOptions(True, AutoShardPolicy.AUTO)
    assert InputOptions(auto_shard_policy=-1).auto_shard_policy is AutoShardPolicy.OFF  # type: ignore[arg-type]
    assert [policy.value for policy in AutoShardPolicy] == [-1, 0, 1, 2, 3]
    assert [policy.name for policy in AutoShardPolicy] == ["OFF", "AUTO", "FILE", "DATA", "HINT"]
    with pytest.raises(ValueError, match="AutoShardPolicy"):
        InputOptions(auto_shard_policy=7)  # type: ignore[arg-type]
    assert RunOptions() == RunOptions(
        experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False
    )
