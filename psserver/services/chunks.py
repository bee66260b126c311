"""Chunks: which batches of a dataset were handed out to whom, and which are done. Server 0 keeps them.

A plain state machine without clock, network or array work. It never reads an example: workers know by the number of a
batch which examples it has, the same everywhere. What is done is what was handed out, and is neither held by a session
nor waits to be handed out again; so a pass takes no more memory than what its workers hold.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from psserver.effects import Effect, Reply
from psserver.plans.round import ReadyRound
from psserver.services.service import Service
from pswire.cluster import Task
from pswire.errors import ConfigError, InvalidRequest, PSError
from pswire.limits import MAX_CHUNKS, MAX_DATASETS, MAX_HELD
from pswire.model.chunks import Chunk, ChunkAsk, Chunks
from pswire.model.log import Examples, Position
from pswire.servers.chunks import AssignBatchesRequest

log = logging.getLogger("psserver")

MAX_NUMBER = 1 << 62
"""The last batch of a pass, and the last pass: far from where numbers on the wire end."""


def _place(examples: Examples) -> tuple[int, int]:
    return examples.index, examples.first


@dataclass
class _Pass:
    """A pass over a dataset.

    Attributes:
        next: the first batch that was never handed out.
        back: what is to be handed out again, in order.
        out: how many chunks of it sessions hold.
    """

    next: int = 0
    back: list[Examples] = field(default_factory=list)
    out: int = 0


@dataclass
class _Pace:
    """How fast a worker is beside the others, in chunks: nothing here knows the time.

    Attributes:
        mark: chunks of the dataset that had been handed out, to anybody, when it was last looked at.
        done: what the worker has done since.
        share: the worker's chunks and all chunks, between the last two looks; (0, 1) before the second.
    """

    mark: int
    done: int = 0
    share: tuple[int, int] = (0, 1)

    def look(self, handed: int) -> None:
        """Measures anew, if the worker has done anything since; `handed` counts the chunks handed out so far."""
        if self.done:
            between = max(handed - self.mark, 1)
            self.share, self.mark, self.done = (min(self.done, between), between), handed, 0

    def ahead(self, left: int, workers: int) -> int:
        """Returns how many of those that are left the worker may have ahead: half of what it will come to do of them.

        Else the last ones would wait in the hands of a slow worker while the others have nothing left. Two for each of
        the workers are left out of account: so many may be taken at once when several end a step together.
        """
        own, all = self.share
        return max(left - 2 * workers, 0) * own // (2 * all)


@dataclass
class _Dataset:
    """A dataset.

    Attributes:
        count: batches of a pass.
        restores: as in `ChunkAsk`, the most that a worker has told.
        passes: those of which something is not done.
        newest: the last pass that was begun; those up to it that are not among `passes` are over.
        at: the pass in which each session is.
        handed: chunks that were handed out so far.
        paces: how fast each session is.
    """

    count: int
    restores: int
    passes: dict[int, _Pass]
    newest: int
    at: dict[int, int] = field(default_factory=dict)
    handed: int = 0
    paces: dict[int, _Pace] = field(default_factory=dict)

    def enter(self, session: int, epoch: int) -> None:
        """A session is in a pass; nothing is owed of one that all have broken off, and left behind."""
        self.at[session] = epoch
        lowest = min(self.at.values())
        for number in list(self.passes):
            each = self.passes[number]
            if (number < lowest) if each.next < self.count else not (each.back or each.out):
                del self.passes[number]
        if epoch > self.newest:
            self.newest = epoch
            self.passes[epoch] = _Pass()

    def _near(self, epoch: int) -> Iterator[tuple[int, _Pass]]:
        """The passes of which somebody gets something who is in one: that one, and what came back of earlier ones."""
        for number in sorted(self.passes):
            each = self.passes[number]
            if number == epoch or (number < epoch and each.next >= self.count):
                yield number, each

    def left(self, epoch: int) -> int:
        """Returns how many chunks can be handed out to somebody who is in a pass."""
        return sum(len(each.back) + max(self.count - each.next, 0) for _, each in self._near(epoch))

    def take(self, epoch: int) -> tuple[int, Examples] | None:
        """Returns the next chunk for somebody who is in a pass, and the pass that it belongs to."""
        for number, each in self._near(epoch):
            if each.back or each.next < self.count:
                each.out += 1
                self.handed += 1
                if each.back:
                    return number, each.back.pop(0)
                each.next += 1
                return number, Examples(each.next - 1, 0, 0)
        return None


@dataclass(frozen=True)
class _Held:
    """What a session holds by a ticket."""

    dataset: int
    epoch: int
    examples: Examples


@dataclass
class _Worker:
    """A session that asks for chunks.

    Attributes:
        task: whose session it is.
        held: what it holds, by ticket.
        answers: for each dataset the number of its last question, and the answer.
    """

    task: Task
    held: dict[int, _Held] = field(default_factory=dict)
    answers: dict[int, tuple[int, Chunks]] = field(default_factory=dict)


class ChunkQueue(Service):
    """All chunks of a job.

    Args:
        busy: returns whether a session has contributed to a round that is open: it may still be applied.
    """

    verbs = frozenset(("assign_batches",))
    for_sessions = "assigns batches"

    def __init__(self, busy: Callable[[int], bool]) -> None:
        self._busy = busy
        self._datasets: dict[int, _Dataset] = {}
        self._workers: dict[int, _Worker] = {}
        self._ended: dict[int, _Worker] = {}  # what they held is not handed out again yet
        self._ticket = 0

    def assign_batches(self, task: Task, asked: AssignBatchesRequest, future: Future[Chunks]) -> list[Effect]:
        """Answers a worker, as `ParameterServer.assign_batches` says.

        Raises:
            PSError: why it is refused.
        """
        return [Reply(future, self._assign(asked.session, task, asked.ask))]

    def _assign(self, session: int, task: Task, ask: ChunkAsk) -> Chunks:
        worker = self._workers.setdefault(session, _Worker(task))
        number, answer = worker.answers.get(ask.dataset, (0, Chunks()))
        if ask.number == number:
            return answer
        if ask.number < number:
            raise InvalidRequest(f"request {ask.number} for dataset {ask.dataset} arrived after request {number}")
        if ask.want > MAX_CHUNKS or len(worker.held) + ask.want > MAX_HELD:
            raise InvalidRequest(
                f"{task} asks for {ask.want} chunks and holds {len(worker.held)}; the limits are {MAX_CHUNKS} per "
                f"request, and {MAX_HELD} held"
            )
        if max(ask.epoch, ask.count, *(max(each.epoch, each.index) for each in ask.begins), 0) > MAX_NUMBER:
            raise InvalidRequest(f"{task} names a batch or an epoch above {MAX_NUMBER}")
        dataset = self._dataset(task, ask)
        for ticket in ask.done:
            self._do(session, worker, ticket)
        for ticket in ask.back:
            self._give_back(worker, ticket)
        self._take_back()
        chunks: tuple[Chunk, ...] = ()
        # Who has not restored yet what others have restored comes to that later, and has nothing to do before.
        stale = 0 < ask.restores < dataset.restores
        if ask.want and not stale:
            dataset.enter(session, ask.epoch)
            chunks = tuple(self._chunks(session, worker, dataset, ask))
        over = stale or not dataset.left(ask.epoch)
        answer = Chunks(chunks, over, self._stands(ask.dataset, dataset) if ask.looks else ())
        worker.answers[ask.dataset] = ask.number, answer
        return answer

    def _dataset(self, task: Task, ask: ChunkAsk) -> _Dataset:
        """Returns the dataset that a worker asks for; it begins where the first one says, and anew with a restore."""
        found = self._datasets.get(ask.dataset)
        if found is None or ask.restores > found.restores:
            if found is None and len(self._datasets) >= MAX_DATASETS:
                raise InvalidRequest(
                    f"the job assigns batches of {MAX_DATASETS} datasets, which is the limit; reuse a dataset"
                )
            for worker in (*self._workers.values(), *self._ended.values()):
                worker.held = {t: held for t, held in worker.held.items() if held.dataset != ask.dataset}
            begins = {each.epoch: each for each in ask.begins if each.dataset == ask.dataset}
            passes = {
                epoch: _Pass(min(each.index, ask.count), sorted(each.returned, key=_place))
                for epoch, each in begins.items()
            }
            newest = max(passes, default=-1)
            found = self._datasets[ask.dataset] = _Dataset(ask.count, max(ask.restores, 1), passes, newest)
        if ask.count != found.count:
            raise ConfigError(
                f"dataset {ask.dataset} has {ask.count} batches per epoch on {task}, but {found.count} on other "
                "workers; with AutoShardPolicy.DYNAMIC, give every worker the same dataset",
                str(task),
            )
        return found

    def _chunks(self, session: int, worker: _Worker, dataset: _Dataset, ask: ChunkAsk) -> Iterator[Chunk]:
        pace = dataset.paces.setdefault(session, _Pace(dataset.handed))
        pace.look(dataset.handed)
        for _ in range(min(ask.want, max(pace.ahead(dataset.left(ask.epoch), len(dataset.at)), ask.needs))):
            if (taken := dataset.take(ask.epoch)) is None:
                return
            self._ticket += 1
            worker.held[self._ticket] = _Held(ask.dataset, *taken)
            yield Chunk(self._ticket, *taken)

    # ---- What is done, and what is not ----

    def applied(self, job: ReadyRound) -> None:
        """A round was applied: the chunks that its contributions are made of are done."""
        if not (self._workers or self._ended) or not job.plan.trains:
            return
        for part in job.parts:
            session = part.member.session
            worker = self._workers.get(session) or self._ended.get(session)
            if worker is not None:
                for ticket in part.said.chunks:
                    self._do(session, worker, ticket)

    def _do(self, session: int, worker: _Worker, ticket: int) -> None:
        """A chunk is done; one that the session does not hold any more is another's, or nobody's."""
        held = worker.held.pop(ticket, None)
        if held is None:
            return
        dataset = self._datasets[held.dataset]
        if session in dataset.paces:
            dataset.paces[session].done += 1
        if held.epoch in dataset.passes:
            dataset.passes[held.epoch].out -= 1

    def _give_back(self, worker: _Worker, ticket: int) -> None:
        held = worker.held.pop(ticket, None)
        found = None if held is None else self._datasets[held.dataset].passes.get(held.epoch)
        if held is not None and found is not None:  # else all have broken that pass off
            found.out -= 1
            insort(found.back, held.examples, key=_place)

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """A session has ended: what it holds is handed out again, once no round of it can be applied any more."""
        worker = self._workers.pop(session, None)
        if worker is not None and worker.held:
            self._ended[session] = worker
        for dataset in self._datasets.values():
            dataset.at.pop(session, None)
            dataset.paces.pop(session, None)
        return []

    def _take_back(self) -> None:
        """Takes back what sessions hold that have ended."""
        for session in [session for session in self._ended if not self._busy(session)]:
            worker = self._ended.pop(session)
            if worker.held:
                log.debug("%s has ended; its %d unfinished batches are assigned again", worker.task, len(worker.held))
            for ticket in list(worker.held):
                self._give_back(worker, ticket)

    def _stands(self, number: int, dataset: _Dataset) -> tuple[Position, ...]:
        """Returns where a dataset stands, pass by pass: a checkpoint of now goes on with what was not done."""
        missing = {epoch: list(each.back) for epoch, each in dataset.passes.items()}
        for worker in (*self._workers.values(), *self._ended.values()):
            for held in worker.held.values():
                if held.dataset == number and held.epoch in missing:
                    missing[held.epoch].append(held.examples)
        found = [
            Position(number, epoch, each.next, tuple(sorted(missing[epoch], key=_place)))
            for epoch, each in sorted(dataset.passes.items())
            if each.next < dataset.count or missing[epoch]
        ]
        if not found or found[-1].epoch < dataset.newest:
            found.append(Position(number, dataset.newest + 1, 0))
        return tuple(found)
