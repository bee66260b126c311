"""Checks that `psctl doctor` makes of this machine: shared memory, GPUs, open files, memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from psclient._src.arrays.devices import gpu_report
from psclient._src.network.transport import SHARED
from psclient.psctl.findings import Check, Finding, LocalHost, Patient, fail, ok, warn
from pswire.network.shared_memory import CLIENT_BYTES, Segment
from pswire.process import versions
from pswire.telemetry.views.numbers import size

MEMINFO = Path("/proc/meminfo")

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files in which Linux tells a container how much memory it may use, in its two ways."""

NO_LIMIT = 1 << 60
"""The least number that some systems write for no limit."""

NVIDIA = Path("/proc/driver/nvidia")
"""There where the driver is."""

FEW_FILES, ENOUGH_FILES = 256, 4096
"""Open files: less do not work; more are needed by a server of many workers."""

LITTLE_MEMORY, ENOUGH_MEMORY = 256 << 20, 1 << 30
"""Free bytes: with less nothing starts; with less than enough little can be trained."""

SHARED_BYTES = 1 << 30
"""The server's --shared-memory, where nothing else is said."""


def here() -> LocalHost:
    """This machine, or this container."""
    return LocalHost(
        shared=SHARED,
        shared_free=_free(SHARED),
        shared_writable=os.access(SHARED, os.W_OK),
        segments=_segments(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=_available(MEMINFO),
        memory_limit=next((limit for path in LIMITS if (limit := _limit(path))), 0),
        gpus=gpu_report(),
        nvidia=NVIDIA.exists(),
        versions=dict(versions()),
    )


def _free(directory: str) -> int:
    try:
        found = os.statvfs(directory)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize


def _segments() -> str:
    try:
        _, file = Segment.make(CLIENT_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    os.close(file)
    return ""


def _available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def _limit(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and int(text) < NO_LIMIT else 0


# ---- The checks ----


def shared_memory(patient: Patient) -> Iterator[Finding]:
    """Returns whether the shm transport can be used: sockets in a directory, data in anonymous shared memory."""
    host = patient.host
    if host.segments:
        yield fail(f"shared memory is not available ({host.segments})", "allow memfd_create, or use --transport tcp")
    else:
        yield ok("processes can share memory")
    if host.shared_free < 0 or not host.shared_writable:
        what = "does not exist" if host.shared_free < 0 else "is not writable"
        advice = "mount a writable tmpfs there; containers of one host need the same one (--ipc)"
        yield warn(
            f"{host.shared} {what}, so the shm transport works only between processes with the same temporary "
            "directory",
            advice,
        )
    elif host.shared_free < 1 << 20:
        yield warn(f"{host.shared} is full", "remove files from it; it holds the transport's sockets")
    else:
        yield ok(f"{host.shared} is writable, {size(host.shared_free)} free")
    if 0 < host.memory_limit < 2 * SHARED_BYTES:
        text = f"this container can use {size(host.memory_limit)}, which includes shared memory"
        yield warn(text, "lower --shared-memory of servers here, such as 128MiB, or 0 for no shm transport")


def gpu(patient: Patient) -> Iterator[Finding]:
    """Returns whether CuPy finds the GPUs that there are."""
    gpus, nvidia = patient.host.gpus, patient.host.nvidia
    if gpus.names:
        yield ok(f"CuPy {gpus.cupy}, CUDA {gpus.runtime}, driver {gpus.driver}: {', '.join(gpus.names)}")
    elif gpus.cupy and nvidia:
        yield fail(f"CuPy {gpus.cupy} finds no GPU, although there is a driver: {gpus.error}", "check nvidia-smi")
    elif gpus.cupy:
        advice = "install the driver, or start the container with its GPUs (--gpus all)"
        yield warn(f"CuPy {gpus.cupy} is installed, but there is no GPU: {gpus.error}", advice)
    elif gpus.error:
        yield fail(gpus.error, "pip install -e '.[gpu]' in the clone again, or remove CuPy")
    elif nvidia:
        yield warn("there is a GPU, but CuPy is not installed", "pip install -e '.[gpu]' in the clone")
    else:
        yield ok("there is none; servers use NumPy")


def open_files(patient: Patient) -> Iterator[Finding]:
    """Returns whether a process may have as many connections as it needs."""
    count = patient.host.open_files
    if count < FEW_FILES:
        yield fail(f"a process may open {count} files", "raise the limit: ulimit -n 65536")
    elif count < ENOUGH_FILES:
        yield warn(
            f"a process can open {count} files, which is too few for a server with many workers", "ulimit -n 65536"
        )
    else:
        yield ok(f"a process may open {count} files")


def memory(patient: Patient) -> Iterator[Finding]:
    """Returns whether there is memory for variables and contributions."""
    host = patient.host
    text = f"{size(host.memory)} are free"
    text += f", and this container can use {size(host.memory_limit)}" if host.memory_limit else ""
    least = min(host.memory, host.memory_limit or host.memory)
    if not host.memory:
        yield ok("the free memory is not known on this system")
    elif least < LITTLE_MEMORY:
        yield fail(text, "end other processes, or give the container more")
    elif least < ENOUGH_MEMORY:
        yield warn(text, "a server needs memory for variables, for old values of checkpoints, and for gradients")
    else:
        yield ok(text)


HOST_CHECKS: dict[str, Check] = {"shared memory": shared_memory, "GPU": gpu, "open files": open_files, "memory": memory}
