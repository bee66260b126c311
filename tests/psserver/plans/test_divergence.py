"""Sections in words: two that differ are told apart, however alike they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from psserver.plans.divergence import LONG, PlanText, compared
from psserver.state.sessions import diverged
from pswire.errors import Diverged
from pswire.model.plan import PlacedVariable, Ref, SnapshotOrder, VariableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.programs import plan_of, traced
from tests.kit.rig import SOON, WORKERS, Job, serving

SPEC = TensorSpec("float32", (3,))
VARIABLES = {
    0: PlacedVariable(0, VariableSpec("vee", SPEC), (0,)),
    1: PlacedVariable(1, VariableSpec("uu", SPEC), (0,)),
}


def plan(fn, values=(SPEC,), variables=(SPEC,)):
    return plan_of(traced(fn, variables, values)[0])


BASE = plan(lambda v, g: v.assign(v - g))


def other_server():
    (reduction,) = BASE.reductions
    return replace(BASE, reductions=(replace(reduction, servers=(1,)),))


def one_update_more():
    more = plan(lambda u: u.assign(u * np.ones(3, "float32")), values=())
    (apply,) = more.applies
    apply = replace(apply, program=1, args=(Ref("variable", 1), Ref("operand", 0)))
    applies, programs = (*BASE.applies, apply), (*BASE.programs, *more.programs)
    return replace(BASE, operands=more.operands, programs=programs, applies=applies)


DIFFERENT = {
    "another op": (
        plan(lambda v, g: v.assign(v + g)),
        "#2 = subtract(#0 float32[3], #1 float32[3])",
        "#2 = add(#0 float32[3], #1 float32[3])",
    ),
    "another order": (plan(lambda v, g: v.assign(g - v)), "subtract(#0", "subtract(#1"),
    "one op more": (plan(lambda v, g: v.assign(np.sqrt(v - g))), "assigns #2 to variable 'vee'", "#3 = sqrt(#2"),
    "another reduction": (plan(lambda v, g: v.assign(v - g.astype("float32")), [TensorSpec("int8", (3,))]), "", "int8"),
    "an operand more": (
        plan(lambda v, g: v.assign(v - g * np.ones(3, "float32"))),
        "computes #2 = subtract(",
        "takes operand 0, float32[3], as #2",
    ),
    "an update more": (one_update_more(), "nothing more", "update 1 of variable 'uu' on /job:ps/task:0 takes variable"),
    "another server": (other_server(), "on /job:ps/task:0", "on /job:ps/task:1"),
    "something given back": (replace(BASE, returned=(Ref("reduction", 0),)), "nothing more", "reduction 0 comes back"),
    "another checkpoint": (replace(BASE, snapshot=SnapshotOrder("x", (0,), 7)), "nothing more", "'x' of round 7"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_sections_that_differ_are_told_apart(name):
    """Each position says what its process does where the two first differ, and not what they do alike."""
    other, mine, its = DIFFERENT[name]
    assert other.id != BASE.id
    one, two = compared([PlanText(BASE, VARIABLES), PlanText(other, VARIABLES)])
    assert mine in one.partition("[where they first differ: ")[2]
    assert its in two.partition("[where they first differ: ")[2]
    told = str(diverged(4, zip(WORKERS, [PlanText(BASE, VARIABLES), PlanText(other, VARIABLES)], strict=False)))
    assert one in told
    assert two in told


def test_attributes_are_told_apart():
    """An axis is part of an op."""
    one, two = (plan(lambda v, g, axis=axis: np.sum(g, axis=axis), [TensorSpec("float32", (3, 3))]) for axis in (0, 1))
    told = compared([PlanText(one, VARIABLES), PlanText(two, VARIABLES)])
    assert ["axis=0" in told[0], "axis=1" in told[1]] == [True, True]


def test_what_is_not_known_is_left_as_it_is():
    """A server that has only heard of a section cannot say what is in it."""
    words = [PlanText(BASE, VARIABLES), "a later section"]
    assert compared(words) == words


def test_a_long_section_is_cut():
    """A message stays one that people read; a short section is whole."""
    many = replace(BASE, applies=BASE.applies * 1000)
    assert len(PlanText(many, VARIABLES)) < LONG + 10
    assert PlanText(BASE, VARIABLES) == BASE.describe(VARIABLES)


@pytest.mark.parametrize("beats", [False, True], ids=["in a round", "by beats"])
def test_processes_with_different_functions_are_told_which(tmp_path, beats):
    """Both update the same variable, and would read the same words twice otherwise."""
    with serving("core", 1, tmp_path) as servers:
        job = Job(servers)
        two = job.join(*WORKERS[:2])
        job.variable(two[0], np.zeros(3, "float32"), name="vee")
        other = DIFFERENT["another op"][0]
        for section in (BASE, other):
            job.approve(section, two[0])

        def at(worker, section):
            if beats:
                return servers.verbs[0].beat(worker.session, 0, section.id)
            return worker.push(section, [np.ones(3, "float32")])

        at(two[0], BASE)
        with pytest.raises(Diverged, match=r"= subtract\(.*= add\("):
            at(two[1], other).result(SOON)
