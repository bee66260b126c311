"""Loops that SIGINT interrupts at random moments, as Ctrl-C does in a notebook, and the values that they have to have.

Each loop adds one to all numbers of its variables in each step, so that any round that counted in part, twice or not
at all shows. It runs by itself, or in one worker of a job; `over` is a number that any worker raises where all end.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from tests.kit.shell import shell

TIMES = [50, pytest.param(1000, marks=pytest.mark.soak)]
"""How often a test interrupts a loop."""

SEED = 7

SIZES = (3, 200_000)
"""Numbers in the variables."""

AGAIN = 5.0
"""Seconds after which an interrupt comes once more."""

SECONDS = 900.0
"""How long all of it may take."""

STUCK = 100.0
"""Seconds after which a step does not come to an end any more, and says where it stands."""


class Loop:
    """A script that trains, one step after the other. Used by one thread.

    Attributes:
        over: True if this worker asks all others to end, from its next step on.
        rounds: rounds of a step.
    """

    rounds = 1

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.over = False

    def step(self) -> None:
        raise NotImplementedError

    def values(self) -> list[Any]:
        """The variables, the last of which is above 0 once a worker has asked all to end."""
        raise NotImplementedError

    def asked(self) -> bool:
        """Returns whether a worker has asked all to end."""
        return bool(np.asarray(self.values()[-1])[0] > 0)

    def clear(self) -> None:
        """Clears what an interrupted step has left, if there is something."""

    def made(self) -> int:
        """Returns how many steps the variables have, of all workers together."""
        found = {float(end) for value in map(np.asarray, self.values()[:-1]) for end in (value.min(), value.max())}
        assert len(found) == 1, f"a round counts in part: {sorted(found)}"
        (number,) = found
        assert number.is_integer(), number
        return int(number)


class Plain(Loop):
    """NumPy."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        with strategy.scope():
            self.variables = [ps.Variable(np.zeros(size, "float32"), name=f"v{size}") for size in (*SIZES, 1)]
            self.optimizer = ps.optimizers.SGD(1.0)

    def replica(self) -> None:
        grads = [np.full(size, -1, "float32") for size in SIZES]
        grads.append(np.full(1, -float(self.over), "float32"))
        self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def step(self) -> None:
        self.strategy.run(self.replica)

    def values(self) -> list[Any]:
        return [v.numpy() for v in self.variables]


class Data(Plain):
    """As `Plain`, in passes over a dataset of three batches."""

    rounds = 3

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.data = strategy.experimental_distribute_dataset([np.ones((2, 1), "float32")] * 3)

    def step(self) -> None:
        for _ in self.data:
            self.strategy.run(self.replica)


class Torch(Loop):
    """PyTorch."""

    large = SIZES[1]
    early = False

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        torch = importlib.import_module("torch")
        pst = importlib.import_module("psclient.torch")

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.small, self.a, self.b, self.stop = (torch.nn.Parameter(torch.zeros(size)) for size in sizes)

        sizes = SIZES[0], self.large, self.large, 1
        self.net = Net()
        options = {"lr": 1.0, "reduction": "sum", "overlap": self.early}
        self.optimizer = pst.Optimizer(self.net, torch.optim.SGD, strategy=strategy, **options)

    def step(self) -> None:
        net = self.net
        self.optimizer.zero_grad()
        loss = -(net.small.sum() + net.a.sum() + net.b.sum() + float(self.over) * net.stop.sum())
        loss.backward()
        self.optimizer.step()

    def clear(self) -> None:
        """What comes before the next forward, after an interrupt in `step()`: parameters have its values then."""
        made = self.made()
        self.optimizer.zero_grad()
        assert self.made() == made + self.strategy.num_replicas_in_sync

    def values(self) -> list[Any]:
        return [p.detach().numpy() for p in self.net.parameters()]


class Early(Torch):
    """As `Torch`, with gradients that leave while backward goes on."""

    large = 600_000
    early = True


class Jax(Loop):
    """JAX, with a `TrainState`."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        jax, psj = importlib.import_module("jax"), importlib.import_module("psclient.jax")
        params = {f"v{size}": np.zeros(size, "float32") for size in SIZES} | {"z": np.zeros(1, "float32")}
        create = psj.TrainState.create
        tx = psj.optimizers.sgd(1.0)
        self.state = create(apply_fn=None, params=params, tx=tx, strategy=strategy, reduction="sum")

        def loss(params: Any, over: Any) -> Any:
            return -sum(params[f"v{size}"].sum() for size in SIZES) - over * params["z"].sum()

        self.gradient = jax.jit(jax.grad(loss))

    def step(self) -> None:
        grads = self.gradient(self.state.params, float(self.over))
        self.state = self.state.apply_gradients(grads=grads)

    def values(self) -> list[Any]:
        params = self.state.params
        return [*(params[f"v{size}"] for size in SIZES), params["z"]]


LOOPS = {kind.__name__.lower(): kind for kind in (Plain, Data, Torch, Early, Jax)}


class Button:
    """Raises SIGINT at random moments, by the handler that is there then, and again if a callback has swallowed it.

    Args:
        seed: of the moments.
        longest: seconds until the last of them.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self._rng = random.Random(seed)
        self._longest = longest
        signal.signal(signal.SIGALRM, self._interrupt)

    @staticmethod
    def _interrupt(number: int, frame: Any) -> None:
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, frame)

    def press(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-5, self._longest), AGAIN)

    def release(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt(loop: Loop, times: int, seed: int, workers: int = 1) -> None:
    """Interrupts a loop, and goes on, as the cells of a notebook do; fails where not all of it is of whole rounds.

    Args:
        loop: the loop.
        times: number of interrupts.
        seed: of their moments.
        workers: number of workers, which all make the same steps.
    """
    for _ in range(3):
        loop.step()
    loop.made()
    began = time.perf_counter()
    for _ in range(10):
        loop.step()
    loop.made()
    each = workers * loop.rounds
    button = Button(seed, (time.perf_counter() - began) / 5)
    for number in range(times):
        faulthandler.dump_traceback_later(STUCK, exit=True)
        before, whole = loop.made(), 0
        try:
            button.press()
            while True:
                loop.step()
                whole += 1
        except KeyboardInterrupt:
            button.release()
        now, least = loop.made(), before + each * whole
        assert least <= now <= least + each, f"interrupt {number}: {whole} steps have made {before} to {now}"
        assert not ps.has_strategy(), f"interrupt {number}: a scope stays entered"
    faulthandler.cancel_dump_traceback_later()


# ---- Scripts, and what checks them ----


def alone(kind: str, times: int) -> None:
    """Interrupts a loop that trains with a server of its own."""
    with ps.ParameterServerStrategy() as strategy:
        loop = LOOPS[kind](strategy)
        interrupt(loop, times, SEED)
        before = loop.made()
        loop.step()
        assert loop.made() == before + loop.rounds


def beside(kind: str, times: int) -> None:
    """Interrupts the loop of worker 1, while worker 0 makes the same."""
    with ps.ParameterServerStrategy() as strategy:
        loop = LOOPS[kind](strategy)
        if ME == 1:
            interrupt(loop, times, SEED, workers=2)
            loop.over = True
            loop.step()
        while not loop.asked():
            loop.step()
        say("made", loop.made())


def idle(kind: str) -> None:
    """Worker 1 stands after an error of its own for a while; worker 0, which waits for it, is interrupted."""
    with ps.ParameterServerStrategy() as strategy:
        loop = LOOPS[kind](strategy)
        loop.step()
        loop.made()
        if ME == 1:
            try:
                strategy.run(lambda: [][0])
            except IndexError:
                say("idle")
                gate("cell")
        else:
            try:
                while True:
                    loop.step()
                    loop.made()
            except KeyboardInterrupt:
                say("interrupted")
                loop.clear()
        while loop.made() < 20:
            loop.step()
        say("made", loop.made())


def opens(times: int) -> None:
    """Interrupts a strategy that is opened, trains and is closed, and closes it again."""
    longest = 0.0
    for number in range(-1, times + 1):  # the first one and the last one as they are
        button, strategy = Button(number, longest), None
        faulthandler.dump_traceback_later(STUCK, exit=True)
        began = time.perf_counter()
        try:
            if 0 <= number < times:
                button.press()
            strategy = ps.ParameterServerStrategy()
            loop = Plain(strategy)
            loop.step()
            loop.made()
            strategy.close()
            longest = longest or time.perf_counter() - began
        except KeyboardInterrupt:
            pass
        button.release()
        if strategy is not None:
            strategy.close()
    faulthandler.cancel_dump_traceback_later()


def check_alone(kind: str, times: int, directory: Path) -> None:
    """One process; it ends as if nothing had been."""
    _run(f"alone({kind!r}, {times})", directory)


def check_opens(times: int, directory: Path) -> None:
    """One process; nothing is left, and nothing is said."""
    _run(f"opens({times})", directory)


def _run(call: str, directory: Path) -> None:
    (directory / "script.py").write_text(f"from tests.kit.interrupted import *\n{call}\n", encoding="utf-8")
    done = shell(["python", "script.py"], directory, SECONDS, PYTHONPATH=os.pathsep.join(sys.path))
    assert (done.code, done.err, done.left) == (0, "", ()), done


def check_beside(kind: str, times: int, directory: Path) -> None:
    """Two workers, one of which is interrupted; both end as if nothing had been, with the same values."""

    def program(kind: str, times: int) -> None:
        from tests.kit.interrupted import beside

        beside(kind, times)

    with ProcessCluster(program, directory, (kind, times), workers=2) as job:
        job.finish(SECONDS)
        (first,), (second,) = job.said(W0, "made"), job.said(W1, "made")
        # Passes of the two are not side by side any more: one of them may end some rounds before the other.
        assert abs(first - second) <= 2 * (LOOPS[kind].rounds - 1)


def check_idle(kind: str, directory: Path) -> None:
    """Who waits names whom, and what to do, and may be interrupted; then both go on."""

    def program(kind: str) -> None:
        from tests.kit.interrupted import idle

        idle(kind)

    with ProcessCluster(program, directory, (kind,), gates=["cell"], workers=2) as job:
        job.hear(W1, "idle")
        word = job.hear_error(W0, f"for {W1}; if its script has stopped")
        assert "run its next step or close its strategy" in word
        job.kill(W0, signal.SIGINT)
        job.hear(W0, "interrupted")
        job.open("cell")
        job.finish()
        assert job.said(W0, "made") == job.said(W1, "made") == [20]
