"""A real Prometheus scrapes a real job by the configuration of the Compose profile: no panel is empty without a reason.

Needs prometheus and promtool. Ports are those that the tasks have picked; all else is what is committed.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
import yaml

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import add, gate, say
from tests.deploy.test_prometheus import ALARMS, RULES, concrete, panels
from tests.kit.telemetry import metrics_url

TASKS = (PS0, PS1, CHIEF, W0, W1)
SECONDS = 60.0

EMPTY = {
    "Missing tasks": "all tasks are there",
    "Certificates expire in": "the job has no certificates",
    "Share of the memory limit": "there is no limit",
}
"""Panels that show nothing in this job, and why."""


def observed() -> None:
    """Trains with a table and saves; stops at a gate."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
        table = ps.dynamic_embedding.get_variable("t", 4)
        optimizer = ps.optimizers.SGD(0.1)
    manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", max_to_keep=1)

    def step() -> None:
        add(v, np.ones(1 << 12, "float32"))
        keys = np.arange(8)
        optimizer.apply_gradients([(ps.IndexedSlices(np.ones((8, 4), "float32"), keys), table)])

    for turn in range(600):
        strategy.run(step)
        v.numpy()
        if turn % 200 == 100:
            manager.save()
        time.sleep(0.02)
    say("rounds", strategy.round)
    gate("on")
    strategy.close()


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def prometheus(directory: Path, targets: list[str]) -> Iterator[str]:
    """Runs a Prometheus by the committed configuration, with other targets, pauses and without TLS; gives its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus: nobody scrapes")
    config = yaml.safe_load((ALARMS.parent / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(ALARMS)]
    scraped = config["scrape_configs"][0]
    scraped["static_configs"] = [{"targets": targets}]
    del scraped["scheme"], scraped["tls_config"]  # this cluster has no certificates
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen([program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def ask(url: str, path: str, **words: str) -> dict:
    """What Prometheus answers; nothing while it is starting."""
    try:
        with urlopen(f"{url}/api/v1/{path}?{urlencode(words)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except HTTPError:
        raise
    except URLError:
        return {}


def test_panels_show_a_job(tmp_path: Path) -> None:
    """Every query has an answer while the job trains, every task is up, and every alarm is loaded and silent."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "metrics_port": 0, "log_format": "json"}
    with ProcessCluster(observed, tmp_path, gates=["on"], **keys) as job:
        urls = [metrics_url(job, task) for task in TASKS]
        targets = [url.removeprefix("http://").removesuffix("/metrics") for url in urls]
        with prometheus(tmp_path, targets) as url:
            missing = {(title, query) for title, query in panels() if title not in EMPTY}
            until = time.monotonic() + SECONDS
            while missing and time.monotonic() < until:
                time.sleep(0.5)
                for title, query in list(missing):
                    if ask(url, "query", query=concrete(query).replace("[1m]", "[10s]")).get("result"):
                        missing.discard((title, query))
            assert not missing
            for title, query in panels():
                if title in EMPTY:
                    assert not ask(url, "query", query=concrete(query))["result"], title
            up = ask(url, "query", query="up")["result"]
            assert [one["value"][1] for one in up] == ["1"] * len(TASKS)
            assert {one["metric"]["job"] for one in up} == {"digits"}
            rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
            assert {(rule["name"], rule["health"], rule["state"]) for rule in rules} == {
                (rule["alert"], "ok", "inactive") for rule in RULES
            }
        job.open("on")
        job.finish()


def test_pages_are_what_prometheus_wants(tmp_path: Path) -> None:
    """promtool has nothing to say about the metrics of a server, a chief and a worker."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: conventions are checked by the tests alone")
    keys = {"ps": 1, "workers": 1, "chief": "driver", "metrics_port": 0, "log_format": "json"}
    with ProcessCluster(standing, tmp_path, gates=["on"], **keys) as job:
        for task in (PS0, CHIEF, W0):
            with urlopen(metrics_url(job, task), timeout=10) as answer:
                page = answer.read()
            done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, timeout=60)
            said = [line for line in (done.stdout + done.stderr).decode().splitlines() if "paramserver_" in line]
            assert (done.returncode in (0, 3), said) == (True, [])
        job.open("on")
        job.finish()


def standing() -> None:
    """Makes a round, and stands still."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4, "float32"), name="v")
    strategy.run(add, args=(v, np.ones(4, "float32")))
    v.numpy()
    gate("on")
    strategy.close()
