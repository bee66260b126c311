"""Train on parameter servers, without TensorFlow, as with `tf.distribute`."""

# A module is imported when the first of its names is used: `psctl` and the launcher, which need few, start faster.

import os as _os

import pswire.process as _process

_process.begin_command()

# gRPC's handlers of fork() abort the child where a call is under way, as one is nearly always. A fork has no part in
# the job and makes no calls, so that it needs no handlers: a data loader may fork at any time. gRPC reads this when it
# is imported, which other libraries of a script may do before the first name of ours is used.
_os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# What matters of its own lines on stderr our errors say, with the task in them.
_os.environ.setdefault("GRPC_VERBOSITY", "NONE")

TYPE_CHECKING = False  # as `typing` has it, which takes longer to import than all that is done here

if TYPE_CHECKING:
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
        Quorum,
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

    __version__: str

del TYPE_CHECKING

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
    "Quorum",
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

_HOMES = {
    "psclient": (
        "cluster_resolver compat compression coordinator dynamic_embedding experimental initializers losses metrics "
        "nn ops optimizers summary train"
    ),
    "psclient._src.arraylike": "Mirrored",
    "psclient._src.context": "ReplicaContext get_replica_context get_strategy has_strategy in_cross_replica_context",
    "psclient._src.data.array_dataset": "ArrayDataset",
    "psclient._src.data.distributed": "DistributedDataset",
    "psclient._src.data.iterators": "DistributedIterator",
    "psclient._src.distribute.strategy": "Strategy experimental_set_strategy",
    "psclient._src.options": (
        "ArraySpec Async AutoShardPolicy BoundedStaleness InputContext InputOptions PerReplicaSpec Quorum "
        "ReduceOp Round RunOptions Sync ValueContext"
    ),
    "psclient._src.strategies.mirrored": "MirroredStrategy",
    "psclient._src.strategies.parameter_server": "ParameterServerStrategy",
    "psclient._src.tracing.update_function": "update_function",
    "psclient._src.values": "DistributedValues PerReplica",
    "psclient._src.variables.indexed_slices": "IndexedSlices convert_to_tensor",
    "psclient._src.variables.sharded": "ShardedVariable",
    "psclient._src.variables.sparse_updates": "exact_update lazy_update",
    "psclient._src.variables.variable": "Variable VariableAggregation VariableSynchronization",
    "psclient.cluster_resolver": (
        "ClusterResolver KubernetesClusterResolver SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver "
        "TorchrunClusterResolver UnionResolver"
    ),
    "psclient.nn.sparse_tensor": "SparseTensor",
    "psclient.ops": "clip_by_global_norm clip_by_norm clip_by_value global_norm",
    "pswire": "errors",
    "pswire.cluster": "ClusterSpec",
    "pswire.errors": "PSError",
    "pswire.limits": "Timeouts",
}
"""The names of `__all__` by the modules that have them; those of a package are its modules."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        return _process.version()  # reads the metadata of the distribution, for which no import waits
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module 'psclient' has no attribute {name!r}")
    is_module = home in ("psclient", "pswire")
    found = import_module(f"{home}.{name}") if is_module else getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
