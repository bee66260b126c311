"""The resolver of `TF_CONFIG`, and what a strategy takes from any resolver."""

from __future__ import annotations

from typing import Any

from psclient._src.cluster_resolver.base import ClusterResolver, url
from psclient._src.config import tf_config_text
from pswire.cluster import EVALUATOR, ClusterSpec, TaskConfig, TFConfig, task_config_of
from pswire.errors import ConfigError

TRAINING_JOBS = ("chief", "worker")
"""Jobs whose tasks run the training script."""


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster from the environment variable `TF_CONFIG`, at each call.

    Values that are given to the constructor, or set later, override those of `TF_CONFIG`; its `environment` is ignored.
    Each method raises `ConfigError` if the part of `TF_CONFIG` that it reads is malformed.

    Source: `tf.distribute.cluster_resolver.TFConfigClusterResolver`.

    Args:
        task_type: the job of this process.
        task_id: its index in the job.
        rpc_layer: the protocol of addresses, such as "grpc".
        environment: the value of the property `environment`.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster of `TF_CONFIG`; an empty one if it has none."""
        return _tf_config().cluster_spec()

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, or the `session_master` of `TF_CONFIG` if it has one; "" for a single task.

        Raises:
            ValueError: the cluster has no such task.
        """
        config = _tf_config()
        if config.session_master is not None:
            return config.session_master
        cluster = config.cluster_spec()
        if _is_alone(cluster):
            return ""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        address = cluster.task_address(job, index)  # type: ignore[arg-type]  # None is no job, and is refused as such
        return url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    @property
    def environment(self) -> str | None:
        """The constructor's `environment`."""
        return self._environment

    def _found(self, name: str) -> Any:
        return getattr(_tf_config(), name)


def _tf_config() -> TFConfig:
    return TFConfig(tf_config_text())


def _is_alone(cluster: ClusterSpec) -> bool:
    jobs = cluster.jobs
    return not jobs or (len(jobs) == 1 and cluster.task_indices(jobs[0]) == [0])


def task_of(resolver: ClusterResolver) -> TaskConfig | None:
    """The cluster and the task of a process that runs a training script.

    Args:
        resolver: says both; a job without an index means its task 0.

    Returns:
        What a strategy is built from; None where the cluster is empty, and the strategy starts a server of its own.

    Raises:
        ConfigError: the cluster cannot train, does not have the task, or the task is none that trains.
        TypeError: it is no `ClusterResolver`.
    """
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(f"cluster_resolver must be a ClusterResolver, not {type(resolver).__name__}")
    where = "TF_CONFIG" if isinstance(resolver, TFConfigClusterResolver) else type(resolver).__name__
    config = task_config_of(resolver, where)
    if config and config.task.job == EVALUATOR:
        raise ConfigError(
            "an evaluator does not take part in training; give it its own strategy, such as MirroredStrategy(), and "
            "restore the checkpoints of ps.train.checkpoints_iterator(directory)",
            str(config.task),
        )
    if config and config.task.job not in TRAINING_JOBS:
        raise ConfigError(
            f"a {config.task.job} task does not run a training script; start a ps task with psserver, and create a "
            "strategy only in workers and the chief",
            str(config.task),
        )
    return config
