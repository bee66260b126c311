"""The names on certificates: each stands for a task of the job, or for who looks at it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from pswire.cluster import Task

DOMAIN = ".paramserver"
"""With what the names on certificates end."""

METRICS = "metrics"
"""The name that all tasks' certificates have besides, for who asks many tasks for metrics: it is no task's."""

ADMIN = "admin"
"""The name of an observer that takes no part in the job: `psctl`."""

_TASK = re.compile("(chief|evaluator|ps|ps-standby|worker)-(0|[1-9][0-9]{0,8})")
"""A name of a task, or of a standby server."""

SOON_SECONDS = 14 * 86400.0
"""Seconds before their end from which on certificates are warned of."""


def ends_soon(expiry: float) -> bool:
    """Returns whether certificates that are good until then, in Unix seconds, are to be warned of."""
    return expiry - time.time() < SOON_SECONDS


def task_name(task: Task) -> str:
    """The name of a task where no slash may be: `ps-0`."""
    return f"{task.job}-{task.index}"


def standby_name(number: int) -> str:
    """The name of a standby server, which may take the place of any ps task: `ps-standby-0`."""
    return f"ps-standby-{number}"


def certificate_name(name: str) -> str:
    """The DNS name on the certificate of a task or of `ADMIN`: `ps-0.paramserver`."""
    return name + DOMAIN


def named(dns_names: Iterable[str]) -> frozenset[str]:
    """The tasks, as `task_name` writes them, that the DNS names of a certificate stand for; also `ADMIN` and standbys.

    Other names stand for nobody, such as `*.paramserver`, which means all of them to who checks names of hosts.
    """
    found = (name.removesuffix(DOMAIN) for name in dns_names if name.endswith(DOMAIN))
    return frozenset(name for name in found if name == ADMIN or _TASK.fullmatch(name))
