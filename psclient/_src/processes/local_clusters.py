"""Files that tell the user of this machine about the clusters that the launcher runs: for `psctl --local`.

A file has the addresses of a cluster and its token, so that only its owner may read it. It is removed at the end of the
cluster; one whose launcher is gone counts for nothing, and is removed by whoever looks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from psclient._src.config import runtime_directory
from pswire.errors import ConfigError

log = logging.getLogger("psworker")

SUFFIX = ".json"

MOST_BYTES = 1 << 20
"""Of a file."""


@dataclass(frozen=True)
class LocalCluster:
    """A cluster of the launcher on this machine.

    Attributes:
        name: its name: the script's, and the launcher's process id.
        pid: process id of the launcher.
        started: when that process was started, in the system's ticks since its boot; process ids are used again.
        script: path of the script.
        servers: addresses of the servers, in order.
        cluster: the cluster, as `TF_CONFIG` has it.
        security: environment variables with the token and the paths of certificates.
    """

    name: str
    pid: int
    started: int
    script: str
    servers: tuple[str, ...]
    cluster: Mapping[str, Sequence[str]]
    security: Mapping[str, str] = field(repr=False)

    @property
    def runs(self) -> bool:
        """True while its launcher is there."""
        return started_at(self.pid) == self.started


def started_at(pid: int) -> int:
    """Returns when a process was started, in the system's ticks since its boot; -1 where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])  # the name before may have blanks and brackets


def register(
    script: str, servers: Sequence[str], cluster: Mapping[str, Sequence[str]], security: Mapping[str, str]
) -> Path | None:
    """Writes the file of a cluster of this process; returns its path, None where it cannot be written.

    Args:
        script: path of the script, "" for none.
        servers: addresses of the servers, in order.
        cluster: the cluster, as `TF_CONFIG` has it.
        security: environment variables with the token and the paths of certificates.
    """
    pid = os.getpid()
    name = f"{Path(script).stem or 'servers'}-{pid}"
    one = LocalCluster(name, pid, started_at(pid), os.path.abspath(script), tuple(servers), cluster, security)
    try:
        directory = _directory(make=True)
        found = _read_all(directory)
        number = sum(each.pid == pid for each in found.values())
        path = directory / f"{name}{f'-{number + 1}' if number else ''}{SUFFIX}"
        # Nobody else may have put a file or a link there, and nobody reads half of one.
        draft = directory / f".{path.name}"
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(asdict(one) | {"name": path.name.removesuffix(SUFFIX)}, file)
        draft.replace(path)
    except (OSError, ConfigError) as error:
        log.info("psctl --local cannot find this cluster: %s", error)
        return None
    return path


def find_clusters() -> list[LocalCluster]:
    """Returns the clusters of this user that run on this machine, by name; removes the files of others.

    Raises:
        ConfigError: the directory may be written by somebody else.
    """
    try:
        directory = _directory(make=False)
    except FileNotFoundError:
        return []
    return sorted(_read_all(directory).values(), key=lambda each: each.name)


def choose(name: str) -> LocalCluster:
    """Returns the cluster of a name, or with "" the only one that there is.

    Raises:
        ConfigError: there is none, or there are several; it names them.
    """
    found = find_clusters()
    named = [each for each in found if name in ("", each.name)]
    if len(named) == 1:
        return named[0]
    if not found:
        raise ConfigError(
            "no cluster started by psworker --standalone runs on this machine for this user; start one, or "
            "use psctl --address for servers elsewhere"
        )
    names = ", ".join(each.name for each in found)
    if named:
        raise ConfigError(f"{len(found)} clusters run on this machine: {names}; choose one with --local=NAME")
    raise ConfigError(f"no cluster is named {name!r}; running clusters: {names}")


def _directory(make: bool) -> Path:
    """Returns the directory; raises `ConfigError` where it is not this user's alone."""
    directory = Path(runtime_directory())
    if make:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} contains tokens and must be accessible to this user only (mode 0700); remove it, "
            "or set XDG_RUNTIME_DIR"
        )
    return directory


def _read_all(directory: Path) -> dict[Path, LocalCluster]:
    """Returns the clusters that run, by their files; removes the files of those that do not."""
    found: dict[Path, LocalCluster] = {}
    for path in directory.glob(f"*{SUFFIX}"):
        one = _read(path)
        if one is None:
            continue
        if one.runs:
            found[path] = one
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _read(path: Path) -> LocalCluster | None:
    """Reads a file; returns None where it is not this user's alone, or is none of ours."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
                log.warning("ignoring %s: it must be accessible to this user only (mode 0600)", path)
                return None
            said: dict[str, Any] = json.loads(file.read(MOST_BYTES))
        servers = tuple(map(str, said["servers"]))
        cluster = {str(job): list(map(str, each)) for job, each in said["cluster"].items()}
        security = {str(name): str(value) for name, value in said["security"].items()}
        numbers = int(said["pid"]), int(said["started"])
        return LocalCluster(path.name.removesuffix(SUFFIX), *numbers, str(said["script"]), servers, cluster, security)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
