"""What commands import: each runs in a new process, which lists its modules. Importing is most of what they cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.kit.certificates import Certificates, guarded
from tests.kit.internals import Security
from tests.kit.storage import write_checkpoint

PSCTL = """
import sys
from psclient.psctl import main
try: main(sys.argv[1:])
except SystemExit as end: assert not end.code
"""
LAUNCHER = "import psclient._src.launch.psworker, psclient._src.launch.cluster, psclient._src.processes.output"
NETWORK = {"asyncio", "cryptography", "google.protobuf", "grpc"}
TRAINING = {"numba", "psclient._src.distribute", "psclient._src.network.remote_server", "psclient.optimizers"}


def modules_of(script: str, *args: str, **variables: str) -> set[str]:
    """The modules that a new process has loaded once it has run a script."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "PS_", "TF_CONFIG"))}
    command = [sys.executable, "-P", "-c", f"{script}\nimport sys; print('loaded', *sys.modules)", *args]
    done = subprocess.run(command, env=environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("secured", [False, True])
def test_a_health_check_that_succeeds_loads_the_standard_library_alone(secured: bool, certificates: Certificates):
    """Containers make one every few seconds; with TLS a task's own certificate is enough for it."""
    environ = {}
    if secured:
        files = {"PS_TLS_CERT": "tls.crt", "PS_TLS_KEY": "tls.key", "PS_TLS_CA": "ca.crt"}
        environ = {name: f"{certificates.out}/{{task}}/../ps-0/{file}" for name, file in files.items()}
        environ["TF_CONFIG"] = json.dumps({"task": {"type": "ps", "index": 0}})
    with guarded(certificates.of("ps-0") if secured else Security()) as server:
        found = modules_of(PSCTL, "health", server.address, **environ)
    ours = {name for name in found if name.startswith(("psclient.", "pswire."))}
    assert ours == {"psclient.psctl", "pswire.process", "pswire.network", "pswire.network.health_probe"}
    assert not found & {"click", "dataclasses", "typing", "numpy", *NETWORK}
    assert ("ssl" in found) == secured
    assert len(found) < 100


@pytest.mark.parametrize(
    "script",
    [
        "import psclient as ps; assert float(ps.Variable(1.0).numpy()) == 1",
        "import psclient as ps; assert not ps.has_strategy(); assert ps.get_strategy().num_replicas_in_sync == 1",
        "from psclient.optimizers import SGD; from psclient import Variable; SGD(0.1).build([Variable(1.0)])",
        "from psclient._src import context; assert context.get_replica_context().devices",
    ],
)
def test_the_default_strategy_is_there_whatever_is_used_first(script: str):
    """A module is imported when it is needed, and so is that of the strategy outside of every scope."""
    modules_of(script)


# gRPC reads this when it is imported, by whomever; its handlers would abort forks, as of data loaders.
PACKAGE = "import os, psclient; assert os.environ['GRPC_ENABLE_FORK_SUPPORT'] == '0'"

COMMANDS = {
    "import psclient": (PACKAGE, (), {"click", "numpy"}, 70),
    "launcher": (LAUNCHER, (), {"numpy", "rich"}, 230),
    "psctl --version": (PSCTL, ("--version",), {"numpy"}, 300),
    "psctl checkpoint": (PSCTL, ("checkpoint", "verify", "run"), set(), 460),
}


@pytest.mark.parametrize(("script", "args", "without", "most"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_loads_what_it_needs(tmp_path, monkeypatch, script, args, without, most):
    """A launcher and a command on files load no gRPC, and nothing that is for training."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "run" / "ckpt-1", {"w": np.ones(2)})
    found = modules_of(script, *args)
    assert not found & {*without, *NETWORK, *TRAINING}
    assert len(found) <= most, sorted(found)
