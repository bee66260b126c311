"""Environment variables, each declared once: its meaning, its default, and the processes that read it.

A variable that is the same as an option has its meaning there (`Option.variable`). `tools/check_reference.py` writes
all of them into docs/reference.md, and fails where code reads one that is not declared here.
"""

from __future__ import annotations

from dataclasses import dataclass

SERVERS, CLIENTS, TASKS, EVERY, LAUNCHER = "servers", "workers, chief", "all tasks", "all tasks, psctl", "psworker"
SLURM, TESTS = "configs/slurm/train.sbatch", "the tests of this project"
"""Readers of variables."""


@dataclass(frozen=True)
class EnvironmentVariable:
    """The description of an environment variable.

    Attributes:
        readers: the processes that read it.
        about: its meaning, in a sentence or two; "" where an option describes it.
        default: the value where it is not set, in words; "" for none, or that of the option.
    """

    readers: str
    about: str = ""
    default: str = ""


DECLARED: dict[str, EnvironmentVariable] = {}
"""All variables by their names; `*` at the end of a name stands for anything."""


def _declare(name: str, readers: str, about: str = "", default: str = "") -> str:
    DECLARED[name] = EnvironmentVariable(readers, about, default)
    return name


TF_CONFIG = _declare("TF_CONFIG", EVERY, "The cluster and the task of this process, as JSON, as for tf.distribute.")
JOB = _declare(
    "PS_JOB",
    CLIENTS,
    "Name of the job. Servers that hold a job refuse other jobs until it ends or `psctl job delete` discards it.",
    "unnamed; psworker draws a random name for a cluster",
)
TRANSPORT = _declare("PS_TRANSPORT", CLIENTS)
LOCAL_REDUCTION = _declare("PS_LOCAL_REDUCTION", CLIENTS, default="0")
GRPC_STREAM = _declare(
    "PS_GRPC_STREAM",
    CLIENTS,
    "0 sends each push and pull over gRPC as a call of its own, for proxies that buffer long streams.",
    "1",
)
REFUSED = _declare(
    "PS_CONNECTION_REFUSED",
    CLIENTS,
    "Meaning of a refused connection to a server: `lost`, or `retry` behind a proxy that refuses connections while "
    "the server lives; the server is then waited for.",
    "lost",
)
REPLICATION_FACTOR = _declare("PS_REPLICATION_FACTOR", CLIENTS)
SCRIPT_ERROR = _declare(
    "PS_SCRIPT_ERROR",
    "workers",
    "Effect of an error that ends a worker's script: `end` ends the job, `leave` removes the worker from the job. Set "
    "`leave` where something restarts the worker; psworker --restarts and the files for Docker, Kubernetes and systemd "
    "do so.",
    "end",
)
SAVE_ON_SIGTERM = _declare("PS_SAVE_ON_SIGTERM", "workers", default="0")
DOMAIN = _declare("PS_DOMAIN", SERVERS)
KERNEL_CACHE = _declare(
    "PS_KERNEL_CACHE",
    SERVERS,
    "Folder in which servers keep compiled update functions, so that each is compiled once per host; 0 for none.",
    "$XDG_CACHE_HOME/paramserver/kernels, else ~/.cache/paramserver/kernels",
)
INSECURE = _declare("PS_INSECURE", SERVERS, default="0")
TLS_CERT = _declare("PS_TLS_CERT", EVERY)
TLS_KEY = _declare("PS_TLS_KEY", EVERY)
TLS_CA = _declare("PS_TLS_CA", EVERY)
TOKEN_FILE = _declare("PS_TOKEN_FILE", EVERY)
TOKEN = _declare(
    "PS_TOKEN",
    EVERY,
    "The job's token itself. It has no flag, because other users can read command lines.",
)
LOG_LEVEL = _declare("PS_LOG_LEVEL", TASKS)
LOG_FORMAT = _declare("PS_LOG_FORMAT", TASKS)
METRICS_PORT = _declare("PS_METRICS_PORT", TASKS)
METRICS_HOST = _declare("PS_METRICS_HOST", TASKS, default="127.0.0.1; for servers their --host")
TRACES = _declare("PS_TRACES", TASKS)

_declare("PS_SERVERS", SLURM, "Number of tasks that are servers.", "2")
_declare("PS_PORT", SLURM, "First port of servers. Jobs that share a node need different ones.", "22220")
_declare("PS_CERTS", SLURM, "Directory that psctl certs has written.", "certs")
_declare("PS_CHECKPOINTS", SLURM, "Directory of checkpoints, which all nodes see.", "runs")
EXECS = _declare("PS_TESTS_EXEC", TESTS, "1 starts each process in place of forking it.")

VARIABLES = frozenset(name for name in DECLARED if name.startswith("PS_"))
"""The names of this project's variables, but for those of `Timeouts`."""

THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"
"""The variables that set the number of threads of numerical libraries."""

for _name in THREADS:
    _declare(
        _name,
        TASKS,
        "Number of threads of numerical libraries. Set by psworker for the tasks that it starts.",
        "the cores of the host divided by its tasks",
    )

VISIBLE_GPUS = _declare("CUDA_VISIBLE_DEVICES", TASKS, "GPUs that a process may use. Set by SlurmClusterResolver.")
_declare("GLIBC_TUNABLES", TASKS, "Settings of the allocator. Set by psworker for the tasks that it starts.")
_declare("GRPC_ENABLE_FORK_SUPPORT", CLIENTS, "gRPC's handlers of forks, which are not needed here.", "0")
_declare("GRPC_VERBOSITY", TASKS, "gRPC's own log.", "NONE; for servers ERROR")
_declare(
    "NUMBA_*",
    SERVERS,
    "Settings of the compiler. All except NUMBA_CACHE_DIR, NUMBA_NUM_THREADS and NUMBA_THREADING_LAYER switch off the "
    "cache of compiled update functions.",
)
_declare(
    "OTEL_*",
    TASKS,
    "OpenTelemetry's own settings, with --traces otlp: endpoint, protocol (http/protobuf or grpc), sampler, "
    "attributes. OTEL_SDK_DISABLED=true switches traces off.",
)
RUNTIME_DIRECTORY = _declare(
    "XDG_RUNTIME_DIR",
    "psworker, psctl",
    "Directory of files about running local clusters.",
    "/tmp/paramserver-UID",
)
CACHE_HOME = _declare("XDG_CACHE_HOME", SERVERS, "Directory of caches; see PS_KERNEL_CACHE.", "~/.cache")
NO_COLOR = _declare("NO_COLOR", "psworker, psctl", "Any value switches colours off.")
RAY_ADDRESS = _declare("RAY_ADDRESS", LAUNCHER, "The Ray cluster of --ray auto.", "the cluster of this host")
_declare("SLURM_*", "SlurmClusterResolver", "Nodes, tasks and the rank of a process, as Slurm sets them.")
for _name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
    _declare(_name, "TorchrunClusterResolver", "Rank, sizes and the first node's address, as torchrun sets them.")
for _name in ("HOSTNAME", "JOB_COMPLETIONS", "JOB_COMPLETION_INDEX", "JOB_INDEX", "JOBSET_NAME", "REPLICATED_JOB_NAME"):
    _declare(_name, "KubernetesClusterResolver", "Name and index of the pod, as Kubernetes and JobSet set them.")


# ---- Names of before ----

RETIRED = {
    "PS_AGGREGATION": "PS_LOCAL_REDUCTION",
    "PS_LANE": "PS_TRANSPORT",
    "PS_REFUSED": "PS_CONNECTION_REFUSED",
    "PS_REPLICATION": "PS_REPLICATION_FACTOR",
    "PS_TIMEOUT_ALONE": "PS_NO_WORKERS_TIMEOUT",
    "PS_TIMEOUT_BEAT": "PS_HEARTBEAT_INTERVAL",
    "PS_TIMEOUT_CALL": "PS_CALL_TIMEOUT",
    "PS_TIMEOUT_CHIEF": "PS_CHIEF_TIMEOUT",
    "PS_TIMEOUT_FIRST": "PS_FIRST_WORKER_TIMEOUT",
    "PS_TIMEOUT_GRACE": "PS_TERMINATION_GRACE",
    "PS_TIMEOUT_LEASE": "PS_SESSION_TIMEOUT",
    "PS_TIMEOUT_ROUND": "PS_ROUND_TIMEOUT",
    "PS_TIMEOUT_SERVER": "PS_SERVER_TIMEOUT",
    "PS_TIMEOUT_START": "PS_START_TIMEOUT",
    "PS_TIMEOUT_WORD": "PS_REPORT_INTERVAL",
}
"""Names that environment variables had before the first release, and those that they have now. There are no aliases."""

RETIRED_OPTIONS = {
    "aggregation": "local_reduction",
    "lane": "transport",
    "refused": "connection_refused",
    "replication": "replication_factor",
} | {
    old.removeprefix("PS_TIMEOUT_").lower(): new.removeprefix("PS_").lower()
    for old, new in RETIRED.items()
    if old.startswith("PS_TIMEOUT_")
}
"""The same of options, as keys of a configuration file have them; a flag has dashes."""

RETIRED_COMMANDS = {"page": "dashboard", "recent": "events", "end": "delete"}
"""The same of commands of `psctl` and of its groups."""

_NOTES = {"PS_REPLICATION": "it counts the original too: 2 in place of 1", "replication": "2 in place of 1"}
"""What else differs."""


def renamed(name: str, known: dict[str, str]) -> str:
    """Returns what to say of a retired name; "" for any other one.

    Args:
        name: the name that was given.
        known: one of the tables above.
    """
    if name not in known:
        return ""
    note = f" ({_NOTES[name]})" if name in _NOTES else ""
    return f"is called {known[name]} now{note}"
