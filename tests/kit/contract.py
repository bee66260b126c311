"""What tests outside `tests/pswire` need of the contract between workers and servers, in one place.

A name that moves in `pswire` is put right here, and not in fifty files. Errors, `ClusterSpec` and `Timeouts` are
public: a test that imports `psclient` takes them from there. A module that only one file needs is imported there.
"""

# ruff: noqa: F401, I001 - all of it is for others, in groups
# fmt: off

from __future__ import annotations

# ---- Verbs of a server, and what they take and give ----

from pswire.api import (
    ALL, Begun, Contribution, CreateBatchReply, CreateReply, Opened, ParameterServer, PullReply, RestoreOrder,
    RestoreReply, RESTS, RoundReply, RowRead, ServerStatus, TableRead, UNTIL_ENDED, Watched,
)
from pswire.errors import (
    Abandoned, BY_NAME, CheckpointError, ConfigError, DamagedCheckpoint, Diverged, Fenced, Forbidden,
    InvalidRequest, LocalityError, MemoryLimit, NewcomerDiverged, NoCheckpoint, ProgramError, PSError, RoundTimeout,
    ServerLost, TaskTaken, Unauthenticated, Unreachable, VariableMismatch,
)
from pswire.model.status import (
    Difference, Happened, MissedPeer, OpenRound, Pace, ProcessStatus, Saving, SessionState, STILL, WorkerProgress,
)

# ---- Tasks, sessions and limits ----

from pswire.cluster import check_addresses, ClusterSpec, parse_tf_config, Task
from pswire.limits import (
    ALIGN, MAX_NDIM, MAX_PARTS, MAX_PLAN_ITEMS, MAX_PLAN_NODES, MAX_PLANS, MAX_SAVES, MAX_VARIABLES, PART_BYTES,
    Timeouts, WINDOW,
)
from pswire.model.joins import Enlisted
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
from pswire.model.table_state import joined, TableState
from pswire.model.tables import (
    CBFFilter, Constant, CounterFilter, GlobalStepEvict, L2WeightEvict, LFU, LRU, MIN_CAPACITY, Normal,
    ProbabilityFilter, ROWS, SlotTensor, TablePart, TableSpec, TimeToLive, TruncatedNormal, Uniform, Zeros,
)

# ---- The log of a job, and votes ----

from pswire.model.log import (
    Approved, Created, Done, Epoch, EpochClosed, Examples, Gone, JobStarted, LogEntry, Lost, Member, Mode, Position,
    Return, Snapshotted, Start, Started, STEP,
)
from pswire.servers.votes import Digest, Testimony, Vote

# ---- Checkpoints ----

from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.manifest import FORMAT, MANIFEST, Manifest, MAX_MANIFEST, Saved
from pswire.checkpoint.reader import FoundCheckpoint, open_saved, SavedCheckpoint
from pswire.checkpoint.storage import storage_at
from pswire.model.saved import PartOf, SavedTable, SavedTensor, Shard

# ---- Messages, and how they travel ----

from pswire.encoding import messages
from pswire.encoding.protocol import PROTOCOL
from pswire.encoding.verbs import (
    bearer, Caller, ERROR_KEY, MAX_DETAILS_BYTES, parse, refusal, refusal_to_pb, refused, TOKEN_KEY, VERBS,
)
from pswire.pb import parameter_server_pb2 as pb
from pswire.transport.grpc_frames import Frame, frames
from pswire.transport.parts import Assembly, parts_of
from pswire.transport.payload import EMPTY, Payload
from pswire.transport.shared_memory import CLIENT_BYTES, Segment
from pswire.transport.sockets import HEAD, INLINE, Kind, MAX_PART_BYTES, Message, MessageSocket
from pswire.transport.tls_socket import PIECE, RECORD, Sealed, Stream
from pswire.transport.traffic import LaneName, LANES, traffic

# ---- Security ----

from pswire.security.identity import FLAGS, Security, SecurityOptions
from pswire.security.link_codes import check_code, GOOD_SECONDS, make_code
from pswire.security.names import certificate_name, METRICS, named, spare_name, task_name
