"""The verbs by which checkpoints are saved and restored."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from pswire.model.plan import Turn
from pswire.model.saved import ALL, RestoreOrder, RestoreReply, Shard
from pswire.servers.requests import ServerRequest


@dataclass(frozen=True)
class SnapshotRequest(ServerRequest[Future[Shard]]):
    """Waits for a checkpoint's shard, or writes its manifest. Key: the plan, and the step: shard or manifest.

    A server begins to write its shard by itself, when the round that ordered it has run.

    Attributes:
        token: the chief's fencing token.
        plan_id: the plan that ordered it.
        manifest: the JSON text of the manifest, which comes after all shards, or "" for the shard.

    Raises:
        CheckpointError: the file cannot be written; its round failed, or will not come; it is over.
    """

    token: int
    plan_id: bytes
    manifest: str

    def words(self) -> tuple[None, str]:
        return None, f"plan {self.plan_id[:4].hex()}, the {'manifest' if self.manifest else 'shard'}"


@dataclass(frozen=True)
class RestoreRequest(ServerRequest[Future[RestoreReply]]):
    """Makes a checkpoint ready to be restored; variables change in the round that commits it. Key: (turn, stage).

    Attributes:
        session: number of the session that asks; every process does. The first request is done, and its outcome, an
            error too, is told to the others.
        path: a checkpoint directory, below the servers' checkpoint root, or a directory of them.
        turn: the restore's place among those of the job.
        order: the stage, the variables that it changes, and the way.

    Raises:
        NoCheckpoint: there is no checkpoint.
        DamagedCheckpoint: its files are not as they were saved; of a directory, those of all that may be meant.
        CheckpointError: the checkpoint cannot be read.
        VariableMismatch: the checkpoint has a variable with another shape or dtype.
        Diverged, InvalidRequest: another process has gone on to a later restore; the latter where workers are
            asynchronous.
    """

    session: int
    path: str
    turn: Turn
    order: RestoreOrder = ALL

    def words(self) -> tuple[int, str]:
        return self.session, f"{self.order.stage} {self.path!r}"
