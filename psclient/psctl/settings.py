"""Options that every command of `psctl` has, and the cluster that they name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType

from psclient._src.config import security_options, tf_config_text
from psclient._src.processes.local_clusters import LocalCluster, choose
from psclient.psctl import SECONDS
from psclient.psctl.output import say, show
from pswire.cluster import Task, TFConfig, check_address, check_addresses
from pswire.errors import ConfigError
from pswire.flags import Command, Decorated, Flag
from pswire.options import CLUSTER, OUTPUT, flag_name, options_of
from pswire.security.identity import FLAGS, Security, SecurityOptions
from pswire.security.names import ADMIN, task_name

if TYPE_CHECKING:
    from psclient._src.telemetry.observer import Servers

SECTIONS = WATCH, CHECK, CHANGE, FILES, PLAN = (
    *("Watch a job", "Find faults", "Change a running job", "Checkpoints and certificates"),
    "Measure and plan",
)
"""Headings of `psctl --help`, under which commands stand together."""


@dataclass(frozen=True)
class ObservedCluster:
    """The servers of a cluster, and the tasks that should be there.

    Attributes:
        servers: the servers and their addresses, in order.
        expected: the workers and the chief that TF_CONFIG names; none where addresses were given.
    """

    servers: dict[Task, str]
    expected: tuple[Task, ...] = ()


@dataclass
class CommandSettings:
    """Arguments of the command line that all commands have.

    Attributes:
        addresses: addresses of the servers, in order; none for those of TF_CONFIG.
        json: True to answer in JSON.
        seconds: time that a server may take to answer.
        local: name of a cluster of the launcher on this machine, "" for the only one; None for none.
        tls_cert, tls_key, tls_ca, token_file: paths, as in `SecurityOptions`; "" for what the environment says.
    """

    addresses: tuple[str, ...] = ()
    json: bool = False
    seconds: float = SECONDS
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    token_file: str = ""
    local: str | None = None

    @cached_property
    def chosen(self) -> LocalCluster | None:
        """The cluster of this machine that `--local` names; None without `--local`.

        Raises:
            ConfigError: there is none, or several.
        """
        if self.local is None:
            return None
        if self.addresses:
            raise ConfigError("--local and --address both name servers; leave one of them out")
        return choose(self.local)

    def tell(self, said: Mapping[str, object], *shown: RenderableType, wrong: bool = False) -> int:
        """Answers in JSON, or with texts and tables for people; returns the exit code, 1 where something is wrong."""
        if self.json:
            say(said)
        else:
            show(*shown)
        return int(wrong)

    def cluster(self) -> ObservedCluster:
        """The cluster that `--local`, `--address` or TF_CONFIG names.

        Raises:
            ConfigError: there is none, or it is malformed.
        """
        text = self.tf_config()
        if self.addresses:
            return ObservedCluster({Task("ps", index): address for index, address in enumerate(self.addresses)})
        return cluster_of(text)

    def tf_config(self) -> str:
        """The text of a TF_CONFIG: that of the cluster that `--local` names, without a task; else the environment's.

        Raises:
            ConfigError: `--local` names no cluster.
        """
        return tf_config_text() if self.chosen is None else json.dumps({"cluster": self.chosen.cluster})

    def paths(self) -> SecurityOptions:
        """Returns where certificates and the token are."""
        found = security_options() if self.chosen is None else SecurityOptions.from_environ(self.chosen.security)
        return found.under({name: getattr(self, name) for name in FLAGS})

    def name(self) -> str:
        """The name on psctl's certificate: `admin`, or that of the task that this process is, where it has no other."""
        try:
            self.paths().read(ADMIN)
        except ConfigError:
            own = own_task(self.tf_config())
            return ADMIN if own is None else task_name(own)
        return ADMIN

    def security(self) -> Security:
        """Returns what psctl shows to servers; raises `ConfigError` where a file is not what it should be."""
        return self.paths().read(self.name())


def connected(settings: CommandSettings, cluster: ObservedCluster | None = None) -> Servers:
    """Connections to the servers that the command line names, or to those of a cluster.

    Raises:
        ConfigError: none are named, or a file is not what it should be.
    """
    from psclient._src.telemetry.observer import Servers  # with gRPC, which commands on files do without

    return Servers((cluster or settings.cluster()).servers, settings.seconds, settings.security())


def own_task(text: str) -> Task | None:
    """The task that a TF_CONFIG says this process is; None where it says none, or is malformed."""
    try:
        config = TFConfig(text)
        return None if config.task_type is None else Task(config.task_type, config.task_id or 0)
    except ConfigError:
        return None


def cluster_of(text: str) -> ObservedCluster:
    """Returns the cluster that a TF_CONFIG names; an observer need not know which task this process is.

    Raises:
        ConfigError: the text names no servers, or is malformed.
    """
    spec = TFConfig(text).cluster_spec()
    servers = {task: spec.address(task) for task in spec.tasks("ps")}
    if not servers:
        raise ConfigError(
            "no servers are given; write --address HOST:PORT[,HOST:PORT...], set TF_CONFIG, or "
            "use --local for a cluster on this machine"
        )
    for task, address in servers.items():
        check_address(address, f"TF_CONFIG: {task}")
    return ObservedCluster(servers, (*spec.tasks("chief"), *spec.tasks("worker")))


def _option(name: str, *flags: str, read: Callable[[Any], object] = lambda value: value, **keys: Any) -> Flag:
    """An option that is given before the command or after it, and sets an attribute of `CommandSettings`."""

    def store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            setattr(context.ensure_object(CommandSettings), name, read(value))

    return Flag([*flags, name], expose_value=False, callback=store, **keys)


def number(
    flag: str, kind: click.IntRange | click.FloatRange, about: str, default: float | None = None, metavar: str = "N"
) -> Callable[[Decorated], Decorated]:
    """An option of one command with a number; what the default is, `about` says."""
    return click.option(flag, cls=Flag, type=kind, default=default, metavar=metavar, help=about)


AS_JSON = _option("json", "--json", is_flag=True, group=OUTPUT, help="Print JSON.")

OPTIONS = (
    _option(
        "addresses",
        "--address",
        read=partial(check_addresses, where="--address"),
        metavar="HOST:PORT[,...]",
        group=CLUSTER,
        help="Addresses of all servers, in order. [default: TF_CONFIG's]",
    ),
    _option(
        "local",
        "--local",
        metavar="[=NAME]",
        group=CLUSTER,
        help="Use the cluster that psworker --standalone runs on this machine, and its token.",
    ),
    _option(
        "seconds",
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        group=CLUSTER,
        help=f"Time that a server may take to answer. [default: {SECONDS:g}]",
    ),
    *(
        _option(name, flag_name(name), metavar="PATH", group=each.group, help=each.help(""))
        for name, each in options_of(SecurityOptions).items()
    ),
    AS_JSON,
)
"""The options of a command that connects to servers."""


def command(
    section: str,
    *examples: tuple[str, str],
    name: str | None = None,
    group: click.Group | None = None,
    connects: bool = True,
) -> Callable[[Callable[..., int]], Command]:
    """Makes a function a command of `psctl`: it is called with the `CommandSettings`, and returns the exit code.

    Args:
        section: the heading of help under which the command stands.
        examples: as of `Command`.
        name: its name; None for the function's.
        group: the command that it is part of; None for `psctl`.
        connects: False for a command that needs no servers, and of the options of all has `--json` alone.
    """

    def decorate(run: Callable[..., int]) -> Command:
        shared = [*OPTIONS] if connects else [AS_JSON]
        made = click.command(name, Command, section=section, examples=examples, params=shared)(
            click.make_pass_decorator(CommandSettings, ensure=True)(run)
        )
        if group is not None:
            group.add_command(made)
        return made

    return decorate
