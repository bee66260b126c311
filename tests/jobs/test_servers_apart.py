"""Servers that do not reach one another: rounds wait, everybody is told of both, and what was agreed on stays whole."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

import psclient as ps
from pstesting import forks
from pstesting.network import Relay
from pstesting.processes import PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, add_all, gate, say

APART = "127.0.0.2"
"""An address of this host at which no server listens, and so no lane: servers that are told it vote over gRPC."""

KEYS = {"ps": 2, "workers": 2, "chief": "driver"}


def count(rounds, stops):
    """Adds to a variable of each server; waits at a gate before one round."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4), name="v")
        u = ps.Variable(np.zeros(4), name="u")
    mine = np.full(4, 100.0**ME)
    try:
        for step in range(rounds):
            if step == stops:
                say("at", step)
                gate("go")
            strategy.run(lambda: add_all([(v, mine), (u, mine)]))
            assert float(v[0]) == float(u[0]) == 101.0 * (step + 1)
            say("did", step)
    except ps.errors.ServerLost as error:
        say("lost", [error.task, str(error)])
        raise
    say("sums", [float(v[0]), float(u[0])])


def lead(relays, job):
    """Lets relays lead to the servers of a job."""
    for relay, server in zip(relays, (PS0, PS1), strict=True):
        relay.lead_to(job.cluster.addresses[server])


@pytest.mark.parametrize(
    "words",
    [pytest.param(b"", marks=pytest.mark.soak), b"HTTP/1.1 400 Bad Request\r\nServer: nobody we know of here\r\n\r\n"],
)
def test_servers_that_are_cut_off_for_a_while(tmp_path, stack, words):
    """Rounds wait, `psctl status` says why, and once the servers reach each other again all go on.

    At the address of a server's lane another program answers, as with forwarded ports: votes go over gRPC.
    """
    relays = [Relay(stack, APART), Relay(stack, APART)]
    between = [relay.address for relay in relays]
    # What is cut is found when a call has ended; and nobody is lost on a machine that others use.
    timeouts = dataclasses.replace(QUICK, server=SECONDS)
    with ProcessCluster(count, tmp_path, (8, 3), between=between, timeouts=timeouts, gates=["go"], **KEYS) as job:
        for server in (PS0, PS1):
            answer_all(stack, APART, lane_port(job, server), words)
        lead(relays, job)
        for task in (W0, W1):
            job.hear(task, "at", 3)
        for one, other in ((PS0, PS1), (PS1, PS0)):
            assert f"{one} votes over gRPC at {other}: its lane cannot be reached (" in job.errors(one)
        for relay in relays:
            relay.cut()
        job.open("go")
        addresses = ",".join(job.cluster.addresses[server] for server in (PS0, PS1))
        job.until(lambda: _missed(job) == {PS0: [1], PS1: [0]})
        told = cut_off(addresses, job.cluster._options.variables())
        assert f"it has not reached {PS1} for " in told[str(PS0)]
        assert not {3, 4} & {*job.said(W0, "did"), *job.said(W1, "did")}
        for relay in relays:
            relay.mend()
        for task in (W0, W1):
            assert job.hear(task, "sums") == [808.0, 808.0]
        job.finish()


def _missed(job):
    """The servers that each server does not reach."""
    found = {}
    for task in (PS0, PS1):
        with job.server(task) as server:
            found[task] = [missed.server for missed in server.status().missed]
    return found


def cut_off(addresses, variables):
    """What `psctl status` says of servers that are cut off."""
    psctl = [sys.executable, "-m", "psclient.psctl", "--address", addresses, "status", "--json"]
    environ = os.environ | variables
    done = forks.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    found = [problem for problem in json.loads(done.stdout)["problems"] if problem["kind"] == "cut_off"]
    return {problem["task"]: problem["message"] for problem in found}


def lane_port(job: ProcessCluster, server) -> int:
    """The port of a server's tcp lane, as the system knows it."""
    listens = psutil.Process(job.cluster.processes[server].pid).net_connections("tcp")
    ports = {found.laddr.port for found in listens if found.status == psutil.CONN_LISTEN}
    [port] = ports - {int(job.cluster.addresses[server].rpartition(":")[2])}
    return port


def answer_all(stack: ExitStack, host: str, port: int, words: bytes) -> None:
    """Says some words to whoever connects, and hangs up."""
    listener = stack.enter_context(socket.create_server((host, port)))

    def answer() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.sendall(words)

    threading.Thread(target=answer, daemon=True).start()
    stack.callback(listener.shutdown, socket.SHUT_RDWR)
