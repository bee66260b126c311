"""The calls of the code that wait, by the functions that they are in; `test_architecture` holds that none is missing.

A new wait gets a generator in `tests/integration/test_waits.py`, and a row in `TRIED`. Only what is over sooner than
`Timeouts.word`, or does not wait for another process, gets one in `BRIEF`, with the reason.
"""

from __future__ import annotations

TRIED: dict[str, tuple[str, ...]] = {
    # A worker, and the chief beside its script. All waits of a session come to `Session.wait`.
    "psclient._src.transport.session.Session.wait": ("for_a_worker_in_a_round",),
    "psclient._src.transport.log_calls.LogCalls.ask_keeper": (
        "for_a_chief",
        "for_a_worker_that_starts",
        "for_the_others_in_a_change",
        "for_the_others_to_take_it_in",
        "for_a_checkpoint_to_be_written",
    ),
    "psclient._src.rounds.creation.Creation._begin": ("for_a_first_value",),
    "psclient._src.rounds.creation.Creation._await": ("for_a_server_to_take_first_values",),
    "psclient._src.rounds.window.Window._await": ("for_a_worker_in_a_round", "for_approval"),
    "psclient._src.rounds.window.OwnWindow._await": ("for_approval_of_its_own",),
    "psclient._src.rounds.read_cache._Pulls._answer": ("for_a_value",),
    "psclient._src.rounds.rounds.Exchange._stand_in": ("for_who_saves",),
    "psclient._src.rounds.restore.Restoring._answer": ("for_a_checkpoint_to_be_read",),
    "psclient._src.transport.retries.Attempts.until_answered": ("for_a_server_that_answers",),
    # A coordinator, and a worker whose closure needs a result; one that is idle waits for the coordinator's script.
    "psclient.coordinator.pieces.wait": ("for_closures",),
    "psclient._src.chief.driver.Chief.stop": ("for_others_that_never_came", "for_others_to_leave"),
    # A chief alone. It waits for its workers until PS_TIMEOUT_FIRST, or PS_TIMEOUT_ALONE.
    "psclient._src.chief.driver.Chief._watch": ("for_workers",),
    "psclient._src.chief.checkpoints.CheckpointCommitter._awaited": ("for_a_shard",),
    # Whoever starts processes. Scripts may take as long as they like.
    "psclient._src.launch.cluster.Cluster.wait": ("for_a_script_of_a_cluster",),
    "psclient._src.launch.joining.Joiner.take": ("for_a_job_to_join",),
    "psclient._src.processes.process.await_listening": ("for_a_server_that_listens",),
    # An evaluator; without a timeout of its own for ever, as in TensorFlow.
    "psclient.train.iterator._next": ("for_a_newer_checkpoint",),
    # A server that ends. A disk that hangs is waited for until another signal comes.
    "psserver.cli._thread": ("for_a_disk",),
}
"""For each function which waits of `test_waits` try it."""

ENDS = "at the end of a server, a second at most"
CALLER = "its caller waits, in Session.wait"
OVER = "takes the result of what is done"
LOCAL = "for threads of this process, which wait for nobody"
IDLE = "a thread without work waits for some; nobody waits for it"
ASKED = "as long as the user has asked for"

BRIEF: dict[str, str] = {
    # ---- Of clients ----
    "psclient._src.launch.agent._run": "for a task that has ended, or was killed",
    "psclient._src.launch.agent._end": "at most TERM_SECONDS, when nobody is there any more who could be told",
    "psclient._src.launch.ssh_cluster.SshCluster._beat": IDLE,
    "psclient._src.launch.ssh_cluster.SshCluster._end_at_last": "for what was killed, at most TERM_SECONDS",
    "psclient._src.rounds.backend.RemoteBackend.section_here": "for another thread's section, at most Timeouts.call; the error says so",
    "psclient._src.processes.sigterm.Notice._count_down": "the grace period, of which the log has told, in a thread of its own",
    "psclient._src.chief.standby.stand_by": "a chief that stands by is waited for by nobody; it says what for at INFO",
    "psclient.coordinator.pieces.result_of": "in pieces.wait",
    "psclient.coordinator.cluster_coordinator.ClusterCoordinator._ask": "in pieces.wait",
    "psclient.coordinator.cluster_coordinator.ClusterCoordinator._look": "in pieces.wait, for an answer that comes at once",
    "psclient.coordinator.worker.Worker._ask": "in pieces.wait",
    "psclient._src.transport.staging.host": "for the end of a copy from this process's GPU",
    "psclient._src.transport.session.Session._hold": OVER,
    "psclient._src.transport.daemon_threads.follow": OVER,
    "psclient._src.transport.hosting.Hosting.look_around": "for calls that say themselves which server does not answer",
    "psclient._src.transport.pacing._await_epoch": "for the chief's next call, at most Timeouts.call; it says so in Session.wait",
    "psclient._src.transport.session.Session.pause": "between two questions; who asks again and again speaks itself",
    "psclient._src.transport.session.Session._beat": "the pause between two beats",
    "psclient._src.transport.patience.until_free": "at most a lease and two beats; it says at once for whom (test_verdicts)",
    "psclient._src.transport.session.Session._unless_broken": "for a call that speaks itself, in until_answered",
    "psclient._src.transport.session.Session.check": OVER,
    "psclient._src.transport.session.Session._take": OVER,
    "psclient._src.transport.session.Session.close": "for a beat under way, at most Timeouts.call; it speaks itself",
    "psclient._src.chief.checkpoints.CheckpointCommitter.ended": OVER,
    "psserver.transport.server._look": "the pause between two looks at files",
    "pswire.telemetry.web_server._shake": "in the connection's thread, at most SILENT_SECONDS",
    "psclient._src.chief.hung_members.HungMembers.look": OVER,
    "psclient._src.chief.returns.Returns._find": OVER,
    "psclient._src.chief.returns.Returns._ask_for_spares": OVER,
    "psclient._src.chief.returns.Returns.end": "a second at most, where servers are gone at the end of a job",
    "psclient._src.chief.returns.Returns._proceed": OVER,
    "psclient._src.chief.returns.Returns._prepare": "in a thread of its own, while members wait in Group._follow",
    "psclient._src.chief.returns.Returns._read": "in a thread of its own; members that wait for it say so, in Group._follow",
    "psclient._src.chief.job_log.JobLog.insist": "at most Timeouts.call before a chief ends, --timeout of psctl",
    "psclient._src.data.distributed._Distributed._position": "no join of threads: Group.join, which comes to Group._follow",
    "psclient._src.transport.chunk_calls.ChunkCalls.wait": "for an answer that comes at once, in Session.wait",
    "psclient._src.data.dynamic.HandedOut.end": "in ChunkCalls.wait",
    "psclient._src.data.dynamic.HandedOut.look": "in ChunkCalls.wait",
    "psclient._src.data.dynamic.HandedOut._collect": "in ChunkCalls.wait",
    "psclient.metrics.averages.RootMeanSquaredError.result": "a metric's result, which is no future's",
    "psclient.metrics.base.Metric.__call__": "a metric's result, which is no future's",
    "psclient._src.transport.lane.Lane.__init__": "at most CONNECT_SECONDS for a server's welcome, then the next lane is taken",
    "psclient._src.transport.lane.Lane._turn": IDLE,
    "psclient._src.transport.lane_reader.LaneReader.wait": CALLER,
    "psclient._src.transport.lane_reader.LaneReader._receive": CALLER,
    "psclient._src.transport.lane_selector.LaneSelector.ask": CALLER,
    "psclient._src.transport.grpc_calls.GrpcCalls._answer": "one attempt of until_answered, which bounds it",
    "psclient._src.transport.staging.fill": "for a copy from a GPU",
    "psclient._src.transport.staging.StagedParts.__iter__": "gRPC's thread, for what the process itself is copying; `end` ends it",
    "psclient._src.distribute.replicas.ReplicaRunner._pool": "makes threads; `close` waits for them",
    "psclient._src.distribute.replicas.ReplicaRunner.close": "for user's functions in threads of this process",
    "psclient._src.distribute.replicas.ReplicaRunner._run_threads": "for user's functions in threads of this process",
    "psclient._src.distribute.replicas._Meeting.call": "for user's functions in threads of this process, and their rounds, which speak",
    "psclient._src.distribute.replicas._Meeting.gather": "for user's functions in threads of this process",
    "psclient.train.iterator.checkpoints_iterator": ASKED,
    "pswire.traces.tracer.Tracer.close": "at the end of a process, at most FLUSH_SECONDS, for the last spans to be taken",
    # ---- Of the launcher and the embedded server ----
    "psclient._src.launch.psworker.run_cluster": "Cluster.wait",
    "psclient._src.launch.joining.Joiner._hold": "the pause between two words that keep a place",
    "psclient._src.launch.joining.Joiner._told": "at most LOOK_SECONDS, for an answer that comes at once",
    "psclient._src.launch.supervisor._Child.run": "for the user's script, whose output is there to see",
    "psclient._src.launch.cluster.Cluster.kill": "for the kernel, after SIGKILL",
    "psclient._src.launch.cluster.Cluster.stop": "for the kernel, after SIGKILL",
    "psclient._src.launch.cluster.Cluster._await": "at most LEAVE_SECONDS, then who still runs is named, or TERM_SECONDS",
    "psclient._src.processes.process.start_server": "for the kernel, after SIGKILL",
    "psclient._src.processes.embedded_server.EmbeddedServer.stop": "at most twice END_SECONDS, then for the kernel, after SIGKILL",
    "psclient._src.processes.output.Relay.close": "at most a second",
    "psclient._src.processes.output.Relay._run": IDLE,
    # ---- Of psctl: each command ends after --timeout, and names the server ----
    "psclient._src.telemetry.observer.Servers._ask_each": "at most --timeout",
    "psclient.psctl.job._await": "at most --wait, then it says which server has not moved, and where to look",
    "psclient._src.telemetry.observer.Servers.variables": "at most --timeout",
    "psclient._src.telemetry.observer.Servers.read": "at most --timeout",
    "psclient.psctl.cluster_checks._at_once": "at most --timeout",
    "psclient.psctl.status.status": ASKED,
    "psclient.psctl.activity.top": ASKED,
    "psclient.psctl.activity._live": ASKED,
    # ---- Of servers: they wait for calls, and nobody for them; a client that waits for a server speaks itself ----
    "psserver.cli.Departure._move": "at most Timeouts.grace; it says before to where the server moves",
    "psserver.transport.joining.await_place": "for a place, on purpose without an end where servers answer; it says so",
    "psserver.transport.joining._answer": "at most ASK_SECONDS",
    "psserver.transport.joining.StandingOffer._run": "the pause between two offers",
    "psserver.transport.joining.StandingOffer.close": "at most twice ASK_SECONDS",
    "psserver.cli._until_end": "for the end of the job, on purpose without one where it has none; PS_TIMEOUT_ALONE",
    "psserver.cli._tick": "the pause between two looks",
    "psserver.transport.health.Health._look": "the pause between two looks",
    "psserver.transport.server.serve": "for whoever runs the server to end it",
    "psserver.transport.server.leave_nothing": "at most the grace of an end",
    "psserver.transport.server.ServerThread.__enter__": LOCAL,
    "psserver.transport.server.ServerThread.stop": LOCAL,
    "psserver.transport.grpc_answers.Bell.heard": "for an answer's next part, which the round makes, or its connection's end",
    "psserver.transport.lane_connection.Connection.close": "no wait: a socket's shutdown",
    "psserver.transport.lane_connection.Connection._answer_round": OVER,
    "psserver.transport.lane_connection.Connection._answer_pull": OVER,
    "psserver.transport.grpc_service.Service._wait": OVER,
    "psserver.transport.grpc_service.Service._send_answer": OVER,
    "psserver.checkpoints.snapshots._follow": OVER,
    "psserver.state.counters.ServerCounters.written": OVER,
    "psserver.programs.kernels.background.Background.close": "at most the seconds that it is given",
    "psserver.programs.kernels.background.Background._next": IDLE,
    "psserver.programs.kernels.compiler.Compiler.wait": LOCAL,
    "psserver.programs.kernels.compiler.Compiler._get": "at most WAIT_SECONDS, for the compiler in this process",
    "psserver.programs.kernels.kept._lock": "at most LOCK_SECONDS, in the compiler's thread; rounds are interpreted meanwhile",
    "psserver.programs.kernels.launch.Crew.__init__": "makes threads; `close` waits for them",
    "psserver.programs.kernels.launch.Crew.close": LOCAL,
    "psserver.programs.kernels.launch.Crew._run": LOCAL,
    # ---- Of both ----
    "pswire.telemetry.web_server.WebServer.close": LOCAL,
    "pswire.telemetry.web_server.Budget._drop": "ends a socket, and waits for nobody",
    "pswire.telemetry.page.sampler.Sampler._run": IDLE,
    "pswire.telemetry.page.sampler.Sampler._look": "half a second, in a thread of the page's own",
    "pswire.telemetry.page.sampler.Sampler.after": "at most ANSWER_SECONDS, in the thread of a browser's connection",
    "pswire.telemetry.page.sampler.Sampler.close": "at most END_SECONDS",
    "psserver.cli._on": "at most LOOP_SECONDS, in a thread of the page's own, which does without then",
    "psserver.transport.peers.Link._run": "the pause between two attempts to connect; status and log say whom it misses",
    "psserver.transport.peers.Link.join": ENDS,
    "psserver.transport.peers.Peers.close": ENDS,
}
"""For each function why nobody has to be told."""
