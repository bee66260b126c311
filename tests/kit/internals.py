"""Names of the inside that tests outside the unit folders need, in one place: one that moves is put right here.

Most tests need none of it: `tests.kit.rig` has servers, `tests.kit.strategies` strategies, `pstesting.processes`
clusters. Errors, `ClusterSpec` and `Timeouts` are public: a test that imports `psclient` takes them from there. A
module that one file alone needs is imported there, and so is one in which a test replaces something.
"""

# ruff: noqa: F401, I001 - all of it is for others, in groups
# fmt: off

from __future__ import annotations

# ---- Verbs of a server, and what they take and give ----

from pswire.api import (
    ApproveRequest, Begun, Contribution, CreateBatchReply, Enlisted, Opened, ParameterServer, PullReply, RESTS,
    RoundReply, RowRead, ServerStatus, TableRead, UNTIL_ENDED, Watched,
)
from pswire.errors import (
    Abandoned, BY_NAME, CheckpointError, ConfigError, DamagedCheckpoint, Diverged, Fenced, Forbidden,
    InvalidRequest, LocalityError, MemoryLimit, NewcomerDiverged, NoCheckpoint, ProgramError, PSError, RoundTimeout,
    ServerLost, TaskTaken, Unauthenticated, Unreachable, VariableMismatch,
)
from pswire.servers.checkpoints import RestoreRequest
from pswire.servers.requests import ServerRequest
from pswire.model.status import (
    Difference, Happened, MissedPeer, OpenRound, Pace, ProcessStatus, Saving, SessionState, STILL, WorkerProgress,
)

# ---- Tasks, sessions and limits ----

from pswire.cluster import check_addresses, ClusterSpec, parse_tf_config, Task
from pswire.flags import ABOUT
from pswire.limits import (
    ALIGN, MAX_NDIM, MAX_PARTS, MAX_PLAN_ITEMS, MAX_PLAN_NODES, MAX_PLANS, MAX_SAVES, MAX_VARIABLES, PART_BYTES,
    Timeouts, WINDOW,
)
from pswire.security.session_numbers import count_of, number_for
from pswire.server_options import ServerOptions

# ---- Plans, programs and tensors ----

from pswire.model.plan import (
    Apply, Operand, PlacedVariable, Plan, ReduceOp, Reduction, Ref, RestoreCommit, ShardOf, SnapshotOrder, Sparse,
    Trim, Turn, VariableSpec,
)
from pswire.model.program import Attr, infer, Input, Node, OPS, Program
from pswire.model.rows import row_specs, Rows
from pswire.model.tensor import align, Array, as_bytes, DTYPES, portable, spec_of, TensorSpec

# ---- Tables ----

from pswire.model.hashing import BUCKETS, buckets_of, hashes_of
from pswire.model.table_state import TableState
from pswire.model.tables import (
    CBFFilter, Constant, CounterFilter, GlobalStepEvict, L2WeightEvict, LFU, LRU, MIN_CAPACITY, Normal,
    ProbabilityFilter, ROWS, SlotTensor, TablePart, TableSpec, TimeToLive, TruncatedNormal, Uniform, Zeros,
)

# ---- The log of a job, and votes ----

from pswire.model.consistency import ASYNC, SYNC, Consistency, Mode
from pswire.model.log import (
    Approved, Created, Done, Generation, GenerationClosed, Examples, Gone, JobStarted, LogEntry, Lost, Member,
    Position, Return, Snapshotted, Start, Started, STEP,
)
from pswire.servers.votes import Digest, Testimony, Vote

# ---- Checkpoints ----

from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.manifest import FORMAT, MANIFEST, Manifest, MAX_MANIFEST, Saved
from pswire.checkpoint.reader import FoundCheckpoint, open_saved, SavedCheckpoint
from pswire.checkpoint.storage import storage_at
from pswire.model.saved import (
    ALL, PartOf, RestoreOrder, RestoreReply, SavedTable, SavedTensor, Shard,
)

# ---- Messages, and how they travel ----

from pswire.encoding import messages
from pswire.encoding.calls import CALLS
from pswire.encoding.protocol import PROTOCOL, spoken
from pswire.encoding.verbs import (
    bearer, Caller, ERROR_KEY, MAX_DETAILS_BYTES, parse, refusal, refusal_to_pb, refused, TOKEN_KEY, VERBS,
)
from pswire.pb import parameter_server_pb2 as pb
from pswire.network.grpc_frames import Frame, frames
from pswire.network.parts import Assembly, parts_of
from pswire.network.payload import EMPTY, Payload
from pswire.network.shared_memory import CLIENT_BYTES, Segment
from pswire.network.sockets import HEAD, INLINE, MessageKind, MAX_PART_BYTES, Message, MessageSocket
from pswire.network.tls_socket import PIECE, RECORD, Sealed, Stream
from pswire.network.traffic import TransportName, TRANSPORTS, traffic

# ---- Security ----

from pswire.security.identity import FLAGS, Security, SecurityOptions
from pswire.security.link_codes import check_code, GOOD_SECONDS, make_code
from pswire.security.names import certificate_name, METRICS, named, standby_name, task_name

# ---- Servers ----

from psserver.cli import command as psserver_command, OUTLIVED
from psserver.config import LEAST_IN_FLIGHT, server_config, ServerConfig
from psserver.core.core import Core
from psserver.rounds.digests import ROUNDS as DIGEST_ROUNDS
from psserver.calls import MAX_CALLS
from psserver.effects import Effect, Fail, Others, Peer
from psserver.registry import Registry
from psserver.values.dense import Dense
from psserver.telemetry import MetricsPort, Rim, ROWS as SERVER_METRICS
from psserver.network.server import ServerThread

# ---- What servers compute ----

from psserver.devices import ServerDevice
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs.kernels.kernels import Kernels

# ---- Workers ----

from psclient._src.arrays.devices import available_gpus, Device as ClientDevice, Download, gpu_report, local_devices
from psclient._src.distribute.reduction import combine, SentRows
from psclient._src.rounds.rounds import Exchange, Outgoing
from psclient._src.network.remote_server import connect, RemoteServer
from psclient._src.network.session import Session

# ---- Chiefs and launchers ----

from psclient._src.chief.driver import Chief
from psclient._src.config import child_environ, GLIBC_TUNABLES, LaunchConfig, security_from
from psclient._src.processes.sigterm import LAST_SECONDS
from psclient._src.launch.agent import LOST, MODULE
from psclient._src.launch.cluster import Cluster, EVALUATOR
from psclient._src.launch.outcome import Outcome
from psclient._src.launch.psworker import command as psworker_command
from psclient._src.processes.process import address_in, await_listening, start_server
from psclient._src.processes.shutdown import ABANDONED, code_of, SERVER_LOST
