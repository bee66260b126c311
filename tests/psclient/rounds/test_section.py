"""One section by itself: where its reductions are made, what comes back, and whose values it takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import psclient as ps
from psclient._src.distribute.reduction import combine
from psclient._src.rounds.section import Section

VALUE = np.full(2, 7.0)


@ps.update_function
def doubled(x):
    return x + x


def reduced(*places):
    """A section of three servers that has reduced a pair for each place; whatever is asked of it is `VALUE`."""

    def send(section):
        found = dict.fromkeys(section.outgoing().plan.returned, VALUE)
        section.sent(lambda: found)

    section = Section(3, send)
    return section, [section.reduce(combine("sum", [np.ones(2)], frozenset(), None), place) for place in places]


def test_a_reduction_without_a_place_gets_it_where_it_is_used():
    """And not where other reductions are; one that has a place keeps it."""
    section, (here, anywhere) = reduced((0,), None)
    section.apply((2,), doubled, (anywhere,), {})
    section.apply((0,), doubled, (here,), {})
    assert [reduction.servers for reduction in section.outgoing().plan.reductions] == [(0,), (2,)]


def test_a_reduction_that_nothing_uses_is_made_beside_the_rest():
    """Where another one is made, or a program runs, so that the round has one server less."""
    reducing, _ = reduced(None, (2,))
    updating, _ = reduced(None)
    updating.apply((1,), doubled, (np.ones(2),), {})
    assert [section.outgoing().plan.reductions[0].servers for section in (reducing, updating)] == [(2,), (1,)]


def test_a_reduction_without_a_place_comes_back():
    """Though a program takes it, and nobody has looked at it before the section ends."""
    section, (anywhere,) = reduced(None)
    section.apply((2,), doubled, (anywhere,), {})
    assert section.outgoing().plan.returned == (anywhere.ref,)


def test_what_a_program_takes_does_not_come_back():
    """Of what nobody has asked for, the program may still look only at what was made last."""
    section, (total,) = reduced((0,))
    made = section.apply((0,), doubled, (total,), {})
    section.give_back_unused()
    assert section.outgoing().plan.returned == (made.ref,)


def test_a_value_of_another_section_is_an_operand():
    """That section ends, and this one sends what came back: a reference would name something of its own."""
    other, (total,) = reduced((0,))
    section, _ = reduced((0,))
    section.apply((0,), doubled, (total,), {})
    assert other.flushed
    assert [array.tolist() for array in section.outgoing().operands] == [VALUE.tolist()]


def test_a_thread_that_did_not_open_a_section_does_not_end_it():
    """It may look at a value once the section is sent."""
    section, (total,) = reduced((0,))
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(RuntimeError, match="another thread has opened a section"):
            other.submit(np.asarray, total).result()
        assert not section.flushed
        assert np.asarray(total).tolist() == other.submit(np.asarray, total).result().tolist() == VALUE.tolist()
