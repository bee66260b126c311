"""How updates of different workers relate: what goes together with what, and changes of it while a job runs."""

from __future__ import annotations

from collections.abc import Callable

from psclient._src import context
from psclient._src.network.session import Session
from psclient._src.options import Async, BoundedStaleness, Consistency, Quorum, Sync
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.rounds.membership import Group
from pswire.cluster import TaskConfig
from pswire.errors import ConfigError
from pswire.model import consistency as model
from pswire.model.changes import Change


def check_deterministic(deterministic: bool, consistency: Consistency) -> None:
    """Raises `ConfigError` where time would decide what is computed, and a user insists that it does not."""
    if deterministic and consistency.backup_workers:
        raise ConfigError(
            "deterministic=True needs the gradients of all workers in each round, but with backup_workers "
            "the slowest are excluded; remove one of the two"
        )
    if deterministic and isinstance(consistency, Quorum):
        raise ConfigError(
            "deterministic=True needs the gradients of all workers in each round, but with ps.Quorum late ones are "
            "merged into the next round; remove one of the two"
        )
    if deterministic and not isinstance(consistency, Sync):
        raise ConfigError(
            f"deterministic=True needs rounds of all workers, but {type(consistency).__name__} applies each "
            "update when it arrives; use consistency=Sync(), or remove deterministic"
        )


def check_copied(consistency: Consistency) -> None:
    """Raises `ConfigError` where copies could come to differ."""
    if consistency.mode != "sync":
        raise ConfigError(
            "PS_REPLICATION_FACTOR=2 needs rounds with the same gradients on all servers, but with "
            f"{_said(consistency)} each server decides separately; use consistency=ps.Sync(), or set "
            "PS_REPLICATION_FACTOR=1"
        )


def check_workers(consistency: Consistency, config: TaskConfig | None) -> None:
    """Raises `ConfigError` where rounds would wait for no worker, or for more workers than the cluster has."""
    workers, backup_workers = 1, consistency.backup_workers
    if config is not None:
        workers = len(config.cluster.tasks("worker")) + (config.task.job == "chief")
    if isinstance(consistency, Quorum) and consistency.size > workers:
        raise ConfigError(
            f"ps.Quorum(size={consistency.size}) needs at least {consistency.size} workers, but the cluster has "
            f"{workers}; use a smaller size"
        )
    if backup_workers and backup_workers >= workers:
        raise ConfigError(
            f"backup_workers={backup_workers} needs more than {backup_workers} workers, but the cluster has "
            f"{workers}; use a smaller number, or remove backup_workers"
        )


def is_apart(
    given: Consistency, name: str, job: Consistency, deterministic: bool, session: Session, began: Consistency
) -> bool:
    """Returns whether each worker updates a variable alone, which all workers would update together without a word.

    It has a consistency of its own also in a job that is asynchronous now: that may be changed.

    Args:
        given: the variable's consistency.
        name: its name.
        job: the consistency of the job by now.
        deterministic: True if the user insists on the same bits.
        session: this process's session.
        began: the consistency with which the job began.

    Raises:
        ConfigError: a variable of this job cannot have it.
    """
    if not isinstance(given, Async):
        if given in (job, began):
            return False
        raise ConfigError(
            f"variable {name!r} has consistency={_said(given)}, but the job has {_said(job)}; use the "
            "consistency of the job, or ps.Async() in a job with ps.Sync()"
        )
    what = f"variable {name!r} has consistency={_said(given)}"
    if given.nonfinite not in (job.nonfinite, began.nonfinite):
        raise ConfigError(
            f"{what}, but the job has {_said(job)}, and nonfinite must be the same in the whole job; use "
            f"{_said(Async(job.nonfinite))}"
        )
    if deterministic:
        raise ConfigError(
            f"{what}, which applies each update when it arrives, but deterministic=True needs rounds of all "
            "workers; remove one of the two"
        )
    if session.copied:
        raise ConfigError(
            f"{what}, but PS_REPLICATION_FACTOR=2 needs rounds with the same gradients on all servers; "
            "remove the consistency, or set PS_REPLICATION_FACTOR=1"
        )
    check_variables(job, name)
    return True


def check_variables(job: Consistency, name: str) -> None:
    """Raises `ConfigError` for a consistency of a job that goes not together with variables with `ps.Async()`.

    Args:
        job: the consistency that a job has, or is to have.
        name: the name of such a variable.
    """
    if job.backup_workers:
        raise ConfigError(
            f"variable {name!r} has consistency=ps.Async(), but with {_said(job)} the examples of a late "
            "worker are reassigned after they have updated the variable; use ps.Sync() without backup "
            "workers"
        )
    if isinstance(job, BoundedStaleness):
        raise ConfigError(
            f"variable {name!r} has consistency=ps.Async(), but {_said(job)} limits all variables to "
            f"{job.k} rounds of staleness; use ps.Sync() or ps.Async() for the job, or remove the "
            "variable's consistency"
        )


def _said(consistency: Consistency) -> str:
    """Returns a consistency as users write it."""
    return value_of(consistency).words(consistency.nonfinite)


def consistency_of(change: Change) -> Consistency:
    """Returns what a change has given to all processes of a job."""
    value = change.consistency
    if value.mode == "async":
        return Async(change.nonfinite)
    if value.mode == "bounded":
        return BoundedStaleness(value.staleness, change.nonfinite)
    return Sync(change.nonfinite, value.backup_workers)


def value_of(consistency: Consistency) -> model.Consistency:
    """Returns what servers are told of a consistency."""
    k = consistency.k if isinstance(consistency, BoundedStaleness) else 0
    quorum, grace = (consistency.size, consistency.grace) if isinstance(consistency, Quorum) else (0, 0.0)
    return model.Consistency(consistency.mode, consistency.backup_workers, k, quorum, grace)


def check_place(backend: RemoteBackend, now: Consistency, consistency: Consistency, coordinates: bool) -> None:
    """Raises what is wrong with a call of `set_consistency`, where it is made.

    Args:
        backend: the strategy's.
        now: the one that the job has.
        consistency: the one that the job is to have.
        coordinates: True if this process schedules functions.

    Raises:
        RuntimeError: it is in a replica's or an update function, in `merge_call`, or amid a pass over a dataset.
        ConfigError: the workers run what a coordinator schedules; variables have another consistency, with which this
            one does not go together; a quorum is to begin or to end.
    """
    if now != consistency and (isinstance(now, Quorum) or isinstance(consistency, Quorum)):
        raise ConfigError(
            "set_consistency cannot begin or end ps.Quorum, because late contributions wait for the next round; give "
            "consistency=ps.Quorum(...) to the strategy, or restart from a checkpoint"
        )
    if context.in_merge_call() or (context.has_strategy() and not context.crosses_replicas()):
        raise RuntimeError(
            "set_consistency was called inside of run, merge_call or update; call it between steps, in "
            "cross-replica context"
        )
    group = backend.group
    if coordinates or group.apart:
        raise ConfigError(
            "set_consistency does not support workers of a ClusterCoordinator, which stay asynchronous; "
            "use it where every worker runs the script"
        )
    if (dataset := group.under_way) is not None:
        raise RuntimeError(
            f"set_consistency was called during a pass over dataset {dataset}, whose batches are already "
            "assigned; call it between two passes, or close the iterator before"
        )
    for variable in backend.exchange.creation.variables.values():
        if variable.spec.alone:
            check_variables(consistency, variable.spec.name)


def meet(group: Group, coordinates: bool, now: Consistency, set_consistency: Callable[[Consistency], object]) -> None:
    """Waits until all asynchronous workers have come: they meet where they change how they make rounds.

    Args:
        group: the process's place among the members.
        coordinates: True if this process schedules functions.
        now: the consistency, which stays.
        set_consistency: the strategy's.

    Raises:
        RuntimeError: they cannot change it here.
    """
    if coordinates or group.apart or group.under_way is not None:
        raise RuntimeError(
            "barrier() was called during a pass over a dataset, or by a worker of a ClusterCoordinator; "
            "call it before or after the loop"
        )
    if not group.outside:
        set_consistency(Sync(nonfinite=now.nonfinite))
        set_consistency(now)


def change(backend: RemoteBackend, now: Consistency, consistency: Consistency) -> bool:
    """Changes the consistency of a running job, with all its processes.

    Args:
        backend: the strategy's.
        now: the consistency that it has, as far as this process knows.
        consistency: the one that it is to have.

    Returns:
        Whether it was changed.
    """
    exchange = backend.exchange
    backend.parts.hand_in()
    backend.settle()  # what was recorded and sent so far belongs to the consistency of until now
    exchange.group.settle_in()
    change = exchange.session.change
    if consistency == (now if change is None else consistency_of(change)):
        return False

    def changed() -> bool:
        backend.settle()
        if not exchange.group.change(Change(0, 0, value_of(consistency), consistency.nonfinite)):
            return False
        exchange.reads.begin_anew()
        backend.reader.refresh()
        return True

    return backend.parts.changes(changed)
