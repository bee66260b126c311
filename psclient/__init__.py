"""Train on parameter servers, without TensorFlow, as with `tf.distribute`."""

from psclient import ops, optimizers
from psclient.checkpoint import Checkpoint
from psclient.consistency import Sync
from psclient.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from psclient.data import ArrayDataset, InputContext
from psclient.reduce_op import ReduceOp
from psclient.strategy import ParameterServerStrategy
from psclient.values import Mirrored, PerReplica
from psclient.variables import Variable, VariableAggregation
from pswire import errors
from pswire.errors import PSError
from pswire.limits import Timeouts

__all__ = [
    "ArrayDataset",
    "Checkpoint",
    "InputContext",
    "Mirrored",
    "PSError",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "Sync",
    "Timeouts",
    "Variable",
    "VariableAggregation",
    "errors",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "ops",
    "optimizers",
]
