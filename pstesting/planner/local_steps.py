"""Predicts training by local steps, such as DiLoCo: steps per second, bytes and goodput by how often workers exchange.

An exchange is a round with the bytes of one fragment, simulated as in `plan`. The rest is arithmetic: H local steps of
c seconds have P exchanges of x seconds, and tau local steps hide tau * c of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pstesting.planner.plan import DAY, Question, predict
from pswire.errors import ConfigError


@dataclass(frozen=True)
class LocalSteps:
    """How workers exchange.

    Attributes:
        sync_every: H, the local steps between two exchanges of a parameter.
        fragments: P, the parts of the model, exchanged one after another.
        sync_delay: tau, the local steps that are made while an exchange is under way.
        wait: seconds that the others wait for a worker that is lost: the session timeout, or the grace of a quorum.
        rejoin: seconds until a lost worker trains again.
    """

    sync_every: int
    fragments: int = 1
    sync_delay: int = 0
    wait: float = 0.0
    rejoin: float = 0.0

    def __post_init__(self) -> None:
        if self.sync_every % self.fragments:
            raise ConfigError(
                f"--sync-every {self.sync_every} is not divisible by --fragments {self.fragments}; use a multiple"
            )
        if self.sync_delay >= self.sync_every // self.fragments:
            raise ConfigError(
                f"--sync-delay {self.sync_delay} is too long for --sync-every {self.sync_every} and --fragments "
                f"{self.fragments}; it must be below {self.sync_every // self.fragments}"
            )


@dataclass(frozen=True)
class LocalPrediction:
    """What a job does that trains by local steps.

    Attributes:
        sync_every: H.
        servers: their number.
        exchange_seconds: of a fragment.
        exposed_seconds: of these, the part that no local step hides.
        steps_per_second: local steps of a worker.
        efficiency: these, as a part of those without exchanges.
        goodput: the part of all workers' time whose steps count, where hosts fail.
        sent_bytes, received_bytes: of a worker for each local step.
    """

    sync_every: int
    servers: int
    exchange_seconds: float
    exposed_seconds: float
    steps_per_second: float
    efficiency: float
    goodput: float
    sent_bytes: float
    received_bytes: float


def predict_local(question: Question, how: LocalSteps, servers: int) -> LocalPrediction:
    """Predicts training by local steps with a number of servers.

    Args:
        question: the job; its step is a local step.
        how: how workers exchange.
        servers: number of servers.

    Raises:
        ConfigError: a local step takes no time; or the job is too large to be simulated.
    """
    if not question.step:
        raise ConfigError("local steps need a time; give --step, such as 100ms")
    fragment = replace(
        question,
        step=0.0,
        dense=question.dense / how.fragments,
        variables=max(question.variables // how.fragments, 1),
    )
    exchange = predict(fragment, servers).step_seconds
    exposed = max(exchange - how.sync_delay * question.step, 0.0)
    steps = how.sync_every * question.step
    period = steps + how.fragments * exposed
    # A worker that fails loses half of its H steps, on average, and the time until it is back; the others wait once.
    lost = steps / 2 + how.rejoin + question.workers * how.wait
    failing = lost / question.between_failures + question.lost(servers, exchange).servers / DAY
    received = question.dense / how.sync_every
    return LocalPrediction(
        how.sync_every,
        servers,
        exchange,
        exposed,
        how.sync_every / period,
        steps / period,
        steps / period * max(1 - failing, 0.0),
        received * question.compressed,
        received,
    )


def plan_local(question: Question, ways: Sequence[LocalSteps]) -> list[LocalPrediction]:
    """Predicts each of several ways to exchange, with as many servers as are worth it.

    Raises:
        ConfigError: as `predict_local`.
    """
    return [_chosen(question, how) for how in ways]


def _chosen(question: Question, how: LocalSteps) -> LocalPrediction:
    """Doubles the servers while that saves the part of the time that is asked for."""
    found = predict_local(question, how, question.least_servers)
    while found.exposed_seconds:
        twice = predict_local(question, how, 2 * found.servers)
        if found.steps_per_second > twice.steps_per_second * (1 - question.worth):
            break
        found = twice
    return found
