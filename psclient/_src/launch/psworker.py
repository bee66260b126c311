"""The command `psworker`: a script as one task of a cluster, or a whole local cluster of it."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from psclient._src.config import (
    LaunchConfig,
    job_from,
    metrics_from,
    refused_from,
    replication_factor_from,
    security_from,
    security_options,
    set_variables,
    task_config,
    tf_config_text,
    timeouts_from,
    wants_colour,
)
from psclient._src.launch.script import die_with, end_on_sigterm, run_module, run_script, say
from psclient._src.launch.start_options import StartOptions
from psclient._src.processes.shutdown import code_of
from pswire.cluster import EVALUATOR, TaskConfig, check_addresses
from pswire.errors import ConfigError, PSError
from pswire.flags import ABOUT, Command, Flag, explained, flag, flags, version
from pswire.options import CLUSTER, flag_name, said
from pswire.process import INTERRUPTED, ends_with, take_interrupts
from pswire.security.identity import SecurityOptions
from pswire.security.names import task_name
from pswire.server_options import ServerOptions
from pswire.telemetry import logging_setup
from pswire.variables import METRICS_HOST, METRICS_PORT, SAVE_ON_SIGTERM, TF_CONFIG, TRACES, TRANSPORT

if TYPE_CHECKING:  # what only some command lines need is imported where each of them begins
    from psclient._src.launch.cluster import Cluster
    from psclient._src.processes.output import Printer

log = logging.getLogger("psworker")


OF_A_TASK = (
    *("debug", "transport", "log_level", "log_format", "metrics_port", "metrics_host", "module", "save_on_sigterm"),
    "traces",
)
"""Options of a local cluster that a single task has as well."""


@dataclass(frozen=True)
class Invocation:
    """The arguments of a command line.

    Attributes:
        script: path of the script, "" for none.
        args: arguments of the script.
        launch: a local cluster to start; None for one task.
        parent: process id of the launcher to die with; 0 for none.
        log_level, log_format: of this package's log.
        debug: True to show tracebacks of this package.
        module: the module that a worker imports in place of the script; "" for none.
        options: where and how it runs, as the command line says it.
        join: addresses of servers whose job is to be joined; none for a task of TF_CONFIG.
        restarts: with `join` the failures after which the script is started again.
        named: True if lines of the log say the task though there is a parent, which does not relay them.
        early: True if the launcher says on stdin what `TF_CONFIG` is, once servers listen.
    """

    script: str
    args: tuple[str, ...]
    launch: LaunchConfig | None
    parent: int
    log_level: str
    log_format: str
    debug: bool
    module: str = ""
    options: StartOptions = field(default_factory=StartOptions)
    join: tuple[str, ...] = ()
    restarts: int = 0
    named: bool = False
    early: bool = False


EXAMPLES = (
    ("Train on this machine, with two servers and four workers", "psworker --standalone --ps 2 --workers 4 train.py"),
    ("Run one task of a cluster that TF_CONFIG describes", "psworker --transport tcp train.py --epochs 3"),
    ("Start a cluster over ssh, and restart failed tasks", "psworker --hosts hosts.txt --restarts 3 train.py"),
)


@click.command(
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    examples=EXAMPLES,
    last=ABOUT,
)
@flags(StartOptions, unsaid=True)
@flags(LaunchConfig, unsaid=True, without=("chief", "script", "log_level", "log_format"))
@click.option(
    "--chief/--no-chief",
    "has_chief",
    default=None,
    cls=Flag,
    group=CLUSTER,
    help="Run the chief in its own process, or in worker 0. [default: own process]",
)
@click.option("--chief-runs-script", is_flag=True, cls=Flag, group=CLUSTER, help="Run the script in the chief as well.")
@flags(ServerOptions, unsaid=True)
@flags(SecurityOptions, unsaid=True)
@flag("log_level", logging_setup.LOG_LEVEL, unsaid=True, environ=True)
@flag("log_format", logging_setup.LOG_FORMAT, "text", unsaid=True, environ=True)
@click.option("--die-with-parent", "parent", type=int, default=0, hidden=True)
@click.option("--named", is_flag=True, hidden=True)
@click.option("--early", is_flag=True, hidden=True)
@version()
@click.argument("script", default="")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], **given: Any) -> Invocation:
    """Run SCRIPT as one task of a cluster, or start a whole cluster.

    By default, run the task that TF_CONFIG names. A chief without SCRIPT only coordinates the job.

    With --standalone or --config, start servers, workers and a chief on this machine; with --hosts on several hosts
    over ssh, with --ray on a Ray cluster. Flags override the file.

    With --join, run as one more worker of a running job. With --module, workers import a module and run the functions
    that the script of the chief schedules.
    """
    if given["transport"]:
        set_variables({TRANSPORT: given["transport"]})
    cluster = said(LaunchConfig, given)
    server = said(ServerOptions, given)
    if given["chief_runs_script"]:
        cluster["chief"] = "script"
    elif given["has_chief"] is not None:
        cluster["chief"] = "driver" if given["has_chief"] else "none"
    launch = None
    _check_hosts(given, cluster)
    options = StartOptions(**said(StartOptions, given))
    if options.standalone or options.config or options.hosts or options.ray:
        if script:
            cluster |= {"script": script, "args": args}
        if given["module"]:
            cluster.setdefault("chief", "script")  # nobody else would run it
        launch = _launch_config(Path(options.config) if options.config else None, cluster, server, given)
    else:
        told = security_options().under(given).variables() | {
            TRACES: given["traces"],
            METRICS_HOST: given["metrics_host"],
        }
        told |= {} if given["metrics_port"] is None else {METRICS_PORT: str(given["metrics_port"])}
        told |= {SAVE_ON_SIGTERM: "1"} if given["save_on_sigterm"] else {}
        set_variables({name: value for name, value in told.items() if value})
        of_a_task = (*OF_A_TASK, "restarts") if given["join"] else OF_A_TASK
        for name in (name for name in cluster | server if name not in of_a_task):
            raise ConfigError(f"{flag_name(name)} describes a local cluster; add --standalone")
    level, kind = given["log_level"] or "warning", launch.log_format if launch else given["log_format"] or "text"
    if options.standby and (launch or script):
        raise ConfigError("--standby starts a second chief, which does not run a script; leave the script out")
    how = level, kind, bool(given["debug"]), given["module"] or "", options
    join = () if options.join is None else check_addresses(options.join, "--join")
    more = join, given["restarts"] or 0, given["named"], given["early"]
    invocation = Invocation(script, args, launch, given["parent"], *how, *more)
    if join:
        _check_join(invocation)
    return invocation


def _check_hosts(given: Mapping[str, Any], cluster: Mapping[str, object]) -> None:
    """Raises `ConfigError` if flags say several places of a cluster, or something that belongs to another place."""
    for name in ("remote_python", "ssh"):
        if given[name] is not None and given["hosts"] is None:
            raise ConfigError(f"{flag_name(name)} is for tasks on other hosts; add --hosts FILE")
    for name in ("ps_resources", "worker_resources", "placement"):
        if given[name] is not None and not given["ray"]:
            raise ConfigError(f"{flag_name(name)} is for tasks on a Ray cluster; add --ray auto")
    places = [flag_name(name) for name in ("standalone", "hosts", "ray") if given[name]]
    if len(places) > 1:
        raise ConfigError(f"{' and '.join(places)} cannot be used together; keep one of them")
    if given["hosts"] is None:
        return
    for name in ("ps", "workers"):
        if name in cluster:
            raise ConfigError(f"the file of --hosts defines the tasks; leave {flag_name(name)} out")


def _check_join(invocation: Invocation) -> None:
    """Raises `ConfigError` if a process with these arguments cannot join a job, whatever the servers say."""
    if invocation.launch or invocation.options.standby:
        raise ConfigError("--join adds a worker to a running job; leave out --standalone, --config, --standby")
    if tf_config_text().strip():
        raise ConfigError(
            "with --join the servers choose this process's task, but TF_CONFIG names one; unset TF_CONFIG, or leave "
            "out --join"
        )
    if not (invocation.script or invocation.module):
        raise ConfigError("a worker needs a script; write psworker --join HOST:PORT [OPTIONS] SCRIPT [ARGS]")
    if invocation.script and not Path(invocation.script).exists():
        raise ConfigError(f"there is no script {invocation.script!r} in {Path.cwd()}")


def _launch_config(
    path: Path | None, cluster: dict[str, Any], server: dict[str, Any], given: Mapping[str, object]
) -> LaunchConfig:
    config = LaunchConfig()
    if path:
        from psclient._src.launch.config_file import load_launch_config  # with YAML, which no single task needs

        config = load_launch_config(path)
    config = dataclasses.replace(
        config,
        server=dataclasses.replace(config.server, **server),
        security=config.security.under(given),
        **cluster,
    )
    if not config.script:
        elsewhere = [f"--{name} {given[name]}" for name in ("hosts", "ray") if given[name]]
        usage = " ".join([*elsewhere, *([f"--config {path}"] if path else [])]) or "--standalone"
        file = f", or `script: SCRIPT` into {path}" if path else ""
        raise ConfigError(f"a cluster needs a script; write psworker {usage} [OPTIONS] SCRIPT [ARGS]{file}")
    if not Path(config.script).exists():
        raise ConfigError(f"there is no script {config.script!r} in {Path.cwd()}")
    return config


def run_task(invocation: Invocation, config: TaskConfig | None) -> int:
    """Runs one task; returns the exit code.

    Args:
        invocation: the arguments of the command line.
        config: the cluster and task of TF_CONFIG; None without one.

    Raises:
        ConfigError: the task is one that this command cannot be.
        PSError: a chief that only drives could not go on.
    """
    take_interrupts()
    end_on_sigterm(bool(invocation.parent))
    if invocation.parent:
        die_with(invocation.parent)
    task = config.task if config else None
    if task and task.job == "ps":
        raise ConfigError(f"TF_CONFIG names {task} as this process's task; start it with psserver")
    if invocation.module and task is None:
        raise ConfigError(f"{invocation.module} is for workers of a cluster; set TF_CONFIG, or add --standalone")
    if invocation.module and task and task.job == "worker":
        return run_module(invocation.module, invocation.script, invocation.args, task, invocation.debug)
    if invocation.options.standby and (task is None or task.job != "chief"):
        raise ConfigError("--standby is for the chief task; set TF_CONFIG to the cluster's, with that task")
    if invocation.script:
        return run_script(invocation.script, invocation.args, task, invocation.debug)
    if config is None or config.task.job != "chief":
        who = f"{_named(task.job)} needs a script" if task else "there is no TF_CONFIG and no script"
        raise ConfigError(f"{who}; write psworker SCRIPT [ARGS], or see psworker --help")
    timeouts = timeouts_from()
    if invocation.parent:
        # The launcher sees by itself whether its workers run, and a script may do without a strategy.
        timeouts = dataclasses.replace(timeouts, first_worker_timeout=math.inf)
    from psclient._src.launch.chief import drive

    security = security_from(task_name(config.task))
    standby, copied = invocation.options.standby, replication_factor_from() > 1
    drive(config, timeouts, security, job_from(), refused_from(), standby, copied)
    return 0


def _await_cluster(invocation: Invocation) -> None:
    """Imports what the task needs while servers start; then reads `TF_CONFIG` from the launcher, a line on stdin."""
    die_with(invocation.parent)
    if invocation.script or invocation.module:
        import_module("psclient").ParameterServerStrategy  # noqa: B018  # which nearly every script needs
    else:
        import_module("psclient._src.launch.chief")
    told = b""
    while not told.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            raise SystemExit(128 + signal.SIGKILL)  # the launcher is gone
        told += more
    set_variables({TF_CONFIG: told.decode()})


def _named(job: str) -> str:
    return f"an {job}" if job == EVALUATOR else f"a {job}"


def run_joined(invocation: Invocation) -> int:
    """Runs a script as one more worker of a running job; returns the exit code, 0 where the job is over.

    Raises:
        PSError: there is no job, or it does not take this process.
    """
    from psclient._src.launch.joining import JobIsOver, Joiner, certified_task
    from psclient._src.launch.supervisor import supervise

    take_interrupts()
    end_on_sigterm()
    options = security_options()
    wanted = certified_task(options)
    security = options.read("worker" if wanted is None else task_name(wanted))
    with Joiner(invocation.join, timeouts_from(), security, wanted, job_from()) as joiner:
        try:
            joined = joiner.take()
        except JobIsOver as error:
            say(None, str(error))
            return 0
        logging_setup.name(str(joined.task))
        said = joined.job.name, joined.task, len(joined.job.workers)
        log.warning("joins the job %r as %s; its cluster has %d workers", *said)
        joiner.hold(always=invocation.restarts > 0)
        if invocation.restarts:
            return supervise(joiner, joined, _arguments(invocation), invocation.restarts)
        set_variables(joined.variables())
        return run_task(invocation, task_config())


def _arguments(invocation: Invocation) -> list[str]:
    """The arguments of a process that runs the same script as one task; what else there is the environment tells it."""
    host, port = metrics_from()
    flags = ["--named", "--log-level", invocation.log_level, "--log-format", invocation.log_format]
    flags += ["--debug"] * invocation.debug + (["--module", invocation.module] if invocation.module else [])
    flags += [] if port is None else ["--metrics-host", host, "--metrics-port", str(port)]
    return [*flags, "--", *([invocation.script] if invocation.script else []), *invocation.args]


def run_cluster(invocation: Invocation, config: LaunchConfig) -> int:
    """Runs a cluster to its end; returns the exit code.

    Raises:
        ConfigError: a server refused its flags, or a host cannot run tasks.
    """
    from psclient._src.launch.cluster import Cluster
    from psclient._src.processes.output import Printer

    take_interrupts()
    end_on_sigterm()
    printer = Printer(colour=wants_colour())
    started = False
    if invocation.options.hosts:
        cluster: Cluster = _on_hosts(invocation.options, config, printer)
    elif invocation.options.ray:
        cluster = _on_ray(invocation.options, config, printer)
    else:
        cluster = Cluster(config, printer)
    cluster.client_environ = printer.terminal()

    def told(number: int, _: object) -> None:
        # What is raised while it starts may be lost in a callback of anybody; then `wait` ends it.
        cluster.interrupt(number)
        if not started:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, told)
    with cluster:
        started = True
        outcome = cluster.wait()
    printer.finish()
    if outcome.report:
        _report(outcome.summary)  # the printer has shown the rest
    return outcome.code


def _on_hosts(options: StartOptions, config: LaunchConfig, printer: Printer) -> Cluster:
    from psclient._src.launch.hosts_file import load_hosts
    from psclient._src.launch.ssh_cluster import RemoteShell, SshCluster

    try:
        command = tuple(shlex.split(options.ssh or "")) or RemoteShell.ssh
    except ValueError as error:
        raise ConfigError(f"--ssh {options.ssh!r} is not a command: {error}") from None
    how = RemoteShell(command, options.remote_python or RemoteShell.python)
    return SshCluster(load_hosts(Path(options.hosts or "")), how, config, printer)


def _on_ray(options: StartOptions, config: LaunchConfig, printer: Printer) -> Cluster:
    from psclient._src.launch.ray_cluster import RayCluster, Resources, connect, parse_resources

    given: dict[str, Any] = {"placement": options.placement} if options.placement else {}
    for name, text in (("ps", options.ps_resources), ("worker", options.worker_resources)):
        if text is not None:
            given[name] = parse_resources(text, f"--{name}-resources")
    resources = Resources(**given)
    connect(options.ray or "")
    return RayCluster(resources, config, printer)


def _report(text: str) -> None:
    if logging_setup.structured():
        log.error("%s", text.removeprefix("psworker: "))
    else:
        click.echo(text, err=True)


def run(invocation: Invocation) -> int:
    """Runs the command line; returns the exit code."""
    logging_setup.configure(
        invocation.log_format, invocation.log_level, relayed=bool(invocation.parent) and not invocation.named
    )
    config: TaskConfig | None = None
    try:
        if invocation.launch:
            return run_cluster(invocation, invocation.launch)
        if invocation.join:
            return run_joined(invocation)
        if invocation.early:
            _await_cluster(invocation)
        config = task_config()
        logging_setup.name(str(config.task) if config else "")
        return run_task(invocation, config)
    except PSError as error:
        if invocation.debug:
            raise
        say(config.task if config else None, f"error: {' '.join(str(error).split())}")
        return code_of(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def main(args: Sequence[str] | None = None) -> None:
    """The console script; exits with the script's code, or 2 where it could not start."""
    code: Any = 2
    try:
        code = command.main(args, prog_name="psworker", standalone_mode=False)
    except click.ClickException as error:
        say(None, f"error: {explained(error)}")
    except ConfigError as error:
        say(None, f"error: {error}")
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    if isinstance(code, Invocation) and (code.join or code.module or (code.script and not code.launch)):
        sys.exit(run(code))
    sys.exit(ends_with(run(code) if isinstance(code, Invocation) else code))
