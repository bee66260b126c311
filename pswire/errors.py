"""Every error of the parameter server, in one tree.

    PSError
    ├── ConfigError          TF_CONFIG, flags or a cluster file say something impossible
    │   └── TaskTaken        another process is this task, and is alive
    ├── Unreachable          a server does not answer: not started, wrong address, network
    ├── ServerLost           a server died or was replaced: its variables are gone
    ├── ServerGone           a server died, and others have its variables; no user sees it
    ├── ChiefLost            no chief answered in time, and what was asked needs one
    ├── Abandoned            a job was given up: nobody was there any more to finish it
    ├── Fenced               this session was ended by the cluster (lease lost, or replaced)
    ├── Forbidden            the caller's certificate does not allow what it asks for
    │   └── Unauthenticated  the caller lacks the token of the job
    ├── Diverged             two processes of one job do not run the same program
    │   └── NewcomerDiverged a process that joined a running job runs another program; it alone ends
    ├── VariableMismatch     two processes, or a checkpoint, disagree on a variable
    ├── LocalityError        values that live on different servers meet in one update
    ├── ProgramError         an update function cannot be traced, or a program is refused
    │   └── NonfiniteError   a contribution has NaN or infinity, and the job asks for an error
    ├── MemoryLimit          a server would exceed its memory limit
    ├── PushAgain            a server asks for a contribution once more; no user sees it
    ├── RoundTimeout         a round did not complete before its deadline
    ├── CheckpointError      a checkpoint cannot be written or read
    │   ├── DamagedCheckpoint its files are not what was saved
    │   └── NoCheckpoint     there is none where one was looked for
    ├── ClosureError         a function that was scheduled has failed on a worker
    │   └── ClosureCancelled it was not run, since another one had failed
    ├── InvalidRequest       a malformed or hostile message
    └── UsageError           a call of the script is wrong; raised where it stands, before anything is sent
        ├── InvalidArgument  a value: also a `ValueError`
        ├── InvalidType      a type: also a `TypeError`
        ├── InvalidCall      the time or the place of the call: also a `RuntimeError`
        └── UnknownName      a key: also a `KeyError`

The message says what is wrong, where, and what to do. `task` names the process it is about, as
`/job:ps/task:0`. All but a `UsageError` travel by name: `BY_NAME` is the table that both rims use.
"""

from __future__ import annotations


class PSError(Exception):
    """Base of all errors of this package.

    Args:
        message: the fault, its place, and the remedy, in one line.
        task: the task that the error is about, as `/job:ps/task:0`, or "" when it is about none.
    """

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.task = task

    def __str__(self) -> str:
        return f"{self.task}: {self.message}" if self.task else self.message


class ConfigError(PSError, ValueError):
    """TF_CONFIG, a flag or a cluster file says something impossible."""


class TaskTaken(ConfigError):
    """Another process is this task of the job, and is alive."""


class Unreachable(PSError, ConnectionError):
    """A server does not answer at its address."""


class ServerLost(PSError, ConnectionError):
    """A server died or was replaced by a new incarnation: restart from a checkpoint."""


class ServerGone(PSError, ConnectionError):
    """A server died, and others have copies of its variables: the caller asks one of these."""


class ChiefLost(PSError, TimeoutError):
    """A request needs a chief, and none answered before the deadline."""


class Abandoned(PSError):
    """A job was given up: for too long none of those who would finish it was there."""


class Fenced(PSError):
    """This session was ended by the cluster; the process has to restart to take part again."""


class Forbidden(PSError, PermissionError):
    """The caller's certificate does not allow what it asks for."""


class Unauthenticated(Forbidden):
    """The caller lacks the token of the job."""


class Diverged(PSError):
    """Two processes of one job do not make the same sequence of sections."""


class NewcomerDiverged(Diverged):
    """A process that joined a running job makes another sequence of sections than its members; it alone ends."""


class ScriptFailed(PSError):
    """A worker's script ended with an error, and nothing starts it again: its job ends with it."""


class VariableMismatch(PSError, ValueError):
    """Two processes, or a checkpoint and a process, disagree on a variable."""


class LocalityError(PSError, ValueError):
    """Values that live on different servers meet in one update."""


class ProgramError(PSError, ValueError):
    """An update function cannot be traced, or a program was refused by the verifier."""


class NonfiniteError(ProgramError):
    """A contribution has NaN or infinity; nothing of its round was applied."""


class MemoryLimit(PSError, MemoryError):
    """A server would exceed its memory limit."""


class PushAgain(PSError):
    """A server has used up a contribution of which nothing counts: a member of the round was lost meanwhile.

    The client sends it once more.
    """


class RoundTimeout(PSError, TimeoutError):
    """A round did not complete before its deadline."""


class CheckpointError(PSError, OSError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files are not what was saved: a wrong checksum, a malformed file, a missing shard.

    A file that cannot be read now, for want of permission or of a disk that answers, is a plain `CheckpointError`.
    """


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint where one was looked for: a job that is to resume may start anew."""


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
    """A function that was scheduled was not run: another one had failed before."""


class InvalidRequest(PSError, ValueError):
    """A malformed message, or one that asks for what its sender may not have."""


class UsageError(PSError):
    """A call of the script is wrong: it would be so on any cluster, and nothing was sent.

    A job treats it as any other exception of the script: its worker has failed, and not the cluster.
    """


class InvalidArgument(UsageError, ValueError):
    """An argument has a value that the call cannot take."""


class InvalidType(UsageError, TypeError):
    """An argument is of a type that the call cannot take."""


class InvalidCall(UsageError, RuntimeError):
    """The call is not allowed here, or not any more."""


class UnknownName(UsageError, KeyError):
    """Nothing has the name that was asked for."""


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
