"""The file of `psworker --hosts`: the hosts of a cluster, and the tasks of each.

A line is a host as ssh takes it, and its tasks: `user@node1:22 ps=1 worker=4`. The form is that of MPI's hostfiles, and
`slots=4` is four workers here as there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pswire.cluster import is_loopback, join_address
from pswire.errors import ConfigError
from pswire.limits import refuse_unknown
from pswire.security.given import read_small

COUNTS = {"ps": "ps", "worker": "worker", "slots": "worker"}
"""Keys that say how many tasks of a job a host has."""

TEXTS = ("address", "listen")
"""Keys that say where the servers of a host are."""

MOST = 1000
"""Tasks of one kind on a host; more is a slip."""

_HOST = re.compile(r"(?:([^@:\s\[\]]+)@)?(?:([^@:\s\[\]]+)|\[([0-9a-fA-F:.%]+)\])(?::([0-9]{1,5}))?")


@dataclass(frozen=True)
class Host:
    """A host, and what runs there.

    Attributes:
        name: its name or address for ssh, without user and port.
        user: the user to log in as, "" for ssh's own choice.
        port: ssh's port there, 0 for ssh's own choice.
        ps, worker: numbers of tasks.
        address: the name or address by which the others reach its servers.
        listen: the address on which its servers listen.
    """

    name: str
    user: str = ""
    port: int = 0
    ps: int = 0
    worker: int = 0
    address: str = ""
    listen: str = ""

    @property
    def target(self) -> list[str]:
        """The arguments of ssh that name it."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, f"{self.user}@{self.name}" if self.user else self.name]

    def count(self, job: str) -> int:
        """The number of its servers or workers."""
        return self.ps if job == "ps" else self.worker


def load_hosts(path: Path) -> tuple[Host, ...]:
    """Reads the hosts of a cluster, in the order in which tasks are numbered through them.

    Raises:
        ConfigError: the file cannot be read, or says something unknown or impossible; it names the line.
    """
    try:
        text = read_small(path).decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}") from error
    hosts: list[Host] = []
    lines: dict[tuple[str, int], int] = {}
    for number, words in _lines(text):
        where = f"{path}, line {number}"
        host = _host(words, where)
        before = lines.setdefault((host.name, host.port), number)
        if before != number:
            raise ConfigError(f"{where}: host {host.name} is also in line {before}; write all of its tasks there")
        hosts.append(host)
    _check(hosts, path, list(lines.values()))
    return tuple(hosts)


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            yield number, words


def _host(words: list[str], where: str) -> Host:
    match = _HOST.fullmatch(words[0])
    if not match or words[0].startswith("-") or (match[4] and not 0 < int(match[4]) < 1 << 16):
        raise ConfigError(f"{where}: {words[0]!r} is not a host; write node1, user@node1 or node1:22")
    user, name, port = match[1] or "", match[2] or match[3], int(match[4] or 0)
    counts: dict[str, int] = {}
    texts: dict[str, str] = {}
    for word in words[1:]:
        key, found, value = word.partition("=")
        refuse_unknown([key], [*COUNTS, *TEXTS], f"{where}: key")
        if not found or not value:
            raise ConfigError(f"{where}: {word!r} has no value; write {key}={1 if key in COUNTS else 'ADDRESS'}")
        said = counts if key in COUNTS else texts
        if COUNTS.get(key, key) in said:
            raise ConfigError(f"{where}: {COUNTS.get(key, key)} appears twice; remove one")
        if key in COUNTS:
            counts[COUNTS[key]] = _count(value, f"{where}: {key}")
        else:
            texts[key] = value
    if not counts:
        counts = {"worker": 1}
    address = texts.get("address", name)
    return Host(name, user, port, **counts, address=address, listen=texts.get("listen", address))


def _count(text: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > MOST:
        raise ConfigError(f"{where} must be a whole number from 0 to {MOST}, not {text!r}")
    return int(text)


def _check(hosts: list[Host], path: Path, lines: list[int]) -> None:
    """Raises `ConfigError` if these hosts are no cluster, or some could not reach the servers of others."""
    if not any(host.ps for host in hosts):
        raise ConfigError(f"{path}: no host has a server; write ps=1 after one of them")
    if all(is_loopback(host.address) for host in hosts):
        return
    for host, line in zip(hosts, lines, strict=True):
        if host.ps and is_loopback(host.address):
            raise ConfigError(
                f"{path}, line {line}: other hosts cannot reach servers at {join_address(host.address, 0)[:-2]}, "
                "which means another machine there; write address=NAME with the name by which they reach this "
                "machine"
            )
