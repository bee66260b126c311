"""`psctl certs`: a CA, and a certificate for each task of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from psclient._src.config import tf_config_text
from psclient.psctl.settings import FILES, CommandSettings, command, number
from pswire.cluster import EVALUATOR, Task, TFConfig
from pswire.errors import ConfigError
from pswire.security.given import read_small
from pswire.security.names import ADMIN, standby_name, task_name

DAYS = 365
"""Days that certificates are valid by default."""


@command(
    FILES,
    ("Make certificates for two servers, four workers and a chief", "psctl certs certs --ps 2 --workers 4"),
    ("Make new ones before the old ones expire", "psctl certs certs --ps 2 --workers 4 --renew"),
    connects=False,
)
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@number("--ps", click.IntRange(1), "Number of servers. [default: TF_CONFIG's]")
@number("--workers", click.IntRange(0), "Number of workers. [default: TF_CONFIG's]")
@click.option(
    "--chief/--no-chief", "has_chief", default=True, help="With or without a chief task. [default: with a chief]"
)
@click.option("--evaluator", is_flag=True, help="With an evaluator.")
@number(
    "--extra-workers",
    click.IntRange(0),
    "Number of workers that may join later (psworker --join); they get the next indices.",
    0,
)
@number(
    "--extra-ps",
    click.IntRange(0),
    "Number of standby servers (psserver --join); their certificates name all servers.",
    0,
)
@click.option(
    "--cluster",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with a TF_CONFIG; its tasks get certificates.",
)
@number("--days", click.IntRange(1, 36500), f"Days for which certificates are valid. [default: {DAYS}]", DAYS)
@click.option("--renew", is_flag=True, help="Replace existing keys and certificates; keep the CA and the token.")
def certs(
    told: CommandSettings,
    out: Path,
    ps: int | None,
    workers: int | None,
    has_chief: bool,
    evaluator: bool,
    extra_workers: int,
    extra_ps: int,
    cluster: Path | None,
    days: int,
    renew: bool,
) -> int:
    """Make certificates and a token for all tasks of a cluster.

    Write OUT/ca, and for each task a directory such as OUT/ps-0 with tls.crt, tls.key, ca.crt and token. Existing files
    are kept; tasks that are added later get certificates of the same CA. OUT/admin is for psctl, OUT/ps-standby-0 for a
    standby server. Give each process only its own directory. No process needs OUT/ca.
    """
    tasks = list(_tasks(ps, workers, has_chief, evaluator, cluster))
    known = [task.index for task in tasks if task.job == "worker"]
    tasks += [Task("worker", max(known, default=-1) + more) for more in range(1, extra_workers + 1)]
    servers = tuple(task_name(task) for task in tasks if task.job == "ps")
    # Only here: to load it takes a while.
    from psclient.psctl.certificate_authority import CA, ROOT_KEY, Authority, paths

    authority = Authority(out, days)
    made = [authority.issue(name, renew) for name in map(task_name, tasks)]
    made += [authority.issue(standby_name(number), renew, servers) for number in range(extra_ps)]
    made += [authority.issue(ADMIN, renew)]
    rows = [{"path": str(one.path), "made": one.made, "until": one.until.isoformat()} for one in made]
    environment = " ".join(f"{name}={path}" for name, path in paths(out).variables().items() if path)
    return told.tell(
        {"certificates": rows},
        *(f"{'made' if one.made else 'kept'} {one.path}, good until {one.until:%Y-%m-%d}" for one in made),
        f"\nFor every process:\n  {environment}",
        f"Do not copy the CA's key, {out / CA / ROOT_KEY}, to machines of the cluster.",
    )


def _tasks(
    ps: int | None, workers: int | None, has_chief: bool, evaluator: bool, cluster: Path | None
) -> Iterable[Task]:
    if ps is None and workers is None:
        text = read_small(cluster).decode() if cluster else tf_config_text()
        spec = TFConfig(text).cluster_spec()
        tasks = [task for job in spec.jobs for task in spec.tasks(job)]
        if not tasks:
            raise ConfigError("no tasks are given; write --ps 2 --workers 2, --cluster FILE, or set TF_CONFIG")
        return [*tasks, *([Task(EVALUATOR, 0)] if evaluator else [])]
    if cluster is not None:
        raise ConfigError("--cluster names the tasks already; leave out --ps and --workers")
    chief = [Task("chief", 0)] if has_chief else []
    counts = (("ps", 1 if ps is None else ps), ("worker", 1 if workers is None else workers), (EVALUATOR, evaluator))
    return [*chief, *(Task(job, index) for job, count in counts for index in range(count))]
