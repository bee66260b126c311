"""Jobs under a real torchrun: two nodes, which are two torchruns on this machine, and a server among the ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
import numpy as np
import psclient as ps

resolver = ps.TorchrunClusterResolver({"ps": 1, "worker": 3}, port_base=int(sys.argv[1]))
resolver.serve()
strategy = ps.ParameterServerStrategy(cluster_resolver=resolver)
with strategy.scope():
    w = ps.Variable(np.zeros(2, "float32"))
    optimizer = ps.optimizers.SGD(1.0)
for _ in range(2):
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2, "float32"), w)]))
print("rank", os.environ["RANK"], "is", resolver.task_type, resolver.task_id, "w", *w.numpy(), flush=True)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def torchrun(directory: Path, node: int, port: int, base: int) -> subprocess.Popen[str]:
    """One of two nodes with two processes each."""
    words = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    names = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "PS_TOKEN")}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words, "--master-port", str(port), "script.py", str(base)],
        cwd=directory,
        env=names,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_job_of_two_nodes(tmp_path: Path) -> None:
    """Rank 0 is the server, on the first node; workers of both nodes train on it, and all end well."""
    (tmp_path / "script.py").write_text(SCRIPT)
    port, base = free_port(), free_port()
    nodes = [torchrun(tmp_path, node, port, base) for node in range(2)]
    try:
        said = [node.communicate(timeout=600)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert f"psserver /job:ps/task:0 listening on 127.0.0.1:{base}" in said[0]
    lines = sorted(line for text in said for line in text.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} is worker {rank - 1} w -6.0 -6.0" for rank in (1, 2, 3)]
