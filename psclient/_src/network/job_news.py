"""What a process reads in the log of its job: generations, checkpoints, servers that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from psclient._src.network.patience import Deadline
from psclient._src.network.session import Session
from pswire.api import Watched
from pswire.cluster import Task
from pswire.errors import PSError, RoundTimeout, ServerLost
from pswire.model.changes import change_of
from pswire.model.log import (
    Approved,
    Generation,
    GenerationClosed,
    Gone,
    Member,
    Return,
    Snapshotted,
    Start,
    Started,
)


class JobNews:
    """What this process has read in server 0's log. Used by the thread that runs cross-replica code.

    Args:
        session: this process's session, open.
        told: called when news have come.

    Attributes:
        followed: the number of entries that it has read.
        generations: all generations, by number.
        starts: places at which new members of a generation begin, as an older one has said it, by the generation's
            number.
        snapshots: checkpoints that are complete, or failed, and were not asked for yet, by their plan.
        saves: plans that ordered a checkpoint which is neither complete nor failed.
        changed: the generations that began with a change of consistency, in order.
        returned: servers that came back, and were not readmitted yet: by which generation, how, and after how many
            losses.
    """

    def __init__(self, session: Session, told: Callable[[], object]) -> None:
        self._session, self._told = session, told
        self.followed = 0
        self.generations: dict[int, Generation] = {}
        self.starts: dict[int, Start] = {}
        self.snapshots: dict[bytes, Snapshotted] = {}
        self.saves: set[bytes] = set()
        self.changed: list[Generation] = []
        self.returned: list[tuple[Generation, Return, int]] = []
        self._losses = Counter[int]()  # how often each server was lost

    def follow(self, deadline: Deadline, late: Callable[[], PSError], word: Callable[[], str]) -> None:
        """Reads on, waiting for the log to grow; the arguments are those of `Session.wait`."""
        self.take(self._session.ask_keeper(partial(self._session.follow, self.followed), deadline, late, word))

    def take(self, watched: Watched) -> None:
        """Takes in the next entries; raises `ServerLost` where the log is another one than before."""
        if watched.start < self.followed:
            error = ServerLost("the servers hold a new job; restart this process")
            self._session.end(error)
            raise error
        self.followed = watched.start + len(watched.entries)
        for entry in watched.entries:
            match entry:
                case GenerationClosed():
                    self.generations[entry.generation.number] = entry.generation
                    self.changed += [entry.generation] if change_of(entry.generation) else []
                    if (back := entry.generation.returns) is not None and back.ready:
                        self.returned.append((entry.generation, back, self._losses[back.server]))
                case Gone():
                    self._losses[entry.server] += 1
                case Started():
                    self.starts[entry.start.generation] = entry.start
                case Approved() if entry.plan.snapshot is not None:
                    self.saves.add(entry.plan.id)
                case Snapshotted():
                    self.snapshots[entry.plan_id] = entry
                    self.saves.discard(entry.plan_id)
        self._told()

    def snapshotted(self, plan_id: bytes, deadline: Deadline) -> Snapshotted:
        """Waits until the checkpoint that a plan ordered is complete, or failed."""
        while plan_id not in self.snapshots:
            self.follow(deadline, _incomplete, self._word_of_saves)
        return self.snapshots.pop(plan_id)

    def is_snapshotted(self, plan_id: bytes) -> bool:
        """Returns whether the checkpoint that a plan ordered is complete, or failed, as of now."""
        self.take(self._session.look(self.followed))
        return plan_id in self.snapshots

    def settle_saves(self) -> None:
        """Waits until all checkpoints that were ordered are complete, or failed: also those of before this process."""
        deadline = self._session.deadline(self._session.timeouts.round_timeout)
        known = self._session.log_status().log
        while self.followed < known or self.saves:
            self.follow(deadline, _incomplete, self._word_of_saves)

    def _word_of_saves(self) -> str:
        """Servers write their parts, then the chief has the manifest written."""
        servers = zip(self._session.hosting.live, self._session.live, strict=True)
        writing = [str(Task("ps", i)) for i, one in servers if any(each.nbytes for each in one.status().saving)]
        return f"waits for {', '.join(writing) or 'the chief'} to complete a checkpoint"

    def readmit(self, generation: Generation) -> None:
        """Goes on with the servers that are back by a generation that was taken in, or an earlier one."""
        returned = self.returned
        self.returned = [each for each in returned if each[0].number > generation.number]
        for by, back, times in returned:
            if by.number <= generation.number:
                self._session.take_back(back, times)

    def await_return(self, generation: Generation, back: Return, take_in: Callable[[Generation], object]) -> None:
        """Waits for a server that comes back, and takes in the generations until members go on with it or without."""
        task, session = Task("ps", back.server), self._session
        deadline = session.deadline(session.timeouts.round_timeout)
        late = RoundTimeout(
            f"{session.task} waited too long for {task} to be readmitted; check that the chief is running"
        )
        word = f"waits for {task}, which is being readmitted, to read its variables"
        while generation.awaited is not None:
            self.follow(deadline, lambda: late, lambda: word)
            generation = self.after(generation)
            take_in(generation)

    def others(self) -> str:
        """Returns the other members of the newest generation, in words."""
        tasks = [str(member.task) for member in self.newest.members if member.task != self._session.task]
        return ", ".join(tasks) or "the others"

    @property
    def newest(self) -> Generation:
        """The newest generation that it has read of."""
        return self.generations[max(self.generations)]

    def after(self, generation: Generation) -> Generation:
        """Returns the generation that members go on with who wait, since one tells of a server that comes back.

        It is the first that ends their wait, and not one after it, by which they would wait for the next server; as
        long as there is none the newest.
        """
        newer = (self.generations[number] for number in sorted(self.generations) if number > generation.number)
        return next((each for each in newer if each.awaited is None), self.newest)

    @property
    def sharers(self) -> list[Member]:
        """The members that share the data where each makes rounds of its own, in task order.

        Those that began the job, and those that were there when it was changed.
        """
        found = {member.task: member for member in self.generations[min(self.generations)].members}
        for generation in self.changed[-1:]:
            found |= {member.task: member for member in generation.members}
        return [found[task] for task in sorted(found)]


def _incomplete() -> RoundTimeout:
    return RoundTimeout("the checkpoint was not completed in time; check that the chief is running")
