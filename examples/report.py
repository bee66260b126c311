"""What the examples show of a job: one process does, a progress bar on a terminal, elsewhere a line for each epoch."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from rich import get_console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress

import psclient as ps


def say(strategy: ps.ParameterServerStrategy, text: str) -> None:
    """Prints a line in the leading process: one of all that run the script, and another one when that dies."""
    if strategy.is_main_process:
        print(text, flush=True)


class Report:
    """Loss, speed and traffic of the last epoch's worth of steps: in the end nothing of the start is in them."""

    def __init__(self, strategy: ps.ParameterServerStrategy, epochs: int, steps: int, first: int) -> None:
        self.strategy, self.epochs, self.steps = strategy, epochs, steps
        self.losses = deque[float](maxlen=steps)
        self.marks = deque(
            [(time.monotonic(), sum(strategy.bytes_transferred))], maxlen=steps + 1
        )  # an epoch back, at most
        drawn = get_console().is_terminal and strategy.is_main_process
        self.bar = Progress("{task.description}", BarColumn(16), disable=not drawn)
        self.task = self.bar.add_task(f"step {first}", total=epochs * steps, completed=first)

    def step(self, epoch: int, step: int, loss: float) -> None:
        """Step number `step` of the job is over."""
        self.losses.append(loss)
        self.marks.append((time.monotonic(), sum(self.strategy.bytes_transferred)))
        (began, before), (now, moved) = self.marks[0], self.marks[-1]
        speed, traffic = (len(self.marks) - 1) / (now - began), decimal(int((moved - before) / (now - began)))
        text = f"epoch {epoch + 1:2}/{self.epochs}  loss {np.mean(self.losses):.4f}  {speed:3.0f} steps/s  {traffic}/s"
        self.bar.update(self.task, completed=step, description=text)
        if self.bar.disable and step % self.steps == 0:
            say(self.strategy, text)
