"""Sizes and times that both ends must agree on, or that bound what a peer may ask for."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pswire.errors import ConfigError
from pswire.options import SECONDS, option
from pswire.variables import RETIRED, RETIRED_OPTIONS, VARIABLES, renamed

PART_BYTES = (4 << 20) - (4 << 10)
"""Payload of one part, and of a push that is one message: gRPC's default limit of a message is 4 MiB. Where the
allocator uses its memory again, large parts are the fastest: fewer messages, and fewer tensors in pieces."""

ALIGN = 16
"""Tensors start at multiples of this in a payload, and payloads at multiples of it in a frame, in bytes."""

MAX_NODES = 10_000
"""Nodes of one update program."""

MAX_PLANS = 10_000
"""Plans that a server remembers; more means that every round has another shape. Those that save do not count."""

MAX_SAVES = 100
"""Checkpoints that are ordered and not complete; more means that nobody completes them."""

MAX_PLAN_BYTES = 3 << 20
"""Encoded size of one plan: it travels in one message."""

MAX_PLAN_NODES = 50_000
"""Nodes of all update programs of one plan."""

MAX_PLAN_ITEMS = 250_000
"""Messages within the encoded plan, and numbers in lists there: what reading it costs, whatever its bytes are."""

MAX_VARIABLES = 100_000
"""Variables of a job: whoever may create one may create many, and all of them stay in the log."""

WINDOW = 8
"""Rounds of one session that may be under way at a time. All processes of a job have the same: what answers say of the
members, a process takes in so many rounds later at the latest."""

BUFFER_BYTES = 1 << 36
"""Address space of a client's segment for the arrays of `strategy.buffer`; what is not written takes no memory."""

MAX_PARTS = 1024
"""Parts of dynamic tables on one server: each has an index, and address space for its rows."""

MAX_BESIDE = 128
"""Tensors beside the rows of one part of a table."""

LOOKUP_BYTES = 1 << 28
"""Bytes of rows that one call may ask for, however low the memory limit is."""

MAX_QUEUED = 1024
"""Closures of a coordinator that wait for a worker at a time; the call that schedules one more waits."""

CLOSURE_BYTES = 1 << 30
"""Bytes of arguments and results of closures that server 0 holds at a time, all together."""

CLOSURE_ROUNDS = 1000
"""Rounds that one closure may make: servers keep their answers until it is over."""

CLOSURE_LOSSES = 8
"""Workers that may be lost while they run a closure, before it counts as failed: it may be what ends them."""

MAX_CHUNKS = 16
"""Batches that a worker may ask for at a time."""

MAX_DATASETS = 1024
"""Datasets of a job whose batches are handed out."""

MAX_HELD = 100_000
"""Batches that a worker may have been handed out and not done; it has done a step with all but the last few."""

MAX_FUNCTIONS = 1000
"""Functions of closures that a process registers."""

PIECE_BYTES = 3 << 20
"""Bytes of a closure's arguments or result in one message, below gRPC's limit of 4 MiB together with the rest."""

MAX_BATCH_VARIABLES = 4096
"""Variables that one call may create: while they are read and declared, other calls wait."""

MAX_SESSIONS = 1024
"""Default maximum of concurrent sessions."""

MAX_STANDBYS = 64
"""Processes that may wait for the place of a server at a time."""

STANDBY_SECONDS = 5.0
"""Seconds after which a process that waits is forgotten; it says once a second that it is there."""

MAX_NAME = 512
"""Characters in a variable's name."""

MAX_NDIM = 32
"""Dimensions of a tensor."""

MAX_TENSOR_BYTES = 1 << 44
"""Size of one tensor that a message may announce; what may be held is the server's memory limit."""


ROUND_LEASES = 3
"""The least number of leases that a round may take before a member that heartbeats is left out of it."""

Refused = Literal["lost", "retry"]
"""The meaning of a refused connection, where nothing listens at a server's address any more: its process is lost; or
nothing is known, since something else than its host may have refused."""

REFUSALS: tuple[Refused, ...] = ("lost", "retry")


def _seconds(default: float, about: str) -> Any:
    return option(default, about, SECONDS, 0)


@dataclass(frozen=True)
class Timeouts:
    """Time limits, in seconds.

    Each has an environment variable: `PS_SESSION_TIMEOUT=5` sets `session_timeout`.

    Attributes:
        session_timeout: a session without a heartbeat for this long is ended.
        heartbeat_interval: time between two heartbeats; several must fit into a session timeout.
        call_timeout: deadline of an ordinary call, retries included.
        round_timeout: how long a live worker may delay a synchronous round, from the first push on, before it is
            excluded. At least three session timeouts.
        server_timeout: how long a server may be silent before it counts as lost.
        report_interval: time between two log lines that name the task a waiting call waits for.
        chief_timeout: how long a request that needs a chief waits for one.
        no_workers_timeout: how long a chief, or a server that ends with its job, waits for a worker after the last one
            has left, before it gives up the job.
        first_worker_timeout: how long a chief waits for all workers to connect; scripts may do much before they make a
            strategy.
        start_timeout: how long a process waits at its start for the tasks of its cluster.
        termination_grace: how long a worker that receives SIGTERM has to reach the beginning of a step and leave; then
            it ends at once.
    """

    session_timeout: float = _seconds(10.0, "A session that sends no heartbeat for this long ends.")
    heartbeat_interval: float = _seconds(2.0, "Pause between two heartbeats; several must fit into a session timeout.")
    call_timeout: float = _seconds(30.0, "Deadline of an ordinary call, retries included.")
    round_timeout: float = _seconds(
        600.0, "Time that a live worker may hold up a round; at least three session timeouts."
    )
    server_timeout: float = _seconds(60.0, "Time that a server may be silent before it counts as lost.")
    report_interval: float = _seconds(
        10.0, "Pause between two log lines of a waiting process; they name the tasks it waits for."
    )
    chief_timeout: float = _seconds(300.0, "Time that an operation waits for a chief when it needs one.")
    no_workers_timeout: float = _seconds(
        300.0, "Time without any live worker after which the chief, and servers with --until-done, end the job."
    )
    first_worker_timeout: float = _seconds(
        3600.0,
        "Time that a chief waits for all workers to connect; a script may do much before it creates a strategy. "
        "Unlimited for clusters that psworker starts.",
    )
    start_timeout: float = _seconds(120.0, "Time that a starting process waits for the tasks of its cluster.")
    termination_grace: float = _seconds(25.0, "Time that a worker has to leave after SIGTERM, then it ends at once.")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Timeouts:
        """Reads the timeouts from the environment, such as `PS_SESSION_TIMEOUT`, in seconds.

        Raises:
            ConfigError: a variable has a retired or misspelled name, or a value is not a positive number.
        """
        check_variables(environ)
        names = {f"PS_{field.name.upper()}": field.name for field in dataclasses.fields(cls)}
        found = {name: parse_seconds(key, environ[key]) for key, name in names.items() if key in environ}
        timeouts = dataclasses.replace(cls(), **found)
        timeouts.check()
        return timeouts

    def check(self) -> None:
        """Raises `ConfigError` for times that contradict each other."""
        if self.round_timeout < ROUND_LEASES * self.session_timeout:
            raise ConfigError(
                f"PS_ROUND_TIMEOUT={self.round_timeout:g} is below {ROUND_LEASES} times PS_SESSION_TIMEOUT "
                f"({self.session_timeout:g} s), so slow workers would be excluded; raise it"
            )

    def environ(self) -> dict[str, str]:
        """Returns the environment variables that `from_environ` reads back."""
        return {f"PS_{name.upper()}": repr(value) for name, value in dataclasses.asdict(self).items()}


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises `ConfigError` for a name that is not known, with the one that may be meant."""
    known = sorted(known)
    for name in given:
        if name not in known:
            if RETIRED_OPTIONS.get(name) in known:
                raise ConfigError(f"{what} {name} {renamed(name, RETIRED_OPTIONS)}")
            begins = [other for other in known if name and other.startswith(name)]
            near = begins or difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known) or 'none'}"
            raise ConfigError(f"{what} {name} is unknown; {hint}")


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises `ConfigError` for a variable with a retired name, or with one that is almost one of ours.

    Others with our prefix may be anything's: of the command `ps`, or what Kubernetes says of a service that is called
    ps, which has numbers, an address, or the word SERVICE.
    """
    known = VARIABLES | {f"PS_{field.name.upper()}" for field in dataclasses.fields(Timeouts)}
    for name in sorted(environ):
        if not name.startswith("PS_") or name in known:
            continue
        if now := renamed(name, RETIRED):
            raise ConfigError(f"environment variable {name} {now}")
        of_kubernetes = re.search("[0-9]|_SERVICE", name) or environ[name].startswith(("tcp://", "udp://"))
        near = [] if of_kubernetes else difflib.get_close_matches(name, {*known, *RETIRED}, 1, 0.85)
        if near:
            meant = RETIRED.get(near[0], near[0])
            raise ConfigError(f"environment variable {name} is unknown; did you mean {meant}?")


def parse_seconds(name: str, given: Any) -> float:
    """A positive, finite number of seconds; raises `ConfigError` naming what it is for."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={given!r} must be a positive number of seconds")
    return value
