"""The command `psworker`: a script as one task of a cluster, or a whole local cluster of it."""

from __future__ import annotations

import dataclasses
import logging
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from psclient._src.config import (
    LaunchConfig,
    ServerOptions,
    job_from,
    refused_from,
    security_from,
    security_options,
    set_lane,
    set_metrics,
    set_security,
    task_config,
    timeouts_from,
    wants_colour,
)
from psclient._src.launch.chief import drive
from psclient._src.launch.cluster import Cluster
from psclient._src.launch.script import code_of, die_with, end_on_sigterm, run_script, say
from psclient._src.processes.output import Printer
from pswire.cluster import EVALUATOR, TaskConfig
from pswire.errors import ConfigError, PSError
from pswire.security.names import task_name
from pswire.telemetry import logging_setup
from pswire.transport.traffic import LANES

log = logging.getLogger("psworker")


@dataclass(frozen=True)
class Invocation:
    """What the command line says.

    Attributes:
        script: path of the script, "" for none.
        args: its arguments.
        launch: a local cluster to start; None for one task.
        parent: process id of the launcher to die with; 0 for none.
        log_level, log_format: of this package's log.
        debug: whether tracebacks of this package are shown.
    """

    script: str
    args: tuple[str, ...]
    launch: LaunchConfig | None
    parent: int
    log_level: str
    log_format: str
    debug: bool


@click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS]")
@click.option("--standalone", is_flag=True, help="Start a whole local cluster that runs SCRIPT.")
@click.option("--config", type=click.Path(path_type=Path), help="A file that describes the local cluster.")
@click.option("--ps", type=click.IntRange(1), help="Servers of the local cluster [default: 1].")
@click.option("--workers", type=click.IntRange(0), help="Workers of the local cluster [default: 1].")
@click.option(
    "--chief/--no-chief",
    "has_chief",
    default=None,
    help="A process of its own drives [default]; or worker 0.",
)
@click.option("--chief-runs-script", is_flag=True, help="The chief is a replica as well.")
@click.option("--evaluator", is_flag=True, help="One more process runs SCRIPT, as the task that follows checkpoints.")
@click.option(
    "--restarts", type=click.IntRange(0), help="Failures, in all, after which tasks are replaced [default: 0]."
)
@click.option("--device", help="Where the servers' variables live: cpu or gpu:N.")
@click.option("--memory-limit", help="Bytes for variables on each server, such as 4GiB.")
@click.option("--checkpoint-root", help="Directory below which checkpoints are, or a URL: s3://bucket/run.")
@click.option("--snapshot-limit", help="Bytes of old values that each server holds for checkpoints being written.")
@click.option("--shared-memory", help="Bytes in which each server's answers are for workers here, such as 4GiB.")
@click.option("--threads", type=click.IntRange(1), help="Threads of one update program on each server.")
@click.option("--in-flight", help="Bytes of one worker's contribution that a server holds before they are used.")
@click.option("--lane", type=click.Choice(LANES), help="The fastest lane to use [default: PS_LANE, else shm].")
@click.option("--tls-cert", help="The process's certificate; {task} becomes worker-0 [default: PS_TLS_CERT].")
@click.option("--tls-key", help="Its key [default: PS_TLS_KEY].")
@click.option("--tls-ca", help="Whose signature other tasks' certificates must have [default: PS_TLS_CA].")
@click.option("--token-file", help="A file with the token of the job [default: PS_TOKEN_FILE, else PS_TOKEN].")
@click.option("--max-sessions", type=click.IntRange(1), help="That may be open at a time on each server.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve metrics there; 0 picks; tasks of a local cluster count up from it [default: PS_METRICS_PORT, or none].",
)
@click.option("--metrics-host", help="Where metrics are served [default: PS_METRICS_HOST, else 127.0.0.1].")
@click.option(
    "--log-level",
    type=click.Choice(logging_setup.LEVELS),
    envvar="PS_LOG_LEVEL",
    help="Of the log [default: PS_LOG_LEVEL, else warning; servers: info].",
)
@click.option(
    "--log-format",
    type=click.Choice(logging_setup.FORMATS),
    envvar="PS_LOG_FORMAT",
    help="Of the log, on stderr [default: PS_LOG_FORMAT, else text].",
)
@click.option("--die-with-parent", "parent", type=int, default=0, hidden=True)
@click.option("--debug", is_flag=True, help="Show tracebacks of this package.")
@click.argument("script", default="")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], **flags: Any) -> Invocation:
    """Runs SCRIPT as the task that TF_CONFIG names; a chief without a SCRIPT drives.

    With --standalone, or --config, starts servers, workers and a chief on this machine instead. Flags
    win over the file.
    """
    if flags["lane"]:
        set_lane(flags["lane"])
    if not (flags["standalone"] or flags["config"]):
        set_security(security_options().under(flags))
        set_metrics(flags["metrics_host"], flags["metrics_port"])
    given = {name: flags[name] for name in ("ps", "workers", "restarts") if flags[name] is not None}
    names = [field.name for field in dataclasses.fields(ServerOptions) if flags[field.name] is not None]
    server = {name: str(flags[name]) for name in names}
    given |= {"evaluator": True} if flags["evaluator"] else {}
    if flags["chief_runs_script"]:
        given["chief"] = "script"
    elif flags["has_chief"] is not None:
        given["chief"] = "driver" if flags["has_chief"] else "none"
    launch = None
    if flags["standalone"] or flags["config"]:
        shown = ("lane", "log_level", "log_format", "metrics_port", "metrics_host")
        given |= {name: flags[name] for name in shown if flags[name] is not None}
        launch = _launch_config(flags["config"], given, server, script, args, flags)
    elif given or server:
        name = next(iter(given | server)).replace("_", "-")
        raise ConfigError(f"--{name} describes a local cluster; add --standalone")
    level, kind = flags["log_level"] or "warning", launch.log_format if launch else flags["log_format"] or "text"
    return Invocation(script, args, launch, flags["parent"], level, kind, flags["debug"])


def _launch_config(
    path: Path | None,
    given: dict[str, Any],
    server: dict[str, str],
    script: str,
    args: tuple[str, ...],
    flags: Mapping[str, Any],
) -> LaunchConfig:
    config = LaunchConfig()
    if path:
        from psclient._src.launch.config_file import load_launch_config  # with YAML, which no single task needs

        config = load_launch_config(path)
    if script:
        given |= {"script": script, "args": args}
    config = dataclasses.replace(
        config,
        server=dataclasses.replace(config.server, **server),
        security=config.security.under(flags),
        debug=flags["debug"] or config.debug,
        **given,
    )
    if not config.script:
        usage = f"--config {path}" if path else "--standalone"
        file = f", or `script: SCRIPT` into {path}" if path else ""
        raise ConfigError(f"a local cluster needs a script; write psworker {usage} [OPTIONS] SCRIPT [ARGS]{file}")
    if not Path(config.script).exists():
        raise ConfigError(f"there is no script {config.script!r} in {Path.cwd()}")
    return config


def run_task(invocation: Invocation, config: TaskConfig | None) -> int:
    """Runs one task; returns the exit code.

    Args:
        invocation: what the command line says.
        config: what TF_CONFIG says.

    Raises:
        ConfigError: the task is one that this command cannot be.
        PSError: a chief that only drives could not go on.
    """
    end_on_sigterm()
    if invocation.parent:
        die_with(invocation.parent)
    task = config.task if config else None
    if task and task.job == "ps":
        raise ConfigError(f"TF_CONFIG says that this process is {task}; start it with psserver")
    if invocation.script:
        return run_script(invocation.script, invocation.args, task, invocation.debug)
    if config is None or config.task.job != "chief":
        who = f"{_named(task.job)} needs a script" if task else "there is no TF_CONFIG and no script"
        raise ConfigError(f"{who}; write psworker SCRIPT [ARGS], or see psworker --help")
    timeouts = timeouts_from()
    if invocation.parent:
        # The launcher sees by itself whether its workers run, and a script may do without a strategy.
        timeouts = dataclasses.replace(timeouts, first=math.inf)
    drive(config, timeouts, security_from(task_name(config.task)), job_from(), refused_from())
    return 0


def _named(job: str) -> str:
    return f"an {job}" if job == EVALUATOR else f"a {job}"


def run_cluster(config: LaunchConfig) -> int:
    """Runs a local cluster to its end; returns the exit code.

    Raises:
        ConfigError: a server refused its flags.
    """
    end_on_sigterm()
    printer = Printer(colour=wants_colour())
    with Cluster(config, printer, printer.terminal()) as cluster:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: cluster.interrupt(number))
        outcome = cluster.wait()
    printer.finish()
    if outcome.report:
        _report(outcome.report)
    return outcome.code


def _report(text: str) -> None:
    """Says why a cluster failed."""
    if logging_setup.structured():
        log.error("%s", text.removeprefix("psworker: "))
    else:
        click.echo(text, err=True)


def run(invocation: Invocation) -> int:
    """Does what the command line says; returns the exit code."""
    logging_setup.configure(invocation.log_format, invocation.log_level, relayed=bool(invocation.parent))
    config: TaskConfig | None = None
    try:
        if invocation.launch:
            return run_cluster(invocation.launch)
        config = task_config()
        logging_setup.name(str(config.task) if config else "")
        return run_task(invocation, config)
    except PSError as error:
        if invocation.debug:
            raise
        say(config.task if config else None, f"error: {' '.join(str(error).split())}")
        return code_of(error)
    except KeyboardInterrupt:
        return 130


def main(args: Sequence[str] | None = None) -> None:
    """The console script; exits with the script's code, or 2 where it could not start."""
    code: Any = 2
    try:
        code = command.main(args, prog_name="psworker", standalone_mode=False)
    except click.ClickException as error:
        say(None, f"error: {error.format_message()}")
    except ConfigError as error:
        say(None, f"error: {error}")
    except click.Abort:
        code = 130
    sys.exit(run(code) if isinstance(code, Invocation) else code)
