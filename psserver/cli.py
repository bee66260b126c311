"""The command `psserver`: one `ps` task.

It prints one line once it listens, and one with a summary when it ends. All other output goes to stderr. It ends at
SIGTERM or SIGINT. With `--until-done` it also ends with the job, or once no process has been there for too long; with
`--lifeline`, once the process that started it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import click

from psserver.config import ListenOptions, ServerConfig, server_config
from psserver.core.core import Core
from psserver.network.joining import StandingOffer, await_place
from psserver.network.server import Server, check_listening, leave_nothing
from psserver.telemetry import MetricsPort, Rim
from pswire.cluster import join_address
from pswire.errors import ConfigError, PSError
from pswire.flags import ABOUT, Command, Flag, explained, flag, flags, version
from pswire.model.places import NOWHERE
from pswire.model.status import ServerStatus
from pswire.options import LOGGING, SERVER
from pswire.process import INTERRUPTED, ends_with, take_interrupts
from pswire.security.identity import SecurityOptions
from pswire.server_options import ServerOptions
from pswire.sizes import human
from pswire.telemetry import logging_setup

TICK = 0.25
"""Seconds between two looks at leases and deadlines."""

TELL_SECONDS = 3.0
"""Seconds that a server stays whose job is over, for processes that wait for a place: they ask once a second."""

LOOP_SECONDS = 2.0
"""Seconds that the status page waits for the event loop."""

ENDS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the process."""

OUTLIVED = 76
"""The exit code of a server without which the job goes on: it was paused, or cut off, for longer than a lease."""

GRACE = 1.0
"""Seconds that answers under way get when the server ends."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""

T = TypeVar("T")

log = logging.getLogger("psserver")


EXAMPLES = (
    ("Run a server on this machine", "psserver --port 2222 --memory-limit 4GiB"),
    ("Run the server that TF_CONFIG names, until the job ends", "psserver --host 0.0.0.0 --until-done"),
)


@click.command(cls=Command, examples=EXAMPLES, last=ABOUT)
@flags(ListenOptions, environ=True)
@flags(ServerOptions)
@flags(SecurityOptions)
@flag("log_level", logging_setup.LOG_LEVEL, "info", environ=True)
@flag("log_format", logging_setup.LOG_FORMAT, "text", environ=True)
@click.option("--until-done", is_flag=True, cls=Flag, group=SERVER, help="Exit when the job ends.")
@click.option("--lifeline", is_flag=True, cls=Flag, group=SERVER, help="Exit when stdin, a pipe, is closed.")
@click.option("--debug", is_flag=True, cls=Flag, group=LOGGING, help="Show tracebacks of this package's errors.")
@version()
def command(until_done: bool, lifeline: bool, log_level: str, log_format: str, debug: bool, **given: Any) -> int:
    """Run one server of a cluster: it holds variables and runs the optimizer.

    By default the server is the ps task that TF_CONFIG names. On addresses that other machines can reach it needs TLS
    and a token. SIGTERM and SIGINT end it.
    """
    logging_setup.configure(log_format, log_level, relayed=lifeline)
    try:
        config = server_config(**given)
        if lifeline:
            _check_lifeline()
        if config.join:
            found = joined(config, until_done, lifeline, given)
            if found is None:
                return 0
            config = found
        logging_setup.name(str(config.task))
        outlived = asyncio.run(serve(config, until_done, lifeline))
    except PSError as error:
        if debug:
            raise
        return _refuse(str(error))
    return 0 if outlived is None else OUTLIVED


def joined(config: ServerConfig, until_done: bool, lifeline: bool, given: Mapping[str, Any]) -> ServerConfig | None:
    """Waits for the place of a server; returns the configuration there, None where it is told to end before.

    Raises:
        PSError: why it cannot wait.
    """
    logging_setup.name("psserver")
    check_listening(config)
    with _noted(*ENDS) as noted:
        _say(f"psserver {config.address} is a standby server for {', '.join(config.join)}")
        place, addresses = await_place(config, until_done, partial(_pause, noted, lifeline))
    if place == NOWHERE:
        _say("psserver ended; it was a standby server")
        return None
    placed = server_config(**{**given, "task": place, "join": None, "advertise": None})
    return replace(placed, address=config.address, join=addresses)


def _check_lifeline() -> None:
    """Raises `ConfigError` if stdin is no pipe."""
    try:
        with select.epoll() as poll:
            poll.register(0, select.EPOLLIN)
    except OSError as error:
        raise ConfigError("--lifeline needs a pipe as stdin that the starting process holds open") from error


def _held() -> bool:
    """Returns whether the other end of stdin, the lifeline, is open; reads what comes there."""
    while select.select([0], [], [], 0.0)[0]:
        if not os.read(0, 4096):
            return False
    return True


def _pause(noted: int, lifeline: bool, seconds: float) -> bool:
    """Waits; returns False if the process is to end, as a signal that was noted, or its lifeline, says."""
    return not select.select([noted], [], [], seconds)[0] and (not lifeline or _held())


@contextlib.contextmanager
def _noted(*numbers: signal.Signals) -> Iterator[int]:
    """Yields a file from which can be read once one of these signals has come.

    A handler that raised would do so in any code, which may swallow the exception.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
    woken = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


async def serve(config: ServerConfig, until_done: bool = False, lifeline: bool = False) -> PSError | None:
    """Serves until a signal, the end of the job or of the lifeline.

    Returns:
        Why the job goes on without this server; None if it does not.

    Raises:
        ConfigError: the port is in use, the device is not there, or stdin is no pipe.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    loop.add_signal_handler(signal.SIGTERM, stopped.set)  # until there is something that could move
    if lifeline:
        _hold_lifeline(loop, stopped)
    # Rounds do not wait for a disk: files have a thread of their own.
    async with (
        _thread(config, "arrays", "computes") as pool,
        _thread(config, "files", "writes or reads a file") as files,
    ):
        core = Core(config, secrets.randbits(64), time.monotonic, pool.submit, files.submit)
        tracer = config.traces.open(config.task)
        if tracer is not None:
            from psserver.core.traces import RoundTraces

            core.tally.traces = RoundTraces(tracer, str(config.task), time.monotonic)
        logging_setup.follow(lambda: (core.tally.round, 0))
        server = Server(core, config, core.well)
        port = await server.start()
        page = offer = departure = None
        try:
            if config.metrics_port is not None:
                process = partial(_on, loop, server.process)
                rim = Rim(join_address(config.host, port), process, server.events, server.refused)
                page = MetricsPort(core, server.traffic, config, config.metrics_port, rim)
                server.serve_page(page.page_url)
            _say(f"psserver {config.task} listening on {join_address(config.host, port)} ({config.describe()})")
            if page:
                _say(f"psserver {config.task} serves metrics at {page.url}")
            if config.join:
                over = partial(loop.call_soon_threadsafe, stopped.set) if until_done else None
                offer = StandingOffer(config, config.join, lambda: core.status().takes_part, over)
            departure = ServerDeparture(core, stopped)
            loop.add_signal_handler(signal.SIGTERM, departure.begin)
            alone = max(config.timeouts.no_workers_timeout, config.timeouts.session_timeout)
            await _until_end(core, stopped, alone if until_done else math.inf)
        finally:
            held = summary(core.status())
            if departure:
                departure.end()
            if offer:
                await asyncio.to_thread(offer.close)
            if page:
                await asyncio.to_thread(page.close)  # a look at this loop may be under way
            core.close()
            await server.stop(GRACE)
            await leave_nothing(GRACE)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
    moved_to = core.machine.standbys.moved_to
    _say(f"psserver {config.task} ended; " + (f"and has moved to {moved_to}" if moved_to else f"it held {held}"))
    return core.machine.outlived


def _on(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Calls a function on an event loop, from another thread; raises `TimeoutError` where it is too busy for that."""
    made: Future[T] = Future()
    loop.call_soon_threadsafe(lambda: made.set_result(call()))
    return made.result(LOOP_SECONDS)


class ServerDeparture:
    """The end of a server after SIGTERM: where a process waits for a place, its variables move there before.

    Processes of the job that were told to end with it leave before: they finish a step, and may save a checkpoint.
    All methods are called on the event loop.

    Args:
        core: the server.
        stopped: set to end the process.
    """

    def __init__(self, core: Core, stopped: asyncio.Event) -> None:
        self._core = core
        self._stopped = stopped
        self._moving: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Moves the server if it can, lets others leave, and ends it then; ends it at once when it is called again."""
        if self._moving is None and not self._stopped.is_set():
            self._moving = asyncio.ensure_future(self._leave())
        else:
            self._stopped.set()

    def end(self) -> None:
        """Moves it no more."""
        if self._moving is not None:
            self._moving.cancel()

    async def _leave(self) -> None:
        until = time.monotonic() + self._core.config.timeouts.termination_grace
        try:
            await self._move(until)
            await self._let_others_leave(until)
        finally:
            self._stopped.set()

    async def _let_others_leave(self, until: float) -> None:
        core, told = self._core, False
        soon = (
            time.monotonic() + core.config.timeouts.heartbeat_interval
        )  # by then those say so who were told at the same time
        while not core.machine.left.done() and time.monotonic() < until:
            leaving = core.seen(core.machine.leaving)
            if leaving and not told:
                log.warning(
                    "%s received a signal to end; it waits for the processes that are leaving the job", core.task
                )
            if leaving:
                told, soon = True, time.monotonic() + core.config.timeouts.heartbeat_interval
            elif leaving is False or time.monotonic() > soon:
                return
            await asyncio.sleep(TICK)

    async def _move(self, until: float) -> None:
        core, told = self._core, ""
        try:
            while not core.machine.left.done() and time.monotonic() < until:
                address = core.move(core.server)  # again: who waits for a place may have got another one meanwhile
                if address != told:
                    log.warning("%s received a signal to end; it moves to %s first", core.task, address)
                told = address
                await asyncio.sleep(TICK)
        except PSError as error:
            log.log(
                logging.INFO if told else logging.DEBUG,
                "%s ends without moving to a standby server: %s",
                core.task,
                error,
            )


def summary(status: ServerStatus) -> str:
    """Returns a summary of a server's variables, last round and device, on one line."""
    last = "no round" if status.round < 0 else f"round {status.round}"
    return f"{status.variables} variables, {human(status.variable_bytes)} of them here, after {last} on {status.device}"


@contextlib.asynccontextmanager
async def _thread(config: ServerConfig, name: str, does: str) -> AsyncIterator[ThreadPoolExecutor]:
    """Yields a thread for work, and waits for it in the end: nothing can interrupt it.

    A disk that hangs is waited for as long as it takes. A warning says so, and a second signal then kills the process.

    Args:
        config: the server's configuration.
        name: the thread's name.
        does: its kind of work in words, for the log.
    """
    pool = ThreadPoolExecutor(1, name)
    try:
        yield pool
    finally:
        ended = asyncio.get_running_loop().run_in_executor(None, pool.shutdown)
        while not (await asyncio.wait([ended], timeout=config.timeouts.report_interval))[0]:
            log.warning("%s still %s, and ends after that; another signal kills it at once", config.task, does)
            for number in ENDS:
                signal.signal(number, signal.SIG_DFL)


async def _until_end(core: Core, stopped: asyncio.Event, alone: float) -> None:
    """Waits for a signal, until the job goes on without this server, and, unless `alone` is infinite, for its end.

    Processes that wait for a place hear of the end before: nobody else could tell them.
    """
    loop = asyncio.get_running_loop()
    for end in [core.machine.left, *([core.done] if alone < math.inf else [])]:
        end.add_done_callback(lambda _: loop.call_soon_threadsafe(stopped.set))
    ticker = asyncio.ensure_future(_tick(core, alone))
    waiter = asyncio.ensure_future(stopped.wait())
    await asyncio.wait((ticker, waiter), return_when=asyncio.FIRST_COMPLETED)
    for future in (ticker, waiter):
        if not future.cancel():
            future.result()
    until = loop.time() + TELL_SECONDS
    while not core.machine.left.done() and core.seen(core.machine.untold) and loop.time() < until:
        await asyncio.sleep(TICK / 5)


async def _tick(core: Core, alone: float) -> None:
    """Ticks the core's clock; returns once a job has begun and no process has been heard of for `alone` seconds.

    Only time in which this process ran counts: while it stood still it could hear nobody.
    """
    signs, silent = 0, 0.0
    while silent < alone:
        await asyncio.sleep(TICK)
        core.tick()
        silent = silent + TICK if core.tally.signs == signs > 0 else 0.0
        signs = core.tally.signs
    log.warning(
        "no process has contacted this server for %g s (PS_NO_WORKERS_TIMEOUT), so it ends; if the job is not done, "
        "see the logs of its other processes, and restart the job from a checkpoint",
        alone,
    )


def _hold_lifeline(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Sets `stopped` when the other end of stdin is closed, as the death of its process always does."""

    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stopped.set()

    loop.add_reader(0, readable)


def _say(line: str) -> None:
    """Prints a line. The reader of stdout may be gone, which must not change how the server ends."""
    try:
        print(logging_setup.line_of(line, "psserver"), flush=True)  # noqa: T201
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _refuse(text: str) -> int:
    line = " ".join(text.split())
    if logging_setup.structured():
        log.error("%s", line)
    else:
        click.echo(f"psserver: error: {line}", err=True)
    return 2


def tune_allocator() -> None:
    """Configures glibc to keep and reuse the memory of messages: fresh pages cost more than copies."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1)):
            mallopt(name, value)


def leave_scipy_out() -> None:
    """Makes SciPy as if it were not installed: Numba would import its linear algebra, which no kernel has.

    That takes 0.3 s of processor time. It is done for this process as a whole, which runs nobody else's code: Numba
    looks for SciPy twice, and so would any part of it that is imported later.
    """
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]  # the import system's own word for it


def main(args: Sequence[str] | None = None) -> None:
    """Runs the console script; exits with 0 after a clean end, with 2 where the server could not start."""
    try:
        take_interrupts()
        tune_allocator()
        leave_scipy_out()
        code = command.main(args, prog_name="psserver", standalone_mode=False)
    except click.ClickException as error:
        code = _refuse(explained(error))
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(ends_with(code))
