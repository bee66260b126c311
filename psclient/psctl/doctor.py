"""`psctl doctor`: looks for what may be wrong before a job starts, or while it does not run, and says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from psclient._src.telemetry.observer import Servers
from psclient.psctl.cluster_checks import CLUSTER_CHECKS
from psclient.psctl.findings import Check, Finding, Patient
from psclient.psctl.host_checks import HOST_CHECKS, here
from psclient.psctl.output import table
from psclient.psctl.settings import CHECK, CommandSettings, ObservedCluster, command
from pswire.errors import ConfigError
from pswire.security.identity import Security
from pswire.telemetry.views.looked import Looked

CHECKS: dict[str, Check] = {**CLUSTER_CHECKS, **HOST_CHECKS}
"""All that is looked at, in order, by its name."""

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@command(
    CHECK,
    ("Check this machine and the cluster that TF_CONFIG names", "psctl doctor"),
    ("Check the cluster that runs on this machine", "psctl doctor --local"),
)
def doctor(settings: CommandSettings) -> int:
    """Find out why a job does not run here.

    Check TF_CONFIG, host names, ports, TLS, servers, clocks, versions, shared memory, GPUs and limits. Run it on the
    machine of a task, with the task's environment. With --local, check that cluster instead of TF_CONFIG. Exit with 1
    if a check fails.
    """
    found = examine(patient(settings))
    failed = any(finding.level == "fail" for findings in found.values() for finding in findings)
    listed = [{"check": name, **vars(each)} for name, findings in found.items() for each in findings]
    return settings.tell({"ok": not failed, "findings": listed}, *_shown(found), wrong=failed)


def patient(settings: CommandSettings) -> Patient:
    """Returns what there is to look at from here; nothing that is wrong keeps it from being looked at."""
    cluster: ObservedCluster | None = None
    try:
        cluster = settings.cluster()
    except ConfigError:
        pass  # the first check says it
    return Patient(
        tf_config=settings.tf_config(),
        local=settings.chosen.name if settings.chosen else "",
        cluster=cluster,
        looked=_look(cluster, settings) if cluster else (),
        security=settings.paths(),
        name=settings.name(),
        host=here(),
        seconds=settings.seconds,
    )


def _look(cluster: ObservedCluster, settings: CommandSettings) -> Sequence[Looked]:
    try:
        security = settings.security()
    except ConfigError:
        security = Security()
    with Servers(cluster.servers, settings.seconds, security) as servers:
        return servers.look()


def examine(patient: Patient, checks: Mapping[str, Check] = CHECKS) -> dict[str, list[Finding]]:
    """Returns what each check finds, by its name."""
    return {name: list(check(patient)) for name, check in checks.items()}


def _shown(found: Mapping[str, Sequence[Finding]]) -> tuple[Table, str]:
    rows = [
        (
            "" if number else name,
            Text(each.level, style=COLOURS[each.level]),
            Text.assemble(each.message, (f"\n→ {each.advice}" if each.advice else "", "bold")),
        )
        for name, findings in found.items()
        for number, each in enumerate(findings)
    ]
    counts = {level: sum(each.level == level for findings in found.values() for each in findings) for level in COLOURS}
    said = ", ".join(f"{count} {level}" for level, count in counts.items())
    return table(("check", "", "result, and what to do"), rows), said
