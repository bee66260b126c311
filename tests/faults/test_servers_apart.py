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
from psclient._src.processes.shutdown import SERVER_LOST
from pstesting import forks
from pstesting.network import Relay
from pstesting.processes import CHIEF, PS0, PS1, QUICK, SECONDS, W0, W1, ProcessCluster
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


@pytest.mark.parametrize("how", ["silent", pytest.param("refused", marks=pytest.mark.soak)])
def test_servers_that_never_reach_each_other(tmp_path, stack, how):
    """No round is made, and nobody waits for ever: after `PS_TIMEOUT_SERVER` every process ends, and names both."""
    if how == "silent":
        relays = [Relay(stack, APART), Relay(stack, APART)]
        for relay in relays:
            relay.cut()
        between = [relay.address for relay in relays]
    else:
        bound = [stack.enter_context(socket.socket()) for _ in range(2)]  # nobody else gets these ports
        for sock in bound:
            sock.bind((APART, 0))
        between = [f"{APART}:{sock.getsockname()[1]}" for sock in bound]
    timeouts = dataclasses.replace(QUICK, lease=6.0, server=6.0)
    with ProcessCluster(count, tmp_path, (5, -1), between=between, timeouts=timeouts, **KEYS) as job:
        for one, other in ((PS0, PS1), (PS1, PS0)):
            job.hear_error(one, f"rounds wait: {one} does not reach {other} (at {between[other.index]}: ")
        for task in (W0, W1):
            lost, text = job.hear(task, "lost")
            assert lost == str(PS1)
            assert f"{PS0} has not reached {PS1} for " in text or f"{PS1} has not reached {PS0} for " in text
            assert "let the servers connect to each other, or give every process ps.Sync(whole_rounds=False)" in text
        for task in (W0, W1, CHIEF):
            assert job.exited(task) == SERVER_LOST
            assert not job.said(task, "did")


def test_servers_that_are_cut_off_for_a_while(tmp_path, stack):
    """Rounds wait, `psctl status` says why, and once the servers reach each other again all go on."""
    relays = [Relay(stack, APART), Relay(stack, APART)]
    between = [relay.address for relay in relays]
    # What is cut is found when a call has ended; and nobody is lost on a machine that others use.
    timeouts = dataclasses.replace(QUICK, server=SECONDS)
    with ProcessCluster(count, tmp_path, (12, 5), between=between, timeouts=timeouts, gates=["go"], **KEYS) as job:
        lead(relays, job)
        for task in (W0, W1):
            job.hear(task, "at", 5)
        for one, other in ((PS0, PS1), (PS1, PS0)):
            assert f"{one} votes at {other}, lane grpc" in job.errors(one)
        for relay in relays:
            relay.cut()
        job.open("go")
        addresses = ",".join(job.cluster.addresses[server] for server in (PS0, PS1))
        psctl = [sys.executable, "-m", "psclient.psctl", "--address", addresses, "status", "--json"]
        environ = os.environ | job.cluster._options.variables()

        def cut_off():
            done = forks.run(psctl, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
            found = [problem for problem in json.loads(done.stdout)["problems"] if problem["kind"] == "cut_off"]
            return {problem["task"]: problem["message"] for problem in found}

        job.until(lambda: cut_off().keys() == {str(PS0), str(PS1)})
        assert f"it has not reached {PS1} for " in cut_off()[str(PS0)]
        assert not {5, 6} & {*job.said(W0, "did"), *job.said(W1, "did")}
        for relay in relays:
            relay.mend()
        for task in (W0, W1):
            assert job.hear(task, "sums") == [1212.0, 1212.0]
        job.finish()


def test_a_server_and_its_copy_that_do_not_reach_each_other(tmp_path, stack):
    """With copies the job goes on with one of them, by the chief's word alone; the other answers nobody any more."""
    relays = [Relay(stack, APART), Relay(stack, APART)]
    between = [relay.address for relay in relays]
    keys = {**KEYS, "replication": 1, "timeouts": dataclasses.replace(QUICK, lease=4.0)}
    with ProcessCluster(count, tmp_path, (12, 5), between=between, gates=["go"], **keys) as job:
        lead(relays, job)
        for task in (W0, W1):
            job.hear(task, "at", 5)
        for relay in relays:
            relay.cut()
        job.open("go")
        for task in (CHIEF, W0, W1):
            said = job.hear_error(task, f"goes on without {PS1}")
            assert f"{PS0} has not reached {PS1}" in said or f"{PS1} has not reached {PS0}" in said
        for task in (W0, W1):  # each round counts once, as the script itself checks
            assert job.hear(task, "sums") == [1212.0, 1212.0]
        assert {job.exited(task) for task in (PS0, CHIEF, W0, W1)} == {0}


@pytest.mark.parametrize(
    "words",
    [pytest.param(b"", marks=pytest.mark.soak), b"HTTP/1.1 400 Bad Request\r\nServer: nobody we know of here\r\n\r\n"],
)
def test_somebody_else_at_a_lane(tmp_path, stack, words):
    """At the address of a server's lane another program answers, as with forwarded ports: votes go over gRPC."""
    relays = [Relay(stack, APART), Relay(stack, APART)]
    between = [relay.address for relay in relays]
    with ProcessCluster(count, tmp_path, (2, 0), between=between, gates=["go"], **KEYS) as job:
        lead(relays, job)
        for server in (PS0, PS1):
            answer_all(stack, APART, lane_port(job, server), words)
        job.open("go")
        for task in (W0, W1):
            assert job.hear(task, "sums") == [202.0, 202.0]
        job.finish()
        for one, other in ((PS0, PS1), (PS1, PS0)):
            assert f"{one} votes over gRPC at {other}: its lane cannot be reached (" in job.errors(one)


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
