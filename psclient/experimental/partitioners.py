"""Partitioners cut variables into shards: for `ParameterServerStrategy(variable_partitioner=...)`."""

from psclient._src.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
