"""The calls of the code that wait, by the functions that they are in; `test_architecture` holds that none is missing.

A new wait gets a generator in `tests/integration/test_waits.py`, and a row in `TRIED`. Only what is over sooner than
`Timeouts.word`, or does not wait for another process, gets one in `BRIEF`, with the reason.
"""

from __future__ import annotations

TRIED: dict[str, tuple[str, ...]] = {
    # A worker, and the chief beside its script. All waits of a session come to `Session.wait`.
    "psclient.session.Session.wait": ("for_a_worker_in_a_round",),
    "psclient.session.Session.await_job": ("for_a_chief",),
    "psclient.group.Group._follow": (
        "for_a_worker_that_starts",
        "for_the_others_to_take_it_in",
        "for_a_checkpoint_to_be_written",
    ),
    "psclient.exchange.Exchange._await": ("for_a_worker_in_a_round", "for_approval"),
    "psclient.exchange.Exchange._pull": ("for_a_value",),
    "psclient.exchange.Exchange._stand_in": ("for_who_saves",),
    "psclient.restoring.Restoring._answer": ("for_a_checkpoint_to_be_read",),
    "psclient.attempts.Attempts.until_answered": ("for_a_server_that_answers",),
    "psclient.chief.Chief.stop": ("for_others_that_never_came", "for_others_to_leave"),
    # A chief alone. It waits for its workers until PS_TIMEOUT_FIRST, or PS_TIMEOUT_ALONE.
    "psclient.chief.Chief._watch": ("for_workers",),
    "psclient.chief.Chief._awaited": ("for_a_shard",),
    # Whoever starts processes. Scripts may take as long as they like.
    "psclient.launch.Cluster.wait": ("for_a_script_of_a_cluster",),
    "psclient.processes.await_listening": ("for_a_server_that_listens",),
    # An evaluator; without a timeout of its own for ever, as in TensorFlow.
    "psclient.train.iterator._next": ("for_a_newer_checkpoint",),
    # A server that ends. A disk that hangs is waited for until another signal comes.
    "psserver.cli._thread": ("for_a_disk",),
}
"""For each function which waits of `test_waits` try it."""

CALLER = "its caller waits, in Session.wait"
OVER = "takes the result of what is done"
LOCAL = "for threads of this process, which wait for nobody"
IDLE = "a thread without work waits for some; nobody waits for it"
ASKED = "as long as the user has asked for"

BRIEF: dict[str, str] = {
    # ---- Of clients ----
    "psclient.session.Session.look": "at most Timeouts.call; the error names server 0",
    "psclient.session.Session._beat": "the pause between two beats",
    "psclient.session.Session._open_first": "at most a lease and two beats; it says at once for whom (test_verdicts)",
    "psclient.session.Session._unless_broken": "for a call that speaks itself, in until_answered",
    "psclient.session.Session.check": OVER,
    "psclient.session.Session._take": OVER,
    "psclient.session.Session.close": "for a beat under way, at most Timeouts.call; it speaks itself",
    "psclient.chief.Chief._saved": OVER,
    "psclient.chief.Chief._stalled": OVER,
    "psclient.chief.Chief._announce": "at most Timeouts.call, before it ends",
    "psclient.chief.Chief.discard": "at most --timeout of psctl",
    "psclient.data._Distributed._position": "no join of threads: Group.join, which comes to Group._follow",
    "psclient.metrics.Metric.__call__": "a metric's result, which is no future's",
    "psclient.lane.Lane.__init__": "at most CONNECT_SECONDS for a server's welcome, then the next lane is taken",
    "psclient.lane.Lane._turn": IDLE,
    "psclient.lanes.Lanes.ask": CALLER,
    "psclient.rpc.RemoteServer.create": "one attempt of until_answered, which bounds it",
    "psclient.rpc.RemoteServer.watch": "the same; held as long as the session is, on purpose",
    "psclient.staging.fill": "for a copy from a GPU",
    "psclient.staging.Parts.__iter__": "gRPC's thread, for what the process itself is copying; `end` ends it",
    "psclient.replicas.ReplicaRunner.__init__": "makes threads; `close` waits for them",
    "psclient.replicas.ReplicaRunner.close": "for user's functions in threads of this process",
    "psclient.replicas.ReplicaRunner._run_threads": "for user's functions in threads of this process",
    "psclient.replicas._Meeting.call": "for user's functions in threads of this process, and their rounds, which speak",
    "psclient.replicas._Meeting.gather": "for user's functions in threads of this process",
    "psclient.train.iterator.checkpoints_iterator": ASKED,
    # ---- Of the launcher and the embedded server ----
    "psclient.cli.run_cluster": "Cluster.wait",
    "psclient.launch.Cluster.kill": "for the kernel, after SIGKILL",
    "psclient.launch.Cluster.stop": "for the kernel, after SIGKILL",
    "psclient.launch.Cluster._await": "at most LEAVE_SECONDS, then who still runs is named, or TERM_SECONDS",
    "psclient.processes.start_server": "for the kernel, after SIGKILL",
    "psclient.embedded.EmbeddedServer.stop": "at most twice END_SECONDS, then for the kernel, after SIGKILL",
    "psclient.relay.Relay.close": "at most a second",
    "psclient.relay.Relay._run": IDLE,
    # ---- Of psctl: each command ends after --timeout, and names the server ----
    "psclient.psctl.servers.Servers.look": "at most --timeout",
    "psclient.psctl.servers.Servers.variables": "at most --timeout",
    "psclient.psctl.servers.Servers.read": "at most --timeout",
    "psclient.psctl.cluster_checks._at_once": "at most --timeout",
    "psclient.psctl.status.status": ASKED,
    "psclient.psctl.top.top": ASKED,
    "psclient.psctl.top._live": ASKED,
    # ---- Of servers: they wait for calls, and nobody for them; a client that waits for a server speaks itself ----
    "psserver.cli._until_end": "for the end of the job, on purpose without one where it has none; PS_TIMEOUT_ALONE",
    "psserver.cli._tick": "the pause between two looks",
    "psserver.health.Health._look": "the pause between two looks",
    "psserver.server.serve": "for whoever runs the server to end it",
    "psserver.server.leave_nothing": "at most the grace of an end",
    "psserver.server.ServerThread.__enter__": LOCAL,
    "psserver.server.ServerThread.stop": LOCAL,
    "psserver.outgoing.Bell.heard": "for an answer's next part, which the round makes, or its connection's end",
    "psserver.connection.Connection.close": "no wait: a socket's shutdown",
    "psserver.connection.Connection._answer_round": OVER,
    "psserver.connection.Connection._answer_pull": OVER,
    "psserver.service.Service._wait": OVER,
    "psserver.service.Service._send_answer": OVER,
    "psserver.snapshots._follow": OVER,
    "psserver.tally.Tally.written": OVER,
    "psserver.kernels.background.Background.close": "at most the seconds that it is given",
    "psserver.kernels.background.Background._next": IDLE,
    "psserver.kernels.compiled.Compiler.wait": LOCAL,
    "psserver.kernels.compiled.Compiler._get": "at most WAIT_SECONDS, for the compiler in this process",
    "psserver.kernels.launch.Crew.__init__": "makes threads; `close` waits for them",
    "psserver.kernels.launch.Crew.close": LOCAL,
    "psserver.kernels.launch.Crew._run": LOCAL,
    # ---- Of both ----
    "pswire.exposition.Page.close": LOCAL,
}
"""For each function why nobody has to be told."""
