"""Hosts on one machine: their links have a rate, and nothing of them is left, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pstesting import hosts as hosts_module
from pstesting.hosts import Host, HostCluster, Hosts, HostsUnavailable
from pstesting.processes import until
from tests.kit.internals import ConfigError, Task
from tests.kit.shell import linked

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0

RATE = 20e6
"""Bits per second: so few that a machine that is busy moves them, too."""

NBYTES = 4_000_000

SINK = """
import socket, sys, time
with socket.create_server(("0.0.0.0", 5000)) as listener:
    print("ready", flush=True)
    peer, _ = listener.accept()
left, buffer, began = {nbytes}, bytearray(1 << 20), 0.0
while left:
    count = peer.recv_into(buffer, min(left, len(buffer)))
    if not began:
        began, first = time.monotonic(), count
    left -= count
print(({nbytes} - first) / (time.monotonic() - began), flush=True)
"""

ECHO = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as listener:
    print("ready", flush=True)
    peer, _ = listener.accept()
while (data := peer.recv(1 << 16)):
    peer.sendall(data)
"""

TRIPS = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
took = []
for _ in range(5):
    began = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    took.append(time.monotonic() - began)
print(min(took))
"""

SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.sendall(bytes({nbytes}))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
"""

OWNER = """
import json, os, sys
from pstesting.hosts import Host, Hosts
with Hosts([Host("here", 1e6), Host("there")]) as hosts:
    process = hosts.start("here", ["sh", "-c", "echo; sleep 600; sleep 600"], stdout=-1)
    process.stdout.readline()
    print(json.dumps([hosts.processes("here"), os.stat(f"/proc/{process.pid}/ns/net").st_ino]), flush=True)
    sys.stdin.read()
"""

POOR = """
import os
from pstesting.hosts import Host, Hosts, HostsUnavailable
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
try:
    Hosts([Host("here")]).__enter__()
except HostsUnavailable as error:
    print(error)
"""


def python(text):
    return [sys.executable, "-c", text.format(nbytes=NBYTES)]


def move(hosts, source, sink):
    """Bytes per second that a plain socket moves from one host to another."""
    taker = hosts.start(sink, python(SINK), stdout=subprocess.PIPE)
    assert taker.stdout.readline() == b"ready\n"
    giver = hosts.start(source, [*python(SOURCE), hosts.addresses[sink]])
    said = taker.communicate(timeout=SECONDS)[0]
    assert giver.wait(SECONDS) == 0
    return float(said)


def namespaces():
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.add(os.stat(path / "ns" / "net").st_ino)
    return found


def interfaces():
    return sorted(name for _, name in socket.if_nameindex())


def test_a_link_carries_its_rate_each_way(stack):
    """A plain socket gets the rate but for headers, to the host as from it; a link without a rate is faster."""
    hosts = linked(stack, Host("slow", RATE), Host("fast"), Host("faster"))
    before = dict.fromkeys(("slow", "fast"), (0, 0))
    for source, sink in (("fast", "slow"), ("slow", "fast")):
        assert 0.8 <= move(hosts, source, sink) * 8 / RATE <= 1.05
        moved = {name: (each.sent, each.received) for name, each in hosts.moved().items()}
        sent, received = (moved[source][0] - before[source][0], moved[sink][1] - before[sink][1])
        assert sent >= NBYTES <= received
        back, answered = moved[source][1] - before[source][1], moved[sink][0] - before[sink][0]
        assert max(back, answered) < NBYTES / 4
        before = moved
    assert move(hosts, "fast", "faster") * 8 / RATE > 2


def test_a_link_delays_packets_each_way_and_carries_its_rate(stack):
    """A round trip takes the delays of both links twice, also beside a host without one."""
    hosts = linked(stack, Host("far", RATE, delay=0.03), Host("farther", delay=0.05), Host("near"))
    for one, other, least in (("far", "farther", 0.16), ("near", "far", 0.06)):
        echo = hosts.start(other, python(ECHO), stdout=-1)
        echo.stdout.readline()
        asks = hosts.start(one, [*python(TRIPS), hosts.addresses[other]], stdout=-1)
        assert least <= float(asks.communicate(timeout=SECONDS)[0]) < least + 0.2
        assert echo.wait(SECONDS) == 0
    assert move(hosts, "near", "far") * 8 / RATE <= 1.05


def test_processes_see_the_name_of_their_host_and_its_links_alone(stack):
    """No address of the machine is there; a process that has only begun is ended, too."""
    with linked(stack, Host("here"), Host("there")) as hosts:
        text = "import socket; print(socket.gethostname(), *(name for _, name in socket.if_nameindex()))"
        process = hosts.start("there", python(text), stdout=subprocess.PIPE)
        assert process.communicate(timeout=SECONDS)[0].split() == [b"there", b"lo", b"eth0"]
        started = [hosts.start("here", ["sleep", "600"]) for _ in range(3)]
    assert {process.returncode for process in started} == {-signal.SIGKILL}


def test_the_machine_keeps_its_interfaces_and_nothing_is_left_after_an_error(stack):
    """Interfaces are made in namespaces alone; these end with the context, and so does all that runs there."""
    before, theirs = interfaces(), namespaces()
    with suppress(ZeroDivisionError), linked(stack, Host("here", RATE), Host("there")) as hosts:
        process = hosts.start("here", ["sh", "-c", "sleep 600 & sleep 600"])
        until(lambda: len(hosts.processes("here")) == 3, SECONDS, lambda: "the shell has started nothing")
        started = hosts.processes("here")
        assert interfaces() == before
        assert len(namespaces() - theirs) >= 3
        own = os.stat(f"/proc/{process.pid}/ns/net").st_ino
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert not any(Path(f"/proc/{pid}/ns/net").exists() for pid in started)
    assert own not in namespaces()
    assert interfaces() == before


def test_nothing_is_left_where_the_owner_is_killed(stack):
    """The kernel ends the processes, and with the last of them the namespaces and their interfaces."""
    linked(stack, Host("here")).__exit__()
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, cwd=ROOT, process_group=0)
    with owner:
        try:
            pids, namespace = json.loads(owner.stdout.readline())
            assert pids
            assert namespace in namespaces()
        finally:
            owner.kill()
    until(lambda: namespace not in namespaces(), SECONDS, lambda: "a process of the killed owner's hosts is left")


def test_who_is_not_root_is_told():
    """Nothing is tried that is not permitted; the error says what would be needed."""
    done = subprocess.run(python(POOR), capture_output=True, text=True, timeout=SECONDS, check=False, cwd=ROOT)
    assert "hosts need the right to create network namespaces" in done.stdout, done.stderr


def test_a_missing_program_is_told(environ, tmp_path):
    """By its name, and with what to install."""
    ip = shutil.which("sh")
    (tmp_path / "ip").symlink_to(ip)
    environ["PATH"] = str(tmp_path)
    with pytest.raises(HostsUnavailable, match="hosts need tc, nsenter, unshare; install iproute2"):
        Hosts([Host("here")]).__enter__()


def test_what_a_kernel_lacks_is_told(stack, monkeypatch):
    """As the tool says it, and nothing is left of the hosts that were begun."""
    linked(stack, Host("here")).__exit__()
    monkeypatch.setattr(hosts_module, "_limits", lambda interface, host: ["qdisc add dev eth0 root nosuch"])
    before = namespaces()
    with pytest.raises(HostsUnavailable, match=r"hosts need a kernel with bridges, veth and tbf; tc: .*qdisc"):
        Hosts([Host("here", RATE)]).__enter__()
    until(lambda: namespaces() <= before, SECONDS, lambda: "a namespace is left")


def test_a_cluster_has_a_host_for_each_task_and_no_transport_of_shared_memory():
    """A transport of shared memory would pass by the links that are measured. Hosts that make no sense are refused."""
    for wrong in ([Host("a"), Host("a")], [Host("switch")], [Host("a", rate=0)], [Host("a", delay=-1)]):
        with pytest.raises(ValueError, match=r"different names|has rate"):
            Hosts(wrong)
    hosts, where = Hosts([Host("here")]), {Task("ps", 0): "here", Task("worker", 0): "here"}
    with pytest.raises(ConfigError, match="do not share memory"):
        HostCluster(hosts, where, transport="shm", script="x.py")
    with pytest.raises(ConfigError, match="has no host for /job:worker/task:1"):
        HostCluster(hosts, where, workers=2, script="x.py", chief="none")
