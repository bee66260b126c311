"""A real sshd on loopback, with keys and a configuration of its own, for tests of what runs on other hosts."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

PROGRAM = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

HOSTS = ("127.0.0.1", "127.0.0.2")
"""The addresses of one machine that stand for two."""

CONFIG = """
ListenAddress 127.0.0.1:{port}
ListenAddress 127.0.0.2:{port}
HostKey {directory}/host
PidFile {directory}/pid
AuthorizedKeysFile {directory}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
"""


@dataclass(frozen=True)
class Sshd:
    """A server of ssh.

    Attributes:
        port: its port, on each of `HOSTS`.
        ssh: the command that gets in.
        process: the server.
    """

    port: int
    ssh: str
    process: subprocess.Popen[bytes]

    def connections(self) -> list[psutil.Process]:
        """The processes that sshd has for the connections that are open."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def sshd(directory: Path) -> Iterator[Sshd]:
    """Runs a server; skips the test where there is none."""
    if PROGRAM is None or shutil.which("ssh") is None:
        pytest.skip("no sshd, or no ssh: no task runs on another host (apt-get install openssh-server)")
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's own place, which the service would make
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = directory / "sshd_config"
    config.write_text(CONFIG.format(port=port, directory=directory))
    key = (directory / "host.pub").read_text()
    (directory / "known").write_text("".join(f"[{host}]:{port} {key}" for host in HOSTS))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "-D", "-e", "-f", str(config)], stderr=log, stdin=subprocess.DEVNULL)
    try:
        _await(port, process, directory / "log")
        options = {
            "IdentityFile": directory / "user",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": directory / "known",
            "User": getpass.getuser(),
        }
        words = ["ssh", "-F", "none", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        yield Sshd(port, shlex.join(words), process)
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait()
        for one in left:
            if one.is_running():
                one.kill()


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            for host in HOSTS:
                socket.create_connection((host, port), 5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"sshd does not listen: {log.read_text()}")
            time.sleep(0.05)
