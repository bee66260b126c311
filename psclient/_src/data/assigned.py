"""The batches that server 0 assigns to this process."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Protocol

from psclient._src.data.adapters import Batch, Indexable
from pswire.limits import MAX_CHUNKS
from pswire.model.chunks import Chunk, ChunkAsk, Chunks
from pswire.model.log import Examples, Position

HELD_BACK = 64
"""Batches of a dataset that trains, without a round of updates since, that do not count as done yet: the script may
accumulate their gradients. More are no accumulation, but an evaluation."""

APART = 0.02
"""Seconds between two questions that a worker asks ahead, where its steps are shorter: a question costs as much as a
small round."""


class ChunkCalls(Protocol):
    """Server 0, as a process asks it for batches."""

    restores: Callable[[], int]
    """Returns what `ChunkAsk.restores` is to be."""

    def ask(self, ask: ChunkAsk) -> Future[Chunks]:
        """Asks, and waits for nothing."""

    def wait(self, future: Future[Chunks]) -> Chunks:
        """Waits for an answer; raises what ends the session meanwhile."""


class AssignedBatches:
    """The batches of one dataset that are assigned to this process. Used by the thread that runs cross-replica code.

    It asks for the next ones while the program computes, so that a step waits for no answer.

    Args:
        calls: asks server 0.
        dataset: the dataset's number.
        begins: returns where the workers began, pass by pass.
        trains: returns whether rounds of updates were made in passes over it.
        source: its batches.
        least: batches that it has ahead at least, beside the one in use.
    """

    def __init__(
        self,
        calls: ChunkCalls,
        dataset: int,
        begins: Callable[[], tuple[Position, ...]],
        trains: Callable[[], bool],
        source: Indexable,
        least: int,
    ) -> None:
        self._calls = calls
        self._dataset = dataset
        self._begins, self._trains = begins, trains
        self._source = source
        self._least = least
        self._epoch = -1
        self._questions = 0
        self._told: tuple[tuple[Position, ...], int] = ((), -1)
        self._ahead: deque[Chunk] = deque()
        self._asked: Future[Chunks] | None = None
        self._in_use: list[int] = []  # no round of updates has taken them in
        self._sent: list[int] = []  # rounds that are under way have
        self._done: list[int] = []  # of which server 0 is to be told
        self._back: list[int] = []
        self._read: dict[int, Batch] = {}  # of what is ahead, by tickets
        self._latency = 0.0  # seconds from a question to its answer
        self._step = math.inf  # seconds from batch to batch
        self._last = math.nan

    # ---- For rounds ----

    @property
    def tickets(self) -> tuple[int, ...]:
        """The batches in use, which no round of updates has taken in."""
        return tuple(self._in_use)

    def sent(self) -> None:
        """A round of updates was sent that takes them in."""
        self._sent += self._in_use
        self._in_use.clear()

    # ---- For a pass ----

    def begin(self, epoch: int) -> None:
        """A pass begins; what is left here of one that was broken off goes back."""
        self._collect()
        self._back += [chunk.ticket for chunk in self._ahead]
        self._ahead.clear()
        self._read.clear()
        self._settle(everything=True)
        self._epoch, self._last = epoch, math.nan

    def next(self) -> Chunk | None:
        """Returns the next batch, which is in use from now on; None if there is none for this process.

        To be called once all rounds that were sent are answered.
        """
        now = time.monotonic()
        self._step = now - self._last if self._last < now else math.inf
        self._settle()
        if not self._ahead:
            self._collect()
        if not self._ahead:
            self._asked = self._ask(self._least + 1, needs=True)
            self._collect()
        if not self._ahead:
            return None
        chunk = self._ahead.popleft()
        self._in_use.append(chunk.ticket)
        self._last = time.monotonic()
        return chunk

    def coming(self, count: int) -> list[Batch]:
        """Reads the batches that come next, as many as are wanted and are here already."""
        if self._asked is not None and self._asked.done():
            self._collect()
        chunks = list(islice(self._ahead, count))
        for chunk in chunks:
            if chunk.ticket not in self._read:
                self._read[chunk.ticket] = self.read(chunk.epoch, chunk.examples)
        return [self._read[chunk.ticket] for chunk in chunks]

    def batch(self, chunk: Chunk) -> Batch:
        """Returns a batch that `next` has given."""
        found = self._read.pop(chunk.ticket, None)
        return self.read(chunk.epoch, chunk.examples) if found is None else found

    def ask_ahead(self) -> None:
        """Asks for what comes after the batch in use."""
        steps = math.ceil(max(2 * self._latency, APART) / max(self._step, 1e-6))
        deep = max(self._least, min(steps, MAX_CHUNKS))
        if self._asked is None and len(self._ahead) <= deep // 2:
            self._asked = self._ask(deep - len(self._ahead))

    def end(self) -> None:
        """A pass has ended: gradients of its batches that were accumulated, and not pushed, will not be."""
        self._settle(everything=True)
        if self._done:
            self._calls.wait(self._ask(0))

    def stands(self) -> tuple[Position, ...]:
        """Asks where the dataset stands, pass by pass; nothing before it was asked for anything.

        To be called once all rounds that were sent are answered.
        """
        return self.look() if self._questions else ()

    def look(self) -> tuple[Position, ...]:
        """As `stands`, also before anything else was asked: then the dataset begins."""
        self._collect()
        self._settle()
        return tuple(map(self._sized, self._calls.wait(self._ask(0, looks=True)).positions))

    def _sized(self, position: Position) -> Position:
        """Says of whole batches how many examples they have, which servers do not know; leaves out empty ones."""
        sizes = (
            each if each.stop else Examples(each.index, 0, self.read(position.epoch, each).examples)
            for each in position.returned
        )
        return replace(position, returned=tuple(each for each in sizes if each.stop))

    def read(self, epoch: int, examples: Examples) -> Batch:
        """Returns a batch, or the part of one that was assigned."""
        if examples.index >= self._source.count():
            raise ValueError(
                f"batch {examples.index} of pass {epoch} was unfinished, but dataset {self._dataset} has "
                f"only {self._source.count()} batches; pass the dataset that was used when the checkpoint "
                "was saved"
            )
        batch = self._source.batch(epoch, examples.index)
        if not examples.stop:
            return batch
        first, stop = examples.first, min(examples.stop, batch.examples)
        return Batch(stop - first, lambda a, b: batch.rows(min(first + a, stop), min(first + b, stop)))

    def _settle(self, everything: bool = False) -> None:
        """Notes which batches are done: those whose rounds are answered, and those that need none."""
        self._done += self._sent
        self._sent.clear()
        keep = 0 if everything or not self._trains() else HELD_BACK
        over = max(len(self._in_use) - keep, 0)
        self._done += self._in_use[:over]
        del self._in_use[:over]

    def _collect(self) -> None:
        """Takes the answer to what was asked."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._ahead += self._calls.wait(asked).chunks

    def _ask(self, want: int, needs: bool = False, looks: bool = False) -> Future[Chunks]:
        self._questions += 1
        done, self._done = tuple(self._done), []
        back, self._back = tuple(self._back), []
        begins, restores = self._begins(), self._calls.restores()
        if self._told == (begins, restores):
            begins = ()  # server 0 knows it
        else:
            self._told = begins, restores
        count, number = self._source.count(), self._questions
        epoch, want = max(self._epoch, 0), min(want, MAX_CHUNKS)
        asked = time.monotonic()
        future = self._calls.ask(
            ChunkAsk(self._dataset, number, epoch, count, restores, begins, want, needs, done, back, looks)
        )
        future.add_done_callback(lambda _: self._note(time.monotonic() - asked))
        return future

    def _note(self, latency: float) -> None:
        self._latency = latency
