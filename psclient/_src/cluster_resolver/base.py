"""The interface of cluster resolvers, and the base class for one's own."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from typing import Any

from psclient._src.arrays.devices import available_gpus
from pswire.cluster import ClusterSpec
from pswire.errors import ConfigError


class ClusterResolver(abc.ABC):
    """Finds the cluster that a process belongs to, and which of its tasks the process is.

    A custom resolver has `cluster_spec` and `master`, and sets `task_type` and `task_id`. Its methods may be called in
    any context.

    Source: `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current cluster; an empty one if there is none."""

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task as `<rpc_layer>://host:port`, or `host:port` without a layer.

        Session masters do not exist here: this is for scripts that show or compare addresses.

        Args:
            task_type: the job; None for that of this process.
            task_id: the index in the job; None for that of this process.
            rpc_layer: the protocol to write before the address; None for that of the resolver.

        Raises:
            ValueError: the cluster has no such task.
        """

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as "worker"; None if it is not known."""
        return self._found("task_type") if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is not known."""
        return self._found("task_id") if self._task_id is None else int(self._task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` writes before addresses, such as "grpc"; None for none."""
        return self._found("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """Empty, as in TensorFlow outside of Google, unless the resolver was given another value."""
        return ""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Returns the number of GPUs of a task.

        Args:
            task_type: the job; None for that of this process.
            task_id: the index in the job; None for that of this process.
            config_proto: ignored; it is a parameter in TensorFlow.

        Returns:
            `{"GPU": n}` for this process with n usable GPUs, and `{}` without. `{}` as well for any other task, because
            the devices of other processes are not known.

        Raises:
            ValueError: the cluster has no such task.
        """
        own = (self.task_type, self.task_id)
        asked = (own[0] if task_type is None else task_type, own[1] if task_id is None else task_id)
        cluster = self.cluster_spec()
        if cluster and task_type is not None and task_id is not None:
            cluster.task_address(task_type, task_id)
        gpus = available_gpus() if asked == own else 0
        return {"GPU": gpus} if gpus else {}

    def _found(self, name: str) -> Any:
        """Looks for `task_type`, `task_id` or `rpc_layer` in the surroundings, where the resolver was not told."""
        return None


class StartedClusterResolver(ClusterResolver):
    """The base of resolvers that know the cluster, and this process's task in it, from when they are made.

    They set `task_type` and `task_id`, and `_cluster`.
    """

    _cluster: ClusterSpec

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster as it was when the resolver was created."""
        return self._cluster

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job and the index of this process."""
        return self.task_type, self.task_id

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, by default of this one.

        Raises:
            ValueError: the cluster has no such task.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return ""
        return url(self._cluster.task_address(job, index), rpc_layer or self.rpc_layer)


def dealt(jobs: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the job and the index of each rank, from 0: jobs take ranks in the order of their names."""
    return [(job, index) for job, count in sorted(jobs.items()) for index in range(count)]


def whole_number(name: str, text: str) -> int:
    """Returns the value of a variable; raises `ConfigError` if it is no whole number from 0."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r} must be a whole number from 0")
    return int(text)


def url(address: str, rpc_layer: str | None) -> str:
    """An address with its protocol in front, where it has one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address
