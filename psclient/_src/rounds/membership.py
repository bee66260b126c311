"""The group that makes rounds together, as one process sees it: who is in it, and where it stands.

A process takes part from the round that the log names. A newer generation, announced in a round's answer, is
taken in by every member at the same place of the program: at once if nobody is new in it, else where the
new members wait. Where workers are asynchronous, each makes rounds of its own, and what others do is nothing to it:
its pushes bear the generation in which it began.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import islice

from psclient._src.arrays.devices import Device
from psclient._src.data.group import ReplicaGroup
from psclient._src.data.progress import Pass
from psclient._src.network.chunk_calls import BatchCalls
from psclient._src.network.job_news import JobNews
from psclient._src.network.pacing import goes_on
from psclient._src.network.session import Session
from psclient._src.processes.departure import Departure
from psclient._src.processes.sigterm import NOTICE, Notice
from pswire.cluster import Task
from pswire.errors import ConfigError, Diverged, PSError, RoundTimeout
from pswire.model.changes import Change, change_of
from pswire.model.log import STEP, Examples, Generation, Member, Start
from pswire.telemetry import logging_setup

log = logging.getLogger("psclient")


class Group(ReplicaGroup):
    """The members of rounds, and this process's place among them. Used by the thread that runs cross-replica code.

    Args:
        session: this process's session, open.
        devices: the local replicas' devices.
        expected: the tasks that begin a job together, for messages.
        notice: whether this process was told to end.
    """

    def __init__(
        self, session: Session, devices: tuple[Device, ...], expected: Sequence[Task] = (), notice: Notice = NOTICE
    ) -> None:
        super().__init__(devices, has_servers=True)
        self.session = session
        self.departure = Departure(session.task, lambda each: session.number in each.by_session, notice)
        self.news = JobNews(session, self._told)
        self._be_as_all()
        self.round = 0
        """The next round of this process."""
        self.start = 0
        """The round from which it takes part, as the log says it."""
        self.generation: Generation | None = None
        """The newest generation that this process has taken in; None before it takes part."""
        self.apart = False
        """True while this process runs a closure, which no other does: nobody else creates the same variables."""
        self.saved = 0
        """Rounds of this process that only saved, which are no ticks of its clock."""
        self.given: tuple[int, int] | None = None
        """The last result of `slice`; None before its first call."""
        self.settle: Callable[[], object] = lambda: None
        """Takes in the answers of all rounds of this process; called where the program comes to a batch."""
        self._expected = tuple(expected)
        self._awaits = partial(_late, session.task, self._expected), partial(_word, session, self._expected)
        logging_setup.follow(lambda: (self.round, session.number))
        self._entered = False
        self._placed: tuple[Generation, int] | None = None  # the first replica's number in a generation
        self._over = 0  # rounds that are over, from 0 on, as answers have told it that came late
        self._taken_in = ""
        self._announced: Generation | None = None

    def _be_as_all(self) -> None:
        """Makes rounds as the session says; called where that has changed."""
        session = self.session
        self.alone = session.consistency.own_rounds
        """True if each worker makes rounds of its own."""
        self.chunk_calls = BatchCalls(session, lambda: 0 if self.late else self.restores + 1) if self.alone else None
        """Asks for batches that are handed out to workers that do."""
        self.passing = (lambda under_way: None) if session.clock is None else session.clock.note_pass
        self.leaves_out = session.consistency.drops

    # ---- For datasets ----

    def join(self, dataset: int) -> None:
        """Takes part from now on; a process that comes late waits until the others take it in."""
        self.settle()
        self.enter(f"dataset:{dataset}")

    def boundary(self, dataset: int) -> None:
        """Enters the join point before a batch: a newer generation may begin here; a process asked to end leaves."""
        self.settle()
        self._begin_step()
        self.enter(f"dataset:{dataset}")

    def slice(self) -> tuple[int, int]:
        """Returns the number of this process's first replica, and R; for an asynchronous worker 0 and L.

        Waits until all that begin together are there. A process that comes late has, until it takes part, the number
        that its task would have had.
        """
        if self.alone:
            return 0, len(self.devices)
        newest = self._newest
        if self._placed is None or self._placed[0] is not newest:
            self._placed = newest, _place_in(newest.members, self.session.task)
        self.given = self._placed[1], newest.replicas
        return self.given

    def share(self) -> tuple[int, int]:
        """Returns the number of this process's first replica among those that share the data, and their count.

        Asynchronous workers share the data as they were when the job began, or was last changed, so that a task which
        comes back gets its place again; one that was not there has no place, and gets nothing.

        Raises:
            ConfigError: the task came back with another number of replicas.
        """
        if not self.alone or self.coordinated:
            return self.slice()
        self.settle_in()
        sharers = self.news.sharers
        replicas = sum(member.replicas for member in sharers)
        place = next((member for member in sharers if member.task == self.session.task), None)
        if place is None:
            return replicas, replicas
        if place.replicas != len(self.devices):
            raise ConfigError(
                f"{place.task} has {len(self.devices)} replicas, but had {place.replicas} when the job "
                "began, and its share of the data depends on that number; start it with the same number of "
                "devices"
            )
        return _place_in(sharers, self.session.task), replicas

    def any_more(self, dataset: int) -> bool | None:
        """Returns what `Progress.any_more` does; of an asynchronous worker's rounds only its own batches count."""
        if not self._passes and self._taken_in == f"dataset:{dataset}":
            return True  # a process that is taken in before a batch knows that there is one
        self.settle()
        return super().any_more(dataset)

    def returned(self, dataset: int) -> tuple[Examples, ...]:
        """Returns what `Progress.returned` does, once all rounds of this process are answered."""
        self.settle()
        return super().returned(dataset)

    def excluded(self, dataset: int) -> bool:
        """Returns whether this process was left out of a round of updates with the batch in use.

        Waits for the answers of its rounds.
        """
        if not self.leaves_out:
            return False
        self.settle()
        return any(self.session.task in item.out for item in self._passes if item.dataset == dataset)

    def is_behind(self, dataset: int) -> bool:
        """Returns whether the round of updates that the next batch is for is over already, without this process."""
        return self.round < self._over and dataset in self._trained

    def deal(self, dataset: int, examples: Sequence[Examples]) -> None:
        """Told which examples each replica of all processes has in the batch that was taken; empty ones included."""
        rest = iter(examples)
        dealt = {
            member.task: tuple(each for each in islice(rest, member.replicas) if each.first < each.stop)
            for member in self._newest.members
        }
        next(item for item in self._passes if item.dataset == dataset).dealt = dealt

    @property
    def replicas(self) -> int:
        """R of the generation taken in; before that R of the first generation, once all that begin together are there.

        Of an asynchronous worker it is L, and waits for nobody.
        """
        return len(self.devices) if self.alone else self._newest.replicas

    @property
    def pipeline(self) -> tuple[int, int]:
        """This process's place among those that share the data, and how many they are; as `share` and `replicas`.

        Workers that run closures share no batches, and each has a place, whether it has come or not.
        """
        if self.coordinated:
            index, workers = self.session.task.index, [task for task in self._expected if task.job == "worker"]
            return (index, max(len(workers), index + 1)) if self.session.task.job == "worker" else (0, 1)
        generation = self._first_generation if self.alone else self._newest
        tasks = list(dict.fromkeys((*(member.task for member in generation.members), self.session.task)))
        return tasks.index(self.session.task), len(tasks)

    @property
    def late(self) -> bool:
        """True if the job began without this process: its variables are newer than any checkpoint."""
        return self._first_generation.session(self.session.number) is None

    @property
    def outside(self) -> bool:
        """True if the job began without this process, and it has not come to where the others are.

        A synchronous process that was taken in makes from then on the same calls as all.
        """
        return self.late and (self.alone or not self._entered)

    @property
    def leads(self) -> bool:
        """True if this process is the first of the group, in task order; of asynchronous workers always the same."""
        if self.alone:
            return self._first_generation.members[0].task == self.session.task
        self.settle_in()
        return self.generation is not None and self.generation.members[0].session == self.session.number

    def ahead(self) -> Sequence[Member]:
        """Returns those before this process, in task order, of the members that began the job with it.

        Empty once this process has made a round, for one that came late, and in a closure. Waits until all that begin
        together are there.
        """
        me = self.session.task
        if self.apart or self.round > self.start or me == min(self._expected, default=me) or self.late:
            return ()
        return [member for member in self._first_generation.members if member.task < me]

    def saves(self) -> bool:
        """Returns whether this process says, for those that make rounds together, what a checkpoint has but variables.

        The first in task order of those that began the job: who came later has not restored what it has. Where none
        of them is left, whoever has been there the longest.
        """
        if self.alone or self.generation is None or len(self.generation.members) == 1:
            return True
        gone = {member.session for member in self.session.ended()}
        here = [member.session for member in self.generation.members if member.session not in gone]
        began = [number for number in here if self._first_generation.session(number)]
        return self.session.number == next(iter(began), min(here, default=self.session.number))

    @property
    def has_chief(self) -> bool:
        """True if the chief runs the script, as this process does. Waits until all that begin together are there."""
        return any(member.task.job == "chief" for member in self._first_generation.members)

    @property
    def _first_generation(self) -> Generation:
        self.settle_in()
        return self.news.generations[min(self.news.generations)]

    @property
    def _newest(self) -> Generation:
        self.settle_in()
        return self.generation or self._first_generation

    # ---- For rounds ----

    def begin_run(self) -> None:
        """The program begins a `run`, outside of every section. Where no pass is under way that is a step."""
        if not self._passes:
            self._begin_step()

    def _begin_step(self) -> None:
        """Begins a step: adopts the generation in which members leave; `Departure` may end this process."""
        if self.apart:
            return  # a closure is finished first
        if (generation := self.due(STEP)) is not None:
            self.departure.save_for(generation)
            self._take_in(generation)
            self._await_return(generation)
        self.departure.look(self.generation, self.alone)

    def sent(self, trains: bool = False) -> Pass | None:
        """A round was sent: the next one is the next number. Returns the pass that it belongs to."""
        self.round += 1
        self._taken_in = ""
        return super().sent(trains)

    def answered(
        self, passed: Pass | None, newest: Generation | None, more: bool, out: Set[Task] = frozenset(), over: int = 0
    ) -> None:
        """Takes in what a round's answers said, the oldest round first.

        Called where all members take in the same rounds: what it changes, they all see from the same place on.

        Args:
            passed: as `sent` returned it.
            newest: the newest generation that the answers name; None where there are none.
            more: True if any member had a further batch.
            out: who was left out of it, if it is a round of updates, and there are backup workers.
            over: rounds that are over, from 0 on; 0 where this process was not left out.
        """
        self._over = max(self._over, over)
        if passed is not None:
            passed.any_more = more
            if out:
                self.come_back(passed, out)
        if self.alone:
            return
        if newest is not None and (self._announced is None or newest.number > self._announced.number):
            self._announced = newest
            if not newest.join_point:
                self._take_in(newest)

    def due(self, join_point: str) -> Generation | None:
        """Returns the generation whose new members begin at this join point, or None."""
        announced = self._announced
        if announced is None or announced.join_point != join_point:
            return None
        return announced if self.generation is None or announced.number > self.generation.number else None

    def enter(self, join_point: str) -> None:
        """Enters a join point, a place in the program where generations begin.

        Args:
            join_point: `dataset:<number>` before a batch of that dataset, `save` before a checkpoint, `plan:<hex>`
                before a round of that plan. An asynchronous worker only waits here until it takes part.
        """
        self.session.check()
        if due := (self.due(join_point) is not None):
            self.settle()  # new members begin with the values that all rounds before this place have left
        if self.generation is None:
            self._join(join_point)
            if self.late and self.session.clock is not None:
                self.session.clock.come_late()
        if self.session.clock is not None:
            self.round = goes_on(self.session, self.round - self.saved) + self.saved
        if due and (generation := self.due(join_point)) is not None:
            self._take_in(generation)
        self._entered = True

    def _take_in(self, generation: Generation) -> None:
        if self.generation is None or generation.number <= self.generation.number:
            return
        self.generation = generation
        self.news.readmit(generation)
        if generation.join_point and generation.join_point != STEP:  # where some leave nobody is new
            start = Start(generation.number, self.round, self.positions)
            self.session.propose(start=start)

    def _await_return(self, generation: Generation) -> None:
        """Where a generation tells of a server that comes back: hands over what it held, as all members do, and waits.

        The next round is made with it, or, if it could not be readmitted, without.
        """
        if (back := generation.awaited) is not None:
            self.session.hosting.moves = {**self.session.hosting.moves, back.server: back.address}
            self.departure.hand_over(back.path, "", back.generation)
            self.news.await_return(generation, back, self._take_in)

    def change(self, change: Change) -> bool:
        """Makes rounds in another way from now on, with all members, which come to this place as well.

        Waits until they have. All of this process's rounds are answered.

        Args:
            change: how; its number and its round are found here.

        Returns:
            False if this process has come late, and learns by this call only where the job is: the place of this call
            the others have behind them.

        Raises:
            Diverged: a member asks for another change, makes a round first, or does not come.
        """
        session = self.session
        if self.late and not self._entered and not (self.alone and self.generation is not None):
            if self.alone:
                self._join("")
            return False
        made, round = len(self.news.changed), self.round
        change = replace(change, number=made, round=round)
        if session.clock is not None:
            session.clock.rest()
            for index in session.hosting.live:
                session.heartbeat_now(index)
        session.propose(join_point=str(change))
        waits = partial(_never_came, session, self.news, change), partial(_word_of_change, session, self.news, change)
        deadline = session.deadline(session.timeouts.round_timeout)
        while len(self.news.changed) == made:
            self.news.follow(deadline, *waits)
        self.generation = self.news.changed[made]
        self.round = self.generation.start.round if self.generation.start else round
        self._announced, self._entered, self.saved = None, True, 0
        self._adopt()
        log.info("%s trains with %s from round %d, generation %d", session.task, change.said, self.round, made + 1)
        return True

    def _told(self) -> None:
        if self.generation is None:  # members come to a change themselves
            self._adopt()

    def _adopt(self) -> None:
        for generation in self.news.changed:
            if (change := change_of(generation)) is not None and self.session.move(change):
                self._be_as_all()

    def _join(self, join_point: str) -> None:
        asked = False
        self.settle_in()
        # Who comes late waits until the others come to the place where they take it in: as long as for a round.
        deadline = self.session.deadline(self.session.timeouts.round_timeout)
        while self.generation is None and not self._begin():
            if not (self.alone or asked):  # where each makes rounds of its own, as may have been till now, nobody waits
                self.session.propose(join_point=join_point)
                asked = True
                continue
            late, word = self._awaits if self.alone else _behind(join_point, self.session.task, self.news.others)
            with self.departure.notice.anywhere():
                self.news.follow(deadline, late, word)

    def settle_in(self) -> None:
        """Waits until the job has closed a generation; takes part at once if this process is in the first."""
        if self.generation is not None:
            return
        deadline = self.session.deadline(self.session.timeouts.start_timeout)
        while not self.news.generations:
            self.news.follow(deadline, *self._awaits)
        self._begin()

    def _begin(self) -> bool:
        for number in sorted(self.news.generations):
            generation = self.news.generations[number]
            start = generation.start or self.news.starts.get(number)
            if start is not None and generation.session(self.session.number):
                self.generation, self.round, self.start = generation, start.round, start.round
                self.news.readmit(generation)
                self._taken_in = generation.join_point
                if start.positions:
                    self.begin_at(start.positions)
                log.info("%s takes part from round %d, generation %d", self.session.task, self.round, number)
                return True
        return False


def _late(task: Task, expected: Sequence[Task]) -> RoundTimeout:
    missing = ", ".join(map(str, expected)) or "the others"
    return RoundTimeout(f"{task} waited too long to join the job; check that {missing} and the chief are running")


def _word(session: Session, expected: Sequence[Task]) -> str:
    here = {state.member.task for state in session.look().sessions if state.state == "open"}
    missing = [str(task) for task in expected if task not in here]
    return f"waits for {', '.join(missing)} to start" if missing else "waits for the chief to add it to the job"


def _awaited(session: Session, news: JobNews, change: Change) -> list[str]:
    """Returns the members that have not come to a change."""
    there: list[str] = []
    for state in session.look().sessions:
        asked = Change.parse(state.join_point)
        missing = state.state == "open" and news.newest.takes_part(state.member.session)
        if missing and (asked is None or asked.number != change.number):
            there.append(str(state.member.task))
    return there


def _word_of_change(session: Session, news: JobNews, change: Change) -> str:
    missing = ", ".join(_awaited(session, news, change)) or "the chief"
    return f"waits for {missing} in set_consistency({change.said})"


def _never_came(session: Session, news: JobNews, change: Change) -> PSError:
    missing = _awaited(session, news, change)
    if not missing:
        return RoundTimeout(
            f"set_consistency({change.said}) did not take effect in time; check that the chief is running"
        )
    error = Diverged(
        f"{session.task} called set_consistency({change.said}), and {', '.join(missing)} did not within "
        f"{session.timeouts.round_timeout:g} s (PS_ROUND_TIMEOUT); call it in every process at the same "
        "place of the program, with the same value"
    )
    session.end(error)
    return error


def _behind(
    join_point: str, task: Task, others: Callable[[], str]
) -> tuple[Callable[[], RoundTimeout], Callable[[], str]]:
    """Returns the error of a late process whose join point the others do not reach, and the text while it waits."""
    kind, _, which = join_point.partition(":")
    places = {"dataset": f"a batch of its dataset {which}", "save": "a save"}
    place = places.get(kind, "the compiled step that it begins with")

    def late() -> RoundTimeout:
        return RoundTimeout(
            f"{task} joined late and waited too long, because the others did not reach {place} again. A "
            "late process joins where its script begins: record no step before the training loop, and "
            "distribute each dataset once, not for each epoch"
        )

    return late, lambda: f"waits until {others()} reach {place} to join them"


def _place_in(members: Sequence[Member], task: Task) -> int:
    """Returns the number of a task's first replica among members; what it would be if it is none of them."""
    return sum(member.replicas for member in members if member.task < task)
