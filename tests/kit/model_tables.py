"""Tables in a model of rounds: the rows that each contribution brings, and what the tables are after each round.

Each server has two. To one of them rounds add rows. To the other they add rows, and 1 to every element: an update that
all other rows miss, and that is made up later, or at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from psclient._src.distribute.reduction import SentRows
from psserver.state.missed import whole
from psserver.state.variables import Store
from pswire.api import Contribution, RowRead
from pswire.model.plan import Apply, Plan, Reduction, Ref, Sparse
from pswire.model.program import Input, Node, Program
from pswire.model.rows import Rows, row_specs
from pswire.model.tensor import Array, TensorSpec
from pswire.transport.payload import Payload
from tests.kit.rig import adding

SIZE = 5
NUMBER, TABLE = TensorSpec("int64", ()), TensorSpec("int64", (SIZE, 2))
PRIME = (1 << 53) - 111

Kind = int
ADDS, TICKS = KINDS = (0, 1)

TICKING = Program(
    (Input("variable", TABLE), Input("value", TABLE), Input("operand", NUMBER)),
    (Node("add", (0, 1)), Node("add", (3, 2))),
    ((0, 4),),
    (),
)

Name = tuple[int, Hashable, int]
"""A round of a server: the server, whose round, its number."""


class Tables:
    """The tables of all servers, as they should be.

    Args:
        servers: how many there are.
        first: the variable that is the first one's table; tables follow one another by kind, then by server.
    """

    def __init__(self, servers: int, first: int) -> None:
        self._servers, self._first = servers, first
        self._states = [[{kind: np.zeros(TABLE.shape, np.int64) for kind in KINDS}] for _ in range(servers)]
        self._known = [0] * servers  # states that there were when a server was last looked at
        self._after: dict[Name, int] = {}  # the state after a round
        self._least: dict[Name, Mapping[Kind, Array]] = {}
        self._given: dict[tuple[Name, int], dict[Kind, Rows]] = defaultdict(dict)
        self._seen = set[object]()

    # ---- Sections ----

    def variable(self, kind: Kind, server: int) -> int:
        """The number of a table's variable."""
        return self._first + kind * self._servers + server

    def _kind(self, variable: int) -> Kind:
        return (variable - self._first) // self._servers

    def updated(self, plan: Plan, ways: Mapping[Kind, Sparse], returned: bool) -> Plan:
        """A plan that updates tables of its servers as well.

        Args:
            plan: has one operand, which is 1.
            ways: the tables, with what the update is to other rows.
            returned: whether the sums of rows are given back.
        """
        reductions, applies, programs, given = [*plan.reductions], [*plan.applies], [*plan.programs], [*plan.returned]
        for kind, way in ways.items():
            programs.append(TICKING if kind == TICKS else adding(TABLE))
            for server in plan.servers:
                rows = Ref("reduction", len(reductions))
                args = (Ref("variable", self.variable(kind, server)), rows, *[Ref("operand", 0)] * (kind == TICKS))
                applies.append(Apply(len(programs) - 1, (server,), args, way))
                reductions.append(Reduction("sum", TABLE, (server,), "a table", "rows"))
                given += [rows] * returned
        lists = (tuple(found) for found in (reductions, applies, programs, given))
        return replace(plan, **dict(zip(("reductions", "applies", "programs", "returned"), lists, strict=True)))

    def drawn(self, number: int, luck: Random) -> SentRows | None:
        """Rows of one contribution; a number that is given once tells whose they are. Some are none, some nothing."""
        if number % 5 == 0:
            return None
        ids = np.array(sorted(luck.sample(range(SIZE), luck.randrange(SIZE + 1) if number % 5 > 1 else 0)), np.int64)
        values = [[pow(3, (number * SIZE + id) * 2 + column, PRIME) for column in range(2)] for id in ids.tolist()]
        return SentRows(ids, np.array(values, np.int64).reshape(-1, 2))

    # ---- What servers do ----

    def came(self, name: Name, plan: Plan, said: Contribution, payload: Payload) -> None:
        """A contribution begins to arrive."""
        server, _, _ = name
        here = [(place, reduction) for place, reduction in enumerate(plan.reductions) if server in reduction.servers]
        dense = [place for place, reduction in here if reduction.form == "dense" and said.weights[place]]
        sent = {
            place: n
            for place, n in zip(plan.rows, said.rows, strict=False)
            if n and (place, plan.reductions[place]) in here
        }
        tensors = (
            payload.tensors([NUMBER] * (1 + len(dense)) + [spec for n in sent.values() for spec in row_specs(TABLE, n)])
            if sent
            else []
        )
        found = iter(tensors[1 + len(dense) :])
        updates = {ref.index: apply for apply in plan.applies for ref in apply.args if ref.kind == "reduction"}
        for place in sent:
            kind = self._kind(updates[place].args[0].index)
            self._given[name, said.session][kind] = Rows(next(found), next(found))

    def looked_at(self, server: int) -> None:
        """All rounds of a server are counted: those that are counted next ran since, in any order."""
        self._known[server] = len(self._states[server]) - 1

    def count(self, name: Name, plan: Plan | None, counted: Collection[int], ran: bool) -> None:
        """A round is over; it has these contributions."""
        server, _, _ = name
        states = self._states[server]
        own = {kind: self._sum(name, kind, counted) for kind in KINDS}
        if ran and TICKS in self._updated(plan, server):
            own[TICKS] += 1
        states.append({kind: states[-1][kind] + own[kind] for kind in KINDS})
        self._after[name] = len(states) - 1
        self._least[name] = {
            kind: states[self._known[server]][kind] + own[kind] for kind in self._updated(plan, server)
        }

    def _updated(self, plan: Plan | None, server: int) -> set[Kind]:
        """The tables of a server that a plan updates."""
        assigned = {apply.args[0].index for apply in plan.applies} if plan is not None else set()
        return {kind for kind in KINDS if self.variable(kind, server) in assigned}

    def _sum(self, name: Name, kind: Kind, counted: Collection[int]) -> Array:
        total = np.zeros(TABLE.shape, np.int64)
        for session in counted:
            if kind in self._given[name, session]:
                rows = self._given[name, session][kind]
                total[rows.ids] += rows.values
        return total

    # ---- Laws ----

    def check(self, server: int, store: Store) -> None:
        """The tables are the sums of the rounds that counted, each row as often as it was given."""
        for kind in KINDS:
            variable = self.variable(kind, server)
            if store.initialized(variable):
                found = whole(store.views([variable])[0])
                assert np.array_equal(found, self._states[server][-1][kind]), "a row is not the sum of its rounds"

    def check_given(self, name: Name, plan: Plan, counted: Collection[int], given: Sequence[Array]) -> None:
        """The rows that a round gives back are the sums of what counted, each place once."""
        server, _, _ = name
        arrays = iter(given)
        for ref, _ in plan.given_rows(server):
            (kind,) = {self._kind(apply.args[0].index) for apply in plan.applies if ref in apply.args}
            own = [self._given[name, session][kind] for session in counted if kind in self._given[name, session]]
            ids, values = next(arrays), next(arrays)
            assert ids.tolist() == sorted({id for rows in own for id in rows.ids.tolist()})
            assert np.array_equal(values, self._sum(name, kind, counted)[ids])

    def check_answer(
        self, name: Name, answer: object, reads: Sequence[RowRead], rows: Sequence[Array], alone: bool
    ) -> None:
        """Rows that come with an answer are those after its round; where it is asked again, perhaps of a later one."""
        if answer in self._seen:
            return
        self._seen.add(answer)
        server, _, _ = name
        states = self._states[server][self._after[name] :]
        for read, found in zip(reads, rows, strict=True):
            kind, ids = self._kind(read.variable), read.numbers()
            if alone:  # its own, and of the others' those before it; which of the next are in it, nobody says
                assert (self._least[name][kind][ids] <= found).all(), "rows of before their round"
                assert (found <= states[-1][kind][ids]).all()
            else:
                assert any(np.array_equal(found, state[kind][ids]) for state in states), "rows of no round since"

    def check_read(self, server: int, variable: int, ids: Array, rows: Array) -> None:
        """Rows that a member reads are those of the last round: there is no later one without it."""
        assert np.array_equal(rows, self._states[server][-1][self._kind(variable)][ids]), "rows of another round"

    def check_read_late(self, server: int, variable: int, ids: Array, rows: Array) -> None:
        """Rows that a member reads are those of a round: there may be later ones without it, where it was late."""
        kind = self._kind(variable)
        assert any(np.array_equal(rows, state[kind][ids]) for state in self._states[server]), "rows of no round"

    def check_read_alone(self, last: Name, variable: int, ids: Array, rows: Array) -> None:
        """Rows that an asynchronous member reads are at least those of its last round that updated the table."""
        (server, strand, round), kind = last, self._kind(variable)
        own = [found[2] for found, least in self._least.items() if found[:2] == last[:2] and kind in least]
        at = max((number for number in own if number <= round), default=None)
        least = self._states[server][0] if at is None else self._least[server, strand, at]
        assert (least[kind][ids] <= rows).all(), "rows of before its last round"
        assert (rows <= self._states[server][-1][kind][ids]).all(), "rows that nobody has added"
