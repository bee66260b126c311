from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    SYNC: _ClassVar[Mode]
    ASYNC: _ClassVar[Mode]
    BOUNDED: _ClassVar[Mode]

class Nonfinite(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    APPLY: _ClassVar[Nonfinite]
    SKIP: _ClassVar[Nonfinite]
    RAISE: _ClassVar[Nonfinite]

class RestoreStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESTORE_STAGE_UNSPECIFIED: _ClassVar[RestoreStage]
    RESTORE_STAGE_LOOK: _ClassVar[RestoreStage]
    RESTORE_STAGE_OPEN: _ClassVar[RestoreStage]
    RESTORE_STAGE_PREPARE: _ClassVar[RestoreStage]
MODE_UNSPECIFIED: Mode
SYNC: Mode
ASYNC: Mode
BOUNDED: Mode
APPLY: Nonfinite
SKIP: Nonfinite
RAISE: Nonfinite
RESTORE_STAGE_UNSPECIFIED: RestoreStage
RESTORE_STAGE_LOOK: RestoreStage
RESTORE_STAGE_OPEN: RestoreStage
RESTORE_STAGE_PREPARE: RestoreStage

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("offset", "pad", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    pad: bytes
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., pad: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushFrame(_message.Message):
    __slots__ = ("header", "part")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    part: Part
    def __init__(self, header: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class RoundFrame(_message.Message):
    __slots__ = ("header", "part")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    part: Part
    def __init__(self, header: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class PullFrame(_message.Message):
    __slots__ = ("header", "part")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    part: Part
    def __init__(self, header: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class ExchangeHeader(_message.Message):
    __slots__ = ("push", "pull")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    push: PushHeader
    pull: PullRequest
    def __init__(self, push: _Optional[_Union[PushHeader, _Mapping]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class AskFrame(_message.Message):
    __slots__ = ("header", "part")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    part: Part
    def __init__(self, header: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class AnswerFrame(_message.Message):
    __slots__ = ("header", "part", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    part: Part
    end: Refusal
    def __init__(self, header: _Optional[bytes] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., end: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("job", "index")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    job: str
    index: int
    def __init__(self, job: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("mode", "backup_workers", "staleness", "quorum", "grace")
    MODE_FIELD_NUMBER: _ClassVar[int]
    BACKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    backup_workers: int
    staleness: int
    quorum: int
    grace: float
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., backup_workers: _Optional[int] = ..., staleness: _Optional[int] = ..., quorum: _Optional[int] = ..., grace: _Optional[float] = ...) -> None: ...

class Spoken(_message.Message):
    __slots__ = ("protocol", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("task", "replicas", "session", "drives", "consistency", "job", "term", "spoken")
    TASK_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    task: Task
    replicas: int
    session: int
    drives: bool
    consistency: Consistency
    job: str
    term: int
    spoken: Spoken
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., replicas: _Optional[int] = ..., session: _Optional[int] = ..., drives: _Optional[bool] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., job: _Optional[str] = ..., term: _Optional[int] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("session", "incarnation", "token", "server", "device", "data_port", "data_path", "transport_token", "in_flight", "term", "window", "buffer_bytes", "domain", "takes_hints")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    TAKES_HINTS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    token: int
    server: int
    device: str
    data_port: int
    data_path: str
    transport_token: bytes
    in_flight: int
    term: int
    window: int
    buffer_bytes: int
    domain: str
    takes_hints: bool
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., token: _Optional[int] = ..., server: _Optional[int] = ..., device: _Optional[str] = ..., data_port: _Optional[int] = ..., data_path: _Optional[str] = ..., transport_token: _Optional[bytes] = ..., in_flight: _Optional[int] = ..., term: _Optional[int] = ..., window: _Optional[int] = ..., buffer_bytes: _Optional[int] = ..., domain: _Optional[str] = ..., takes_hints: _Optional[bool] = ...) -> None: ...

class EnlistRequest(_message.Message):
    __slots__ = ("key", "task", "spoken")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    key: int
    task: Task
    spoken: Spoken
    def __init__(self, key: _Optional[int] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ...) -> None: ...

class EnlistReply(_message.Message):
    __slots__ = ("task", "opened")
    TASK_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    task: Task
    opened: bool
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., opened: _Optional[bool] = ...) -> None: ...

class TransportHello(_message.Message):
    __slots__ = ("session", "token", "lease", "replaces")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    session: int
    token: bytes
    lease: float
    replaces: bool
    def __init__(self, session: _Optional[int] = ..., token: _Optional[bytes] = ..., lease: _Optional[float] = ..., replaces: _Optional[bool] = ...) -> None: ...

class TransportAlive(_message.Message):
    __slots__ = ("received", "paused")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    received: int
    paused: bool
    def __init__(self, received: _Optional[int] = ..., paused: _Optional[bool] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("error", "message", "task")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    task: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("session", "round", "plan_id", "pace", "clock")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    session: int
    round: int
    plan_id: bytes
    pace: Pace
    clock: int
    def __init__(self, session: _Optional[int] = ..., round: _Optional[int] = ..., plan_id: _Optional[bytes] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., clock: _Optional[int] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("steps", "rounds", "waits", "leaving", "saving", "page", "local")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    steps: int
    rounds: int
    waits: int
    leaving: bool
    saving: bool
    page: str
    local: LocalProgress
    def __init__(self, steps: _Optional[int] = ..., rounds: _Optional[int] = ..., waits: _Optional[int] = ..., leaving: _Optional[bool] = ..., saving: _Optional[bool] = ..., page: _Optional[str] = ..., local: _Optional[_Union[LocalProgress, _Mapping]] = ...) -> None: ...

class LocalProgress(_message.Message):
    __slots__ = ("steps", "since", "seconds", "tokens", "moved", "rate")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    since: int
    seconds: float
    tokens: float
    moved: int
    rate: float
    def __init__(self, steps: _Optional[int] = ..., since: _Optional[int] = ..., seconds: _Optional[float] = ..., tokens: _Optional[float] = ..., moved: _Optional[int] = ..., rate: _Optional[float] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("drive",)
    DRIVE_FIELD_NUMBER: _ClassVar[int]
    drive: bool
    def __init__(self, drive: _Optional[bool] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("session", "error")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session: int
    error: str
    def __init__(self, session: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class IntroduceRequest(_message.Message):
    __slots__ = ("server", "incarnation", "spoken")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    server: int
    incarnation: int
    spoken: Spoken
    def __init__(self, server: _Optional[int] = ..., incarnation: _Optional[int] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ...) -> None: ...

class IntroduceReply(_message.Message):
    __slots__ = ("data_port", "transport_token")
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    data_port: int
    transport_token: bytes
    def __init__(self, data_port: _Optional[int] = ..., transport_token: _Optional[bytes] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("standby", "spoken")
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    standby: Standby
    spoken: Spoken
    def __init__(self, standby: _Optional[_Union[Standby, _Mapping]] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("place", "addresses", "over")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    place: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    over: bool
    def __init__(self, place: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., over: _Optional[bool] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("server", "address", "token")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    server: int
    address: str
    token: int
    def __init__(self, server: _Optional[int] = ..., address: _Optional[str] = ..., token: _Optional[int] = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Standby(_message.Message):
    __slots__ = ("address", "domain", "place")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    address: str
    domain: str
    place: int
    def __init__(self, address: _Optional[str] = ..., domain: _Optional[str] = ..., place: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("server", "address")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    server: int
    address: str
    def __init__(self, server: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ServerVote(_message.Message):
    __slots__ = ("session", "job", "round", "plan_id", "generation", "attempt", "whole", "error", "closed", "testimony", "digest", "sums", "late")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    TESTIMONY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    session: int
    job: int
    round: int
    plan_id: bytes
    generation: int
    attempt: int
    whole: _containers.RepeatedScalarFieldContainer[int]
    error: Refusal
    closed: int
    testimony: Testimony
    digest: Digest
    sums: _containers.RepeatedCompositeFieldContainer[Sessions]
    late: _containers.RepeatedCompositeFieldContainer[LateContribution]
    def __init__(self, session: _Optional[int] = ..., job: _Optional[int] = ..., round: _Optional[int] = ..., plan_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., attempt: _Optional[int] = ..., whole: _Optional[_Iterable[int]] = ..., error: _Optional[_Union[Refusal, _Mapping]] = ..., closed: _Optional[int] = ..., testimony: _Optional[_Union[Testimony, _Mapping]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., sums: _Optional[_Iterable[_Union[Sessions, _Mapping]]] = ..., late: _Optional[_Iterable[_Union[LateContribution, _Mapping]]] = ...) -> None: ...

class LateContribution(_message.Message):
    __slots__ = ("session", "round")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    session: int
    round: int
    def __init__(self, session: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Sessions(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("round", "variables", "hashes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    round: int
    variables: _containers.RepeatedScalarFieldContainer[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., variables: _Optional[_Iterable[int]] = ..., hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class Testimony(_message.Message):
    __slots__ = ("job", "gone", "votes", "before")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    job: int
    gone: int
    votes: _containers.RepeatedCompositeFieldContainer[ServerVote]
    before: int
    def __init__(self, job: _Optional[int] = ..., gone: _Optional[int] = ..., votes: _Optional[_Iterable[_Union[ServerVote, _Mapping]]] = ..., before: _Optional[int] = ...) -> None: ...

class VariableSpec(_message.Message):
    __slots__ = ("name", "tensor", "trainable", "saved_as", "shard", "part", "alone")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    SAVED_AS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensor: TensorSpec
    trainable: bool
    saved_as: str
    shard: ShardOf
    part: TablePart
    alone: bool
    def __init__(self, name: _Optional[str] = ..., tensor: _Optional[_Union[TensorSpec, _Mapping]] = ..., trainable: _Optional[bool] = ..., saved_as: _Optional[str] = ..., shard: _Optional[_Union[ShardOf, _Mapping]] = ..., part: _Optional[_Union[TablePart, _Mapping]] = ..., alone: _Optional[bool] = ...) -> None: ...

class TablePart(_message.Message):
    __slots__ = ("table", "spec", "first", "count", "slot")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    table: str
    spec: TableSpec
    first: int
    count: int
    slot: SlotTensor
    def __init__(self, table: _Optional[str] = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., slot: _Optional[_Union[SlotTensor, _Mapping]] = ...) -> None: ...

class SlotTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    value: float
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., value: _Optional[float] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("shape", "dtype", "key_dtype", "initializer", "admission", "eviction", "capacity", "memory_limit", "refused", "seed", "hash_seed")
    class KeyDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KEY_DTYPE_UNSPECIFIED: _ClassVar[TableSpec.KeyDtype]
        INT64: _ClassVar[TableSpec.KeyDtype]
        UINT64: _ClassVar[TableSpec.KeyDtype]
    KEY_DTYPE_UNSPECIFIED: TableSpec.KeyDtype
    INT64: TableSpec.KeyDtype
    UINT64: TableSpec.KeyDtype
    class Unknown(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN_UNSPECIFIED: _ClassVar[TableSpec.Unknown]
        INITIAL: _ClassVar[TableSpec.Unknown]
        ZEROS: _ClassVar[TableSpec.Unknown]
    UNKNOWN_UNSPECIFIED: TableSpec.Unknown
    INITIAL: TableSpec.Unknown
    ZEROS: TableSpec.Unknown
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KEY_DTYPE_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    key_dtype: TableSpec.KeyDtype
    initializer: Initializer
    admission: Admission
    eviction: Eviction
    capacity: int
    memory_limit: int
    refused: TableSpec.Unknown
    seed: int
    hash_seed: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., key_dtype: _Optional[_Union[TableSpec.KeyDtype, str]] = ..., initializer: _Optional[_Union[Initializer, _Mapping]] = ..., admission: _Optional[_Union[Admission, _Mapping]] = ..., eviction: _Optional[_Union[Eviction, _Mapping]] = ..., capacity: _Optional[int] = ..., memory_limit: _Optional[int] = ..., refused: _Optional[_Union[TableSpec.Unknown, str]] = ..., seed: _Optional[int] = ..., hash_seed: _Optional[int] = ...) -> None: ...

class Initializer(_message.Message):
    __slots__ = ("zeros", "constant", "uniform", "normal", "truncated_normal")
    ZEROS_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_FIELD_NUMBER: _ClassVar[int]
    NORMAL_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_NORMAL_FIELD_NUMBER: _ClassVar[int]
    zeros: Zeros
    constant: Constant
    uniform: Uniform
    normal: Normal
    truncated_normal: TruncatedNormal
    def __init__(self, zeros: _Optional[_Union[Zeros, _Mapping]] = ..., constant: _Optional[_Union[Constant, _Mapping]] = ..., uniform: _Optional[_Union[Uniform, _Mapping]] = ..., normal: _Optional[_Union[Normal, _Mapping]] = ..., truncated_normal: _Optional[_Union[TruncatedNormal, _Mapping]] = ...) -> None: ...

class Zeros(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Constant(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class Uniform(_message.Message):
    __slots__ = ("low", "high")
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    low: float
    high: float
    def __init__(self, low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class Normal(_message.Message):
    __slots__ = ("mean", "stddev")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STDDEV_FIELD_NUMBER: _ClassVar[int]
    mean: float
    stddev: float
    def __init__(self, mean: _Optional[float] = ..., stddev: _Optional[float] = ...) -> None: ...

class TruncatedNormal(_message.Message):
    __slots__ = ("mean", "stddev")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STDDEV_FIELD_NUMBER: _ClassVar[int]
    mean: float
    stddev: float
    def __init__(self, mean: _Optional[float] = ..., stddev: _Optional[float] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("counter_filter", "cbf_filter", "probability_filter")
    COUNTER_FILTER_FIELD_NUMBER: _ClassVar[int]
    CBF_FILTER_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FILTER_FIELD_NUMBER: _ClassVar[int]
    counter_filter: CounterFilter
    cbf_filter: CBFFilter
    probability_filter: ProbabilityFilter
    def __init__(self, counter_filter: _Optional[_Union[CounterFilter, _Mapping]] = ..., cbf_filter: _Optional[_Union[CBFFilter, _Mapping]] = ..., probability_filter: _Optional[_Union[ProbabilityFilter, _Mapping]] = ...) -> None: ...

class CounterFilter(_message.Message):
    __slots__ = ("k",)
    K_FIELD_NUMBER: _ClassVar[int]
    k: int
    def __init__(self, k: _Optional[int] = ...) -> None: ...

class CBFFilter(_message.Message):
    __slots__ = ("k", "max_element_size", "false_positive_probability", "decay")
    K_FIELD_NUMBER: _ClassVar[int]
    MAX_ELEMENT_SIZE_FIELD_NUMBER: _ClassVar[int]
    FALSE_POSITIVE_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    k: int
    max_element_size: int
    false_positive_probability: float
    decay: int
    def __init__(self, k: _Optional[int] = ..., max_element_size: _Optional[int] = ..., false_positive_probability: _Optional[float] = ..., decay: _Optional[int] = ...) -> None: ...

class ProbabilityFilter(_message.Message):
    __slots__ = ("p",)
    P_FIELD_NUMBER: _ClassVar[int]
    p: float
    def __init__(self, p: _Optional[float] = ...) -> None: ...

class Eviction(_message.Message):
    __slots__ = ("lru", "lfu", "global_step_evict", "l2_weight_evict", "time_to_live")
    LRU_FIELD_NUMBER: _ClassVar[int]
    LFU_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_EVICT_FIELD_NUMBER: _ClassVar[int]
    L2_WEIGHT_EVICT_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    lru: LRU
    lfu: LFU
    global_step_evict: GlobalStepEvict
    l2_weight_evict: L2WeightEvict
    time_to_live: TimeToLive
    def __init__(self, lru: _Optional[_Union[LRU, _Mapping]] = ..., lfu: _Optional[_Union[LFU, _Mapping]] = ..., global_step_evict: _Optional[_Union[GlobalStepEvict, _Mapping]] = ..., l2_weight_evict: _Optional[_Union[L2WeightEvict, _Mapping]] = ..., time_to_live: _Optional[_Union[TimeToLive, _Mapping]] = ...) -> None: ...

class LRU(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LFU(_message.Message):
    __slots__ = ("decay",)
    DECAY_FIELD_NUMBER: _ClassVar[int]
    decay: float
    def __init__(self, decay: _Optional[float] = ...) -> None: ...

class GlobalStepEvict(_message.Message):
    __slots__ = ("steps_to_live",)
    STEPS_TO_LIVE_FIELD_NUMBER: _ClassVar[int]
    steps_to_live: int
    def __init__(self, steps_to_live: _Optional[int] = ...) -> None: ...

class L2WeightEvict(_message.Message):
    __slots__ = ("threshold",)
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    threshold: float
    def __init__(self, threshold: _Optional[float] = ...) -> None: ...

class TimeToLive(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class ShardOf(_message.Message):
    __slots__ = ("whole", "first", "rows")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    whole: str
    first: int
    rows: int
    def __init__(self, whole: _Optional[str] = ..., first: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("id", "spec", "servers")
    ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    id: int
    spec: VariableSpec
    servers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., spec: _Optional[_Union[VariableSpec, _Mapping]] = ..., servers: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateBatchRequest(_message.Message):
    __slots__ = ("session", "variables")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    session: int
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    def __init__(self, session: _Optional[int] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ...) -> None: ...

class CreateBatchReply(_message.Message):
    __slots__ = ("count", "initialized", "restored", "error")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    count: int
    initialized: _containers.RepeatedScalarFieldContainer[int]
    restored: _containers.RepeatedScalarFieldContainer[int]
    error: Refusal
    def __init__(self, count: _Optional[int] = ..., initialized: _Optional[_Iterable[int]] = ..., restored: _Optional[_Iterable[int]] = ..., error: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("kind", "spec")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Input.Kind]
        VARIABLE: _ClassVar[Input.Kind]
        VALUE: _ClassVar[Input.Kind]
        OPERAND: _ClassVar[Input.Kind]
    KIND_UNSPECIFIED: Input.Kind
    VARIABLE: Input.Kind
    VALUE: Input.Kind
    OPERAND: Input.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    kind: Input.Kind
    spec: TensorSpec
    def __init__(self, kind: _Optional[_Union[Input.Kind, str]] = ..., spec: _Optional[_Union[TensorSpec, _Mapping]] = ...) -> None: ...

class Attr(_message.Message):
    __slots__ = ("name", "flag", "number", "real", "text", "numbers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    flag: bool
    number: int
    real: float
    text: str
    numbers: Numbers
    def __init__(self, name: _Optional[str] = ..., flag: _Optional[bool] = ..., number: _Optional[int] = ..., real: _Optional[float] = ..., text: _Optional[str] = ..., numbers: _Optional[_Union[Numbers, _Mapping]] = ...) -> None: ...

class Numbers(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("op", "args", "attrs")
    OP_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    ATTRS_FIELD_NUMBER: _ClassVar[int]
    op: str
    args: _containers.RepeatedScalarFieldContainer[int]
    attrs: _containers.RepeatedCompositeFieldContainer[Attr]
    def __init__(self, op: _Optional[str] = ..., args: _Optional[_Iterable[int]] = ..., attrs: _Optional[_Iterable[_Union[Attr, _Mapping]]] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("target", "value")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    target: int
    value: int
    def __init__(self, target: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("inputs", "nodes", "assigns", "outputs")
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ASSIGNS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    assigns: _containers.RepeatedCompositeFieldContainer[Assign]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., assigns: _Optional[_Iterable[_Union[Assign, _Mapping]]] = ..., outputs: _Optional[_Iterable[int]] = ...) -> None: ...

class Ref(_message.Message):
    __slots__ = ("kind", "index")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Ref.Kind]
        VARIABLE: _ClassVar[Ref.Kind]
        REDUCTION: _ClassVar[Ref.Kind]
        OPERAND: _ClassVar[Ref.Kind]
        RESULT: _ClassVar[Ref.Kind]
    KIND_UNSPECIFIED: Ref.Kind
    VARIABLE: Ref.Kind
    REDUCTION: Ref.Kind
    OPERAND: Ref.Kind
    RESULT: Ref.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    kind: Ref.Kind
    index: int
    def __init__(self, kind: _Optional[_Union[Ref.Kind, str]] = ..., index: _Optional[int] = ...) -> None: ...

class Reduction(_message.Message):
    __slots__ = ("op", "tensor", "servers", "target", "form", "codec")
    class Op(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OP_UNSPECIFIED: _ClassVar[Reduction.Op]
        SUM: _ClassVar[Reduction.Op]
        MEAN: _ClassVar[Reduction.Op]
        FIRST: _ClassVar[Reduction.Op]
    OP_UNSPECIFIED: Reduction.Op
    SUM: Reduction.Op
    MEAN: Reduction.Op
    FIRST: Reduction.Op
    class Form(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DENSE: _ClassVar[Reduction.Form]
        ROWS: _ClassVar[Reduction.Form]
        KEYS: _ClassVar[Reduction.Form]
    DENSE: Reduction.Form
    ROWS: Reduction.Form
    KEYS: Reduction.Form
    OP_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    op: Reduction.Op
    tensor: TensorSpec
    servers: _containers.RepeatedScalarFieldContainer[int]
    target: str
    form: Reduction.Form
    codec: Codec
    def __init__(self, op: _Optional[_Union[Reduction.Op, str]] = ..., tensor: _Optional[_Union[TensorSpec, _Mapping]] = ..., servers: _Optional[_Iterable[int]] = ..., target: _Optional[str] = ..., form: _Optional[_Union[Reduction.Form, str]] = ..., codec: _Optional[_Union[Codec, _Mapping]] = ...) -> None: ...

class Codec(_message.Message):
    __slots__ = ("kind", "ratio")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Codec.Kind]
        FLOAT16: _ClassVar[Codec.Kind]
        BFLOAT16: _ClassVar[Codec.Kind]
        INT8: _ClassVar[Codec.Kind]
        TOPK: _ClassVar[Codec.Kind]
        INT4: _ClassVar[Codec.Kind]
    KIND_UNSPECIFIED: Codec.Kind
    FLOAT16: Codec.Kind
    BFLOAT16: Codec.Kind
    INT8: Codec.Kind
    TOPK: Codec.Kind
    INT4: Codec.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    kind: Codec.Kind
    ratio: float
    def __init__(self, kind: _Optional[_Union[Codec.Kind, str]] = ..., ratio: _Optional[float] = ...) -> None: ...

class Operand(_message.Message):
    __slots__ = ("tensor", "servers", "label")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    tensor: TensorSpec
    servers: _containers.RepeatedScalarFieldContainer[int]
    label: str
    def __init__(self, tensor: _Optional[_Union[TensorSpec, _Mapping]] = ..., servers: _Optional[_Iterable[int]] = ..., label: _Optional[str] = ...) -> None: ...

class Apply(_message.Message):
    __slots__ = ("program", "servers", "args", "sparse", "optional")
    class Sparse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DENSE: _ClassVar[Apply.Sparse]
        LAZY: _ClassVar[Apply.Sparse]
        EXACT: _ClassVar[Apply.Sparse]
        CLOSED: _ClassVar[Apply.Sparse]
    DENSE: Apply.Sparse
    LAZY: Apply.Sparse
    EXACT: Apply.Sparse
    CLOSED: Apply.Sparse
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    program: int
    servers: _containers.RepeatedScalarFieldContainer[int]
    args: _containers.RepeatedCompositeFieldContainer[Ref]
    sparse: Apply.Sparse
    optional: bool
    def __init__(self, program: _Optional[int] = ..., servers: _Optional[_Iterable[int]] = ..., args: _Optional[_Iterable[_Union[Ref, _Mapping]]] = ..., sparse: _Optional[_Union[Apply.Sparse, str]] = ..., optional: _Optional[bool] = ...) -> None: ...

class SnapshotOrder(_message.Message):
    __slots__ = ("path", "servers", "round", "state", "returns")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    path: str
    servers: _containers.RepeatedScalarFieldContainer[int]
    round: int
    state: str
    returns: int
    def __init__(self, path: _Optional[str] = ..., servers: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., state: _Optional[str] = ..., returns: _Optional[int] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("round", "generation", "ordinal")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    round: int
    generation: int
    ordinal: int
    def __init__(self, round: _Optional[int] = ..., generation: _Optional[int] = ..., ordinal: _Optional[int] = ...) -> None: ...

class RestoreCommit(_message.Message):
    __slots__ = ("path", "servers", "turn", "choice")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    path: str
    servers: _containers.RepeatedScalarFieldContainer[int]
    turn: Turn
    choice: str
    def __init__(self, path: _Optional[str] = ..., servers: _Optional[_Iterable[int]] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., choice: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("reductions", "operands", "programs", "applies", "returned", "snapshot", "restore", "nonfinite", "trims", "copied")
    REDUCTIONS_FIELD_NUMBER: _ClassVar[int]
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    APPLIES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    TRIMS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    reductions: _containers.RepeatedCompositeFieldContainer[Reduction]
    operands: _containers.RepeatedCompositeFieldContainer[Operand]
    programs: _containers.RepeatedCompositeFieldContainer[Program]
    applies: _containers.RepeatedCompositeFieldContainer[Apply]
    returned: _containers.RepeatedCompositeFieldContainer[Ref]
    snapshot: SnapshotOrder
    restore: RestoreCommit
    nonfinite: Nonfinite
    trims: _containers.RepeatedCompositeFieldContainer[Trim]
    copied: bool
    def __init__(self, reductions: _Optional[_Iterable[_Union[Reduction, _Mapping]]] = ..., operands: _Optional[_Iterable[_Union[Operand, _Mapping]]] = ..., programs: _Optional[_Iterable[_Union[Program, _Mapping]]] = ..., applies: _Optional[_Iterable[_Union[Apply, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[Ref, _Mapping]]] = ..., snapshot: _Optional[_Union[SnapshotOrder, _Mapping]] = ..., restore: _Optional[_Union[RestoreCommit, _Mapping]] = ..., nonfinite: _Optional[_Union[Nonfinite, str]] = ..., trims: _Optional[_Iterable[_Union[Trim, _Mapping]]] = ..., copied: _Optional[bool] = ...) -> None: ...

class Trim(_message.Message):
    __slots__ = ("variable", "servers", "rows")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    variable: int
    servers: _containers.RepeatedScalarFieldContainer[int]
    rows: int
    def __init__(self, variable: _Optional[int] = ..., servers: _Optional[_Iterable[int]] = ..., rows: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("dataset", "epoch", "index", "returned", "source", "restored")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    dataset: int
    epoch: int
    index: int
    returned: _containers.RepeatedCompositeFieldContainer[Examples]
    source: int
    restored: bool
    def __init__(self, dataset: _Optional[int] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., returned: _Optional[_Iterable[_Union[Examples, _Mapping]]] = ..., source: _Optional[int] = ..., restored: _Optional[bool] = ...) -> None: ...

class Examples(_message.Message):
    __slots__ = ("index", "first", "stop")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    index: int
    first: int
    stop: int
    def __init__(self, index: _Optional[int] = ..., first: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("generation", "round", "positions")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    round: int
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, generation: _Optional[int] = ..., round: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("task", "session", "replicas", "consistency")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    task: Task
    session: int
    replicas: int
    consistency: Consistency
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., session: _Optional[int] = ..., replicas: _Optional[int] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("number", "members", "join_point", "start", "leaving", "save", "returns")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOIN_POINT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    number: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    join_point: str
    start: Start
    leaving: _containers.RepeatedCompositeFieldContainer[Member]
    save: int
    returns: Return
    def __init__(self, number: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., join_point: _Optional[str] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., leaving: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., save: _Optional[int] = ..., returns: _Optional[_Union[Return, _Mapping]] = ...) -> None: ...

class Return(_message.Message):
    __slots__ = ("server", "incarnation", "generation", "ready", "round", "address")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    server: int
    incarnation: int
    generation: int
    ready: bool
    round: int
    address: str
    def __init__(self, server: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., ready: _Optional[bool] = ..., round: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class JobStarted(_message.Message):
    __slots__ = ("job", "incarnations", "name", "addresses", "copies", "workers", "chief")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    job: int
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    name: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    copies: _containers.RepeatedScalarFieldContainer[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    chief: str
    def __init__(self, job: _Optional[int] = ..., incarnations: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., copies: _Optional[_Iterable[int]] = ..., workers: _Optional[_Iterable[str]] = ..., chief: _Optional[str] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("server", "reason")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server: int
    reason: str
    def __init__(self, server: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("server", "reason")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server: int
    reason: str
    def __init__(self, server: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Snapshotted(_message.Message):
    __slots__ = ("plan_id", "round", "path", "error")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    plan_id: bytes
    round: int
    path: str
    error: str
    def __init__(self, plan_id: _Optional[bytes] = ..., round: _Optional[int] = ..., path: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("job_started", "created", "approved", "generation_closed", "started", "snapshotted", "done", "lost", "gone")
    JOB_STARTED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CLOSED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    job_started: JobStarted
    created: Variable
    approved: Plan
    generation_closed: Generation
    started: Start
    snapshotted: Snapshotted
    done: Empty
    lost: Lost
    gone: Gone
    def __init__(self, job_started: _Optional[_Union[JobStarted, _Mapping]] = ..., created: _Optional[_Union[Variable, _Mapping]] = ..., approved: _Optional[_Union[Plan, _Mapping]] = ..., generation_closed: _Optional[_Union[Generation, _Mapping]] = ..., started: _Optional[_Union[Start, _Mapping]] = ..., snapshotted: _Optional[_Union[Snapshotted, _Mapping]] = ..., done: _Optional[_Union[Empty, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("session", "plan", "join_point", "start", "trace")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    JOIN_POINT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    session: int
    plan: Plan
    join_point: str
    start: Start
    trace: str
    def __init__(self, session: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., join_point: _Optional[str] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., trace: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("session", "after", "version")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    after: int
    version: int
    def __init__(self, session: _Optional[int] = ..., after: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("member", "state", "join_point", "silent", "drives", "pace", "opened")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    JOIN_POINT_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    DRIVES_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    member: Member
    state: str
    join_point: str
    silent: float
    drives: bool
    pace: Pace
    opened: float
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., state: _Optional[str] = ..., join_point: _Optional[str] = ..., silent: _Optional[float] = ..., drives: _Optional[bool] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., opened: _Optional[float] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("version", "start", "entries", "plans", "sessions", "traces")
    class TracesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    plans: _containers.RepeatedCompositeFieldContainer[Plan]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    traces: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., plans: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ..., traces: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ApproveRequest(_message.Message):
    __slots__ = ("token", "index", "entries")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    token: int
    index: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, token: _Optional[int] = ..., index: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class ApproveReply(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("size", "offset", "data")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    size: int
    offset: int
    data: bytes
    def __init__(self, size: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ClosureOrder(_message.Message):
    __slots__ = ("number", "function", "needs", "arguments", "functions", "told", "joins", "dropped")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    function: str
    needs: _containers.RepeatedScalarFieldContainer[int]
    arguments: Piece
    functions: _containers.RepeatedScalarFieldContainer[str]
    told: int
    joins: bool
    dropped: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., function: _Optional[str] = ..., needs: _Optional[_Iterable[int]] = ..., arguments: _Optional[_Union[Piece, _Mapping]] = ..., functions: _Optional[_Iterable[str]] = ..., told: _Optional[int] = ..., joins: _Optional[bool] = ..., dropped: _Optional[_Iterable[int]] = ...) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("session", "order")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    session: int
    order: ClosureOrder
    def __init__(self, session: _Optional[int] = ..., order: _Optional[_Union[ClosureOrder, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("function", "kind", "text", "task")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    function: str
    kind: str
    text: str
    task: str
    def __init__(self, function: _Optional[str] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class ScheduleReply(_message.Message):
    __slots__ = ("number", "queued", "running", "workers", "settled", "failures", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    queued: int
    running: int
    workers: int
    settled: int
    failures: int
    failure: Failure
    def __init__(self, number: _Optional[int] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., workers: _Optional[int] = ..., settled: _Optional[int] = ..., failures: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class ClosureResult(_message.Message):
    __slots__ = ("number", "result", "kind", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    result: Piece
    kind: str
    text: str
    def __init__(self, number: _Optional[int] = ..., result: _Optional[_Union[Piece, _Mapping]] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("session", "functions", "result", "offset")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    session: int
    functions: _containers.RepeatedScalarFieldContainer[str]
    result: ClosureResult
    offset: int
    def __init__(self, session: _Optional[int] = ..., functions: _Optional[_Iterable[str]] = ..., result: _Optional[_Union[ClosureResult, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class ClosureName(_message.Message):
    __slots__ = ("number", "version", "newest", "begun")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    newest: int
    begun: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., newest: _Optional[int] = ..., begun: _Optional[_Iterable[int]] = ...) -> None: ...

class TakeReply(_message.Message):
    __slots__ = ("name", "function", "coordinator", "arguments", "over")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    name: ClosureName
    function: str
    coordinator: int
    arguments: Piece
    over: bool
    def __init__(self, name: _Optional[_Union[ClosureName, _Mapping]] = ..., function: _Optional[str] = ..., coordinator: _Optional[int] = ..., arguments: _Optional[_Union[Piece, _Mapping]] = ..., over: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session", "number", "offset")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    session: int
    number: int
    offset: int
    def __init__(self, session: _Optional[int] = ..., number: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("state", "result", "failure")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DONE: _ClassVar[FetchReply.State]
        FAILED: _ClassVar[FetchReply.State]
        CANCELLED: _ClassVar[FetchReply.State]
    DONE: FetchReply.State
    FAILED: FetchReply.State
    CANCELLED: FetchReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    state: FetchReply.State
    result: Piece
    failure: Failure
    def __init__(self, state: _Optional[_Union[FetchReply.State, str]] = ..., result: _Optional[_Union[Piece, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("ticket", "epoch", "examples")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    epoch: int
    examples: Examples
    def __init__(self, ticket: _Optional[int] = ..., epoch: _Optional[int] = ..., examples: _Optional[_Union[Examples, _Mapping]] = ...) -> None: ...

class ChunkAsk(_message.Message):
    __slots__ = ("dataset", "number", "epoch", "count", "restores", "begins", "want", "needs", "done", "back", "looks")
    DATASET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BACK_FIELD_NUMBER: _ClassVar[int]
    LOOKS_FIELD_NUMBER: _ClassVar[int]
    dataset: int
    number: int
    epoch: int
    count: int
    restores: int
    begins: _containers.RepeatedCompositeFieldContainer[Position]
    want: int
    needs: bool
    done: _containers.RepeatedScalarFieldContainer[int]
    back: _containers.RepeatedScalarFieldContainer[int]
    looks: bool
    def __init__(self, dataset: _Optional[int] = ..., number: _Optional[int] = ..., epoch: _Optional[int] = ..., count: _Optional[int] = ..., restores: _Optional[int] = ..., begins: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., want: _Optional[int] = ..., needs: _Optional[bool] = ..., done: _Optional[_Iterable[int]] = ..., back: _Optional[_Iterable[int]] = ..., looks: _Optional[bool] = ...) -> None: ...

class AssignBatchesRequest(_message.Message):
    __slots__ = ("session", "ask")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    session: int
    ask: ChunkAsk
    def __init__(self, session: _Optional[int] = ..., ask: _Optional[_Union[ChunkAsk, _Mapping]] = ...) -> None: ...

class AssignBatchesReply(_message.Message):
    __slots__ = ("chunks", "over", "positions")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    over: bool
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., over: _Optional[bool] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("session", "generation", "round", "plan_id", "weights", "more", "positions", "want", "size", "observes", "start", "nonfinite", "follows", "first_values", "rows", "lookups", "seconds", "closure", "chunks", "alone", "trace", "host", "parts", "hints", "batch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OBSERVES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_VALUES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLOSURE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    session: int
    generation: int
    round: int
    plan_id: bytes
    weights: _containers.RepeatedScalarFieldContainer[float]
    more: bool
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    want: _containers.RepeatedScalarFieldContainer[int]
    size: int
    observes: bool
    start: int
    nonfinite: _containers.RepeatedScalarFieldContainer[int]
    follows: int
    first_values: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    lookups: _containers.RepeatedCompositeFieldContainer[RowRead]
    seconds: int
    closure: ClosureName
    chunks: _containers.RepeatedScalarFieldContainer[int]
    alone: bool
    trace: str
    host: int
    parts: _containers.RepeatedCompositeFieldContainer[PushHeader]
    hints: _containers.RepeatedCompositeFieldContainer[RowRead]
    batch: str
    def __init__(self, session: _Optional[int] = ..., generation: _Optional[int] = ..., round: _Optional[int] = ..., plan_id: _Optional[bytes] = ..., weights: _Optional[_Iterable[float]] = ..., more: _Optional[bool] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., want: _Optional[_Iterable[int]] = ..., size: _Optional[int] = ..., observes: _Optional[bool] = ..., start: _Optional[int] = ..., nonfinite: _Optional[_Iterable[int]] = ..., follows: _Optional[int] = ..., first_values: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., lookups: _Optional[_Iterable[_Union[RowRead, _Mapping]]] = ..., seconds: _Optional[int] = ..., closure: _Optional[_Union[ClosureName, _Mapping]] = ..., chunks: _Optional[_Iterable[int]] = ..., alone: _Optional[bool] = ..., trace: _Optional[str] = ..., host: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PushHeader, _Mapping]]] = ..., hints: _Optional[_Iterable[_Union[RowRead, _Mapping]]] = ..., batch: _Optional[str] = ...) -> None: ...

class RoundHeader(_message.Message):
    __slots__ = ("round", "generation", "more", "excluded", "size", "warnings", "observers", "rows", "over")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    OBSERVERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    round: int
    generation: Generation
    more: bool
    excluded: _containers.RepeatedCompositeFieldContainer[Task]
    size: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    observers: _containers.RepeatedCompositeFieldContainer[Task]
    rows: _containers.RepeatedScalarFieldContainer[int]
    over: int
    def __init__(self, round: _Optional[int] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., more: _Optional[bool] = ..., excluded: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., size: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., observers: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ..., over: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("session", "variables", "after", "rows", "tables")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    session: int
    variables: _containers.RepeatedScalarFieldContainer[int]
    after: int
    rows: _containers.RepeatedCompositeFieldContainer[RowRead]
    tables: _containers.RepeatedCompositeFieldContainer[TableRead]
    def __init__(self, session: _Optional[int] = ..., variables: _Optional[_Iterable[int]] = ..., after: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowRead, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[TableRead, _Mapping]]] = ...) -> None: ...

class TableRead(_message.Message):
    __slots__ = ("variable", "what", "first", "count")
    class Question(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        QUESTION_UNSPECIFIED: _ClassVar[TableRead.Question]
        SIZE: _ClassVar[TableRead.Question]
        KEYS: _ClassVar[TableRead.Question]
        ROWS: _ClassVar[TableRead.Question]
    QUESTION_UNSPECIFIED: TableRead.Question
    SIZE: TableRead.Question
    KEYS: TableRead.Question
    ROWS: TableRead.Question
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    variable: int
    what: TableRead.Question
    first: int
    count: int
    def __init__(self, variable: _Optional[int] = ..., what: _Optional[_Union[TableRead.Question, str]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class RowRead(_message.Message):
    __slots__ = ("variable", "ids")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    variable: int
    ids: bytes
    def __init__(self, variable: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("round", "size", "rows")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    round: int
    size: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., size: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("token", "plan_id", "manifest")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    token: int
    plan_id: bytes
    manifest: str
    def __init__(self, token: _Optional[int] = ..., plan_id: _Optional[bytes] = ..., manifest: _Optional[str] = ...) -> None: ...

class NamedTensor(_message.Message):
    __slots__ = ("name", "spec", "checksum", "shard", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: TensorSpec
    checksum: str
    shard: ShardOf
    part: PartOf
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[TensorSpec, _Mapping]] = ..., checksum: _Optional[str] = ..., shard: _Optional[_Union[ShardOf, _Mapping]] = ..., part: _Optional[_Union[PartOf, _Mapping]] = ...) -> None: ...

class PartOf(_message.Message):
    __slots__ = ("whole", "first")
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    whole: str
    first: int
    def __init__(self, whole: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class SavedTable(_message.Message):
    __slots__ = ("name", "spec", "slots", "since", "round")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: TableSpec
    slots: _containers.RepeatedCompositeFieldContainer[SlotTensor]
    since: int
    round: int
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[TableSpec, _Mapping]] = ..., slots: _Optional[_Iterable[_Union[SlotTensor, _Mapping]]] = ..., since: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("path", "file", "round", "positions", "tensors", "nbytes", "tables")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    path: str
    file: str
    round: int
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    tensors: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    nbytes: int
    tables: _containers.RepeatedCompositeFieldContainer[SavedTable]
    def __init__(self, path: _Optional[str] = ..., file: _Optional[str] = ..., round: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ..., nbytes: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[SavedTable, _Mapping]]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("session", "path", "turn", "order")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    session: int
    path: str
    turn: Turn
    order: RestoreOrder
    def __init__(self, session: _Optional[int] = ..., path: _Optional[str] = ..., turn: _Optional[_Union[Turn, _Mapping]] = ..., order: _Optional[_Union[RestoreOrder, _Mapping]] = ...) -> None: ...

class RestoreOrder(_message.Message):
    __slots__ = ("stage", "named", "names", "late", "cast", "damaged", "checkers")
    class NamesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DamagedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    CAST_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    CHECKERS_FIELD_NUMBER: _ClassVar[int]
    stage: RestoreStage
    named: bool
    names: _containers.ScalarMap[str, int]
    late: bool
    cast: bool
    damaged: _containers.ScalarMap[str, str]
    checkers: int
    def __init__(self, stage: _Optional[_Union[RestoreStage, str]] = ..., named: _Optional[bool] = ..., names: _Optional[_Mapping[str, int]] = ..., late: _Optional[bool] = ..., cast: _Optional[bool] = ..., damaged: _Optional[_Mapping[str, str]] = ..., checkers: _Optional[int] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("positions", "path", "manifest", "damaged")
    class DamagedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    path: str
    manifest: str
    damaged: _containers.ScalarMap[str, str]
    def __init__(self, positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., path: _Optional[str] = ..., manifest: _Optional[str] = ..., damaged: _Optional[_Mapping[str, str]] = ...) -> None: ...

class OpenRound(_message.Message):
    __slots__ = ("round", "section", "missing", "approved", "computing")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    APPROVED_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    round: int
    section: str
    missing: _containers.RepeatedCompositeFieldContainer[Task]
    approved: bool
    computing: _containers.RepeatedCompositeFieldContainer[Task]
    def __init__(self, round: _Optional[int] = ..., section: _Optional[str] = ..., missing: _Optional[_Iterable[_Union[Task, _Mapping]]] = ..., approved: _Optional[bool] = ..., computing: _Optional[_Iterable[_Union[Task, _Mapping]]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("task", "round", "positions", "clock")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    task: Task
    round: int
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    clock: int
    def __init__(self, task: _Optional[_Union[Task, _Mapping]] = ..., round: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., clock: _Optional[int] = ...) -> None: ...

class Saving(_message.Message):
    __slots__ = ("path", "round", "nbytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    round: int
    nbytes: int
    def __init__(self, path: _Optional[str] = ..., round: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ProcessStatus(_message.Message):
    __slots__ = ("clock", "resident", "versions", "data_port", "data_path", "transports", "traffic", "uptime", "page")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    class TrafficEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    clock: float
    resident: int
    versions: _containers.ScalarMap[str, str]
    data_port: int
    data_path: str
    transports: _containers.ScalarMap[int, str]
    traffic: _containers.ScalarMap[str, int]
    uptime: float
    page: str
    def __init__(self, clock: _Optional[float] = ..., resident: _Optional[int] = ..., versions: _Optional[_Mapping[str, str]] = ..., data_port: _Optional[int] = ..., data_path: _Optional[str] = ..., transports: _Optional[_Mapping[int, str]] = ..., traffic: _Optional[_Mapping[str, int]] = ..., uptime: _Optional[float] = ..., page: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("server", "incarnation", "log", "generation", "round", "positions", "waiting", "variables", "variable_bytes", "memory_limit", "chief", "places", "spoken", "snapshot_bytes", "snapshot_limit", "saving", "sessions", "incarnations", "over", "broken", "device", "process", "job", "missed", "gap", "gone", "losses", "standbys", "moved", "domain", "differences", "phases", "table_rows", "table_bytes", "recovering", "tier_bytes", "tier_resident_bytes", "tier_memory")
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TableRowsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TableBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERVER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_MEMORY_FIELD_NUMBER: _ClassVar[int]
    server: int
    incarnation: int
    log: int
    generation: Generation
    round: int
    positions: _containers.RepeatedCompositeFieldContainer[Position]
    waiting: _containers.RepeatedCompositeFieldContainer[OpenRound]
    variables: int
    variable_bytes: int
    memory_limit: int
    chief: float
    places: _containers.RepeatedCompositeFieldContainer[Place]
    spoken: Spoken
    snapshot_bytes: int
    snapshot_limit: int
    saving: _containers.RepeatedCompositeFieldContainer[Saving]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    over: bool
    broken: str
    device: str
    process: ProcessStatus
    job: str
    missed: _containers.RepeatedCompositeFieldContainer[MissedPeer]
    gap: int
    gone: _containers.RepeatedScalarFieldContainer[int]
    losses: _containers.RepeatedScalarFieldContainer[int]
    standbys: _containers.RepeatedCompositeFieldContainer[Standby]
    moved: _containers.RepeatedCompositeFieldContainer[Moved]
    domain: str
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    phases: _containers.ScalarMap[str, float]
    table_rows: _containers.ScalarMap[str, int]
    table_bytes: _containers.ScalarMap[str, int]
    recovering: bool
    tier_bytes: int
    tier_resident_bytes: int
    tier_memory: int
    def __init__(self, server: _Optional[int] = ..., incarnation: _Optional[int] = ..., log: _Optional[int] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., round: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[OpenRound, _Mapping]]] = ..., variables: _Optional[int] = ..., variable_bytes: _Optional[int] = ..., memory_limit: _Optional[int] = ..., chief: _Optional[float] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., spoken: _Optional[_Union[Spoken, _Mapping]] = ..., snapshot_bytes: _Optional[int] = ..., snapshot_limit: _Optional[int] = ..., saving: _Optional[_Iterable[_Union[Saving, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ..., incarnations: _Optional[_Iterable[int]] = ..., over: _Optional[bool] = ..., broken: _Optional[str] = ..., device: _Optional[str] = ..., process: _Optional[_Union[ProcessStatus, _Mapping]] = ..., job: _Optional[str] = ..., missed: _Optional[_Iterable[_Union[MissedPeer, _Mapping]]] = ..., gap: _Optional[int] = ..., gone: _Optional[_Iterable[int]] = ..., losses: _Optional[_Iterable[int]] = ..., standbys: _Optional[_Iterable[_Union[Standby, _Mapping]]] = ..., moved: _Optional[_Iterable[_Union[Moved, _Mapping]]] = ..., domain: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ..., phases: _Optional[_Mapping[str, float]] = ..., table_rows: _Optional[_Mapping[str, int]] = ..., table_bytes: _Optional[_Mapping[str, int]] = ..., recovering: _Optional[bool] = ..., tier_bytes: _Optional[int] = ..., tier_resident_bytes: _Optional[int] = ..., tier_memory: _Optional[int] = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("server", "round", "variables", "more", "agreed")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    server: int
    round: int
    variables: _containers.RepeatedScalarFieldContainer[str]
    more: int
    agreed: int
    def __init__(self, server: _Optional[int] = ..., round: _Optional[int] = ..., variables: _Optional[_Iterable[str]] = ..., more: _Optional[int] = ..., agreed: _Optional[int] = ...) -> None: ...

class MissedPeer(_message.Message):
    __slots__ = ("server", "round", "seconds", "reason")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    server: int
    round: int
    seconds: float
    reason: str
    def __init__(self, server: _Optional[int] = ..., round: _Optional[int] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Happened(_message.Message):
    __slots__ = ("seconds", "what", "said", "refused")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    what: str
    said: str
    refused: str
    def __init__(self, seconds: _Optional[float] = ..., what: _Optional[str] = ..., said: _Optional[str] = ..., refused: _Optional[str] = ...) -> None: ...

class EventsReply(_message.Message):
    __slots__ = ("recent",)
    RECENT_FIELD_NUMBER: _ClassVar[int]
    recent: _containers.RepeatedCompositeFieldContainer[Happened]
    def __init__(self, recent: _Optional[_Iterable[_Union[Happened, _Mapping]]] = ...) -> None: ...
