"""Clusters and faults for tests of training scripts: real servers, real processes, real connections.

    InProcessCluster   parameter servers in threads of the test's process, for strategies in it
    ProcessCluster     a job of real processes, which a test may kill, pause, and listen to
    script             for the script under test: messages to its test, and gates at which it waits
    faults             calls that are dropped, repeated, delayed, or lose their responses
    network            connections that are cut without notice
    hosts              hosts on this machine, connected by links of a given rate
    forks              processes that are forked, and so start at once
    processor_time     processor time of processes, and when they are idle
    replay             recordings of the requests to a server, which can be replayed
    Clock              a clock that only the test advances

Training does not need this package; `psclient`, `psserver` and `pswire` do not import it.
"""

from pstesting.clock import Clock
from pstesting.in_process import InProcessCluster
from pstesting.processes import ProcessCluster

__all__ = ["Clock", "InProcessCluster", "ProcessCluster"]
