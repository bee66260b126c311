"""Costs for `psctl plan` where nothing was measured: rounded figures of one host."""

from __future__ import annotations

from dataclasses import replace

from pstesting.simulation.costs import Costs, TransportCosts

_US, _NS = 1e-6, 1e-9

# A round and its bytes are as docs/scale.md says under "Simulated curves" (a server takes 352 us for an asynchronous
# round, 4 us for a variable, 0.29 ns for a byte); rounds of two workers take what docs/lab/security.md has for 4 KB and
# 4 MB, over tcp and over grpc, to a few parts in ten. Sums of a host are those of docs/scale.md. Rows are estimates.
_TCP = TransportCosts(
    send=50 * _US,
    send_byte=0.2 * _NS,
    receive=90 * _US,
    receive_byte=0.1 * _NS,
    answer=50 * _US,
    answer_byte=0.1 * _NS,
    take=50 * _US,
    take_byte=0.2 * _NS,
    piece=20 * _US,
    latency=40 * _US,
)
_GRPC = replace(
    _TCP,
    send=170 * _US,
    send_byte=0.5 * _NS,
    receive=210 * _US,
    receive_byte=0.4 * _NS,
    answer=170 * _US,
    answer_byte=0.4 * _NS,
    take=170 * _US,
    take_byte=0.5 * _NS,
)

TYPICAL = Costs(
    {"tcp": _TCP, "grpc": _GRPC, "shm": replace(_TCP, send_byte=0.1 * _NS, receive_byte=0.0, take_byte=0.1 * _NS)},
    step=200 * _US,
    step_variable=5 * _US,
    round=210 * _US,
    round_variable=4 * _US,
    kernel_byte=0.05 * _NS,
    apply_byte=0.05 * _NS,
    row=0.1 * _US,
    step_row=0.1 * _US,
    vote=30 * _US,
    call=100 * _US,
    heartbeat=100 * _US,
    table=150 * _US,
    step_table=100 * _US,
    part=115 * _US,
    hand=177 * _US,
    hand_byte=0.15 * _NS,
    machine="a virtual machine with 2 cores of an AMD EPYC",
    network=1.25e9,
    network_latency=50 * _US,
)
"""Rounded figures of a virtual machine with two cores, and a network of 10 Gbit/s, which was not measured."""
