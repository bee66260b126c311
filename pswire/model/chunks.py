"""Chunks: batches of a dataset that server 0 hands out to asynchronous workers, whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.model.log import Examples, Position


@dataclass(frozen=True)
class Chunk:
    """Some examples of a batch, or all of it, that a worker was given.

    Attributes:
        ticket: the number of this handing out: the same examples, handed out again, have another one.
        epoch: the pass over the dataset that it belongs to; maybe an earlier one than that in which the worker is.
        examples: which examples; with `stop` 0 the whole batch.
    """

    ticket: int
    epoch: int
    examples: Examples


@dataclass(frozen=True)
class ChunkAsk:
    """What a worker asks of a dataset, and tells of it.

    Attributes:
        dataset: the dataset's number, in the order in which the script distributed its datasets.
        number: the number of the question, from 1, of this session about this dataset.
        epoch: the pass in which the worker is.
        count: batches of a pass.
        restores: one more than the checkpoints that the worker has restored; 0 for one that came to a running job,
            which goes along with the others.
        begins: where the dataset began, or was restored to, pass by pass.
        want: the chunks that it wants, with what it can go on for a while; 0 for none.
        needs: True if it has none any more: it gets one, if there is one.
        done: tickets of chunks that are done.
        back: tickets of chunks that it gives back.
        looks: True if it wants to know where the dataset stands.
    """

    dataset: int
    number: int
    epoch: int
    count: int
    restores: int = 0
    begins: tuple[Position, ...] = ()
    want: int = 0
    needs: bool = False
    done: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    looks: bool = False


@dataclass(frozen=True)
class Chunks:
    """The answer to a worker that asks for chunks.

    Attributes:
        chunks: its chunks, in order.
        over: True if nothing is left of the pass that could be handed out now.
        positions: where the dataset stands, pass by pass, for who wants to know. What is handed out and not done is
            among `returned`, as what waits to be handed out again; with `stop` 0 it is a whole batch.
    """

    chunks: tuple[Chunk, ...] = ()
    over: bool = False
    positions: tuple[Position, ...] = ()
