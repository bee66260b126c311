"""The plan of the house: rooms, floors and imports; and the calls that wait, which `test_architecture` holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """One room.

    Attributes:
        name: of the package, or of the module that stands for itself.
        floor: above all that it imports.
        imports: names of rooms, all that it may import.
    """

    name: str
    floor: int
    imports: frozenset[str]


PLAN = """
pswire                      0
pswire.model                1  pswire
pswire.security             1  pswire
pswire.telemetry            2  pswire wire.security
pswire.traces               1  pswire
pswire.telemetry.views      3  pswire wire.model wire.security
pswire.telemetry.page       4  pswire wire.model wire.security wire.telemetry wire.views
pswire.network              2  pswire wire.model wire.security
pswire.servers              2  pswire wire.model
pswire.api                  3  pswire wire.model wire.network wire.servers
pswire.checkpoint           4  pswire wire.model wire.security
pswire.encoding             4  pswire wire.model wire.servers wire.traces wire.network wire.api
psserver                    4  pswire wire.model wire.security wire.servers wire.traces wire.network
psserver.programs           5  pswire wire.model psserver
psserver.tiers              5  pswire wire.model
psserver.tables             6  pswire wire.model psserver.programs psserver.tiers
psserver.plans              6  pswire wire.model wire.servers wire.network psserver.programs wire.api
psserver.values             7  pswire wire.model wire.api psserver.programs psserver.plans psserver.tables
psserver.network            7  pswire wire.servers wire.model wire.security wire.telemetry psserver
                                wire.network wire.api wire.encoding
psserver.state              8  pswire wire.model wire.security wire.telemetry psserver wire.network
                                wire.api psserver.plans psserver.tables psserver.values
psserver.execution          9  pswire wire.model psserver psserver.programs psserver.plans psserver.state
                                psserver.values
psserver.rounds            10  pswire wire.servers wire.model psserver wire.network psserver.programs wire.api
                                psserver.plans psserver.state psserver.execution psserver.values
psserver.checkpoints       11  pswire wire.model psserver psserver.tables psserver.plans wire.checkpoint
                                psserver.state psserver.rounds psserver.values
psserver.services          12  pswire wire.model wire.servers wire.api psserver psserver.plans psserver.state
                                psserver.rounds psserver.checkpoints
psserver.core              13  pswire wire.servers wire.model wire.security wire.telemetry wire.traces psserver
                                wire.network psserver.programs wire.api psserver.plans psserver.tables psserver.tiers
                                wire.checkpoint psserver.state psserver.checkpoints psserver.execution psserver.rounds
                                psserver.services psserver.values
psserver.telemetry         14  pswire wire.model wire.telemetry wire.views wire.page psserver wire.network
                                psserver.tables psserver.state psserver.core
psserver.cli               15  pswire wire.model wire.security wire.telemetry psserver psserver.network psserver.core
                                psserver.telemetry
psserver.__main__          16  psserver.cli
psclient.ops                2  wire.model
src.arrays                  2  pswire wire.model
src.interpreter             2
psclient._src               3  pswire wire.model wire.security wire.telemetry wire.traces wire.network src.arrays
src.telemetry.traces        4  wire.traces
src.cluster_resolver        4  pswire psclient._src src.arrays
src.data                    4  pswire wire.model psclient._src src.arrays src.interpreter
src.processes               4  pswire wire.model wire.security wire.telemetry psclient._src src.interpreter
src.tracing                 4  pswire wire.model psclient._src src.arrays
src.variables               4  pswire wire.model psclient._src src.arrays src.interpreter
psclient.summary            4  psclient._src src.arrays
psclient.initializers       4  wire.model
psclient.losses             4  psclient._src src.arrays
src.distribute              5  pswire wire.model psclient._src src.arrays src.interpreter src.cluster_resolver src.data
                                src.processes src.tracing src.variables
src.network               5  pswire wire.model wire.security wire.telemetry wire.network psclient._src src.arrays
                                src.interpreter wire.servers wire.api wire.encoding
src.processes.aggregation   5  pswire wire.model wire.network wire.api wire.encoding
psclient.cluster_resolver   5  src.cluster_resolver
psclient.metrics            5  wire.model psclient._src src.arrays src.variables psclient.losses
psclient.nn                 5  wire.model psclient._src src.arrays src.variables
src.chief                   6  pswire wire.model wire.telemetry wire.api wire.checkpoint src.telemetry.traces
                                src.network
src.rounds                  6  pswire wire.model wire.telemetry wire.network psclient._src src.arrays src.interpreter
                                wire.api src.data src.processes src.tracing src.variables src.distribute
                                src.telemetry.traces src.network src.processes.aggregation
psclient.optimizers         6  wire.model psclient._src src.arrays src.tracing src.variables src.distribute
psclient.compat.v1.train    7  psclient._src src.arrays src.tracing src.variables src.distribute
                                psclient.optimizers
psclient.compat.v1          9  src.variables src.strategies psclient.compat.v1.train
psclient.experimental      14  src.variables
psclient.compression       14  src.variables
psclient.dynamic_embedding  7  pswire wire.model psclient._src src.arrays src.variables wire.checkpoint
                                psclient.initializers
psclient.compat            10  psclient._src src.arrays src.data src.variables src.distribute src.strategies
                                psclient.compat.v1
src.telemetry               7  pswire wire.model wire.security wire.telemetry wire.views wire.page psclient._src
                                src.telemetry.traces src.network src.chief src.rounds
psclient.psctl              8  pswire wire.model wire.security wire.network wire.views psclient._src src.arrays
                                wire.checkpoint src.network src.chief src.telemetry src.processes
psclient.train              7  pswire wire.model wire.telemetry psclient._src src.variables
                                wire.checkpoint src.distribute src.rounds psclient.optimizers
psclient.optimizers.local_steps  7  pswire wire.model psclient._src src.distribute src.rounds src.variables
                                psclient.optimizers
src.launch                  8  pswire wire.model wire.security wire.telemetry wire.encoding psclient._src
                                src.interpreter src.processes src.network src.chief src.telemetry src.processes
src.strategies              8  pswire wire.model wire.security wire.network psclient._src src.arrays
                                src.interpreter src.cluster_resolver src.data src.processes src.variables
                                src.distribute src.network src.chief src.rounds src.telemetry
psclient.coordinator       11  pswire wire.model wire.network psclient._src src.arrays src.interpreter
                                src.data src.cluster_resolver src.processes src.variables src.network src.strategies
psclient                   15  pswire psclient.ops psclient._src src.data src.tracing src.variables psclient.summary
                                psclient.coordinator src.distribute psclient.losses psclient.nn
                                psclient.cluster_resolver psclient.metrics psclient.compat psclient.dynamic_embedding
                                psclient.initializers psclient.compression psclient.experimental psclient.optimizers
                                psclient.train src.strategies
psclient.jax               16  pswire wire.model psclient._src src.arrays src.interpreter src.data src.variables
                                src.distribute psclient.optimizers.local_steps psclient.optimizers
psclient.__main__          15  src.launch
psclient.launch            12  pswire psclient._src src.processes src.launch
psclient.torch             16  pswire wire.model psclient._src src.arrays src.interpreter src.data src.distribute
                                psclient.optimizers.local_steps src.rounds src.tracing src.variables psclient.dynamic_embedding psclient.optimizers
                                psclient.train
pstesting                  16  pswire wire.model wire.security psserver psserver.programs wire.network psclient._src
                                src.processes src.network psserver.network psserver.core src.launch src.strategies
                                psclient psserver.cli
pstesting.simulation       16  pswire wire.servers wire.api wire.model wire.network wire.telemetry wire.security
                                psserver psserver.programs psserver.plans psserver.rounds psserver.core src.network src.rounds
                                src.processes src.processes.aggregation src.chief src.arrays
pstesting.planner          17  pswire wire.model wire.network psclient psclient.psctl pstesting pstesting.simulation
"""
"""For each room its floor, and what it imports; `wire.` is `pswire.`, and `src.` is `psclient._src.`."""


def _rooms() -> Iterator[Room]:
    for name, floor, *imports in map(str.split, re.split(r"\n(?! )", PLAN.strip())):
        yield Room(_whole(name), int(floor), frozenset(map(_whole, imports)))


def _whole(name: str) -> str:
    name = re.sub(r"^wire\.(?=views|page)", "pswire.telemetry.", name)
    return re.sub(r"^src\.", "psclient._src.", re.sub(r"^wire\.", "pswire.", name))


ROOMS = {room.name: room for room in _rooms()}

RESERVED = {"psclient._src.rows": 7, "psserver.replication": 12}
"""Rooms that are not built yet, with their floors. No room imports `psclient.torch` or `psclient.jax`."""


TRIED: dict[str, tuple[str, ...]] = {
    # A worker, and the chief beside its script. All waits of a session come to `Session.wait`.
    "psclient._src.network.session.Session.wait": ("for_a_worker_in_a_round",),
    "psclient._src.network.session.Session.ask_keeper": (
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
    "psclient._src.network.retries.Attempts.until_answered": ("for_a_server_that_answers",),
    # A coordinator, and a worker whose closure needs a result; one that is idle waits for the coordinator's script.
    "psclient.coordinator.pieces.wait": ("for_closures",),
    "psclient._src.chief.driver.Chief.stop": ("for_others_that_never_came", "for_others_to_leave"),
    # A chief alone. It waits for its workers until PS_FIRST_WORKER_TIMEOUT, or PS_NO_WORKERS_TIMEOUT.
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
    "psclient._src.interpreter.interrupts.Interrupts._remind": "a thread of its own, until a held interrupt is raised",
    # ---- Of clients ----
    "psclient._src.launch.agent._attend": "for its task, on purpose without an end; for a silent launcher a lease",
    "psclient._src.launch.agent._run": "for a task that has ended, or was killed",
    "psclient._src.launch.agent._end": "at most TERM_SECONDS, when nobody is there any more who could be told",
    "psclient._src.launch.remote_cluster.RemoteCluster._heartbeat": IDLE,
    "psclient._src.launch.remote_cluster.RemoteCluster._end_at_last": "for what was killed, at most TERM_SECONDS",
    "psclient._src.launch.ray_cluster.RayCluster._await_room": "says what Ray lacks, each Timeouts.report_interval; tests/ray tries it",
    "psclient._src.launch.ray_cluster.RayCluster._look": "for Ray, at most Timeouts.start_timeout; the error names the task",
    "psclient._src.launch.ray_cluster.RayCluster._settle": "the same, where the node of a task is gone",
    "psclient.launch.ray.run": "until the job has ended, whose tasks say what they wait for",
    "psclient._src.launch.ray_actor.AgentActor.say": "for the agent, which its driver has ordered to start",
    "psclient._src.launch.ray_actor.AgentActor.hear": "for what a task prints; only a thread of its own waits for it",
    "psclient._src.launch.ray_actor.RayTask.wait": "its caller waits, in Cluster.wait",
    "psclient._src.rounds.backend.RemoteBackend.section_here": "for another thread's section, at most Timeouts.call_timeout; the error says so",
    "psclient._src.processes.sigterm.Notice._count_down": "the grace period, of which the log has told, in a thread of its own",
    "psclient._src.chief.standby.stand_by": "a chief that stands by is waited for by nobody; it says what for at INFO",
    "psclient.coordinator.pieces.result_of": "in pieces.wait",
    "psclient.coordinator.cluster_coordinator.ClusterCoordinator._ask": "in pieces.wait",
    "psclient.coordinator.cluster_coordinator.ClusterCoordinator._look": "in pieces.wait, for an answer that comes at once",
    "psclient.coordinator.worker.Worker._ask": "in pieces.wait",
    "psclient._src.processes.aggregation.follower.LeaderConnection._await_welcome": "at most HELLO_SECONDS, in a thread of its own",
    "psclient._src.processes.aggregation.follower.LeaderConnection._run": "for news, in a thread of its own",
    "psclient._src.processes.aggregation.link.HostLink._end": "never: it shuts a socket",
    "psclient._src.processes.aggregation.leader.Leader.__init__": "never: its thread for sums begins with the first",
    "psclient._src.processes.aggregation.leader.Leader.close": "never: what is added up ends by itself",
    "psclient._src.processes.aggregation.leader.Leader._run": "for news, in a thread of its own",
    "psclient._src.processes.aggregation.leader.Leader._answered": OVER,
    "psclient._src.network.staging.host": "for the end of a copy from this process's GPU",
    "psclient._src.network.lease.Lease._hold": OVER,
    "pswire.network.futures.follow": OVER,
    "pswire.network.futures.LeanFuture.result": "its caller waits",
    "psclient._src.network.hosting.Hosting.look_around": "for calls that say themselves which server does not answer",
    "psclient._src.network.pacing._await_generation": "for the chief's next call, at most Timeouts.call_timeout; it says so in Session.wait",
    "psclient._src.network.lease.Lease.pause": "between two questions; who asks again and again speaks itself",
    "psclient._src.network.lease.Lease._heartbeat": "the pause between two heartbeats",
    "psclient._src.network.patience.until_free": "at most a lease and two heartbeats; it says at once for whom (test_verdicts)",
    "psclient._src.network.lease.Lease._unless_broken": "for a call that speaks itself, in until_answered",
    "psclient._src.network.lease.Lease.check": OVER,
    "psclient._src.network.session.Session._take": OVER,
    "psclient._src.network.lease.Lease.close": "for a heartbeat under way, at most Timeouts.call_timeout; it speaks itself",
    "psclient._src.chief.checkpoints.CheckpointCommitter.ended": OVER,
    "psserver.network.server._look": "the pause between two looks at files",
    "pswire.telemetry.web_server._shake": "in the connection's thread, at most SILENT_SECONDS",
    "psclient._src.chief.hung_members.HungMembers.look": OVER,
    "psclient._src.chief.returns.Returns._find": OVER,
    "psclient._src.chief.returns.Returns._ask_for_standbys": OVER,
    "psclient._src.chief.returns.Returns.end": "a second at most, where servers are gone at the end of a job",
    "psclient._src.chief.returns.Returns._proceed": OVER,
    "psclient._src.chief.returns.Returns._prepare": "in a thread of its own, while members wait in JobNews.follow",
    "psclient._src.chief.returns.Returns._read": "in a thread of its own; members that wait for it say so, in JobNews.follow",
    "psclient._src.chief.job_log.JobLog.insist": "at most Timeouts.call_timeout before a chief ends, --timeout of psctl",
    "psclient._src.data.distributed._Distributed._position": "no join of threads: Group.join, which comes to JobNews.follow",
    "psclient._src.network.chunk_calls.BatchCalls.wait": "for an answer that comes at once, in Session.wait",
    "psclient._src.data.assigned.AssignedBatches.end": "in BatchCalls.wait",
    "psclient._src.data.assigned.AssignedBatches.look": "in BatchCalls.wait",
    "psclient._src.data.assigned.AssignedBatches._collect": "in BatchCalls.wait",
    "psclient.metrics.averages.RootMeanSquaredError.result": "a metric's result, which is no future's",
    "psclient.metrics.base.Metric.__call__": "a metric's result, which is no future's",
    "psclient._src.network.transport.Transport.__init__": "at most CONNECT_SECONDS for a server's welcome, then the next transport is taken",
    "psclient._src.network.transport.Transport._turn": IDLE,
    "psclient._src.network.transport_selector.TransportSelector.heartbeat": "for a part of a lease; then the heartbeat over gRPC says so",
    "psclient._src.network.transport_reader._await": CALLER,
    "psclient._src.network.transport_reader.TransportReader._receive": CALLER,
    "psclient._src.network.grpc_calls.GrpcCalls.watch": "one attempt of until_answered, which bounds it",
    "psclient._src.network.staging.fill": "for a copy from a GPU",
    "psclient._src.network.staging.StagedParts.__iter__": "gRPC's thread, for what the process itself is copying; `end` ends it",
    "psclient._src.distribute.replicas.ReplicaRunner._pool": "makes threads; `close` waits for them",
    "psclient._src.distribute.replicas.ReplicaRunner.close": "for user's functions in threads of this process",
    "psclient._src.distribute.replicas.ReplicaRunner._run_threads": "for user's functions in threads of this process",
    "psclient._src.distribute.replicas._Meeting.call": "for user's functions in threads of this process, and their rounds, which speak",
    "psclient._src.distribute.replicas._Meeting.gather": "for user's functions in threads of this process",
    "psclient.train.iterator.checkpoints_iterator": ASKED,
    "pswire.traces.tracer.SpanTracer.close": "at the end of a process, at most FLUSH_SECONDS, for the last spans to be taken",
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
    "psclient._src.telemetry.observer.Servers._each": "at most --timeout",
    "psclient.psctl.job._await": "at most --wait, then it says which server has not moved, and where to look",
    "psclient._src.telemetry.observer.Servers.variables": "at most --timeout",
    "psclient._src.telemetry.observer.Servers.read": "at most --timeout",
    "psclient.psctl.cluster_checks._at_once": "at most --timeout",
    "psclient.psctl.status.status": ASKED,
    "psclient.psctl.activity.top": ASKED,
    "psclient.psctl.activity._live": ASKED,
    # ---- Of servers: they wait for calls, and nobody for them; a client that waits for a server speaks itself ----
    "psserver.cli.ServerDeparture._let_others_leave": "at most Timeouts.termination_grace; it says before that processes leave",
    "psserver.cli.ServerDeparture._move": "at most Timeouts.termination_grace; it says before to where the server moves",
    "psserver.cli._pause": "for a place, on purpose without an end where servers answer; it says so",
    "psserver.network.joining._answer": "at most ASK_SECONDS",
    "psserver.network.joining.StandingOffer._run": "the pause between two offers",
    "psserver.network.joining.StandingOffer.close": "at most twice ASK_SECONDS",
    "psserver.cli._until_end": "for the end of the job, on purpose without one where it has none; PS_NO_WORKERS_TIMEOUT",
    "psserver.cli._tick": "the pause between two looks",
    "psserver.network.health.Health._look": "the pause between two looks",
    "psserver.network.server.serve": "for whoever runs the server to end it",
    "psserver.network.server.leave_nothing": "at most the grace of an end",
    "psserver.network.server.ServerThread.__enter__": LOCAL,
    "psserver.network.server.ServerThread.stop": LOCAL,
    "psserver.network.grpc_answers.Bell.heard": "for an answer's next part, which the round makes, or its connection's end",
    "psserver.network.transport_connection.Connection.close": "no wait: a socket's shutdown",
    "psserver.network.transport_connection.Connection._answer_round": OVER,
    "psserver.network.transport_connection.Connection._answer_pull": OVER,
    "psserver.network.grpc_service.GrpcService._wait": OVER,
    "psserver.network.grpc_service.GrpcService._send_answer": OVER,
    "psserver.checkpoints.snapshots._follow": OVER,
    "psserver.state.counters.ServerCounters.written": OVER,
    "psserver.tiers.tier.Tier.__init__": "makes what its thread waits for",
    "psserver.tiers.tier.Tier.touch": "for the disk to read some pages, as each touch of one would",
    "psserver.tiers.tier.Tier._wait_for_room": "for the disk to write pages, at most PATIENCE times PAUSE",
    "psserver.tiers.tier.Tier._wait_for_rest": "in the thread that follows hints, until a round is over; at most MOST_UNREST",
    "psserver.tiers.tier.Tier.settle": "the same, in the thread for files, where a checkpoint was read; at most as often",
    "psserver.tiers.tier.Tier.close": LOCAL,
    "psserver.tiers.tier._page_out": IDLE,
    "psserver.tiers.tier._has_looked": "the pause between two looks at what the disk has written",
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
    "pswire.telemetry.web_server.Budget.admit": "ends a socket, and waits for nobody",
    "pswire.telemetry.page.sampler.Sampler._run": IDLE,
    "pswire.telemetry.page.sampler.Sampler._look": "half a second, in a thread of the page's own",
    "pswire.telemetry.page.sampler.Sampler.after": "at most ANSWER_SECONDS, in the thread of a browser's connection",
    "pswire.telemetry.page.sampler.Sampler.close": "at most END_SECONDS",
    "psserver.cli._on": "at most LOOP_SECONDS, in a thread of the page's own, which does without then",
    "psserver.network.peers.TransportCarrier._wait": "at most CONNECT_SECONDS or LOOK_SECONDS, in a thread of its own",
    "psserver.network.peers.PeerConnection._run": "the pause between two attempts to connect; status and log say whom it misses",
    "psserver.network.peers.PeerConnection.join": ENDS,
    "psserver.network.peers.Peers.close": ENDS,
}
"""For each function why nobody has to be told."""
