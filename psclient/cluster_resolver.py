"""Resolvers find the cluster and the task of a process, with the names of `tf.distribute.cluster_resolver`."""

from psclient._src.cluster_resolver.base import ClusterResolver
from psclient._src.cluster_resolver.kubernetes import KubernetesClusterResolver
from psclient._src.cluster_resolver.simple import SimpleClusterResolver, UnionResolver
from psclient._src.cluster_resolver.slurm import SlurmClusterResolver
from psclient._src.cluster_resolver.tf_config import TFConfigClusterResolver, task_of
from psclient._src.cluster_resolver.torchrun import TorchrunClusterResolver

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "task_of",
]
