"""Subjects of the checks of `psctl doctor`, and the findings of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from psclient._src.arrays.devices import GpuReport
from psclient.psctl.settings import ObservedCluster
from pswire.cluster import check_address
from pswire.security.identity import SecurityOptions
from pswire.telemetry.views.looked import Looked

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The finding of a check.

    Attributes:
        level: "ok"; "warn": it works, but not as well as it could, or not for long; "fail": it does not work.
        message: the state that was found.
        advice: the remedy; "" where there is nothing to do.
    """

    level: Level
    message: str
    advice: str = ""


@dataclass(frozen=True)
class LocalHost:
    """This machine, or this container.

    Attributes:
        shared: the directory of shared memory.
        shared_free: free bytes there, -1 where there is no such directory.
        shared_writable: True if this process may write there.
        segments: reason why processes can share no memory; "" if they can.
        open_files: number of files and connections that this process may have.
        memory: bytes that are free for new processes, 0 where that is not known.
        memory_limit: bytes that this container may use, 0 for no limit.
        gpus: the GPUs, and what drives them.
        nvidia: True if the machine has an NVIDIA GPU, usable or not.
        versions: versions of what is installed here.
    """

    shared: str
    shared_free: int
    shared_writable: bool
    segments: str
    open_files: int
    memory: int
    memory_limit: int
    gpus: GpuReport
    nvidia: bool
    versions: dict[str, str]


@dataclass(frozen=True)
class Patient:
    """The subjects of all checks.

    Attributes:
        tf_config: the text of TF_CONFIG, or of the cluster that `--local` names, without a task.
        cluster: the servers; None where none are named, or TF_CONFIG is malformed.
        looked: the answers of the servers, in the order of the cluster.
        security: paths of certificates and of the token.
        name: name that our certificate should have: "admin", or our task's as `task_name` writes it.
        host: the machine on which `psctl` runs.
        seconds: time that a server may take to answer.
        local: name of the cluster that `--local` names; "" without `--local`.
    """

    tf_config: str
    cluster: ObservedCluster | None
    looked: Sequence[Looked]
    security: SecurityOptions
    name: str
    host: LocalHost
    seconds: float
    local: str = ""

    def places(self) -> Iterator[tuple[Looked, str, int]]:
        """Each server with its host and port."""
        for found in self.looked:
            host, port = check_address(found.address, "psctl")
            yield found, host.strip("[]"), port


Check = Callable[[Patient], Iterator[Finding]]
"""Looks for one kind of fault."""


def ok(message: str) -> Finding:
    """All is well."""
    return Finding("ok", message)


def warn(message: str, advice: str) -> Finding:
    """It could be better."""
    return Finding("warn", message, advice)


def fail(message: str, advice: str) -> Finding:
    """It does not work."""
    return Finding("fail", message, advice)
