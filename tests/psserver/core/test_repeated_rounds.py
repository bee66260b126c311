"""The model test of rounds that repeat: a core that compiles them and one that never does are the same after every
stimulus. Both are real cores without a network, on kernels of their own, and get the same stimuli in the same order:
steps of several plans, and between them what a job meets, such as members that leave and join, NaN, resends and
checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import count, product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psserver.devices import ServerDevice
from psserver.execution import execution
from psserver.execution.compiled import CompiledRound, compiled
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from psserver.telemetry import ROWS, Seen
from pstesting.clock import Clock
from pswire.api import Contribution, RowRead
from pswire.errors import PSError
from pswire.model.log import Snapshotted
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, RestoreCommit, Sparse, VariableSpec
from pswire.model.program import Program
from pswire.model.rows import Rows
from pswire.model.saved import ALL, RestoreOrder
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from pswire.network.parts import parts_of
from pswire.network.payload import Payload
from pswire.telemetry.metrics import Histogram
from tests.kit.cases import EXAMPLES
from tests.kit.contributions import packed
from tests.kit.programs import job_of, kept_kernels, run, traced
from tests.kit.rig import WORKERS, Deferred, Job, Servers, Worker, checkpoint, compiler_of, core, create, manifest_of

NUMBER = TensorSpec("float32", ())
STREAMS = 1024
"""Bytes of contributions from which on a plan of this module streams."""

# ---- The variables that each job begins with, and the plans ----

VARIABLES = {
    "w": TensorSpec("float32", (8,)), "u": TensorSpec("float32", (9,)), "u momentum": TensorSpec("float32", (9,)),
    "a": TensorSpec("float32", (5, 3)), "a moment": TensorSpec("float32", (5, 3)), "b": TensorSpec("float32", (7,)),
    "b moment": TensorSpec("float32", (7,)), "c": TensorSpec("float32", (4,)), "c moment": TensorSpec("float32", (4,)),
    "steps": NUMBER, "more steps": NUMBER, "table": TensorSpec("float32", (6, 2)),
    "table momentum": TensorSpec("float32", (6, 2)), "counts": TensorSpec("int64", (4,)),
    "large": TensorSpec("float64", (200,)),
}  # fmt: skip
NAMES, COUNTS = [*VARIABLES], ("steps", "more steps")


def sgd(v, g):
    v.assign_sub(np.float32(0.1) * g)


def momentum(v, m, g):
    m.assign(0.75 * m + g)
    v.assign_sub(0.5 * m)


def adam(v, m, t, g):
    m.assign(0.9 * m + 0.1 * g)
    v.assign_sub(0.01 * m / (1 - 0.9**t))


def adam_alone(v, m, t, g):
    """As `adam`, with a count of steps of its own."""
    adam(v, m, t.assign_add(1.0), g)


def toward(v, other, g):
    v.assign_sub(0.1 * (g + other))


def raised(v, g):
    v.assign(v**g)


def tick(t):
    return t.assign_add(1.0)


Update = tuple[Callable[..., object] | None, Sequence[str], dict[str, Any]]


def of(fn: Callable[..., object] | None, *names: str, **how: Any) -> Update:
    """An update of variables, which may `give` back what it returns; or a reduction that is given back, if of none."""
    return fn, names, how


def planned(*updates: Update, mean: bool = True, **about: Any) -> tuple[Plan, list[Any]]:
    """A plan, which gives back the `mean` of a number, as a loss is; and its operands."""
    reductions = [Reduction("mean", NUMBER, (0,))] * mean
    returned, programs, applies = [Ref("reduction", 0)] * mean, list[Program](), list[Apply]()
    numbers = dict[tuple[str, bytes], Any]()  # by their bits: programs share what is equal
    for fn, names, how in updates:
        spec, op, reduced = VARIABLES[names[0]], how.get("op", "sum"), Ref("reduction", len(reductions))
        if fn is None:
            returned.append(reduced)
            reductions.append(Reduction(op, spec, (0,)))
            continue
        reduces, form = how.get("reduces", True), how.get("form", "dense")
        program, met = traced(fn, [VARIABLES[name] for name in names], [spec] * reduces)
        own = iter([Ref("variable", NAMES.index(name)) for name in names])
        keys = [(each.dtype.str, each.tobytes()) for each in met]
        numbers |= dict(zip(keys, met, strict=True))
        operands = iter([Ref("operand", [*numbers].index(key)) for key in keys])
        taken: dict[str, Iterator[Ref]] = {"variable": own, "operand": operands, "value": iter([reduced])}
        sparse: Sparse = "exact" if form == "rows" else "dense"
        args = tuple(next(taken[item.kind]) for item in program.inputs)
        applies.append(Apply(len(programs), (0,), args, sparse, how.get("optional", False)))
        if reduces:
            reductions.append(Reduction(op, spec, (0,), names[0], form))
        if how.get("gives"):  # the first that returns anything
            returned += [Ref("result", n) for n in range(len(program.outputs))]
        programs.append(program)
    placed = tuple(Operand(spec_of(each), (0,), "rate") for each in numbers.values())
    plan = Plan(tuple(reductions), placed, tuple(programs), tuple(applies), tuple(returned), **about)
    return plan, [*numbers.values()]


@cache
def plans() -> dict[str, tuple[Plan, list[Any]]]:
    """The plans of a job, by name, each with its operands."""
    tables = "table", "table momentum"
    both = of(adam, "a", "a moment", "steps", op="mean"), of(adam, "b", "b moment", "steps", op="mean")
    ticks = of(tick, "steps", reduces=False), of(tick, "more steps", reduces=False)
    return {
        "sgd": planned(of(sgd, "w", op="mean")),
        "loss": planned(of(None, "w"), of(None, "b", op="first"), of(None, "u", op="mean")),
        "momentum": planned(of(momentum, "u", "u momentum")),
        "adam": planned(both[0], of(tick, "steps", gives=True, reduces=False), both[1]),
        "adam alone": planned(*ticks, *both, of(adam, "c", "c moment", "more steps", op="mean")),
        "both": planned(of(sgd, "w"), of(momentum, "u", "u momentum"), nonfinite="skip"),
        "optional": planned(
            *(of(sgd, "w", optional=True), of(adam_alone, "b", "b moment", "steps", optional=True)),
            of(adam_alone, "c", "c moment", "more steps", optional=True),
            nonfinite="raise",
        ),
        "reads": planned(of(toward, "b", "b moment"), of(sgd, "w")),
        "rows": planned(of(momentum, *tables, form="rows")),
        "whole table": planned(of(momentum, *tables)),
        "refuses": planned(of(raised, "counts"), of(sgd, "w"), mean=False),
        "large": planned(of(sgd, "large"), mean=False),
    }


OFTEN = ("sgd", "loss", "momentum", "adam", "adam alone", "both", "optional", "reads", "whole table")


# ---- What a core shows ----


def shown(value: Any) -> Any:
    """Something as it can be compared: arrays and payloads by their bytes, errors by class and text."""
    if isinstance(value, PSError):
        return type(value).__name__, str(value)
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, Payload):
        return value.size, [(at, bytes(chunk)) for at, chunk in value.chunks]
    if isinstance(value, Histogram):
        return value.total, value.buckets()
    if isinstance(value, Mapping):
        return {key: shown(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [shown(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {each.name: shown(getattr(value, each.name)) for each in fields(value)}
    return value


def answer(future: Future[Any]) -> Any:
    """What a call is answered, as it can be compared; None while it waits."""
    if not future.done():
        return None
    return shown(future.exception() or future.result())


COMPILER = ("kernel_seconds", "kernels_compiled", "kernel_compile_seconds")
"""Metrics of the compiler, which goes on from one example to the next."""


class Side:
    """A job on one core. Args: kernels: of the core; root: its checkpoint root. Attributes: workers: the members, in
    task order; past: processes that were members."""

    def __init__(self, kernels: Kernels, root: str) -> None:
        kernels.interpretations = 0
        self.kernels = kernels
        self.files = Deferred()
        clock = Clock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("psserver.core.core.Kernels", lambda *_, **__: kernels)
            self.core = core(0, 0, 0, root, clock, files=self.files)
        compiler_of(self.core)
        self.job = Job(Servers([self.core], [self.core], clock, root, False))
        self.workers: list[Worker] = []
        self.past: list[Worker] = []
        self.held: list[Any] = []
        self.saving: list[tuple[str, Plan]] = []
        self.saved: list[str] = []
        self.plans: dict[str, tuple[Plan, list[Any]]] = {}
        self.made = count()
        self.join(0)
        self.join(1)
        for number, (name, spec) in enumerate(VARIABLES.items()):
            self._create(number, name, spec)

    def _plan(self, name: str) -> tuple[Plan, list[Any]]:
        """A plan with its operands, which is approved when it is first used."""
        if name not in self.plans:
            self.job.approve(plans()[name][0], self.workers[0])
            self.plans[name] = plans()[name]
        return self.plans[name]

    def _create(self, number: int, name: str, spec: TensorSpec) -> None:
        if spec.shape:
            luck = np.random.default_rng(number)
            value = luck.integers(1, 4, spec.shape) if spec.dtype == "int64" else luck.normal(size=spec.shape)
        else:
            value = np.zeros(())
        first = Payload.pack([np.asarray(value, DTYPES[spec.dtype])])
        create(self.core, self.workers[0].session, number, VariableSpec(name, spec), (0,), first)
        self.job.variables.append(PlacedVariable(number, VariableSpec(name, spec), (0,)))

    def meet(self, name: str, *args: Any) -> Any:
        """Lets a stimulus come; returns what it is answered, or why it was refused."""
        try:
            return getattr(self, name)(*args)
        except PSError as error:
            return shown(error)

    @property
    def last(self) -> int:
        """The last round that is over."""
        return self.core.machine.job.rounds.last

    def _turn(self) -> None:
        for worker in self.workers:
            worker.round = self.last + 1

    # ---- Rounds ----

    def rounds(self, name: str, times: int, seed: int, how: dict[str, Any]) -> list[Any]:
        """Rounds of a plan; `how` says what is odd about them."""
        return [self._round(name, seed + n, how) for n in range(times)]

    def _round(self, name: str, seed: int, how: dict[str, Any]) -> Any:
        plan, numbers = self._plan(name)
        order = self.workers[:: how.get("order", 1)]
        self._turn()
        futures: list[Future[Any]] = []
        own: list[Future[Any]] = []
        pushed: list[tuple[Contribution, Payload]] = []
        for place, worker in enumerate(order):
            odd = place == how.get("who", -1) % len(order)
            said, sent = self._contribution(worker, plan, numbers, seed + 7 * place, how, odd)
            pushed.append((said, sent))
            pieces = how.get("pieces", 0) if odd or how.get("all") else 0
            content = Payload((), sent.size) if pieces else sent
            futures.append(self._push(said, content))
            own.append(futures[-1])
            if odd and "twice" in how:
                again = seed + 7 * place + (how["twice"] == "other data")
                futures.append(self._push(*self._contribution(worker, plan, numbers, again, how, odd)))
            if odd and how.get("looks"):
                futures.append(self.core.pull(worker.session, [0, 1], -1))
            for at, buffers in parts_of(sent, pieces) if pieces else ():
                content.add(at, memoryview(b"".join(map(bytes, buffers))))
            if odd and how.get("lost"):
                self.lose(self.workers.index(worker))
        if how.get("resent"):
            said, sent = pushed[how.get("who", 0) % len(pushed)]
            futures.append(self._push(said, sent))
        found = [answer(each) for each in futures]
        if how.get("held"):
            self.held.append(futures)
        for future, (_, sent) in zip(own, pushed, strict=True):
            for _, chunk in sent.chunks if future.done() else ():
                chunk[:] = bytes([170]) * len(chunk)  # a worker with an answer writes its next contribution there
        self.kernels.compiler.wait()
        return found

    def _push(self, said: Contribution, content: Payload) -> Future[Any]:
        try:
            return self.core.push(said, content, lambda _: None)
        except PSError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _contribution(
        self, worker: Worker, plan: Plan, numbers: Sequence[Any], seed: int, how: dict[str, Any], odd: bool
    ) -> tuple[Contribution, Payload]:
        luck = np.random.default_rng(seed)
        weights = [float(how.get("weight", 1)) if odd else 1.0 for _ in plan.reductions]
        if odd and "without" in how:
            weights[how["without"] % len(weights)] = 0.0
        observes = odd and how.get("observes", False)
        bad = how.get("bad") if odd else None
        given: list[Any] = []
        for reduction, weight in zip(plan.reductions, weights, strict=True):
            spec = reduction.tensor
            if reduction.form == "rows":
                ids = np.flatnonzero(luck.integers(0, 2, spec.shape[0]))
                given.append(Rows(ids, luck.normal(size=(len(ids), 2)).astype("float32")))
                continue
            value = luck.normal(size=spec.shape) if spec.dtype != "int64" else luck.integers(0, 3, spec.shape)
            value = np.asarray(value, DTYPES[spec.dtype])
            if bad is not None and spec.shape:
                value.reshape(-1)[seed % value.size] = bad if spec.dtype != "int64" else -1
            given.append(value if weight else None)
        operands = [np.asarray(each) for each in numbers]
        if how.get("rate") and operands:  # as a schedule changes it, for all or for one
            operands[0] = np.asarray(operands[0] * (1 + how["rate"] * (odd or not how.get("differs"))))
        if observes:
            weights, counts, sent = [0.0] * len(weights), (0,) * len(plan.rows), Payload()
        else:
            counts, sent = packed(plan, given, operands)
            sent = Payload([(at, memoryview(bytearray().join(of))) for at, of in parts_of(sent, 1 << 20)], sent.size)
        refused = plan.nonfinite != "apply" and bad is not None
        named = tuple(n for n, r in enumerate(plan.reductions) if r.tensor.shape and weights[n]) if refused else ()
        own = tuple(sorted(plan.writes(0)))
        want = how.get("want", "all") if odd or how.get("all") else "all"
        wanted = {"none": (), "all": own, "some": own[:1], "others": (0, 3)}[want]
        looked = (RowRead.of(NAMES.index("table"), np.array([1, 2])),) if odd and how.get("lookup") else ()
        said = Contribution(worker.session, worker.generation, worker.round, plan.id, tuple(weights), want=wanted)
        return replace(said, observes=observes, nonfinite=named, rows=counts, lookups=looked), sent

    # ---- Between rounds ----

    def read(self, variable: int, holds: bool) -> Any:
        """Somebody reads a variable, and sends or saves it for a while if it `holds` the answer."""
        future = self.core.pull(self.workers[0].session, [variable % len(self.job.variables)], -1)
        if holds:
            self.held.append(future)
        return answer(future)

    def let_go(self) -> None:
        """Nobody holds an answer any more."""
        self.held.clear()

    def create(self) -> None:
        """A variable is created."""
        number = len(self.job.variables)
        self._create(number, f"later {number}", TensorSpec("float32", (3,)))

    def lose(self, place: int) -> Any:
        """A member is lost, unless it is the last; it is fenced."""
        if len(self.workers) < 2:
            return None
        gone = self.workers.pop(place % len(self.workers))
        self.job.end(gone.task)
        self.past.append(gone)
        self._closed()
        return None

    def _closed(self) -> None:
        generation = self.job.close([each.member for each in self.workers])
        for each in self.workers:
            each.generation = generation.number

    def join(self, place: int) -> Any:
        """A worker joins, unless it is a member, with a new generation."""
        task = WORKERS[place % 3]
        if task in [each.task for each in self.workers]:
            return None
        (made,) = self.job.join(task)
        self.workers = sorted([*self.workers, made], key=lambda each: each.task)
        for each in self.workers:
            each.generation = self.job.generation.number
        return None

    def fenced(self, name: str) -> Any:
        """A process that was a member pushes."""
        if not self.past:
            return None
        plan, numbers = self._plan(name)
        worker = self.past[-1]
        worker.round = self.last + 1
        said, sent = self._contribution(worker, plan, numbers, 1, {}, False)
        return answer(self._push(said, sent))

    def heartbeats(self, seconds: float) -> None:
        """Time passes, in which members heartbeat."""
        self.job.servers.spend(seconds, *[each.session for each in self.workers], self.job.opened.session)

    # ---- Checkpoints ----

    def _together(self, plan: Plan) -> list[Any]:
        self._turn()
        return [answer(each) for each in [worker.push(plan) for worker in self.workers]]

    def save(self) -> Any:
        """A checkpoint is ordered; its files are written later."""
        if self.saving:
            return self.write()
        path = f"run/ckpt-{next(self.made)}"
        plan = self.job.approve(checkpoint(path, (0,), "", self.last + 1), self.workers[0])
        found = self._together(plan)
        self.saving.append((path, plan))
        return found

    def write(self) -> Any:
        """The files of a checkpoint are written."""
        if not self.saving:
            return None
        path, plan = self.saving.pop()
        shard = self.core.snapshot(self.job.token, plan.id, "")
        self.files.run()
        manifest = self.core.snapshot(self.job.token, plan.id, manifest_of([shard.result(0)]))
        self.files.run()
        manifest.result(0)
        self.job.append(Snapshotted(plan.id, shard.result(0).round, path))
        self.saved.append(path)
        return shown(shard.result(0).tensors)

    def restore(self) -> Any:
        """The newest checkpoint is restored."""
        if not self.saved:
            return None
        self._turn()
        first = self.workers[0]
        turn = first.turn()
        opened = self._done(self.core.restore(first.session, self.saved[-1], turn, RestoreOrder("open")))
        self._done(self.core.restore(first.session, opened.path, turn, ALL))
        plan = self.job.approve(Plan(restore=RestoreCommit(self.saved[-1], (0,), turn)), first)
        return self._together(plan)

    def _done(self, future: Future[Any]) -> Any:
        self.files.run()
        return future.result(0)

    # ---- What there is to see ----

    def state(self) -> Any:
        """All that a user sees, and what the answers of resends come from."""
        machine = self.core.machine
        store, rounds = machine.job.store, machine.job.rounds
        values = {
            id: (value.shape, value.dtype, value.array.tobytes(), value.group and value.group.updates.behind)
            for id, value in store._values.items()
        }
        kept = {
            key: (each.last, [*each.records], each.records.get(each.last)) for key, each in rounds.sequences.items()
        }
        metrics = Seen(self.core, self.core.status(), {})
        told = {row.name: shown(row.read(metrics)) for row in ROWS if not row.name.endswith(COMPILER)}
        return {"status": metrics.status, "values": values, "records": shown(kept), "metrics": told}

    def end(self) -> Any:
        """The variables as a reader has them, with all updates."""
        store = self.core.machine.job.store
        return {id: shown(store.find(id).view({}).whole()) for id in sorted(store._values)}


# ---- Stimuli ----

ALIKE: dict[str, Sequence[Any]] = {
    "who": (0, 1, 2), "order": (-1,), "weight": (2, 3), "want": ("none", "some", "others"), "all": (True,),
    "rate": (0.5, 1.0), "without": (0, 1, 2),
}  # fmt: skip
"""Rounds that are like each other, and perhaps not like those before: with other weights, other wanted variables, or
another learning rate."""

ODD: Sequence[dict[str, Any]] = (
    {"bad": np.nan}, {"bad": -np.inf}, {"observes": True}, {"pieces": 16}, {"pieces": 64, "all": True},
    {"twice": "same"}, {"twice": "other data"}, {"resent": True}, {"looks": True}, {"lookup": True}, {"lost": True},
    {"held": True}, *({"rate": rate, "differs": True} for rate in (0.5, 1.0, 2.0)),
    *({"without": number} for number in range(3)),
)  # fmt: skip
"""What happens to one member in one round."""

BETWEEN: dict[str, Sequence[Sequence[Any]]] = {
    "read": (range(len(NAMES) + 1), (True, False)),
    "join": (range(3),),
    "lose": (range(3),),
    "fenced": (OFTEN,),
    "heartbeats": (range(1, 20),),
    **dict.fromkeys(("let_go", "create", "save", "write", "restore"), ()),
}
"""What happens between two rounds."""


def stimuli(seed: bytes, length: int) -> list[tuple[Any, ...]]:
    """A job: rounds of one or two plans in turns, and what happens in some of them and between them. Drawn by a seed:
    hypothesis itself draws many examples that differ in one stimulus alone."""
    luck = Random(seed)
    usual = luck.sample(OFTEN, luck.choice((1, 1, 2)))
    begin: list[tuple[Any, ...]] = [
        ("join", luck.choice((0, 2))),
        *(("rounds", name, 3, luck.randrange(100), {}) for name in usual),
    ]
    return begin + [_stimulus(luck, usual) for _ in range(length)]


def _stimulus(luck: Random, usual: Sequence[str]) -> tuple[Any, ...]:
    name, kind = luck.choice(usual), luck.choice(("odd", "odd", "alike", "plain", "other", "between", "between"))
    if kind == "between":
        verb = luck.choice([*BETWEEN])
        return verb, *map(luck.choice, BETWEEN[verb])
    if kind == "odd":
        return "rounds", name, 1, luck.randrange(100), {"who": luck.randrange(3)} | luck.choice(ODD)
    if kind == "other":  # of rows where it defers updates of what is updated
        name = "rows" if name == "whole table" else luck.choice([*plans()])
        return "rounds", name, 1, luck.randrange(100), {}
    how = {key: luck.choice(values) for key, values in ALIKE.items() if kind == "alike" and luck.random() < 0.4}
    return "rounds", name, luck.randint(1, 4), luck.randrange(100), how


# ---- The test ----


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Kernels, Kernels]]:
    """The kernels of the core that compiles, and of the one that does not; theirs are ready for the usual plans."""
    found = kept_kernels(patience=1, smallest=0), kept_kernels(patience=1, smallest=0)
    for kernels, name, contributors in product(found, OFTEN, (1, 2, 3)):
        PreparedPlan(plans()[name][0], 0).batches(kernels, contributors)
    for kernels in found:
        kernels.compiler.wait()
    yield found
    for each in found:
        each.close()


FEW, MANY = EXAMPLES["soak"] // 20, EXAMPLES["soak"]


@pytest.mark.hypothesis
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_a_core_that_compiles_rounds_and_one_that_does_not_are_the_same(examples, both, monkeypatch):
    """After every stimulus: answers, status, metrics, what resends are answered, and variables to the last bit. Four of
    five examples make compiled rounds: the others would prove nothing."""
    monkeypatch.setattr("pswire.model.plan.PART_BYTES", STREAMS)
    without = both[1]
    monkeypatch.setattr(execution, "compiled", lambda *made: None if made[2] is without else compiled(*made))
    made, ran, roots = [0], CompiledRound.run, count()

    def counted(self: CompiledRound, *args: Any) -> Any:
        found = ran(self, *args)
        made[-1] += found is not None
        return found

    monkeypatch.setattr(CompiledRound, "run", counted)

    same_again = examples == FEW and settings().derandomize
    if examples == FEW and not same_again:
        examples //= 2  # of other examples, since no test may cost more than 20 s

    @settings(max_examples=examples, derandomize=same_again)
    @given(st.binary(min_size=8, max_size=8), st.integers(2, 6))
    def same(seed: bytes, length: int) -> None:
        made.append(0)
        sides = [Side(each, f"memory://repeated-{next(roots)}") for each in both]
        for name, *args in stimuli(seed, length):
            one, other = [side.meet(name, *args) for side in sides]
            assert one == other, f"{name}{args} is answered otherwise"
            one, other = [side.state() for side in sides]
            for part in one:
                assert one[part] == other[part], f"{part} after {name}{args}"
        one, other = [side.end() for side in sides]
        assert one == other

    same()
    assert sum(map(bool, made)) > 0.8 * examples


def test_numbers_that_variables_need_alike_are_computed_once(both):
    """In each compiled round: the counts of steps, and the corrections of each count."""
    side = Side(both[0], "memory://once")
    for name, numbers in ("adam alone", 2 + 2), ("adam", 1 + 2):
        side.meet("rounds", name, 4, 1, {})
        before = side.kernels.interpretations
        side.meet("rounds", name, 3, 5, {})
        assert side.kernels.interpretations - before == 3 * numbers


def test_what_is_left_out_counts_no_step(both):
    """Where each variable has a count of its own: the others count on."""
    side = Side(both[0], "memory://left-out")
    side.meet("lose", 1)
    side.meet("rounds", "optional", 4, 1, {})
    side.meet("rounds", "optional", 3, 5, {"who": 0, "without": 2})
    assert [float(side.core.machine.job.store.find(NAMES.index(name)).array) for name in COUNTS] == [4.0, 7.0]


def test_numbers_of_a_variable_that_was_assigned_since_are_computed_anew():
    """Not those that were computed of its value of before."""
    plan, operands = plans()["adam"]
    luck = np.random.default_rng(0)
    values = {NAMES.index(name): luck.normal(size=spec.shape).astype("float32") for name, spec in VARIABLES.items()}
    values[NAMES.index("steps")] = np.float32(1).reshape(())
    sent = [np.float32(0).reshape(()), *(luck.normal(size=VARIABLES[name].shape).astype("float32") for name in "ab")]
    found = run(job_of(plan, [sent], operands), Kernels(ServerDevice()), values).assigned
    f = np.float32
    for name, g, t in ("a", sent[1], f(1)), ("b", sent[2], f(2)):
        v, m = values[NAMES.index(name)], f(0.9) * values[NAMES.index(f"{name} moment")] + f(0.1) * g
        assert found[NAMES.index(name)].tolist() == (v - f(0.01) * m / (f(1) - f(0.9) ** t)).tolist()
