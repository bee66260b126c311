"""Clusters and faults for tests of training scripts: real servers, real processes, real connections.

    InProcessCluster   parameter servers in threads of the test's process, for strategies in it
    ProcessCluster     a job of real processes, which a test may kill, pause, and hear
    script             the other end of that: what a script says to its test, and gates at which it waits
    faults             calls that are dropped, repeated, delayed, or lose their answers
    network            connections that are cut without a word
    hosts              hosts on this machine, joined by links of a given rate
    forks              processes that are forked, and so begin at once
    processor_time     processor time of processes, and when they rest
    replay             recordings of what a server was told, which can be replayed
    Clock              a clock that only the test turns

Nothing here is needed to train; `psclient`, `psserver` and `pswire` import nothing of it.
"""

from pstesting.clock import Clock
from pstesting.in_process import InProcessCluster
from pstesting.processes import ProcessCluster

__all__ = ["Clock", "InProcessCluster", "ProcessCluster"]
