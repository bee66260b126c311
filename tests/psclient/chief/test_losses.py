"""Servers that are lost one after the other, as a chief tells of them: all processes hear of them in one order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from psclient._src.chief.job_state import JobState
from psclient._src.chief.losses import Losses
from psclient._src.transport.hosting import Hosting
from pswire.cluster import Task
from pswire.errors import ServerGone, ServerLost
from pswire.limits import Timeouts
from pswire.model.log import Gone, Lost

SERVERS = [SimpleNamespace(task=Task("ps", index)) for index in range(4)]


def lost(server):
    return ServerLost("was lost; restart from a checkpoint", str(Task("ps", server)))


class JobLog:
    """A log of which each server of `dying` tells this process, and whose chief has no answer, as it dies then."""

    def __init__(self, hosting, dying):
        self.state, self.hosting, self.dying = JobState(), hosting, list(dying)

    def lose(self, losses, more, seconds):
        if self.dying:
            keeper, tells = self.dying.pop(0)
            if tells:
                self.hosting.lose([Gone(server, "was lost") for server in self.state.losses] + list(losses))
            raise lost(keeper)
        self.state.take([*losses, *more])
        self.hosting.lose([entry for entry in self.state.log if isinstance(entry, Gone)])


@pytest.fixture
def hosting():
    return Hosting(Task("chief", 0), SERVERS)


def told(hosting, *errors, dying=()):
    """What the log tells of in the end."""
    log = JobLog(hosting, dying)
    session = SimpleNamespace(hosting=hosting, copied=True, timeouts=Timeouts())
    for error in errors:
        Losses(SERVERS, session, log).go_on_without(error)
    return [entry.server for entry in log.state.log if isinstance(entry, Gone)]


def test_one_is_told_once(hosting):
    """However often it is found."""
    assert told(hosting, lost(1), ServerGone("is gone", "/job:ps/task:1"), lost(1)) == [1]
    assert hosting.gone == {1}
    assert hosting.live == (0, 2, 3)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_the_one_that_is_told_is_lost_as_well(hosting, first, second, tells):
    """It may have told processes of the first one, though nobody has told the chief that it has."""
    assert told(hosting, lost(first), dying=[(second, tells)]) == [first, second]
    assert hosting.losses == (first, second)
    assert hosting.live == (0, 2)


def test_what_others_have_found_is_told_as_well(hosting):
    """In one step, after what a server may have told already."""
    hosting.suspect(0, lost(0), True)
    assert told(hosting, lost(2), dying=[(1, False)]) == [0, 2, 1]


def test_what_the_chief_before_has_told_comes_first(hosting):
    """This process has heard of server 3 from a server that is lost since, whose successor does not know."""
    hosting.lose([Gone(3, "was lost")])
    assert told(hosting, lost(1)) == [3, 1]
    assert hosting.losses == (3, 1)


def test_the_last_one_cannot_be_lost(hosting):
    """Nor one without copies: its error stands."""
    with pytest.raises(ServerLost, match="restart from"):
        told(hosting, *map(lost, range(4)))
    bare = Losses(SERVERS, SimpleNamespace(hosting=hosting, copied=False, timeouts=Timeouts()), JobLog(hosting, ()))
    with pytest.raises(ServerLost, match="restart from"):
        bare.go_on_without(lost(1))


def test_what_has_no_copy_ends_the_job(hosting):
    """The log tells of that as well."""
    log = JobLog(hosting, ())
    log.state.variables.append(SimpleNamespace(servers=(1, 2)))
    session = SimpleNamespace(hosting=hosting, copied=True, timeouts=Timeouts())
    Losses(SERVERS, session, log).go_on_without(lost(1))
    with pytest.raises(ServerLost):
        Losses(SERVERS, session, log).go_on_without(lost(2))
    assert log.state.log == [
        Gone(1, "was lost"),
        Gone(2, "was lost"),
        Lost(2, "was lost; so were its copies"),
    ]
