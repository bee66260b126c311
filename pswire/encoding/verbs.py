"""The verbs, as both gRPC rims use them: paths and deadlines, metadata keys, and errors as statuses.

Statuses are strings, the names of gRPC's codes: grpc itself is imported in the rims only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pswire.errors import BY_NAME, InvalidRequest, PSError
from pswire.pb import parameter_server_pb2 as pb

SERVICE = "paramserver.v1.ParameterServer"

INCARNATION_KEY = "ps-incarnation"
"""Metadata of a call: the life of the server that the client opened its session with, in decimal."""

ERROR_KEY = "ps-error"
"""Trailing metadata of a refused call: the error's class. A call that failed without it never arrived."""

TASK_KEY = "ps-task"
"""Trailing metadata of a refused call: the task that the error is about."""

TOKEN_KEY = "authorization"
"""Metadata of every call of a job that has a token: `Bearer` and the token."""

MAX_BATCH_BYTES = 3 << 20
"""Encoded log entries of one message, below gRPC's limit of 4 MiB together with the rest of it."""

MAX_DETAILS_BYTES = 2048
"""Of an error's message; gRPC refuses headers above 8 KiB, and escapes what is not ASCII threefold."""


Caller = Literal["task", "joiner", "session", "reader", "chief", "server", "standby", "mover", "anyone"]
"""The certificate that a verb asks for, where servers ask for certificates:

- `task`: that of the task which the request names, and a chief's if it drives
- `joiner`: that of the task which the request names; it has to name one
- `session`: that of the task which has opened the request's session
- `reader`: as `session`; as `anyone` for a request without a session, 0
- `chief`: that of a chief task, or of worker 0
- `server`: that of the ps task which the request names
- `standby`: that of any ps task
- `mover`: that of the ps task which the request names, of a chief, or of `psctl`; a chief's if it shows a token
- `anyone`: that of any task of the job, or of `psctl`
"""


SERVICE_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["ParameterServer"]


@dataclass(frozen=True)
class Verb:
    """A row of the table of verbs: its callers and its deadline. Its messages are those of the .proto.

    Attributes:
        name: name of the method in the service.
        caller: the kind of caller that is allowed.
        deadline: the field of `Timeouts` that bounds the call, retries included; "" leaves that to the
            caller.
        late: the name of the error where the deadline passes.
        waits: True if the server may answer late on purpose, so that silence says nothing.
        guarded: True if only the server incarnation that the session was opened with may answer.
        inline: True if it is answered on the event loop, at once: a heartbeat must not wait for a free thread, since
            it keeps a lease.
    """

    name: str
    caller: Caller
    deadline: str
    late: str = "Unreachable"
    waits: bool = False
    guarded: bool = True
    inline: bool = False

    @property
    def path(self) -> str:
        """The path of the verb's gRPC method."""
        return f"/{SERVICE}/{self.name}"

    @cached_property
    def streams(self) -> tuple[bool, bool]:
        """For the request and for the reply, True if it is a stream of frames."""
        method = SERVICE_DESCRIPTOR.methods_by_name[self.name]
        return method.client_streaming, method.server_streaming

    @cached_property
    def request(self) -> type[Message]:
        """The message that asks for it; where requests are streams, the header of their first frame."""
        method = SERVICE_DESCRIPTOR.methods_by_name[self.name]
        return getattr(pb, f"{self.name}Header") if method.client_streaming else GetMessageClass(method.input_type)

    @cached_property
    def reply(self) -> type[Message]:
        """The message that answers it; where replies are streams, their frame."""
        return GetMessageClass(SERVICE_DESCRIPTOR.methods_by_name[self.name].output_type)


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("Open", "task", "start_timeout", guarded=False),
        Verb("Enlist", "joiner", "call_timeout", guarded=False),
        Verb("Heartbeat", "session", "", inline=True),  # until the server has been silent for a lease, and is lost
        Verb("Leave", "session", "call_timeout"),
        Verb("CreateBatch", "session", "call_timeout"),
        Verb("Propose", "session", "call_timeout"),
        Verb("Watch", "reader", "", waits=True),
        Verb("Approve", "chief", "call_timeout"),
        Verb("Push", "session", "", waits=True),
        Verb("Pull", "reader", "", waits=True),
        # Who may push or pull is asked for each of its messages.
        Verb("Exchange", "anyone", "", waits=True),
        Verb("Snapshot", "chief", "round_timeout", "RoundTimeout", waits=True),
        Verb("Restore", "session", "round_timeout", "RoundTimeout", waits=True),
        Verb("Schedule", "session", "", waits=True),
        Verb("Take", "session", "", waits=True),
        Verb("Fetch", "session", "", waits=True),
        Verb("AssignBatches", "session", "call_timeout"),
        Verb("Status", "anyone", "call_timeout", guarded=False, inline=True),
        Verb("Events", "anyone", "call_timeout", guarded=False),
        Verb("Introduce", "server", "call_timeout"),
        Verb("Vote", "session", "call_timeout"),
        Verb("Offer", "standby", "call_timeout", guarded=False),
        Verb("Move", "mover", "call_timeout", guarded=False),
    )
}
"""Every verb of the service. A test holds that the .proto has the same."""

STATUS: dict[str, str] = {
    "PSError": "INTERNAL",
    "ConfigError": "FAILED_PRECONDITION",
    "TaskTaken": "ALREADY_EXISTS",
    "Unreachable": "UNAVAILABLE",
    "ServerLost": "UNAVAILABLE",
    "ServerGone": "UNAVAILABLE",
    "ChiefLost": "DEADLINE_EXCEEDED",
    "Abandoned": "ABORTED",
    "Fenced": "PERMISSION_DENIED",
    "Forbidden": "PERMISSION_DENIED",
    "Unauthenticated": "UNAUTHENTICATED",
    "Diverged": "ABORTED",
    "NewcomerDiverged": "ABORTED",
    "ScriptFailed": "ABORTED",
    "VariableMismatch": "ALREADY_EXISTS",
    "LocalityError": "FAILED_PRECONDITION",
    "ProgramError": "INVALID_ARGUMENT",
    "NonfiniteError": "INVALID_ARGUMENT",
    "MemoryLimit": "RESOURCE_EXHAUSTED",
    "PushAgain": "ABORTED",
    "RoundTimeout": "DEADLINE_EXCEEDED",
    "CheckpointError": "DATA_LOSS",
    "DamagedCheckpoint": "DATA_LOSS",
    "NoCheckpoint": "NOT_FOUND",
    "ClosureError": "ABORTED",
    "ClosureCancelled": "CANCELLED",
    "InvalidRequest": "INVALID_ARGUMENT",
}
"""The gRPC status of each error, for clients that know no better; ours read `ERROR_KEY`."""

UNANSWERED = frozenset(("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED"))
"""Statuses that, without `ERROR_KEY`, come from the transport: the call may be sent again."""

Metadata = tuple[tuple[str, str], ...]


def bearer(token: str) -> str:
    """The value of `TOKEN_KEY`."""
    return f"Bearer {token}"


def _named(error: PSError) -> str:
    """The name of an error's class, or of the nearest that clients know."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in STATUS)


def _details(error: PSError) -> str:
    """An error's message, cut: it may repeat what a peer has said, at any length."""
    return error.message.encode(errors="replace")[:MAX_DETAILS_BYTES].decode(errors="ignore")


def refusal(error: PSError) -> tuple[str, str, Metadata]:
    """An error as it travels.

    Returns:
        The name of its status, its message, and its trailing metadata.
    """
    name, details = _named(error), _details(error)
    # A header that is not plain ASCII would make gRPC drop the whole answer.
    task = error.task if error.task.isascii() and error.task.isprintable() else ""
    return STATUS[name], details, ((ERROR_KEY, name), *([(TASK_KEY, task)] if task else []))


def refusal_to_pb(error: PSError) -> pb.Refusal:
    """An error as it travels on a transport."""
    return pb.Refusal(error=_named(error), message=_details(error), task=error.task)


def refusal_from_pb(message: pb.Refusal) -> PSError:
    """The error that a server refused a call on a transport with."""
    return BY_NAME.get(message.error, PSError)(message.message, message.task)


def refused(details: str, metadata: Iterable[tuple[str, str | bytes]]) -> PSError | None:
    """The error that a server refused a call with, or None where no server did."""
    values = dict(metadata)
    name = values.get(ERROR_KEY)
    if name is None:
        return None
    return BY_NAME.get(str(name), PSError)(details, str(values.get(TASK_KEY, "")))


M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Decodes a protobuf message; raises `InvalidRequest` for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"{len(data)} bytes are not a valid {kind.DESCRIPTOR.name}") from None


def fitting(messages: Iterable[M], limit: int = MAX_BATCH_BYTES) -> list[M]:
    """The first of many that fit one message; at least one, if there is any. Of the rest it looks at one."""
    found: list[M] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if size > limit and found:
            break
        found.append(message)
    return found
