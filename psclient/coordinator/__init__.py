"""Training by a coordinator: it schedules functions, and workers run them; names of `tf.distribute.coordinator`.

cluster_coordinator  `ClusterCoordinator`, and the results of what it schedules
functions            the functions that may be scheduled, by their names
content              arguments and results as bytes: numbers, strings, arrays, nests of them; never code
values               what an argument may refer to: results, and values of which each worker has its own
pieces               contents in pieces, and waits for server 0
worker               runs what is scheduled, once the script of a worker has come to its end
"""

from psclient._src.processes import shutdown
from psclient.coordinator.cluster_coordinator import ClusterCoordinator, RemoteValue, is_coordinator
from psclient.coordinator.functions import function
from psclient.coordinator.values import PerWorkerValues
from psclient.coordinator.worker import serve_at_end

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue", "function", "is_coordinator"]

shutdown.register(serve_at_end, first=True)
