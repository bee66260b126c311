"""Jobs under a real torchrun, and the benchmark of PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.shell import free_port

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


def torchrun(directory: Path, node: int, port: int, base: int) -> subprocess.Popen[str]:
    """One of two nodes with two processes each."""
    words = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    names = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "PS_TOKEN")}
    words += ["--master-port", str(port), "script.py", str(base)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(command, cwd=directory, env=names, **pipes, text=True)


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


@pytest.mark.soak
def test_the_benchmark_of_pytorch(tmp_path):
    """The network learns with us and with torch RPC, and each way has its figures. Of 100 MB the first gradient leaves
    before backward ends, in the median of the steps."""
    works = ["step", "large", "cnn", "trace"]
    file, benchmark = tmp_path / "frameworks.json", Path(__file__).resolve().parents[3] / "benchmarks" / "frameworks.py"
    options = [word for work in works for word in ("--work", work)]
    command = [sys.executable, str(benchmark), "--quick", "--json", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["excluded"], found["format"], found["transport"]) == ([], 1, "shm")
    assert found["machine"]["cores"] > 0
    rows = {(row["work"], row["way"]): row for row in found["rows"]}
    assert {work for work, _ in rows} == {*works}
    assert [way for work, way in rows if work == "cnn"] == ["cnn, psclient.torch", "cnn, torch RPC"]
    assert all(row["laps"] == len(row["lap_medians_ms"]) == 1 for (work, _), row in rows.items() if work != "trace")
    ways = ["first gradient leaves", "backward ends", "step ends"]
    first, backward, step = (rows["trace", way]["ms"]["median"] for way in ways)
    assert 0 < first < backward / 2
    assert backward < step
