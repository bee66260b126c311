"""What things cost: processor time, links and latencies of a machine, as `psctl calibrate` measures them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pswire.errors import ConfigError

FORMAT = 2

OF_FRAMES = 0.956
"""Part of a network's bits that are data: what Ethernet, IP and TCP leave of frames of 1,500 bytes."""


@dataclass(frozen=True)
class TransportCosts:
    """Costs of a push and of its answer on one transport, in seconds, and in seconds a byte.

    Attributes:
        send, send_byte: processor time of the worker for a push to one server.
        receive, receive_byte: of the server for a push, until the machine is told.
        answer, answer_byte: of the server for an answer.
        take, take_byte: of the worker for an answer.
        piece: of each side for a piece of a contribution, or of an answer, that streams, beside its bytes.
        latency: from the end of a process's work to the beginning of the other's, beside what links take.
    """

    send: float
    send_byte: float
    receive: float
    receive_byte: float
    answer: float
    answer_byte: float
    take: float
    take_byte: float
    piece: float
    latency: float


@dataclass(frozen=True)
class Costs:
    """The cost model of a machine.

    Attributes:
        transports: by the transport's name.
        step: processor time of a worker for a round, beside its pushes, in seconds.
        step_variable: the same, for each variable of the round.
        round: processor time of a server for a round, beside its pushes.
        settle: the same, once its answers have left.
        round_variable: as `round`, for each variable of the round.
        kernel_byte: for each byte of a contribution that is summed.
        apply_byte: for each byte of a variable that a round updates.
        row: processor time of a server for a row of a contribution, and for one of the next batch in its answer.
        step_row: the same, of a worker.
        table, step_table: as `round` and `step`, beside them, where a round has rows.
        vote: of a server for a vote that it says or hears.
        call: processor time of a server for a verb that is no push.
        heartbeat: of a server for a heartbeat.
        part: of a server for a worker whose contribution is in a sum.
        hand, hand_byte: processor time on either side where a worker hands a contribution over to another one of its
            host, which sums it, or where an answer is handed back; the same for each of its bytes.
        switch: what a core of a host takes to come to another process, where there are more of these than cores.
        cores: processors of a host; 0 for one for each thread.
        machine: which one it was, for people.
        network: bytes per second, each way, between this host and another, headers included; 0 where it was not
            measured.
        network_latency: seconds that a message needs between them, one way, beyond what transports say.
    """

    transports: Mapping[str, TransportCosts]
    step: float
    step_variable: float
    round: float
    round_variable: float
    kernel_byte: float
    apply_byte: float
    row: float
    step_row: float
    vote: float
    call: float
    heartbeat: float
    table: float = 0.0
    step_table: float = 0.0
    settle: float = 0.0
    switch: float = 0.0
    cores: int = 0
    part: float = 0.0
    hand: float = 0.0
    hand_byte: float = 0.0
    machine: str = ""
    network: float = 0.0
    network_latency: float = 0.0

    @property
    def prices_sums(self) -> bool:
        """True if sums of a host were measured: one of their costs may be 0, where others took more than it."""
        return self.part > 0 or self.hand > 0 or self.hand_byte > 0

    @property
    def between_hosts(self) -> Self:
        """The same, where each message goes from one host to another."""
        later = {
            name: replace(transport, latency=transport.latency + self.network_latency)
            for name, transport in self.transports.items()
        }
        return replace(self, transports=later, network_latency=0.0)

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote; raises `ConfigError` where it is none."""
        try:
            said: dict[str, Any] = json.loads(path.read_text())
            if said.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            said["transports"] = {name: TransportCosts(**costs) for name, costs in said["transports"].items()}
            return cls(**said)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is not a cost model ({error}); make one with psctl calibrate") from error
