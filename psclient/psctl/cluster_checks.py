"""Checks that `psctl doctor` makes of a cluster: TF_CONFIG, names, ports, TLS, servers, clocks, versions."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial

from psclient._src.network.daemon_threads import Threads
from psclient._src.network.tls_diagnosis import mismatch
from psclient.psctl.findings import Check, Finding, Patient, fail, ok, warn
from pswire.cluster import ClusterSpec, TFConfig, check_address, is_loopback, parse_tf_config
from pswire.errors import ConfigError
from pswire.security.identity import Security
from pswire.security.names import certificate_name, ends_soon, task_name
from pswire.telemetry.views.job_view import view_of
from pswire.telemetry.views.looked import Looked
from pswire.telemetry.views.numbers import duration, short

MOST_SKEW = 1.0
"""Seconds by which clocks may differ: times of logs and checkpoints are compared, leases have clocks of their own."""

WRONG_HERE = ("replaced", "other_job", "same_server", "incomplete", "broken", "unreachable", "refused")
"""Problems that keep the servers from working; others come and go while a job runs."""


# ---- TF_CONFIG ----


def tf_config(patient: Patient) -> Iterator[Finding]:
    """Returns whether it is one, whether this task is in it, and whether the servers in it can be found by others."""
    if patient.local:
        yield from _local_cluster(patient)
        return
    if not patient.tf_config.strip():
        if patient.cluster:
            yield ok("it is not set; the servers are those of --address")
        else:
            advice = "set TF_CONFIG in each process of a cluster, or name the servers with --address"
            yield warn("it is not set, so a script starts its own server on its machine", advice)
        return
    try:
        config = parse_tf_config(patient.tf_config)
    except ConfigError as error:
        yield fail(error.message, "correct it in all processes")
        return
    if config is None:
        yield warn("it has no cluster, so a script starts its own server", "add the cluster to it")
        return
    yield ok(f"this process is {config.task}, of a cluster of {config.cluster.describe()}")
    yield from _addresses(config.cluster)


def _local_cluster(patient: Patient) -> Iterator[Finding]:
    """Returns what the file of the launcher says: the environment's TF_CONFIG may be of another cluster."""
    try:
        cluster = TFConfig(patient.tf_config).cluster_spec()
    except ConfigError as error:
        yield fail(f"{patient.local}: {error.message}", "start the cluster again")
        return
    yield ok(f"it is not used; --local names {patient.local}, a cluster of {cluster.describe()}")
    yield from _addresses(cluster)


def _addresses(cluster: ClusterSpec) -> Iterator[Finding]:
    servers = [(task, cluster.address(task)) for task in cluster.tasks("ps")]
    for address, count in Counter(address for _, address in servers).items():
        if count > 1:
            same = " and ".join(str(task) for task, other in servers if other == address)
            yield fail(f"{same} have one address, {address}", "give each server its own address")
    for task, address in servers:
        if check_address(address, "TF_CONFIG")[1] == 0:
            yield fail(f"{task} has port 0, so other processes cannot find it", "give the port on which it listens")
    near = [is_loopback(check_address(address, "TF_CONFIG")[0]) for _, address in servers]
    if any(near) and not all(near):
        task = servers[near.index(True)][0]
        yield warn(
            f"{task} has a loopback address, but other servers have not", "give an address that all hosts can reach"
        )


# ---- Names and ports ----


def names(patient: Patient) -> Iterator[Finding]:
    """Returns whether the names of the servers' hosts are known."""
    yield from _at_once(patient, _resolve)


def _resolve(found: Looked, host: str, port: int, patient: Patient) -> Iterator[Finding]:
    who = short(str(found.task))
    try:
        places = sorted({str(place[4][0]) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:
        advice = "correct the name, or wait until it can be resolved: a pod has one after its headless service"
        yield fail(f"{who}: the name {host!r} cannot be resolved ({error})", advice)
    else:
        yield ok(f"{who}: {host}" + ("" if places == [host] else f" is {', '.join(places)}"))


def ports(patient: Patient) -> Iterator[Finding]:
    """Returns whether the servers can be connected to: over gRPC, and on their transports."""
    yield from _at_once(patient, _connect)


def _connect(found: Looked, host: str, port: int, patient: Patient) -> Iterator[Finding]:
    who, error = short(str(found.task)), _refused(host, port, patient.seconds)
    if isinstance(error, ConnectionRefusedError):
        yield fail(f"{who}: nothing listens at {found.address}", "start it, or correct its address")
    elif error is not None:
        advice = "check firewalls and NetworkPolicies between this machine and the server, and the address"
        yield fail(f"{who}: no connection to {found.address} ({error.strerror or error})", advice)
    else:
        yield ok(f"{who}: {found.address} accepts connections")
        yield from _transports(found, host, patient)


def _transports(found: Looked, host: str, patient: Patient) -> Iterator[Finding]:
    process = found.status.process if found.status else None
    if process is None:
        return
    who, port = short(str(found.task)), process.data_port
    error = _refused(host, port, patient.seconds)
    if error is not None:
        text = f"{who}: no connection to its data port {port} ({error.strerror or error}), so rounds go over gRPC"
        yield warn(text, "open that port, which the server's --data-port sets, or use --transport grpc")
    else:
        yield ok(f"{who}: its data port {port} accepts connections (tcp transport)")
    if process.data_path and os.path.exists(process.data_path):
        yield ok(f"{who}: it shares memory with this process (shm transport)")


def _refused(host: str, port: int, seconds: float) -> OSError | None:
    """Returns why there is no connection; None if there is."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return error
    return None


def _at_once(patient: Patient, look: Callable[[Looked, str, int, Patient], Iterator[Finding]]) -> Iterator[Finding]:
    """Looks at all servers at once: what is silent takes its time."""
    with closing(Threads("doctor")) as threads:
        looks = [partial(look, *place, patient) for place in patient.places()]
        futures = [threads.submit(lambda look=look: list(look())) for look in looks]  # type: ignore[misc]
        for future in futures:
            yield from future.result()


# ---- TLS ----


def tls(patient: Patient) -> Iterator[Finding]:
    """Returns whether our files are good, and whether each server and we accept each other."""
    try:
        security = patient.security.read(patient.name)
    except ConfigError as error:
        yield fail(error.message, "see docs/security.md")
        return
    if security.tls:
        yield _validity(security, patient.name)
    elif patient.looked and all(is_loopback(host) for _, host, _ in patient.places()):
        yield ok("there is none, and all servers are on this machine")
    elif patient.looked:
        advice = (
            "make certificates with psctl certs, and give them to all processes (PS_TLS_CERT, PS_TLS_KEY, PS_TLS_CA)"
        )
        yield warn("there is none, so any host that reaches the servers can read and change the variables", advice)
    for found, _, _ in patient.places():
        why = mismatch(found.address, security, certificate_name(task_name(found.task)))
        if why:
            yield fail(f"{short(str(found.task))}: {why}", "")
        elif security.tls and found.status:
            yield ok(f"{short(str(found.task))}: it has a valid certificate, and accepts ours")


def _validity(security: Security, name: str) -> Finding:
    text = f"our certificate is for {name}, and valid until {datetime.fromtimestamp(security.expiry, UTC):%Y-%m-%d}"
    if ends_soon(security.expiry):
        return warn(text, "run psctl certs OUT --renew, and restart the processes with the new certificates")
    return ok(text)


# ---- Servers ----


def servers(patient: Patient) -> Iterator[Finding]:
    """Returns whether all answer, and belong together."""
    if patient.cluster is None:
        return
    view = view_of(patient.looked, patient.cluster.expected)
    for server in view.servers:
        if server.incarnation:
            yield ok(f"{short(server.task)}: up, {server.variables} variables, round {server.round}, {server.device}")
    for problem in view.problems:
        text = f"{short(problem.task)}: {problem.message}" if problem.task else problem.message
        yield Finding("fail" if problem.kind in WRONG_HERE else "warn", text, "")


def clock(patient: Patient) -> Iterator[Finding]:
    """Returns whether the servers' clocks go as ours does."""
    for found in patient.looked:
        if found.status is None or found.status.process is None:
            continue
        who, ahead = short(str(found.task)), found.skew > 0
        text = f"{who}: its clock is {abs(found.skew):.2g} s {'ahead of' if ahead else 'behind'} ours"
        if abs(found.skew) - found.took / 2 > MOST_SKEW:
            text = f"{who}: its clock is {duration(abs(found.skew))} {'ahead of' if ahead else 'behind'} ours"
            yield warn(text, "synchronize both clocks (NTP); they affect certificates and log times, not training")
        else:
            yield ok(text)


def versions(patient: Patient) -> Iterator[Finding]:
    """Returns whether the servers have what we have."""
    ours = patient.host.versions
    yield ok("here: " + ", ".join(f"{name} {version}" for name, version in sorted(ours.items())))
    for found in patient.looked:
        if found.status and found.status.process:
            yield from _compared(short(str(found.task)), found.status.process.versions, ours)


def _compared(who: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[Finding]:
    other = {name for name in ours.keys() & theirs.keys() if _matters(name, ours[name], theirs[name])}
    for name in sorted(other):
        text = f"{who}: it has {name} {theirs[name]}, but this machine has {ours[name]}"
        yield warn(text, f"install the same version of {name} everywhere")
    if not other:
        yield ok(f"{who}: it has paramserver {theirs.get('paramserver', '')}, which is compatible")


def _matters(name: str, here: str, there: str) -> bool:
    """Returns whether two versions differ too much: ours may not at all, others in their first number alone."""
    return here != there if name == "paramserver" else here.split(".")[0] != there.split(".")[0]


CLUSTER_CHECKS: dict[str, Check] = {
    "TF_CONFIG": tf_config,
    "names": names,
    "ports": ports,
    "TLS": tls,
    "servers": servers,
    "clock": clock,
    "versions": versions,
}
