"""Ways in which a process learns its cluster and its task, with the names of `tf.distribute.cluster_resolver`."""

from psclient.cluster_resolver.base import ClusterResolver
from psclient.cluster_resolver.given import SimpleClusterResolver, UnionResolver
from psclient.cluster_resolver.slurm import SlurmClusterResolver
from psclient.cluster_resolver.tf_config import TFConfigClusterResolver, task_of

__all__ = [
    "ClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
    "task_of",
]
