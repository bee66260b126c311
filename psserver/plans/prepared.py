"""Prepared plans: a plan with everything about its rounds that is computed once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from psserver.plans.batches import KernelBatch, PlanKernels, plan_kernels
from psserver.plans.layout import ContributionLayout, RowBytes, lay_out
from psserver.plans.memory import Need, plan_bytes
from psserver.plans.outline import Outline, outline
from psserver.plans.policy import Policy
from psserver.programs.kernels.kernels import Kernels
from pswire.api import Contribution
from pswire.errors import InvalidRequest
from pswire.model.consistency import Consistency
from pswire.model.log import Member
from pswire.model.plan import Operand, PlacedVariable, Plan, Reduction, Ref, Trim
from pswire.model.rows import ID_BYTES, KEY_BYTES, MAX_ROWS, row_bytes
from pswire.model.tables import ROWS
from pswire.model.tensor import TensorSpec

MAX_LAYOUTS = 64
"""Most layouts that a plan keeps, one per kind of contribution; beyond it, it forgets all of them."""


class PreparedPlan:
    """A plan as a server runs it. Each part is computed when it is first used.

    The constructor verifies the programs by themselves, which is slow for large ones, so it must run without the core's
    lock. The parts may be used once the plan is verified as a whole.

    Args:
        plan: the plan.
        server: the number of this server.
        limited: True if the server's memory is limited: then the needs of the programs are computed now.

    Attributes:
        is_alone: True if a worker may make a round of it alone, in a job whose workers make rounds together.
        compiled: what its rounds are compiled to, by kernels and weights; None for those that cannot be, and a word for
            one that has come once.

    Raises:
        ProgramError: a program cannot be run.
    """

    def __init__(self, plan: Plan, server: int, limited: bool = False) -> None:
        plan.check_programs()
        self.plan = plan
        self.server = server
        self._needs = [Need.of(program) for program in plan.programs] if limited else None
        self._layouts: dict[tuple[bool, tuple[bool, ...]], ContributionLayout] = {}
        self._newest: tuple[tuple[float, ...], bool, ContributionLayout | None] = ((), False, None)
        self._settled: dict[tuple[Kernels, int], PlanKernels] = {}
        self._policies: dict[Consistency, Policy] = {}
        self.is_alone = False
        self.compiled: dict[object, Any] = {}

    def look(self, variables: Mapping[int, PlacedVariable]) -> None:
        """Looks at the variables that it assigns, once it is verified."""
        written = {id for server in self.plan.servers for id in self.plan.writes(server)}
        self.is_alone = not self.orders and all(variables[id].spec.alone for id in written)

    @property
    def orders(self) -> bool:
        """True if its rounds order a checkpoint, or complete a restore."""
        return self.plan.snapshot is not None or self.plan.restore is not None

    def policy(self, consistency: Consistency) -> Policy:
        """Returns how rounds of it are made by members of one consistency."""
        found = self._policies.get(consistency)
        if found is None:
            found = Policy.of(self.plan, consistency, self.may_refuse, self.streams)
            self._policies[consistency] = found
        return found

    @cached_property
    def nbytes(self) -> int:
        """Most bytes that a round takes beside contributions and variables; 0 where memory is not limited."""
        return 0 if self._needs is None else plan_bytes(self.plan, self.server, self._needs)

    @cached_property
    def streams(self) -> bool:
        """True if contributions to its rounds are large enough to be used while they come."""
        return self.server in self.plan.streams

    @cached_property
    def may_refuse(self) -> bool:
        """Whether its rounds may fail by what they compute or restore, and not only by who is lost."""
        refuses = self.plan.restore is not None or any(program.may_refuse for program in self.plan.programs)
        return refuses or bool(self.plan.keys)  # a table may have a limit

    @cached_property
    def revotes(self) -> bool:
        """Whether servers run it before they vote, some of them: then all vote again where others count than ran."""
        return self.may_refuse or bool(self.plan.streams)

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """Numbers of the assigned variables, in the order in which their last values are ready."""
        return self.plan.writes(self.server)

    @cached_property
    def row_tables(self) -> frozenset[int]:
        """Numbers of the variables of which it assigns rows."""
        rows = (each for each in self.outline.applications if each.rows is not None and not each.rows.keyed)
        return frozenset(id for each in rows for id in each.assigned)

    @cached_property
    def inexact(self) -> frozenset[int]:
        """Numbers of the variables whose last bits depend on when updates that rows have missed are made up."""
        rows = ((each.assigned, each.rows) for each in self.outline.applications)
        return frozenset(id for ids, use in rows if use is not None and use.closed and use.tables for id in ids)

    @cached_property
    def makes_up(self) -> bool:
        """True if it may take long to make up what rows have missed."""
        return any(each.rows is not None and each.rows.tables for each in self.outline.applications)

    @cached_property
    def replaces(self) -> tuple[int, ...]:
        """Numbers of the variables that it assigns as a whole."""
        return tuple({id: None for each in self.outline.applications if each.rows is None for id in each.assigned})

    @cached_property
    def trims(self) -> tuple[Trim, ...]:
        """The dynamic tables of this server that are cut."""
        return tuple(trim for trim in self.plan.trims if self.server in trim.servers)

    @cached_property
    def tables(self) -> frozenset[int]:
        """Numbers of the variables, tensors of dynamic tables, that it updates or cuts here."""
        keyed = (each for each in self.outline.applications if each.rows is not None and each.rows.keyed)
        updated = frozenset(id for each in keyed for id, _, shape in each.variables if shape[:1] == (ROWS,))
        return updated | {trim.variable for trim in self.trims}

    @cached_property
    def operands(self) -> list[tuple[Ref, Operand]]:
        """The operands that this server takes."""
        found = enumerate(self.plan.operands)
        return [(Ref("operand", index), operand) for index, operand in found if self.server in operand.servers]

    @cached_property
    def given(self) -> list[tuple[Ref, TensorSpec]]:
        """The values that this server returns to every member, with their specs, but for reduced rows."""
        return self.plan.given(self.server)

    @cached_property
    def given_rows(self) -> tuple[int, ...]:
        """Numbers of the reductions whose rows this server returns to every member."""
        return tuple(ref.index for ref, _ in self.plan.given_rows(self.server))

    @cached_property
    def outline(self) -> Outline:
        """The steps of a round."""
        return outline(self.plan, self.server)

    def layout(self, said: Contribution) -> ContributionLayout:
        """Returns the layout of a contribution. In nearly every round all contributions have the same."""
        weights, observes, found = self._newest
        if found is None or said.weights != weights or said.observes is not observes:
            key = said.observes, tuple(map(bool, said.weights))
            found = self._layouts.get(key)
            if found is None:
                if len(self._layouts) >= MAX_LAYOUTS:
                    self._layouts.clear()
                found = self._layouts[key] = lay_out(self.plan, self.server, self.outline.needs, said)
            self._newest = said.weights, said.observes, found
        if not said.rows or said.observes:
            return found
        sent = zip(self.row_bytes, said.rows, strict=True)
        there = [(each, count) for each, count in sent if each.values >= 0 and said.weights[each.reduction]]
        return found.with_rows(there)

    @cached_property
    def row_bytes(self) -> list[RowBytes]:
        """The bytes of one row of each reduction of rows."""
        found = [(number, self.plan.reductions[number]) for number in self.plan.rows]
        return [
            RowBytes(
                number,
                KEY_BYTES if each.form == "keys" else ID_BYTES,
                self._row_bytes(each) if self.server in each.servers else -1,
            )
            for number, each in found
        ]

    @staticmethod
    def _row_bytes(reduction: Reduction) -> int:
        return row_bytes(reduction.tensor) if reduction.codec is None else reduction.codec.row_bytes(reduction.tensor)

    def check(self, said: Contribution, size: int, sender: Member | None = None) -> None:
        """Raises `InvalidRequest` if a contribution with a payload of this size does not fit the plan.

        An asynchronous `sender` makes each round alone: beside those that count also one that counts as no step.
        """
        reductions = self.plan.reductions
        if said.alone and (self.orders or not (self.is_alone or (sender is not None and sender.alone))):
            raise InvalidRequest(
                "a round of a single worker may use only variables created with ps.Async(), but this compiled step "
                "uses others; all workers must run it together"
            )
        if said.parts and not self.plan.sums:
            raise InvalidRequest("gradients of this compiled step cannot be summed before they reach the server")
        if not said.observes and (len(said.rows) != len(self.plan.rows) or max(said.rows, default=0) > MAX_ROWS):
            raise InvalidRequest(
                f"a push has row counts {said.rows[:8]} for a compiled step with {len(self.plan.rows)} reductions of "
                f"rows; the limit is {MAX_ROWS} rows each"
            )
        fits = len(said.weights) == len(reductions)
        expected = self.layout(said).size if fits else -1
        if size != expected:
            here = sum(self.server in reduction.servers for reduction in reductions)
            raise InvalidRequest(
                f"a push of {size} bytes and {len(said.weights)} weights does not fit a compiled step with "
                f"{f'{expected} bytes and ' if fits else ''}{len(reductions)} reductions, {here} of them on this "
                "server"
            )

    @cached_property
    def computed(self) -> int:
        """Bytes of all that the programs of a round read and compute here, one op at a time; without those of rows.

        And of what is decoded for them.
        """
        whole = (each for each in self.outline.applications if each.rows is None and each.measured is None)
        reduced = (self.plan.reductions[number] for number in self.plan.compressed)
        decoded = sum(each.tensor.nbytes for each in reduced if self.server in each.servers and each.form == "dense")
        return decoded + sum(spec.nbytes for each in whole for spec in each.program.specs)

    def settled(self, kernels: Kernels, count: int) -> PlanKernels | None:
        """Returns how kernels run it, as of `batches`; None while kernels may still come."""
        return self._settled.get((kernels, count))

    def batches(self, kernels: Kernels, count: int) -> Mapping[int, KernelBatch]:
        """Returns the batches, each under the numbers of all its applications.

        Keeps them once all kernels are compiled.

        Args:
            kernels: the kernels that run them.
            count: number of contributors to each reduction.
        """
        if kernels.device.gpu is not None or not count:
            return {}
        found = self._settled.get((kernels, count))
        if found is None:
            found = plan_kernels(self.plan, self.outline.applications, kernels, count)
            if found.settled:
                self._settled[kernels, count] = found
        return found.batches
