#!/usr/bin/env python
"""The cost for a server of many workers that do nothing at the moment: memory for each, and processor time for
heartbeats.

    python benchmarks/idle.py [--quick] [--json FILE] [--transport TRANSPORT ...]

Sessions are opened as a worker opens them: a gRPC connection, its transport, the call that is held until the session
ends, and heartbeats. The limit is measured beside them: a server of grpc.aio alone, with as many connections from as
many processes, each of which has made one call and holds one open stream. Then its clients send messages of a
heartbeat's size as often as workers heartbeat, first as calls of their own, then on the streams. It answers them and
does nothing else.

Clients share processes, as threads, as in `fanin.py`: a server cannot tell. Memory is what the server's process has
for itself (`Pss` of smaps_rollup), less what it had with one session of each process. Processor time is that of its
whole process, and is divided by the heartbeats that clients have counted: on a machine that others use they may be
late. The cost with those few sessions stands beside it.

`--json FILE` writes `{"format", "machine", "sessions", "seconds", "processes", "heartbeat_seconds", "rows"}`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import grpc
from figures import machine, publish
from measures import Cost, read_share
from rich.console import Console
from rich.table import Table

from psclient._src.config import child_environ
from psclient._src.network.remote_server import connect
from psclient._src.network.session import Session
from psclient._src.processes.process import send, spawn, start_server
from pswire.cluster import ClusterSpec, Task
from pswire.limits import Timeouts
from pswire.model.status import STILL, Pace
from pswire.network.grpc_channel import open_channel, stub
from pswire.network.traffic import TRANSPORTS, TransportName
from pswire.security.identity import Security

FORMAT = 1
SESSIONS, QUICK_SESSIONS = 1000, 40
SECONDS, QUICK_SECONDS = 30.0, 4.0
"""For which heartbeats are counted."""

PROCESSES = 8
"""That clients share."""

OPENERS = 8
"""Sessions of one process that are opened at a time."""

HEARTBEAT_SECONDS = Timeouts.heartbeat_interval
HEARTBEAT_BYTES, ANSWER_BYTES = 32, 2
"""About the size of a `HeartbeatRequest` and a `HeartbeatReply` of a worker that does nothing."""

TIMEOUTS = Timeouts(session_timeout=60.0)
"""A thousand clients on one machine may wait for its processors for longer than a session lives otherwise. gRPC's
connections ask for signs of life every 5 s then, and with the usual lease every 2.5 s."""

REST = 2 * HEARTBEAT_SECONDS
"""Seconds after which what was opened is at rest."""

WAIT = 300.0
"""Seconds that anything may take that is waited for."""

CALL, HOLD = "/bare/Call", "/bare/Hold"
"""The methods of the server of gRPC alone."""


# ---- In a process of clients ----


@dataclass(frozen=True)
class Share:
    """What one process of clients is told.

    Attributes:
        server: the server's address.
        sessions: how many there are in all.
        mine: the numbers of those in this process.
        transport: the fastest that may be used; "" for clients of gRPC alone.
    """

    server: str
    sessions: int
    mine: tuple[int, ...]
    transport: str


def be_clients(share: Share) -> None:
    """Opens what is to be idle, and does at each gate what the launcher says."""
    opened: Opened = Sessions(share) if share.transport else Channels(share)
    first, *rest = share.mine
    opened.open(first)
    while word := _ask(opened.heartbeats):
        if word == "open":
            with ThreadPoolExecutor(OPENERS) as threads:
                list(threads.map(opened.open, rest))
        elif word != "count":
            opened.heartbeat_by(word)
    opened.close()


def _ask(heartbeats: int) -> str:
    """Says that this process is at a gate, and how often its clients have beaten; returns what to do next."""
    print(heartbeats, flush=True)
    return sys.stdin.readline().strip()


class Sessions:
    """Sessions of workers, as `ParameterServerStrategy` opens them, and in the first process the chief's.

    Args:
        share: what this process is told.

    Attributes:
        heartbeats: how many there were.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        cluster = {"ps": [share.server], "worker": ["127.0.0.1:0"] * share.sessions, "chief": ["127.0.0.1:0"]}
        self._cluster = ClusterSpec(cluster)
        self._open: list[Session] = []
        self._lock = threading.Lock()  # guards the number
        self.heartbeats = 0
        if 0 in share.mine:
            self._begin(Task("chief", 0), 0, True)

    def open(self, number: int) -> None:
        """Opens a worker's session: it heartbeats from now on."""
        self._begin(Task("worker", number), 1, False)

    def _begin(self, task: Task, replicas: int, drives: bool) -> None:
        timeouts, transport = TIMEOUTS, self._share.transport
        assert transport in TRANSPORTS
        servers = connect(self._cluster, timeouts, transport, drives=drives)
        session = Session(task, servers, replicas, drives, timeouts, broken=_complain)
        session.pace = self._pace
        session.open()
        self._open.append(session)

    def _pace(self) -> Pace:
        """Returns what a heartbeat says of a worker that does nothing; each asks."""
        with self._lock:
            self.heartbeats += 1
        return STILL

    def heartbeat_by(self, word: str) -> None:
        """Sessions heartbeat by themselves."""

    def close(self) -> None:
        """Says nothing: the server is ended."""


def _complain(error: BaseException) -> None:
    print(f"a session has ended: {error}", file=sys.stderr, flush=True)


class Channels:
    """Connections of gRPC alone: each has made a call, and holds a stream.

    Args:
        share: what this process is told.
    """

    def __init__(self, share: Share) -> None:
        self._server = share.server
        self._open: list[Channel] = []

    @property
    def heartbeats(self) -> int:
        """How many there were."""
        return sum(channel.heartbeats for channel in self._open)

    def open(self, number: int) -> None:
        """Opens one, and what it holds."""
        self._open.append(Channel(self._server))

    def heartbeat_by(self, word: str) -> None:
        """Has all send a heartbeat's bytes as often as workers do, by "calls" or on the "streams"; "" ends it."""
        for number, channel in enumerate(self._open):
            channel.begin(word, HEARTBEAT_SECONDS * number / len(self._open))

    def close(self) -> None:
        """Ends all."""
        for channel in self._open:
            channel.close()


class Channel:
    """One of them.

    Args:
        server: the server's address.

    Attributes:
        heartbeats: how many of its messages were answered.
    """

    def __init__(self, server: str) -> None:
        self._channel = open_channel(server, Security(), "", TIMEOUTS.session_timeout)
        self._call = stub(self._channel, CALL, (False, False))
        self._sent = SimpleQueue[bytes | None]()
        self._ended = threading.Event()
        self.heartbeats = 0
        self._call(bytes(HEARTBEAT_BYTES), timeout=WAIT)
        self._stream = stub(self._channel, HOLD, (True, True))(iter(self._sent.get, None))

    def begin(self, how: str, after: float) -> None:
        """Begins to send, the first time after some seconds."""
        self._ended.set()
        self._ended = threading.Event()
        ask = self._ask_by_call if how == "calls" else self._ask_on_stream
        threading.Thread(target=self._heartbeat, args=(ask, after, self._ended), daemon=True).start()

    def _heartbeat(self, ask: Callable[[], object], after: float, ended: threading.Event) -> None:
        ended.wait(after)
        while not ended.wait(HEARTBEAT_SECONDS):
            ask()
            self.heartbeats += 1

    def _ask_by_call(self) -> None:
        self._call(bytes(HEARTBEAT_BYTES), timeout=WAIT)

    def _ask_on_stream(self) -> None:
        self._sent.put(bytes(HEARTBEAT_BYTES))
        next(self._stream)

    def close(self) -> None:
        """Ends it."""
        self._ended.set()
        self._sent.put(None)
        self._channel.close()


Opened = Sessions | Channels


# ---- The server of gRPC alone ----


class Bare(grpc.GenericRpcHandler):
    """Answers calls, and messages of streams, with a few bytes."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method."""
        if details.method == HOLD:
            return grpc.stream_stream_rpc_method_handler(self._hold)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        return bytes(ANSWER_BYTES)

    async def _hold(self, requests: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(bytes(ANSWER_BYTES))


async def be_bare() -> None:
    """Serves until stdin ends."""
    # Our clients ask for signs of life, which gRPC's default is to refuse.
    options = (("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0))
    server = grpc.aio.server(handlers=(Bare(),), options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


# ---- In the launcher ----


def measure(transport: str, sessions: int, seconds: float, processes: int) -> dict[str, Any]:
    """Starts a server and its clients, and ends them; one row of the report.

    Args:
        transport: the fastest that sessions may use; "" for gRPC alone.
        sessions: how many.
        seconds: for which heartbeats are counted.
        processes: for all clients.

    Raises:
        ClickException: a process failed.
    """
    with ExitStack() as stack:
        server, address = stack.enter_context(_server(sessions) if transport else _bare())
        mine = [tuple(range(first, sessions, processes)) for first in range(min(sessions, processes))]
        clients = [stack.enter_context(_clients(Share(address, sessions, each, transport))) for each in mine]
        _meet(clients, "")
        time.sleep(REST)
        alone, memory = _while_beating(server, clients, REST), own_bytes(server.pid)
        start = time.monotonic()
        _meet(clients, "open")
        opening = time.monotonic() - start
        time.sleep(REST)
        kept = own_bytes(server.pid) - memory
        costs = {
            how: _heartbeats(server, clients, how, seconds)
            for how in (("heartbeats",) if transport else ("calls", "streams"))
        }
        after = Cost.of(server.pid)
    many = sessions - len(mine)
    return {
        "what": f"sessions, {transport} transport" if transport else "gRPC alone",
        "transport": transport,
        "open_s": opening,
        "kb_each": kept / many / 1e3,
        "threads": after.threads,
        "rss_mb": after.rss / 1e6,
        "alone_percent": 100 * alone.core,
        "core_percent": {how: 100 * each.core for how, each in costs.items()},
        "heartbeats_per_s": {how: each.heartbeats for how, each in costs.items()},
        "us_per_heartbeat": {how: 1e6 * each.core / each.heartbeats for how, each in costs.items()},
    }


@dataclass(frozen=True)
class Beaten:
    """The resources that a server has taken while its clients heartbeat.

    Attributes:
        core: the part of a core.
        heartbeats: how many there were in a second.
    """

    core: float
    heartbeats: float


def _heartbeats(server: subprocess.Popen[bytes], clients: Sequence[Any], how: str, seconds: float) -> Beaten:
    """Has the clients heartbeat, and returns what their server takes for it."""
    _meet(clients, how)
    time.sleep(REST)
    return _while_beating(server, clients, seconds)


def _while_beating(server: subprocess.Popen[bytes], clients: Sequence[Any], seconds: float) -> Beaten:
    first = _meet(clients, "count")
    start, before = time.monotonic(), Cost.of(server.pid)
    time.sleep(seconds)
    spent, took = Cost.of(server.pid).since(before).seconds, time.monotonic() - start
    return Beaten(spent / took, (_meet(clients, "count") - first) / (time.monotonic() - start))


def own_bytes(pid: int) -> int:
    """Returns a process's memory, of what it shares with others its part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


@contextmanager
def _server(sessions: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start_server(
        timeouts=TIMEOUTS, flags=("--log-level", "warning", "--max-sessions", str(sessions + 1))
    )
    with process:
        try:
            yield process, address
        finally:
            if process.stdin:
                process.stdin.close()  # its lifeline


@contextmanager
def _bare() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with _spawned("--as-bare") as process:
        yield process, _hear(process)


@contextmanager
def _clients(share: Share) -> Iterator[subprocess.Popen[bytes]]:
    with _spawned("--as-clients", json.dumps(asdict(share))) as process:
        yield process


@contextmanager
def _spawned(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    with spawn(command, child_environ(1, None), subprocess.PIPE, None) as process:
        try:
            yield process
        finally:
            send(process, signal.SIGKILL)


def _meet(clients: Sequence[subprocess.Popen[bytes]], word: str) -> int:
    """Tells all processes of clients what to do, if anything; once they have, returns how often all have beaten."""
    if word:
        for client in clients:
            assert client.stdin is not None  # we asked for the pipe
            client.stdin.write(word.encode() + b"\n")
    return sum(int(_hear(client)) for client in clients)


def _hear(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None  # we asked for the pipe
    line = process.stdout.readline().decode().strip()
    if not line:
        raise click.ClickException("a process failed; see its output above")
    return line


# ---- Results ----


def report(rows: Sequence[dict[str, Any]], sessions: int, seconds: float, processes: int) -> dict[str, Any]:
    """Everything as it is written with `--json`; the last row is the limit."""
    limit = rows[-1]
    for row in rows:
        row["kb_beyond"] = row["kb_each"] - limit["kb_each"]
        row["to_stream"] = min(row["us_per_heartbeat"].values()) / limit["us_per_heartbeat"]["streams"]
    settings = {
        "sessions": sessions,
        "seconds": seconds,
        "processes": processes,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
    }
    return {"format": FORMAT, "machine": machine(), **settings, "rows": list(rows)}


def _by_way(row: dict[str, Any], key: str) -> str:
    found = row[key].items()
    return ", ".join(f"{value:.3g}" + (f" ({how})" if len(found) > 1 else "") for how, value in found)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "connections": lambda row: row["what"],
    "KB each": lambda row: f"{row['kb_each']:.1f}",
    "beyond gRPC": lambda row: f"{row['kb_beyond']:+.1f}",
    "% of a core": lambda row: _by_way(row, "core_percent"),
    "heartbeats/s": lambda row: _by_way(row, "heartbeats_per_s"),
    "with few": lambda row: f"{row['alone_percent']:.2g}",
    "us/heartbeat": lambda row: _by_way(row, "us_per_heartbeat"),
    "/ stream": lambda row: f"{row['to_stream']:.2f}",
    "opened in s": lambda row: f"{row['open_s']:.1f}",
    "MB": lambda row: f"{row['rss_mb']:.0f}",
    "threads": lambda row: str(row["threads"]),
}
"""Headings of the table, and what stands below them."""


def table(found: dict[str, Any]) -> Table:
    """The report as a table."""
    title = f"{found['sessions']} connections that are idle, and heartbeat every {found['heartbeat_seconds']:g} s"
    drawn = Table(title=title, title_justify="left")
    for heading in COLUMNS:
        drawn.add_column(heading, justify="left" if heading == "connections" else "right", no_wrap=True)
    for row in found["rows"]:
        drawn.add_row(*(write(row) for write in COLUMNS.values()))
    return drawn


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--sessions", type=click.IntRange(2), help=f"How many [default: {SESSIONS}].")
@click.option("--seconds", type=click.FloatRange(1), help=f"For which heartbeats are counted [default: {SECONDS:g}].")
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(TRANSPORTS),
    default=TRANSPORTS,
    show_default=True,
    help="Transports.",
)
@click.option("--processes", type=click.IntRange(1), default=PROCESSES, show_default=True, help="For all clients.")
@click.option("--quick", is_flag=True, help=f"{QUICK_SESSIONS} sessions, for {QUICK_SECONDS:g} s.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--as-clients", hidden=True)
@click.option("--as-bare", is_flag=True, hidden=True)
def main(
    sessions: int | None,
    seconds: float | None,
    transports: tuple[TransportName, ...],
    processes: int,
    quick: bool,
    json_file: Path | None,
    as_clients: str | None,
    as_bare: bool,
) -> None:
    """Measures, or is a process of clients, or the server of gRPC alone."""
    if as_clients:
        be_clients(read_share(Share, as_clients))
        return
    if as_bare:
        asyncio.run(be_bare())
        return
    console = Console()
    many = sessions or (QUICK_SESSIONS if quick else SESSIONS)
    while_beating = seconds or (QUICK_SECONDS if quick else SECONDS)
    rows = []
    for transport in (*transports, ""):
        with console.status(f"{transport} transport" if transport else "gRPC alone"):
            rows.append(measure(transport, many, while_beating, min(processes, many // 2)))
    found = report(rows, many, while_beating, processes)
    publish(console, found, [table(found)], json_file, None)


if __name__ == "__main__":
    main()
