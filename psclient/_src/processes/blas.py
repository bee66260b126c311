"""Threads of NumPy's BLAS in this process."""

from __future__ import annotations

import logging

from threadpoolctl import ThreadpoolController

from psclient._src.config import threads_chosen, threads_of
from pswire.cluster import ClusterSpec, Task

log = logging.getLogger("psclient")


def share_cores(cluster: ClusterSpec, task: Task) -> None:
    """Gives BLAS this task's share of the machine's cores, where it has more threads and the user has said nothing.

    With a thread for each core, which is the default, tasks of one machine wait for each other in every product of
    small matrices. A number is never raised: a smaller one is the user's.

    Args:
        cluster: the addresses of all tasks; those at this task's host share the machine.
        task: this process's task.
    """
    if threads_chosen():
        return
    share = threads_of(len(cluster.at_host_of(task)))
    for library in ThreadpoolController().lib_controllers:
        if library.user_api == "blas" and library.num_threads > share:
            log.debug("%s: %s uses %d threads instead of %d", task, library.prefix, share, library.num_threads)
            library.set_num_threads(share)
