"""A status page of real processes, in a real browser; links by psctl; clusters of this machine that psctl finds."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from pstesting import forks
from pstesting.processes import CHIEF, PS0, W0, W1, ProcessCluster
from pstesting.script import add, gate, say
from tests.kit.pages import BINARY, Browser

SCRIPT = "<script>document.title='attacked'</script>"


@pytest.fixture(autouse=True)
def directory(tmp_path_factory, monkeypatch):
    """Of the files of this test's clusters."""
    found = tmp_path_factory.mktemp("runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(found))
    return found / "paramserver"


def watched(name: str) -> None:
    """Makes rounds until it is told to end."""
    import time

    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name=name)
    for number in range(100_000):
        strategy.run(add, args=(v, np.ones(1 << 12, "float32")))
        if number == 5:
            v.numpy()
            say("runs")
        time.sleep(0.02)
    gate("on")


def psctl(*args: str) -> Any:
    """What `psctl` says in JSON."""
    done = forks.run(
        [sys.executable, "-m", "psclient.psctl", "--json", *args], capture_output=True, text=True, timeout=120
    )
    return json.loads(done.stdout)


def cluster(tmp_path: Path, **keys: Any) -> ProcessCluster:
    given = {"ps": 2, "workers": 2, "chief": "driver", "restarts": 5, **keys}
    return ProcessCluster(watched, tmp_path, (SCRIPT,), gates=["on"], **given)


def test_psctl_looks_at_a_cluster_of_this_machine(tmp_path, directory):
    """By its token and addresses, which its file has, as long as it runs. Without a port there is no page."""
    with cluster(tmp_path) as job:
        job.hear(W0, "runs")
        (file,) = directory.iterdir()
        (found,) = psctl("--local")["clusters"]
        assert found["servers"] == [job.cluster.addresses[task] for task in sorted(job.cluster.addresses)]
        said = psctl("--local", "status")
        assert said["state"] == "running"
        assert {task["task"] for task in said["tasks"]} == {str(task) for task in (CHIEF, W0, W1)}
        assert all(task["opened_seconds"] > 0 for task in said["tasks"])
        assert psctl(f"--local={found['name']}", "top")["rates"][str(PS0)]["rounds_per_second"] > 0
        assert "no task of this job has a metrics port" in psctl("page", "--local")["error"]["message"]
        assert psctl("--local=other", "status")["error"]["message"] == (
            f"no cluster is named 'other'; there is {found['name']}"
        )
        assert psctl("--local", "--address", "127.0.0.1:1", "status")["error"]["type"] == "ConfigError"
    assert not file.exists()


def test_each_server_and_the_chief_have_a_page(tmp_path):
    """Which psctl links to; a link of one opens all of the job, and a worker has none."""
    with cluster(tmp_path, metrics_port=0) as job:
        job.hear(W0, "runs")
        pages = {each["task"]: each["url"] for each in psctl("--local", "page")["pages"]}
        assert set(pages) == {"/job:chief/task:0", "/job:ps/task:0", "/job:ps/task:1"}
        assert [each["url"].partition("?")[0] for each in psctl("--local", "page", "--chief")["pages"]] == [
            pages["/job:chief/task:0"].partition("?")[0]
        ]
        assert [each["task"] for each in psctl("--local", "page", "--server", "ps:1")["pages"]] == ["/job:ps/task:1"]
        assert "there is no ps-7" in psctl("--local", "page", "--server", "7")["error"]["message"]
        code = pages["/job:ps/task:1"].partition("?")[2]
        for task, url in pages.items():
            text = _load(f"{url.partition('?')[0]}?{code}")
            assert task in text
            assert "job runs: epoch 1" in text
        assert "worker-1" in _load(pages["/job:chief/task:0"])
        assert "ps-1" in _load(pages["/job:chief/task:0"])
        line = job.cluster.output(W0, error=True)
        (metrics,) = [each.rpartition(" ")[2] for each in line if "metrics are at" in each]
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(metrics.removesuffix("metrics"), timeout=60)
        assert caught.value.code == 404
        assert b"psctl page says where there is one" in caught.value.read()


def _load(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.skipif(BINARY is None, reason="no Chromium is installed (apt-get install chromium)")
def test_the_page_lives_in_a_browser(tmp_path):
    """It changes by itself, keeps no code in its address, shows a worker's death, and runs no script of a variable."""
    with cluster(tmp_path, metrics_port=0) as job, Browser(tmp_path / "profile") as browser:
        job.hear(W0, "runs")
        (page,) = psctl("--local", "page", "--chief")["pages"]
        browser.look()
        browser.open(page["url"])
        assert browser.run("location.search") == ""
        assert browser.run("document.cookie") == ""
        browser.until(lambda: browser.text("#live") == "Live.")
        before = browser.text("#summary")
        browser.until(lambda: browser.text("#summary") != before)
        assert SCRIPT in browser.text("#variables")
        assert browser.run("document.title") == "paramserver /job:chief/task:0"
        for place in ("servers", "tasks", "time-line", "rounds", "lanes", "variables"):
            tables = f"document.querySelectorAll('#{place} table')"
            assert browser.run(f"{tables}.length") > 0, place
            unlabelled = f"[...{tables}].filter(t => !t.caption || !t.querySelector('th[scope=row]')).length"
            assert browser.run(unlabelled) == 0, place
        job.cluster.kill(W1)
        job.cluster.start_task(W1)
        browser.until(lambda: "failed" in browser.text("#time-line") or "lost" in browser.text("#time-line"))
        browser.until(lambda: "not any more: worker-1" in browser.text("#time-line"))
        assert browser.run("document.querySelectorAll('#time-line rect.ended').length") == 1
        browser.look(width=390, dark=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        browser.look(script=False)
        browser.open(page["url"])
        assert "job runs" in browser.text("#summary")
        assert "loaded again every 5 seconds" in browser.text("#live")
        shown = browser.text("#summary")
        browser.until(lambda: browser.text("#summary") != shown)
        assert browser.said == [], "the policy was broken, or a script failed"


def test_the_link_needs_the_token(tmp_path, monkeypatch):
    """Whoever has no token, or another job's, is told so by psctl itself."""
    with cluster(tmp_path, metrics_port=0) as job:
        job.hear(W0, "runs")
        addresses = ",".join(job.cluster.addresses[task] for task in sorted(job.cluster.addresses))
        environ = {name: each for name, each in os.environ.items() if name not in ("PS_TOKEN", "TF_CONFIG")}
        for token, said in (("", "the call has none"), ("x" * 32, "the token of another job")):
            command = [sys.executable, "-m", "psclient.psctl", "--json", "page", "--address", addresses]
            more = {"PS_TOKEN": token} if token else {}
            done = forks.run(command, env=environ | more, capture_output=True, text=True, timeout=120)
            assert done.returncode == 2
            assert said in json.loads(done.stdout)["error"]["message"]
        recent = psctl("--local", "recent", "--server", "0")["servers"][0]["recent"]
        refused = [each for each in recent if "Unauthenticated" in each["refused"]]
        assert {each["what"] for each in refused} == {"status"}
        assert all("a caller at ipv4:127.0.0.1" in each["said"] for each in refused)
