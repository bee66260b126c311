"""Loops that SIGINT interrupts at random moments, as Ctrl-C does in a notebook, and the values that they have to have.

Each loop adds one to all numbers of its variables in each step, so that any round that counted in part, twice or not
at all shows. It runs by itself, or in one worker of a job; `over` is a number that any worker raises where all end.
"""

from __future__ import annotations

import importlib
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

import psclient as ps

SIZES = (3, 200_000)
"""Numbers in the variables: one goes at once, the other streams."""


class Loop:
    """The face of all loops. `made` is the number of steps that variables have, of all workers together."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.over = False
        """True if this worker asks all to end, from the next step on."""

    def step(self) -> None:
        raise NotImplementedError

    def values(self) -> list[Any]:
        raise NotImplementedError

    def asked(self) -> bool:
        """True once a worker has asked all to end."""
        return float(np.asarray(self.values()[-1]).ravel()[0]) > 0

    def made(self) -> int:
        *values, _ = map(np.asarray, self.values())
        found = {float(number) for value in values for number in (value.min(), value.max())}
        assert len(found) == 1, f"a round counts in part: {sorted(found)}"
        assert found == {float(int(min(found)))}, found
        return int(min(found))


class Plain(Loop):
    """NumPy, over a dataset of three batches."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        with strategy.scope():
            self.variables = [ps.Variable(np.zeros(size, "float32"), name=f"v{size}") for size in (*SIZES, 1)]
            self.optimizer = ps.optimizers.SGD(1.0)
        self.sizes = (*SIZES, 1)

    def replica(self) -> None:
        grads = [np.full(size, -1, "float32") for size in SIZES]
        grads.append(np.full(1, -float(self.over), "float32"))
        self.optimizer.apply_gradients(zip(grads, self.variables, strict=True))

    def step(self) -> None:
        self.strategy.run(self.replica)

    def values(self) -> list[Any]:
        return [v.numpy() for v in self.variables]


class Data(Plain):
    """As `Plain`, in passes over a dataset."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.data = strategy.experimental_distribute_dataset([np.ones((2, 1), "float32")] * 3)

    def step(self) -> None:
        for _ in self.data:
            self.strategy.run(self.replica)


class Torch(Loop):
    """PyTorch; gradients leave while backward goes on."""

    def __init__(self, strategy: Any, large: int = SIZES[1]) -> None:
        super().__init__(strategy)
        self.torch = torch = importlib.import_module("torch")
        pst = importlib.import_module("psclient.torch")

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                made = [torch.nn.Parameter(torch.zeros(size)) for size in (SIZES[0], large, large, 1)]
                self.a, self.b, self.c, self.stop = made

        self.net = Net()
        self.optimizer = pst.Optimizer(self.net, torch.optim.SGD, lr=1.0, strategy=strategy, reduction="sum")

    def step(self) -> None:
        net = self.net
        self.optimizer.zero_grad()
        loss = -(net.a.sum() + net.b.sum() + net.c.sum() + float(self.over) * net.stop.sum())
        loss.backward()
        self.optimizer.step()

    def values(self) -> list[Any]:
        return [p.detach().numpy() for p in self.net.parameters()]


class Early(Torch):
    """As `Torch`, with gradients that leave while backward goes on."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, 600_000)


class Jax(Loop):
    """JAX, with a `TrainState`."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        jax, psj = importlib.import_module("jax"), importlib.import_module("psclient.jax")
        params = {f"v{size}": np.zeros(size, "float32") for size in SIZES} | {"z": np.zeros(1, "float32")}
        create = psj.TrainState.create
        tx = psj.optax.sgd(1.0)
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
    """Raises SIGINT at a random moment, by the handler that is there then.

    Args:
        seed: of the moments.
        longest: seconds until the last of them.
    """

    def __init__(self, seed: int, longest: float) -> None:
        self._rng = random.Random(seed)
        self._longest = longest
        signal.signal(signal.SIGALRM, self._press)

    @staticmethod
    def _press(number: int, frame: Any) -> None:
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, frame)

    @staticmethod
    def release() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def press(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._rng.uniform(1e-5, self._longest), 5.0)


def interrupt(loop: Loop, times: int, seed: int, longest: float, rounds: int = 1, workers: int = 1, tell: Callable[..., Any] = lambda *rest: None) -> None:
    """Interrupts a loop so often; each time it goes on, with whole rounds."""
    button = Button(seed, longest)
    for number in range(times):
        before, whole = loop.made(), 0
        tell(number, before)
        button.press()
        try:
            while True:
                loop.step()
                whole += 1
        except KeyboardInterrupt:
            button.release()
        now = loop.made()
        assert before + workers * rounds * whole <= now <= before + workers * rounds * (whole + 1), (number, before, whole, now)
        assert not ps.has_strategy(), "a scope stays entered"
