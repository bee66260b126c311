"""The resolver of a pod of an Indexed Job, a JobSet or a StatefulSet."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from psclient._src.cluster_resolver.base import StartedClusterResolver, whole_number
from psclient._src.config import launcher_variable
from pswire.cluster import ClusterSpec, join_address
from pswire.errors import ConfigError

SERVERS = "ps"
"""The job whose tasks listen."""


@dataclass(frozen=True)
class _Place:
    """The pod of this process.

    Attributes:
        job: its job in the cluster.
        prefix: what stands before the controller's own name in hostnames, such as `digits-`.
        replica: the index of its Job in a JobSet; None outside of a JobSet.
        pod: the index of the pod in its Job or StatefulSet.
    """

    job: str
    prefix: str
    replica: int | None
    pod: int


class KubernetesClusterResolver(StartedClusterResolver):
    """Finds the cluster that the pods of Indexed Jobs, a JobSet or StatefulSets form, without asking the API server.

    The hostnames of such pods end with the controller's name and the pod's index: `ps-1` and `digits-ps-1` are task 1
    of `ps`; `digits-ps-0-1` is pod 1 of the first Job `ps` of the JobSet `digits`. A Service without a cluster IP gives
    each server the address `HOSTNAME.SERVICE:PORT`. All pods of a cluster have names of the same form, so that one
    hostname determines all others.

    The constructor reads `HOSTNAME` and, if they are set, `JOB_COMPLETION_INDEX` (set by Kubernetes in each pod of an
    Indexed Job), `JOB_COMPLETIONS`, and `JOBSET_NAME`, `REPLICATED_JOB_NAME` and `JOB_INDEX`, which the downward API
    can set from the labels of a JobSet's pods. TensorFlow's resolver of this name asks the API server for pods by their
    labels, and has other arguments.

    Args:
        jobs: maps job names to numbers of tasks, such as `{"ps": 2, "worker": 4}`; the same in every pod.
        port: the port on which each server listens.
        service: name of the servers' Service, in the namespace of the pods or with it (`ps.training`); None for the
            name of the JobSet, which makes a Service with that name, else the name of the servers' controller.
        names: maps job names to the names of their Jobs, StatefulSets or replicated jobs, if these differ.
        completions: maps job names to the number of pods of each of their Jobs, for jobs with several replicas in a
            JobSet; None for one Job with all tasks. For the job of this pod `JOB_COMPLETIONS` may have it as well.
        rpc_layer: the protocol of addresses.

    Raises:
        ValueError: there is no job of servers, or a number of tasks is less than 1.
        ConfigError: the hostname, or a variable, is not that of a pod of these jobs; the message names the variable.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        port: int = 2222,
        service: str | None = None,
        names: Mapping[str, str] | None = None,
        completions: Mapping[str, int] | None = None,
        rpc_layer: str | None = "grpc",
    ) -> None:
        _check(jobs, names or {}, completions or {})
        self._names = {job: (names or {}).get(job, job) for job in jobs}
        self._completions = dict(jobs) | dict(completions or {})
        place = _found(self._names)
        if said := _number("JOB_COMPLETIONS"):
            if place.job in (completions or {}) and said != self._completions[place.job]:
                raise ConfigError(
                    f"JOB_COMPLETIONS={said}, but completions[{place.job!r}] is {self._completions[place.job]}; "
                    "both are the pods of one Job: make them equal"
                )
            self._completions[place.job] = said
        if service is None:
            in_set = place.replica is not None and place.prefix
            service = place.prefix.removesuffix("-") if in_set else place.prefix + self._names[SERVERS]
        self.task_type, self.task_id, self.rpc_layer = place.job, self._index(place, jobs[place.job]), rpc_layer
        self._cluster = ClusterSpec(
            {job: [*self._addresses(place, job, count, service, port)] for job, count in jobs.items()}
        )

    def _index(self, place: _Place, count: int) -> int:
        """The index of this process in its job."""
        each = self._completions[place.job]
        index = (place.replica or 0) * each + place.pod
        if index >= count or place.pod >= each:
            raise ConfigError(
                f"this pod is task {index} of {place.job!r}, but `jobs` has {count}, {each} in each Job; give the "
                "numbers of the manifest: jobs, and completions if a JobSet has several replicas of a Job"
            )
        return index

    def _addresses(self, place: _Place, job: str, count: int, service: str, port: int) -> Iterator[str]:
        for index in range(count):
            replica, pod = divmod(index, self._completions[job])
            middle = "" if place.replica is None else f"{replica}-"
            host = f"{place.prefix}{self._names[job]}-{middle}{pod if middle else index}"
            yield join_address(f"{host}.{service}", port) if job == SERVERS else join_address(host, 0)


def _check(jobs: Mapping[str, int], names: Mapping[str, str], completions: Mapping[str, int]) -> None:
    if SERVERS not in jobs:
        raise ValueError(f'jobs must contain the servers, such as {{"ps": 2, "worker": 4}}, not {dict(jobs)}')
    for what, counts in (("jobs", jobs), ("completions", completions)):
        for job, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{what}[{job!r}] must be a whole number from 1, not {count!r}")
    for what, keys in (("names", names), ("completions", completions)):
        if unknown := sorted(keys - jobs.keys()):
            raise ValueError(
                f"{what} contains {unknown[0]!r}, which is not in jobs; jobs has {', '.join(sorted(jobs))}"
            )


def _found(names: Mapping[str, str]) -> _Place:
    """Finds which pod this process is in, by its hostname and by variables, which must agree."""
    host = launcher_variable("HOSTNAME") or socket.gethostname()
    place = _of_set(names) or _of_host(host, names)
    if place is None:
        ends = ", ".join(f"{name}-0" for name in names.values())
        raise ConfigError(
            f"HOSTNAME={host!r} is not a pod of these jobs; it must end like {ends}, as in Indexed Jobs, "
            "StatefulSets and JobSets. Give `names` if the controllers have other names, and do not use hostNetwork"
        )
    said = _number("JOB_COMPLETION_INDEX")
    if said is not None and said != place.pod:
        raise ConfigError(
            f"JOB_COMPLETION_INDEX={said}, but HOSTNAME={host!r} belongs to pod {place.pod}; leave both as "
            "Kubernetes sets them"
        )
    return place


def _of_set(names: Mapping[str, str]) -> _Place | None:
    """The place that the variables of a JobSet tell; None where they are not set."""
    told = {name: launcher_variable(name) for name in ("JOBSET_NAME", "REPLICATED_JOB_NAME")}
    if not any(told.values()):
        return None
    for name, value in told.items():
        if not value:
            raise ConfigError(
                f"{name} is not set, but {_other(told, name)} is; set both with the downward API, or neither"
            )
    pod = _number("JOB_COMPLETION_INDEX")
    if pod is None:
        raise ConfigError("JOB_COMPLETION_INDEX is not set; set completionMode: Indexed for the Jobs of a JobSet")
    jobs = [job for job, name in names.items() if name == told["REPLICATED_JOB_NAME"]]
    if not jobs:
        raise ConfigError(
            f"REPLICATED_JOB_NAME={told['REPLICATED_JOB_NAME']!r} is not one of {', '.join(names.values())}; give "
            "`names`"
        )
    return _Place(jobs[0], f"{told['JOBSET_NAME']}-", _number("JOB_INDEX") or 0, pod)


def _other(told: Mapping[str, str], name: str) -> str:
    return next(other for other in told if other != name)


def _of_host(host: str, names: Mapping[str, str]) -> _Place | None:
    """The place that a hostname tells; the job with the longest name, where several fit."""
    for job, name in sorted(names.items(), key=lambda item: -len(item[1])):
        match = re.fullmatch(rf"((?:.+-)?){re.escape(name)}(?:-([0-9]{{1,9}}))?-([0-9]{{1,9}})", host.partition(".")[0])
        if match:
            return _Place(job, match[1], None if match[2] is None else int(match[2]), int(match[3]))
    return None


def _number(name: str) -> int | None:
    """The whole number that a variable says; None where it is not set."""
    text = launcher_variable(name)
    return whole_number(name, text) if text else None
