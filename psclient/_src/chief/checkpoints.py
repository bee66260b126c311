"""Checkpoints as a chief commits them: the servers write their shards, then one of them the manifest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future, wait
from functools import partial

from psclient._src.network.daemon_threads import Threads
from psclient._src.network.session import Session
from pswire.api import ParameterServer
from pswire.checkpoint.assembly import manifest_of
from pswire.checkpoint.manifest import Manifest
from pswire.cluster import Task
from pswire.errors import CheckpointError, Fenced, PSError, RoundTimeout, ServerGone, ServerLost
from pswire.limits import PART_BYTES
from pswire.model.log import Snapshotted
from pswire.model.plan import Plan
from pswire.model.saved import Shard
from pswire.telemetry.metrics import Histogram
from pswire.telemetry.reminder import Reminder

log = logging.getLogger("psclient.chief")


class CheckpointCommitter:
    """The checkpoints of a job, committed one after another, so that of two at one path the later stays.

    Used by the thread that drives; `commit` runs in one of `threads`.

    Args:
        servers: connections to all servers, by number.
        session: the chief's session.
        threads: run the calls that wait.
        took: seconds from an order until its checkpoint was complete, or had failed.
    """

    def __init__(self, servers: Sequence[ParameterServer], session: Session, threads: Threads, took: Histogram) -> None:
        self._servers = servers
        self._session = session
        self._threads = threads
        self._took = took
        self._ordered_at = 0.0
        self._committing: Future[Snapshotted | None] | None = None
        self._without: Set[int] = frozenset()  # the servers that were gone before it was asked for
        self._apart: Set[int] = frozenset()  # those that write no part of it, as they are to move

    def order(self, plans: Iterable[Plan], gone: Set[int], moving: Callable[[int], Set[int]]) -> None:
        """Starts to commit the first of these, unless a checkpoint is being committed.

        Args:
            plans: those that save, in order.
            gone: the servers that are gone, as all others have been told.
            moving: returns, by the generation for which one saves, the servers whose variables the others save.
        """
        plan = next(iter(plans), None)
        if self._committing is None and plan is not None:
            self._ordered_at = self._ordered_at or time.monotonic()
            self._without = gone
            self._apart = moving(plan.snapshot.returns) if plan.snapshot is not None else frozenset()
            self._committing = self._threads.submit(partial(self.commit, plan))

    def pending(self) -> list[Future[Snapshotted | None]]:
        """The checkpoint that is being written, or of which the log does not tell yet, if there is one."""
        return [self._committing] if self._committing is not None else []

    def ended(self) -> list[Snapshotted]:
        """The same once it is complete, or failed; raises what ends this chief.

        One that waits for a server that is lost is ordered once more, when the log tells that it is gone.
        """
        found = [future.result() for future in self.pending() if future.done()]
        if found == [None]:
            self._committing = None
        return [done for done in found if done is not None]

    def told(self) -> None:
        """The log tells of what has `ended`."""
        self._committing = None
        self._took.observe(time.monotonic() - self._ordered_at)
        self._ordered_at = 0.0

    def commit(self, plan: Plan) -> Snapshotted | None:
        """Shards first, the manifest last; without a manifest there is no checkpoint.

        A server that is gone is left out: the others save what it had, as it was after the same round.

        Returns:
            What came of it; None if a server was lost meanwhile, so that the others have to be asked again.
        """
        before = self._without
        done = self._commit(plan, before)
        return None if done is not None and done.error and self._session.hosting.gone - before else done

    def _commit(self, plan: Plan, gone: Set[int]) -> Snapshotted | None:
        order = plan.snapshot
        if order is None:
            raise ValueError("the compiled step does not save a checkpoint")
        try:
            servers = [server for server in order.servers if server not in gone | self._apart]
            pending = [self._ask(server, plan.id) for server in servers]
            shards = [self._awaited(server, plan.id, future) for server, future in zip(servers, pending, strict=True)]
            if len({(shard.round, shard.positions) for shard in shards}) > 1:
                rounds = ", ".join(str(shard.round) for shard in shards)
                raise CheckpointError(f"the servers wrote parts from different rounds ({rounds}); save again")
            if self._session.hosting.gone - gone:
                return None  # one of the parts may have what another one has as well
            text, first = _fitting(manifest_of(shards, order)), servers[0]
            done = self._awaited(first, plan.id, self._ask(first, plan.id, text), text)
        except (ServerGone, ServerLost) as error:
            if not self._session.copied:
                raise
            log.warning(
                "%s was lost while checkpoint %r was written; the other servers save its part", error.task, order.path
            )
            return None
        except Fenced:
            raise  # nobody knows what became of it: who drives the job next will
        except Exception as error:  # whatever it is, the processes that wait for the checkpoint are told
            if not isinstance(error, PSError):
                log.exception("the checkpoint could not be completed")
            return Snapshotted(plan.id, 0, order.path, str(error) if isinstance(error, PSError) else repr(error))
        return Snapshotted(plan.id, done.round, done.path)

    def _ask(self, server: int, plan_id: bytes, manifest: str = "") -> Future[Shard]:
        return self._servers[server].snapshot(self._session.token, plan_id, manifest)

    def _awaited(self, server: int, plan_id: bytes, future: Future[Shard], manifest: str = "") -> Shard:
        """Waits for a server's part of a checkpoint, while its round and disk take their time; repeats the question."""
        said, seconds = (
            "%s is still writing its part of a checkpoint, or waiting for the round of the checkpoint",
            self._session.timeouts.report_interval,
        )
        reminder = Reminder(seconds, lambda: log.info(said, Task("ps", server)))
        while True:
            if wait([future], seconds).done:
                try:
                    return future.result()
                except RoundTimeout:
                    future = self._ask(server, plan_id, manifest)
            reminder.look()


def _fitting(manifest: Manifest) -> str:
    """The text of a manifest; raises `CheckpointError` where it is longer than what a restore could be told of."""
    text = manifest.text()
    if len(text) > PART_BYTES:
        raise CheckpointError(
            f"the manifest of {len(manifest.tensors):,} variables has {len(text):,} bytes; at most "
            f"{PART_BYTES:,} can be sent. Create fewer and larger variables, or use shorter names"
        )
    return text
