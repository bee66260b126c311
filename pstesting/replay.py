"""Recordings of a server's stimuli, which can be replayed: the same machine, without network, threads and time.

A server's state machine depends on nothing but its stimuli, the time that each came, and the bytes of payloads as far
as they had come by then. So a bug that was seen once is seen again as often as one likes, step by step. Array work is
made again; work on files is not: what came of it is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from psserver.core.core import Core
from psserver.core.machine import Machine
from psserver.core.stimuli import Stimulus
from psserver.devices import ServerDevice
from psserver.effects import Effect, Fail, Outcome, Queue, Reply, Run, Work, attempt, settle
from psserver.programs.kernels.kernels import Kernels
from pswire.errors import PSError
from pswire.network.payload import Payload


@dataclass(frozen=True)
class Grown:
    """More of a payload is there, before the next stimulus.

    Attributes:
        payload: which, as it was recorded.
        offset: where the bytes belong.
        data: a copy of them.
    """

    payload: Payload
    offset: int
    data: bytes


class Recording:
    """All that a core is told from now on; begin before its first call.

    Args:
        core: whose stimuli are recorded.

    Attributes:
        steps: the stimuli in order, and between them what had come of payloads.
    """

    def __init__(self, core: Core) -> None:
        self.config, self.incarnation, self.began = core.config, core.incarnation, core.machine.began
        self.steps: list[Stimulus | Grown] = []
        self._growing: dict[Payload, int] = {}
        core.stimuli.record = self._take

    def _take(self, stimulus: Stimulus) -> None:
        """Records a stimulus; called under the core's lock."""
        self._growing |= {arg: 0 for arg in stimulus.args if isinstance(arg, Payload)}
        for payload, known in list(self._growing.items()):
            self._grow(payload, known)
        # Arrays become variables, into which rounds write.
        args = tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in stimulus.args)
        self.steps.append(replace(stimulus, args=args))

    def _grow(self, payload: Payload, known: int) -> None:
        end, chunks = payload.end, payload.chunks[:]
        for offset, buffer in chunks:
            if offset + len(buffer) > known:
                new = max(offset, known)
                self.steps.append(Grown(payload, new, bytes(buffer[new - offset :])))
        self._growing[payload] = end
        if payload.whole:
            del self._growing[payload]


class Replay:
    """A machine that is told what another one was told.

    Args:
        recording: of a core.

    Attributes:
        machine: the state.
        futures: of each future of the recording the one that stands for it.
        time: that of the last stimulus.
    """

    def __init__(self, recording: Recording) -> None:
        self.time = recording.began
        self.futures: dict[Future[Any], Future[Any]] = {}
        self._kernels = Kernels(ServerDevice.parse(recording.config.device), 1)
        self.machine = Machine(recording.config, recording.incarnation, self._kernels, lambda: self.time)
        self._steps = deque(recording.steps)
        self._payloads: dict[Payload, Payload] = {}
        self._work: dict[Queue, deque[Work]] = {"arrays": deque(), "files": deque()}

    def run(self) -> None:
        """Replays all that is left."""
        while self._steps:
            self.step()
        self._kernels.close()

    def step(self) -> Stimulus | Grown:
        """Replays one step, and returns it."""
        step = self._steps.popleft()
        if isinstance(step, Grown):
            payload = self._payload(step.payload)
            payload.add(step.offset, memoryview(step.data))
            return step
        self.time = step.time
        match step.name, step.args:
            case "worked" | "made", (work, result, error):
                self._make(self._work[work.queue].popleft(), result, error)
            case "asked", (work, *args):
                self._take(self.machine.asked, self._work[work.queue][0], *args)
            case _:
                with suppress(PSError):  # whoever called was told
                    self._take(self.machine.verb(step.name), *map(self._stand_in, step.args))
                    self._carry_out(self.machine.progress(self.time))
        return step

    def _stand_in(self, arg: Any) -> Any:
        """What an argument of the recording is here."""
        if isinstance(arg, Future):
            return self.futures.setdefault(arg, Future())
        if isinstance(arg, Payload):
            return self._payload(arg)
        if isinstance(arg, np.ndarray):
            return arg.copy()
        return (lambda _: None) if callable(arg) else arg

    def _payload(self, recorded: Payload) -> Payload:
        if recorded not in self._payloads:
            self._payloads[recorded] = Payload((), recorded.size)
        return self._payloads[recorded]

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(future, value):
                    settle(future, value)
                case Fail(future, error):
                    settle(future, None, error)
                case Run(call, args):
                    call(*args)
                case Work(follows=True, queue=queue):
                    self._work[queue].appendleft(effect)
                case Work(queue=queue):
                    self._work[queue].append(effect)

    def _take(self, stimulus: Callable[..., Outcome[Any]], *args: Any) -> None:
        _, effects = stimulus(self.time, *args)
        self._carry_out(effects)

    def _make(self, work: Work, result: object, error: PSError | None) -> None:
        """Makes work again, or has it come to what is recorded."""
        if work.queue == "arrays":
            result, error = attempt(partial(work.call, *work.args))
        if work.then is not None:
            self._take(self.machine.worked, work, result, error)
            self._carry_out(self.machine.progress(self.time))
        if work.future is not None:
            settle(work.future, result, error)
