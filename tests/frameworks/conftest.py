"""Tests of what needs PyTorch or JAX: skipped, visibly and before any import, where it is not installed.

What all front ends promise is tested over the table `FRONT_ENDS`, by the fixture `front_end`; the folders `torch` and
`jax` hold what one of them alone promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import opened

NAMES = {"torch": "PyTorch", "jax": "JAX"}


class Missing(pytest.Module):
    """A module of tests without what it needs."""

    def collect(self) -> Iterator[pytest.Item]:
        skip_without(self.path.parent.name)


def skip_without(name: str) -> None:
    """Skips a test, or a module, where a framework is not installed."""
    if name in NAMES and find_spec(name) is None:
        reason = f"{NAMES[name]} is not installed; it comes with paramserver[{name}]: make test-frameworks"
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leaves out what could not be imported."""
    folder = module_path.parent.name
    if folder in NAMES and find_spec(folder) is None:
        return Missing.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    """One worker, and two servers."""
    with opened("servers-2x1") as found:
        yield found


@pytest.fixture(scope="session")
def need() -> Callable[[str], None]:
    """A function that skips a test without a framework."""
    return skip_without


# ---- The table of front ends ----


def loss_of(params: Any, x: Any = None, y: Any = None, of: int | None = None) -> Any:
    """The mean of squares over these examples, or their part of a mean over `of` examples; the same in any front end.

    Without examples it is the sum of all parameters: each gradient is one.
    """
    if x is None:
        return params["w"].sum() + params["b"].sum()
    squares = (x @ params["w"] + params["b"] - y) ** 2
    return squares.mean() if of is None else squares.sum() / (of * squares.shape[1])


def loss_of_rows(rows: Any, w: Any) -> Any:
    return ((rows * w - 1.0) ** 2).sum()


class Model:
    """A layer of 5 numbers to 3, as a script of one front end trains it: in a class of each.

    `create` makes it, `batches` shares data, and `step` makes a step by the `loss_of` examples. `values` are copies of
    the parameters, as arrays of NumPy, `variables` those on servers; `checkpoint` has all that is saved of it. `waits`
    is true where a step waits for its round, and not what reads its values.

    Args:
        strategy: where it lives.
        rule: one of `ps.optimizers`.
        first: added to its first numbers.
        dtype: of its parameters.
        params: other parameters.
        options: of its front end, such as the reduction.
    """

    waits = False
    create: Callable[[dict[str, Any]], None]

    def __init__(
        self, strategy: Any, rule: Any, first: float = 0.0, dtype: Any = "f4", params: Any = None, **options: Any
    ) -> None:
        w = np.random.default_rng(1).normal(size=(5, 3))
        self.first = params or {"w": (w + first).astype(dtype), "b": np.full(3, first, dtype)}
        self.strategy, self.rule = strategy, rule
        self.create(options)

    @staticmethod
    def doubled(on: bool) -> AbstractContextManager[Any]:
        """Switches double precision on, where it is not."""
        return nullcontext()


class OfNumPy(Model):
    """Gradients by hand, and `apply_gradients` in a function of `run`."""

    def create(self, options: dict[str, Any]) -> None:
        assert options.pop("reduction", "sum") == "sum"
        with self.strategy.scope():
            self.made = {name: ps.Variable(value, name=name, **options) for name, value in self.first.items()}

    def batches(self, data: Any) -> Any:
        return self.strategy.experimental_distribute_dataset(data)

    def gradients(self, x: Any = None, y: Any = None, of: int | None = None) -> dict[str, Any]:
        if x is None:
            return {name: np.ones_like(value) for name, value in self.first.items()}
        params = {name: v.numpy() for name, v in self.made.items()}
        d = (x @ params["w"] + params["b"] - y) * np.float32(2 / (y.size if of is None else of * y.shape[1]))
        return {"w": x.T @ d, "b": d.sum(0)}

    def step(self, *examples: Any) -> None:
        grads = self.gradients(*examples)
        pairs = [(grads[name], v) for name, v in self.made.items()]
        self.strategy.run(lambda: self.rule.apply_gradients(pairs))

    def values(self) -> dict[str, Any]:
        return {name: np.array(v.numpy()) for name, v in self.made.items()}

    def variables(self) -> dict[str, Any]:
        return self.made

    def checkpoint(self) -> Any:
        return ps.train.Checkpoint(rule=self.rule, **self.made)


class RowsOfNumPy:
    """Rows that are looked up in a step, with numbers by which they are multiplied."""

    def __init__(self, strategy: Any, table: Any, rule: Any) -> None:
        self.strategy, self.table, self.rule = strategy, table, rule
        with strategy.scope():
            self.w = ps.Variable(np.ones(3, "f4"), name="w")

    def batches(self, data: Any, prefetch: Callable[[Any], Any]) -> Any:
        options = ps.InputOptions(prefetch=prefetch(self.table))
        return self.strategy.experimental_distribute_dataset(data, options)

    def step(self, ids: Any, times: float = 1.0) -> None:
        def make() -> None:
            rows, w = ps.nn.embedding_lookup(self.table, ids), self.w.numpy()
            found = np.asarray(rows)
            d = (2 * times / self.strategy.num_replicas_in_sync) * (found * w - 1)
            by_row = np.zeros_like(rows.values)
            np.add.at(by_row, rows.places, d * w)
            d_w = (d * found).reshape(-1, 3).sum(0).astype("f4")
            self.rule.apply_gradients([(rows.gradient(by_row), self.table), (d_w, self.w)])

        self.strategy.run(make)
        self.w.numpy()  # waits for the round


class OfTorch(Model):
    """A module, and a `pst.Optimizer` of it."""

    waits = True

    def create(self, options: dict[str, Any]) -> None:
        self.torch, self.pst = import_module("torch"), import_module("psclient.torch")
        torch = self.torch
        self.module = torch.nn.ParameterDict(
            {name: torch.tensor(x.astype("f8")).to(getattr(torch, str(x.dtype))) for name, x in self.first.items()}
        )
        self.optimizer = self.pst.Optimizer(self.module, self.rule, strategy=self.strategy, **options)

    def batches(self, data: Any) -> Any:
        return self.pst.Loader(data, self.optimizer)

    def step(self, *examples: Any) -> None:
        self.optimizer.zero_grad()
        given = (self.torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in examples)
        loss_of(self.module, *given).backward()
        self.optimizer.step()

    def values(self) -> dict[str, Any]:
        dtype = self.first["w"].dtype
        return {name: p.detach().double().numpy().astype(dtype) for name, p in self.module.named_parameters()}

    def variables(self) -> dict[str, Any]:
        return dict(self.optimizer.variables)

    def checkpoint(self) -> Any:
        return ps.train.Checkpoint(optimizer=self.optimizer)


class RowsOfTorch:
    """A `pst.Embedding`, with numbers by which its rows are multiplied."""

    def __init__(self, strategy: Any, table: Any, rule: Any) -> None:
        self.torch, self.pst = import_module("torch"), import_module("psclient.torch")
        self.module = self.torch.nn.ModuleList([self.pst.Embedding(table)])
        self.module.w = self.torch.nn.Parameter(self.torch.ones(3))
        self.optimizer = self.pst.Optimizer(self.module, rule, strategy=strategy)

    def batches(self, data: Any, prefetch: Callable[[Any], Any]) -> Any:
        return self.pst.Loader(data, self.optimizer, prefetch(self.module[0]))

    def step(self, ids: Any, times: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (times * loss_of_rows(self.module[0](self.torch.as_tensor(ids)), self.module.w)).backward()
        self.optimizer.step()


class OfJax(Model):
    """A `psj.TrainState`."""

    @staticmethod
    def doubled(on: bool) -> AbstractContextManager[Any]:
        return import_module("jax").enable_x64(on)

    def create(self, options: dict[str, Any]) -> None:
        self.psj = import_module("psclient.jax")
        more = {"params": self.first, "tx": self.rule, "strategy": self.strategy, **options}
        self.state = self.psj.TrainState.create(apply_fn=None, **more)

    def batches(self, data: Any) -> Any:
        return self.psj.Loader(data, strategy=self.strategy)

    def step(self, *examples: Any) -> None:
        self.state = self.state.apply_gradients(grads=gradients_of_jax()(self.state.params, *examples))

    def values(self) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.state.params.items()}

    def variables(self) -> dict[str, Any]:
        return dict(self.state.variables)

    def checkpoint(self) -> Any:
        return ps.train.Checkpoint(self.state)


@cache
def gradients_of_jax() -> Any:
    jax = import_module("jax")
    return jax.jit(jax.grad(loss_of), static_argnums=3)


class RowsOfJax:
    """Rows that are looked up before a step of a `psj.TrainState`."""

    def __init__(self, strategy: Any, table: Any, rule: Any) -> None:
        self.psj, self.strategy, self.table = import_module("psclient.jax"), strategy, table
        given = {"params": {"w": np.ones(3, "f4")}, "tx": rule, "tables": [getattr(table, "table", table)]}
        self.state = self.psj.TrainState.create(apply_fn=None, strategy=strategy, **given)

    def batches(self, data: Any, prefetch: Callable[[Any], Any]) -> Any:
        return self.psj.Loader(data, prefetch(self.table), self.strategy)

    def step(self, ids: Any, times: float = 1.0) -> None:
        rows = self.psj.lookup(self.table, ids)
        d, w = gradients_of_rows()(rows.values, self.state.params["w"], rows.inverse)
        self.state = self.state.apply_gradients(grads={"w": times * w}, rows={rows: times * d})
        str(self.state.params)


@cache
def gradients_of_rows() -> Any:
    jax = import_module("jax")
    return jax.jit(jax.grad(lambda values, w, inverse: loss_of_rows(values[inverse], w), argnums=(0, 1)))


FRONT_ENDS = {"numpy": OfNumPy, "torch": OfTorch, "jax": OfJax}
ROWS = {"numpy": RowsOfNumPy, "torch": RowsOfTorch, "jax": RowsOfJax}


@pytest.fixture(scope="session")
def front_ends() -> dict[str, type[Model]]:
    return FRONT_ENDS


@pytest.fixture(params=FRONT_ENDS)
def front_end(request: pytest.FixtureRequest) -> type[Model]:
    """Each of the front ends, where it is installed; a test names them by `parametrize`, indirectly, to have fewer."""
    skip_without(request.param)
    return FRONT_ENDS[request.param]


@pytest.fixture(params=ROWS)
def rows_of(request: pytest.FixtureRequest) -> Any:
    """A class of rows of a table in one of the front ends: `batches` shares ids, `step` makes a step with them."""
    skip_without(request.param)
    return ROWS[request.param]


@pytest.fixture
def pair(strategy):
    """A function that returns a module with its optimizer on servers, and its twin with torch's own.

    It takes the module, a class of `torch.optim`, its options, and `ours`, options that only we have; with `groups`, a
    function of a module, both have these groups of parameters.
    """
    import psclient.torch as pst
    from tests.kit.modules import twin

    def made(module, kind, groups=None, ours=(), **options):
        alone = twin(module)
        own, theirs = (groups(each) if groups else None for each in (module, alone))
        optimizer = pst.Optimizer(module, kind, own, strategy=strategy, **options, **dict(ours))
        return (module, optimizer), (alone, kind(theirs or alone.parameters(), **options))

    return made
