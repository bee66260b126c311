"""`tf.compat.v1`: partitioners, what `StrategyExtended` of r2.2 and r2.3 had besides, and `train`, the optimizers."""

from psclient._src.strategies.extended_v1 import MultiStepContext, StrategyExtended
from psclient._src.variables.partitioners import (
    fixed_size_partitioner,
    min_max_variable_partitioner,
    variable_axis_size_partitioner,
)
from psclient.compat.v1 import train

__all__ = [
    "MultiStepContext",
    "StrategyExtended",
    "fixed_size_partitioner",
    "min_max_variable_partitioner",
    "train",
    "variable_axis_size_partitioner",
]
