"""Train on parameter servers, without TensorFlow, as with `tf.distribute`."""

# ruff: noqa: E402
import pswire.process as _process

_process.begin_command()

from psclient import (
    cluster_resolver,
    compat,
    compression,
    coordinator,
    dynamic_embedding,
    experimental,
    initializers,
    losses,
    metrics,
    nn,
    ops,
    optimizers,
    summary,
    train,
)
from psclient._src.arraylike import Mirrored
from psclient._src.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.data.distributed import DistributedDataset
from psclient._src.data.iterators import DistributedIterator
from psclient._src.distribute.strategy import Strategy, experimental_set_strategy
from psclient._src.options import (
    ArraySpec,
    Async,
    AutoShardPolicy,
    BoundedStaleness,
    InputContext,
    InputOptions,
    PerReplicaSpec,
    ReduceOp,
    Round,
    RunOptions,
    Sync,
    ValueContext,
)
from psclient._src.strategies.mirrored import MirroredStrategy
from psclient._src.strategies.parameter_server import ParameterServerStrategy
from psclient._src.tracing.update_function import update_function
from psclient._src.values import DistributedValues, PerReplica
from psclient._src.variables.indexed_slices import IndexedSlices, convert_to_tensor
from psclient._src.variables.sharded import ShardedVariable
from psclient._src.variables.sparse_updates import exact_update, lazy_update
from psclient._src.variables.variable import Variable, VariableAggregation, VariableSynchronization
from psclient.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    UnionResolver,
)
from psclient.nn.sparse_tensor import SparseTensor
from psclient.ops import clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from pswire import errors
from pswire.cluster import ClusterSpec
from pswire.errors import PSError
from pswire.limits import Timeouts

__all__ = [
    "ArrayDataset",
    "ArraySpec",
    "Async",
    "AutoShardPolicy",
    "BoundedStaleness",
    "ClusterResolver",
    "ClusterSpec",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "KubernetesClusterResolver",
    "Mirrored",
    "MirroredStrategy",
    "PSError",
    "ParameterServerStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReplicaContext",
    "Round",
    "RunOptions",
    "ShardedVariable",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "SparseTensor",
    "Strategy",
    "Sync",
    "TFConfigClusterResolver",
    "Timeouts",
    "TorchrunClusterResolver",
    "UnionResolver",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "cluster_resolver",
    "compat",
    "compression",
    "convert_to_tensor",
    "coordinator",
    "dynamic_embedding",
    "errors",
    "exact_update",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "global_norm",
    "has_strategy",
    "in_cross_replica_context",
    "initializers",
    "lazy_update",
    "losses",
    "metrics",
    "nn",
    "ops",
    "optimizers",
    "summary",
    "train",
    "update_function",
]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'psclient' has no attribute {name!r}")
    return _process.version()  # reads the metadata of the distribution, for which no import waits
