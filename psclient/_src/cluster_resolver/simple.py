"""Resolvers of what the program itself says: one cluster, or the union of several resolvers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psclient._src.cluster_resolver.base import ClusterResolver, url
from pswire.cluster import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Returns its arguments.

    Source: `tf.distribute.cluster_resolver.SimpleClusterResolver`.

    Args:
        cluster_spec: the jobs and the addresses of their tasks.
        master: the result of `master()` without a task.
        task_type: the job of this process.
        task_id: its index in the job.
        environment: the value of the property `environment`.
        num_accelerators: the result of `num_accelerators` for every task; None for `{}`.
        rpc_layer: the protocol of addresses, such as "grpc".

    Raises:
        TypeError: the cluster is not a `ClusterSpec`, or the master not a string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec must be a ClusterSpec, not {type(cluster_spec).__name__}; write ClusterSpec(...)"
            )
        if not isinstance(master, str):
            raise TypeError(f"master must be a string such as host:port, not {master!r}")
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = num_accelerators or {}
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the constructor's cluster."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the constructor's master, or the address of a task if both its job and its index are given.

        Raises:
            ValueError: the cluster has no such task.
        """
        if task_type is None or task_id is None:
            return url(self._master, rpc_layer or self.rpc_layer)
        return url(self._cluster_spec.task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    @property
    def environment(self) -> str:
        """The constructor's `environment`."""
        return self._environment

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Returns the constructor's number for any task; does not detect GPUs."""
        return self._num_accelerators


class UnionResolver(ClusterResolver):
    """Combines the clusters of several resolvers; everything else comes from the first one.

    Source: `tf.distribute.cluster_resolver.UnionResolver`.

    Args:
        resolvers: one or more resolvers.
        task_type: the job of this process, instead of that of the first resolver.
        task_id: its index in the job, instead of that of the first resolver.
        rpc_layer: the protocol of addresses, instead of that of the first resolver.

    Raises:
        TypeError: an argument is not a `ClusterResolver`.
        ValueError: no resolver is given.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("a union needs at least one ClusterResolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"a union takes ClusterResolvers, not {type(resolver).__name__}")
        self._resolvers = resolvers
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs of all resolvers.

        If each resolver lists a job from task 0 without gaps, the lists are concatenated; else the job's tasks keep
        their indices.

        Raises:
            KeyError: two resolvers have the same task of a job in which one of them leaves out indices.
        """
        found: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                found.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merged(job, parts) for job, parts in found.items()})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task if both its job and its index are given; else the first resolver's master.

        Raises:
            ValueError: the cluster has no such task.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer or self.rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        resolver, index = next(self._having(task_type, address))
        return resolver.master(task_type, index, rpc_layer or self._rpc_layer or resolver.rpc_layer or self.rpc_layer)

    def _having(self, job: str, address: str) -> Iterator[tuple[ClusterResolver, int]]:
        """The resolvers that have a task, each with the task's index there: in the union it may have another one."""
        for resolver in self._resolvers:
            own = resolver.cluster_spec()
            for index in own.task_indices(job) if job in own.jobs else ():
                if own.task_address(job, index) == address:
                    yield resolver, index

    @property
    def environment(self) -> str | None:
        """That of the first resolver."""
        return self._resolvers[0].environment

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Returns the first resolver's number."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    def _found(self, name: str) -> Any:
        return getattr(self._resolvers[0], name)


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """The tasks of one job, of which each resolver gave a part."""
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(tasks.keys() & merged.keys())
        if twice:
            raise KeyError(f"several resolvers have task {twice[0]} of job {job!r}; give each task its own index")
        merged |= tasks
    return merged
