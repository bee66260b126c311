"""Every error of the parameter server, in one tree.

    PSError
    ├── ConfigError          TF_CONFIG, a flag or a cluster file has an impossible value
    │   └── TaskTaken        another live process has this task
    ├── Unreachable          a server does not answer: not started, wrong address, network
    ├── ServerLost           a server died or was replaced: its variables are lost
    ├── ServerGone           a server died, and others have its variables; internal
    ├── ChiefLost            no chief answered in time to a request that needs one
    ├── Abandoned            a job was given up: none of its processes was left to finish it
    ├── Fenced               the cluster ended this session (timeout, or replaced)
    ├── Forbidden            the caller's certificate does not allow the request
    │   └── Unauthenticated  the caller does not have the job's token
    ├── Diverged             two processes of one job do not run the same program
    │   └── NewcomerDiverged a process that joined a running job runs another program; only it ends
    ├── ScriptFailed         a worker's script raised an error, and is not restarted
    ├── VariableMismatch     two processes, or a process and a checkpoint, disagree on a variable
    ├── LocalityError        one update uses values on different servers
    ├── ProgramError         an update function cannot be traced, or a program is rejected
    │   └── NonfiniteError   a contribution has NaN or infinity, with nonfinite="raise"
    ├── MemoryLimit          a server would exceed its memory limit
    ├── PushAgain            a server asks for a contribution once more; internal
    ├── RoundTimeout         a round did not complete before its deadline
    ├── CheckpointError      a checkpoint cannot be written or read
    │   ├── DamagedCheckpoint its files differ from what was saved
    │   └── NoCheckpoint     there is no checkpoint
    ├── ClosureError         a scheduled function has failed on a worker
    │   └── ClosureCancelled it was not run, because another one had failed
    ├── InvalidRequest       a malformed or hostile message
    └── UsageError           a call of the script is wrong; raised at once, before anything is sent
        ├── InvalidArgument  a value: also a `ValueError`
        ├── InvalidType      a type: also a `TypeError`
        ├── InvalidCall      the time or the place of the call: also a `RuntimeError`
        └── UnknownName      a key: also a `KeyError`

The message has the fault, the likely cause and the remedy. `task` names the process that the error is about, such as
`/job:ps/task:0`. All errors except `UsageError` are sent between processes by name, from the table `BY_NAME`.
"""

from __future__ import annotations


class PSError(Exception):
    """Base of all errors of this package.

    Args:
        message: the fault, its place, and the remedy, in one line.
        task: the task that the error is about, such as `/job:ps/task:0`, or "" for none.
    """

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.task = task

    def __str__(self) -> str:
        return f"{self.task}: {self.message}" if self.task else self.message


class ConfigError(PSError, ValueError):
    """TF_CONFIG, a flag or a cluster file has an impossible value."""


class TaskTaken(ConfigError):
    """Another live process has this task of the job."""


class Unreachable(PSError, ConnectionError):
    """A server does not answer at its address."""


class ServerLost(PSError, ConnectionError):
    """A server died or was replaced by a new process: restart from a checkpoint."""


class ServerGone(PSError, ConnectionError):
    """A server died, and others have copies of its variables: the caller asks one of these. Scripts do not see it."""


class ChiefLost(PSError, TimeoutError):
    """A request needs a chief, and no chief answered before the deadline."""


class Abandoned(PSError):
    """A job was given up: for too long it had no process to finish it."""


class Fenced(PSError):
    """The cluster ended this session; the process has to restart to take part again."""


class Forbidden(PSError, PermissionError):
    """The caller's certificate does not allow the request."""


class Unauthenticated(Forbidden):
    """The caller does not have the token of the job."""


class Diverged(PSError):
    """Two processes of one job do not make the same sequence of calls."""


class NewcomerDiverged(Diverged):
    """A process that joined a running job does not make the same calls as its members; only it ends."""


class ScriptFailed(PSError):
    """A worker's script ended with an error and is not restarted: its job ends with it."""


class VariableMismatch(PSError, ValueError):
    """Two processes, or a checkpoint and a process, disagree on a variable."""


class LocalityError(PSError, ValueError):
    """One update uses values on different servers."""


class ProgramError(PSError, ValueError):
    """An update function cannot be traced, or the verifier rejected a program."""


class NonfiniteError(ProgramError):
    """A contribution has NaN or infinity; no update of its round was applied."""


class MemoryLimit(PSError, MemoryError):
    """A server would exceed its memory limit."""


class PushAgain(PSError):
    """A server asks for a contribution again, because another member of the round was lost. Scripts do not see it.

    The client sends it once more.
    """


class RoundTimeout(PSError, TimeoutError):
    """A round did not complete before its deadline."""


class CheckpointError(PSError, OSError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files differ from what was saved: a wrong checksum, a malformed file, a missing shard.

    A file that cannot be read at the moment, for example without permission, is a plain `CheckpointError`.
    """


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at the path: a job that should resume may start from the beginning."""


class ClosureError(PSError, RuntimeError):
    """A function that a coordinator has scheduled raised an error on a worker.

    Args:
        message: the function, the error's type and its text.
        task: the worker.
        kind: the name of the error's type, such as "ValueError".
    """

    def __init__(self, message: str, task: str = "", kind: str = "") -> None:
        super().__init__(message, task)
        self.kind = kind


class ClosureCancelled(ClosureError):
    """A scheduled function was not run, because another one had failed before."""


class InvalidRequest(PSError, ValueError):
    """A message is malformed, or its sender may not send it."""


class UsageError(PSError):
    """A call of the script is wrong: it would fail on any cluster, and nothing was sent.

    A job treats it as any other exception of the script: the worker has failed, not the cluster.
    """


class InvalidArgument(UsageError, ValueError):
    """An argument has an invalid value."""


class InvalidType(UsageError, TypeError):
    """An argument has an invalid type."""


class InvalidCall(UsageError, RuntimeError):
    """The call is not allowed here, or not any more."""


class UnknownName(UsageError, KeyError):
    """There is nothing with the given name."""


BY_NAME: dict[str, type[PSError]] = {
    error.__name__: error
    for error in (
        PSError,
        ConfigError,
        TaskTaken,
        Unreachable,
        ServerLost,
        ServerGone,
        ChiefLost,
        Abandoned,
        Fenced,
        Forbidden,
        Unauthenticated,
        Diverged,
        NewcomerDiverged,
        ScriptFailed,
        VariableMismatch,
        LocalityError,
        ProgramError,
        NonfiniteError,
        MemoryLimit,
        PushAgain,
        RoundTimeout,
        CheckpointError,
        DamagedCheckpoint,
        NoCheckpoint,
        ClosureError,
        ClosureCancelled,
        InvalidRequest,
    )
}
