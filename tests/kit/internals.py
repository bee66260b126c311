"""What tests outside `tests/psclient` and `tests/psserver` need of the inside of workers and servers, in one place.

A name that moves is put right here. Most tests need none of it: `tests.kit.rig` has servers, `tests.kit.strategies`
strategies, and `pstesting.processes` clusters. A test that replaces something in a module imports that module itself.
"""

# ruff: noqa: F401, I001 - all of it is for others, in groups
# fmt: off

from __future__ import annotations

# ---- Servers ----

from psserver.cli import command as psserver_command, OUTLIVED
from psserver.config import LEAST_IN_FLIGHT, server_config, ServerConfig
from psserver.core.core import Core
from psserver.core.digests import ROUNDS as DIGEST_ROUNDS
from psserver.core.waiting import Hold, MAX_CALLS, Read, Watch
from psserver.effects import Others, Peer
from psserver.registry import Registry
from psserver.telemetry import MetricsPort, Rim, ROWS as SERVER_METRICS
from psserver.transport.server import ServerThread

# ---- What servers compute ----

from psserver.devices import Device as ServerDevice
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs.kernels.kernels import Kernels

# ---- Workers ----

from psclient._src.devices import available_gpus, Device as ClientDevice, Download, gpu_report, local_devices
from psclient._src.distribute.reduction import combine, SentRows
from psclient._src.rounds.rounds import Exchange, Outgoing
from psclient._src.transport.remote_server import connect, RemoteServer
from psclient._src.transport.session import Session

# ---- Chiefs and launchers ----

from psclient._src.chief.driver import Chief
from psclient._src.config import child_environ, GLIBC_TUNABLES, LaunchConfig, security_from
from psclient._src.launch.agent import LOST, MODULE
from psclient._src.launch.cluster import Cluster, EVALUATOR
from psclient._src.launch.outcome import Outcome
from psclient._src.launch.psworker import command as psworker_command
from psclient._src.processes.process import address_in, await_listening, start_server
from psclient._src.processes.shutdown import ABANDONED, code_of, SERVER_LOST
