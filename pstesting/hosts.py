"""Hosts on one machine: network namespaces that are joined by links of a given rate.

A link is a pair of virtual Ethernet interfaces with a token bucket at each end; one that delays packets has a program
between its ends (`pstesting.delays`). All links meet in one switch.

    Host         a host to be made
    Hosts        makes hosts, and starts processes on them
    HostCluster  a cluster of which each task is on a host

It needs root on Linux, with `iproute2` and `util-linux`. Only interfaces in namespaces of its own are made or changed;
those of the machine are never touched. The namespaces have no names: the kernel removes them, and the interfaces in
them, with their last process. Each has a process that holds it, and that ends all others in it, and itself, once the
process has ended that made the hosts, also if that was killed.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psclient._src.config import child_environ, own_environ
from psclient._src.launch.cluster import Cluster
from psclient._src.processes.process import Process, server_arguments, spawn
from pstesting import delays
from pstesting.delays import MTU
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.model.status import ServerStatus

TOOLS = ("ip", "tc", "nsenter", "unshare")
"""The programs that are needed, of `iproute2` and of `util-linux`."""

BURST_SECONDS, LEAST_BURST = 0.002, 1 << 17
"""The bytes that a link takes at once: those of so many seconds, and no fewer than two segments as the kernel hands
them on."""

QUEUE_SECONDS, LEAST_QUEUE = 0.02, 1 << 18
"""The bytes that wait for a link, as in a switch's buffer: those of so many seconds, and no fewer than these. Further
ones are dropped."""

MOST = 250
"""Most hosts."""

SWITCH = "switch"
"""The name of the namespace in which links meet."""

END_SECONDS = 30.0
"""Seconds that a holder may take to end what is on its host."""


class HostsUnavailable(Exception):
    """No hosts can be made here: the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """A host to be made.

    Attributes:
        name: the host's name, which its processes see as well; no two have the same.
        rate: bits per second of its link, each way; None for as many as the machine can move.
        delay: seconds that a packet takes on the link, each way.
    """

    name: str
    rate: float | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Moved:
    """Bytes that a host has sent and received over its link, with all headers."""

    sent: int
    received: int


class Hosts:
    """Hosts, as a context manager that leaves nothing behind. Used by one thread; `moved` by any.

    Args:
        hosts: the hosts, each on one switch with all others.

    Attributes:
        addresses: the IPv4 address of each host, by its name.

    Raises:
        HostsUnavailable: on entry, if this process may not make hosts, or the machine cannot; says what is missing.
        ValueError: two hosts have one name, or a rate or a delay is no number of its kind.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host for host in hosts}
        if len(self._hosts) != len(hosts) or SWITCH in self._hosts or len(hosts) > MOST:
            raise ValueError(f"give at most {MOST} hosts with different names, and none named {SWITCH!r}")
        for host in hosts:
            if host.delay < 0 or not (host.rate is None or host.rate > 0):
                raise ValueError(f"host {host.name!r} has rate {host.rate} and delay {host.delay}")
        self.addresses = {host.name: f"10.0.0.{number}" for number, host in enumerate(hosts, 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            stack.callback(self._end)
            _check()
            for name in (SWITCH, *self._hosts):
                self._holders[name] = _hold(name)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *rest: object) -> None:
        self._stack.close()

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on a host, as the process itself that is started."""
        return [*_inside(self._holders[host].pid), *command]

    def start(self, host: str, command: Sequence[str], **keys: Any) -> subprocess.Popen[bytes]:
        """Starts a process, which soon is on a host; it is killed when this context ends, or this process.

        Args:
            host: the host's name.
            command: the command line.
            keys: as of `subprocess.Popen`.
        """
        process = subprocess.Popen(self.command(host, command), **keys)
        self._processes.append(process)
        return process

    def processes(self, host: str) -> list[int]:
        """Returns the ids of all processes on a host, but the one that holds it, whoever started them."""
        return processes_beside(self._holders[host].pid)

    def moved(self) -> dict[str, Moved]:
        """Returns what each host has moved over its link since it was made, by its name."""
        text = Path(f"/proc/{self._holders[SWITCH].pid}/net/dev").read_text(encoding="ascii")
        counts = {line.split(":")[0].strip(): line.split(":")[1].split() for line in text.splitlines() if ":" in line}
        return {
            name: Moved(sent=int(port[0]), received=int(port[8]))
            for name, port in ((name, counts[_port(number)]) for number, name in enumerate(self._hosts))
        }

    def _join(self) -> None:
        """Joins all hosts by their links."""
        lines = ["link add bridge type bridge", "link set bridge up"]
        for number, name in enumerate(self._hosts):
            port, theirs = _port(number), f"/proc/{self._holders[name].pid}/ns/net"
            if self._hosts[name].delay:
                self._delay(port, name)
                lines += [f"link set {port} mtu {MTU}"]
            else:
                lines += [f"link add {port} type veth peer name eth0 netns {theirs}"]
            lines += [f"link set {port} master bridge", f"link set {port} up"]
        self._configure(SWITCH, "ip", lines)
        for number, (name, host) in enumerate(self._hosts.items()):
            address = [f"link set eth0 mtu {MTU}"] * bool(host.delay)
            address += [f"address add {self.addresses[name]}/24 dev eth0"]
            self._configure(name, "ip", ["link set lo up", *address, "link set eth0 up"])
            self._configure(name, "tc", _limits("eth0", host))
            self._configure(SWITCH, "tc", _limits(_port(number), host))

    def _delay(self, port: str, name: str) -> None:
        """Makes the link of a host, whose packets are delayed."""
        ends = [f"/proc/{self._holders[host].pid}/ns/net" for host in (SWITCH, name)]
        delay = repr(self._hosts[name].delay)
        command = [sys.executable, "-I", "-S", delays.__file__, delay, port, ends[0], "eth0", ends[1]]
        relay = self.start(SWITCH, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own_environ())
        assert relay.stdout is not None
        if relay.stdout.read(1) != b"!":
            said = (relay.communicate()[1].decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise HostsUnavailable(f"delays need TAP interfaces (/dev/net/tun): {said}")

    def _configure(self, host: str, tool: str, lines: Sequence[str]) -> None:
        """Has a tool do what lines say, in the namespace of a host."""
        if not lines:
            return
        command = [*_inside(self._holders[host].pid), tool, "-batch", "-"]
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, check=False, env=own_environ()
        )
        if done.returncode:
            why = done.stderr.strip().replace("\n", "; ")
            raise HostsUnavailable(f"hosts need a kernel with bridges, veth and tbf; {tool}: {why}")

    def _end(self) -> None:
        """Ends all processes on the hosts, and with them the hosts."""
        for process in self._processes:
            process.kill()  # one that has only begun may not be on its host yet, where its holder would find it
        for holder in self._holders.values():
            assert holder.stdin is not None
            holder.stdin.close()
        for process in (*self._holders.values(), *self._processes):
            process.wait(END_SECONDS)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()


def _check() -> None:
    """Raises `HostsUnavailable` if something is missing that can be seen without trying."""
    if sys.platform != "linux":
        raise HostsUnavailable("hosts need network namespaces, which only Linux has")
    if os.geteuid():  # the tools lie where the PATH of other users often does not lead
        raise HostsUnavailable("hosts need the right to create network namespaces; run this as root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise HostsUnavailable(f"hosts need {', '.join(missing)}; install iproute2 and util-linux")


def _hold(name: str) -> subprocess.Popen[bytes]:
    """Starts a process in namespaces of its own, for network and host name, which holds them until its stdin ends."""
    program = "\n\n".join([inspect.getsource(processes_beside), inspect.getsource(hold), f"hold({name!r})"])
    command = ["unshare", "--net", "--uts", sys.executable, "-I", "-S", "-c", program]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=own_environ(), process_group=0)
    assert holder.stdout is not None
    if holder.stdout.read(1) != b"!":
        said = (holder.communicate()[1].decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise HostsUnavailable(f"hosts need the right to create namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN): {said}")
    return holder


def hold(name: str) -> None:
    """Holds the namespaces of this process until its stdin ends; then kills all others in them.

    Its source, and that of `processes_beside`, is the program of a holder, which so begins in a moment.

    Args:
        name: the name of the host.
    """
    import os
    import signal
    import socket
    from contextlib import suppress

    socket.sethostname(name)
    os.write(1, b"!")
    os.read(0, 1)
    while found := processes_beside(os.getpid()):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_beside(holder: int) -> list[int]:
    """Returns the ids of the processes in the network namespace of another one, without that."""
    import os
    from contextlib import suppress

    found = []
    theirs = os.stat(f"/proc/{holder}/ns/net")
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != holder:
            with suppress(OSError):  # it has ended
                if os.path.samestat(os.stat(f"/proc/{name}/ns/net"), theirs):
                    found.append(int(name))
    return found


def _inside(holder: int) -> list[str]:
    """Returns the beginning of a command line that runs the rest of it in the namespaces of a process."""
    return ["nsenter", f"--net=/proc/{holder}/ns/net", f"--uts=/proc/{holder}/ns/uts", "--"]


def _port(number: int) -> str:
    """The name of the switch's end of a link."""
    return f"port{number}"


def _limits(interface: str, host: Host) -> list[str]:
    """Returns the lines for `tc` that limit what leaves an interface."""
    if host.rate is None:
        return []
    burst = max(int(BURST_SECONDS * host.rate / 8), LEAST_BURST)
    queue = max(int(QUEUE_SECONDS * host.rate / 8), LEAST_QUEUE) + burst
    return [f"qdisc add dev {interface} root tbf rate {round(host.rate)}bit burst {burst} limit {queue}"]


class HostCluster(Cluster):
    """A cluster of which each task is on a host of its `Hosts`. This process is on none of them.

    Transports of shared memory are not used: what is on several hosts has none in common.

    Args:
        hosts: the hosts, which must be there when the cluster starts, and end after it.
        where: the host of each task, by name.
        keys: as of `Cluster`; it has a task `ps` or `worker` for each of `where`.

    Raises:
        ConfigError: the transport is `shm`, or a task has no host.
    """

    starts_early = False

    def __init__(self, hosts: Hosts, where: Mapping[Task, str], **keys: Any) -> None:
        counts = {name: sum(task.job == job for task in where) for name, job in (("ps", "ps"), ("workers", "worker"))}
        super().__init__(**{"transport": "tcp", **counts, **keys})
        if self.config.transport == "shm":
            raise ConfigError("hosts do not share memory; use the transport tcp or grpc")
        homeless = [task for task in (*self.servers(), *self.clients()) if task not in where]
        if homeless:
            raise ConfigError(f"`where` has no host for {', '.join(map(str, homeless))}")
        self._net = hosts
        self._where = dict(where)

    def _spawn(self, task: Task, program: str, arguments: Sequence[str], more: Mapping[str, str]) -> Process:
        """Starts a task on its host. Nobody else is on this network, which so needs no certificates."""
        command = self._net.command(self._where[task], [sys.executable, "-P", "-m", program, *arguments])
        environ = child_environ(len(self._where), self.config.timeouts, {"PS_INSECURE": "1", **more})
        stdin = subprocess.PIPE if task.job == "ps" else subprocess.DEVNULL
        return spawn(command, environ, stdin=stdin, stderr=subprocess.PIPE)

    def _server(self, task: Task, port: int) -> Process:
        address = self._net.addresses[self._where[task]]
        arguments = [*server_arguments(task, address, port, self.config.server), *self._server_flags(task)]
        return self._spawn(task, "psserver", arguments, {**self._options.variables(), **self.server_environ})

    def _client(self, task: Task) -> Process:
        arguments = ["--die-with-parent", str(os.getpid()), *self._arguments(task)]
        more = {**self._told(task), **self._options.variables(), **self.client_environ}
        return self._spawn(task, "psclient", arguments, more)

    def _name(self, task: Task) -> str:
        return f"{self._net.addresses[self._where[task]]}:0"

    def _ask(self, task: Task) -> ServerStatus | None:
        """Returns None: no server can be reached from outside of the hosts."""
        return None
