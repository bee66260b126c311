"""Train on parameter servers, without TensorFlow, as with `tf.distribute`."""

from psclient import compat, metrics, ops, optimizers, summary, train
from psclient.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)
from psclient.compat import contrib as _contrib  # noqa: F401  # so that ps.compat.contrib is there
from psclient.consistency import Async, Sync
from psclient.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from psclient.datasets import ArrayDataset
from psclient.input import (
    ArraySpec,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    PerReplicaSpec,
    RunOptions,
    ValueContext,
)
from psclient.mirrored import MirroredStrategy
from psclient.parameter_server import ParameterServerStrategy
from psclient.reduce_op import ReduceOp
from psclient.strategy import Strategy
from psclient.traces import update_function
from psclient.values import DistributedValues, Mirrored, PerReplica
from psclient.variables import Variable, VariableAggregation, VariableSynchronization
from pswire import errors
from pswire.cluster import ClusterSpec
from pswire.errors import PSError
from pswire.limits import Timeouts

__all__ = [
    "ArrayDataset",
    "ArraySpec",
    "Async",
    "AutoShardPolicy",
    "ClusterResolver",
    "ClusterSpec",
    "DistributedValues",
    "InputContext",
    "InputOptions",
    "Mirrored",
    "MirroredStrategy",
    "PSError",
    "ParameterServerStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "Strategy",
    "Sync",
    "TFConfigClusterResolver",
    "Timeouts",
    "UnionResolver",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "compat",
    "errors",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "ops",
    "optimizers",
    "summary",
    "train",
    "update_function",
]
