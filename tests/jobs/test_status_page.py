"""A status page of real processes, in a real browser; links by psctl; clusters of this machine that psctl finds."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, W0, W1, ProcessCluster
from pstesting.script import add, say
from tests.kit.shell import shell
from tests.kit.telemetry import BINARY, Browser

SCRIPT = "<script>document.title='attacked'</script>"


@pytest.fixture(scope="module", autouse=True)
def own_directory(tmp_path_factory):
    """Of the files of clusters that these tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


def watched(name: str) -> None:
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name=name)
    while True:
        strategy.run(add, args=(v, np.ones(1 << 12, "float32")))
        if strategy.round == 5:
            v.numpy()
            say("runs")
        time.sleep(0.2)


def psctl(*args: str, code: int | None = None, **environ: str) -> Any:
    done = shell(["psctl", "--json", *args], Path.cwd(), **environ)
    assert code in (None, done.code), done.err
    return json.loads(done.out)


def cluster(tmp_path: Path, **keys: Any) -> ProcessCluster:
    return ProcessCluster(watched, tmp_path, (SCRIPT,), chief="driver", restarts=5, **keys)


@pytest.fixture(scope="module")
def job(tmp_path_factory, own_directory):
    """A cluster whose servers and chief have pages."""
    with cluster(tmp_path_factory.mktemp("job"), ps=2, workers=2, metrics_port=0) as found:
        found.hear(W0, "runs")
        yield found


def test_psctl_looks_at_a_cluster_of_this_machine(tmp_path, monkeypatch):
    """By its token and addresses, which its file has, as long as it runs. Without a port there is no page."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))  # the job of other tests may be there
    directory = tmp_path / "runtime" / "paramserver"
    with cluster(tmp_path, ps=2, workers=1) as job:
        job.hear(W0, "runs")
        (file,) = directory.iterdir()
        (found,) = psctl("--local")["clusters"]
        assert found["servers"] == [job.cluster.addresses[task] for task in sorted(job.cluster.addresses)]
        said = psctl("--local", "status")
        assert said["state"] == "running"
        assert {task["task"] for task in said["tasks"]} == {str(task) for task in (CHIEF, W0)}
        assert all(task["opened_seconds"] > 0 for task in said["tasks"])
        assert psctl(f"--local={found['name']}", "top")["rates"][str(PS0)]["rounds_per_second"] > 0
        assert "no task of this job has a metrics port" in psctl("dashboard", "--local")["error"]["message"]
        assert psctl("--local=other", "status")["error"]["message"] == (
            f"no cluster is named 'other'; running clusters: {found['name']}"
        )
        assert psctl("--local", "--address", "127.0.0.1:1", "status")["error"]["type"] == "ConfigError"
    assert not file.exists()


def test_each_server_and_the_chief_have_a_page(job):
    """Which psctl links to; a link of one opens all of the job, and a worker has none."""
    pages = {each["task"]: each["url"] for each in psctl("--local", "dashboard")["pages"]}
    assert set(pages) == {"/job:chief/task:0", "/job:ps/task:0", "/job:ps/task:1"}
    assert [each["url"].partition("?")[0] for each in psctl("--local", "dashboard", "--chief")["pages"]] == [
        pages["/job:chief/task:0"].partition("?")[0]
    ]
    assert [each["task"] for each in psctl("--local", "dashboard", "--server", "ps:1")["pages"]] == ["/job:ps/task:1"]
    assert "there is no ps-7" in psctl("--local", "dashboard", "--server", "7")["error"]["message"]
    (link,) = psctl("--local", "dashboard", "--chief", "--forwarded", "127.0.0.1:9091")["pages"]
    assert link["url"].startswith("http://127.0.0.1:9091/?code=")
    assert link["local"] is False
    for more in ([], ["--chief", "--server", "0"]):
        error = psctl("--local", "dashboard", "--forwarded", "127.0.0.1:9091", *more)["error"]
        assert "is the address of one page" in error["message"]
    code = pages["/job:ps/task:1"].partition("?")[2]
    for task, url in pages.items():
        text = _load(f"{url.partition('?')[0]}?{code}")
        assert task in text
        assert "job is running: generation 1" in text
    assert "worker-1" in _load(pages["/job:chief/task:0"])
    assert "ps-1" in _load(pages["/job:chief/task:0"])
    line = job.cluster.output(W0, error=True)
    (metrics,) = [each.rpartition(" ")[2] for each in line if "metrics are at" in each]
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(metrics.removesuffix("metrics"), timeout=60)
    assert caught.value.code == 404
    assert b"psctl dashboard shows the address of one" in caught.value.read()


def test_the_link_needs_the_token(job, environ):
    """Whoever has no token, or another job's, is told so by psctl itself."""
    addresses = ",".join(job.cluster.addresses[task] for task in sorted(job.cluster.addresses))
    environ.pop("PS_TOKEN", None)
    for more, said in (({}, "the call has no token"), ({"PS_TOKEN": "x" * 32}, "the token of another job")):
        error = psctl("dashboard", "--address", addresses, code=2, **more)["error"]
        assert said in error["message"]
    recent = psctl("--local", "events", "--server", "0")["servers"][0]["events"]
    refused = [each for each in recent if "Unauthenticated" in each["refused"]]
    assert {each["what"] for each in refused} == {"status"}
    assert all("a caller at ipv4:127.0.0.1" in each["said"] for each in refused)


def _load(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.mark.ci  # a browser takes ten seconds
@pytest.mark.skipif(BINARY is None, reason="no Chromium is installed (apt-get install chromium)")
def test_the_page_lives_in_a_browser(job, tmp_path):
    """It changes by itself, keeps no code in its address, shows a worker's death, and runs no script of a variable."""
    with Browser(tmp_path / "profile") as browser:
        (page,) = psctl("--local", "dashboard", "--chief")["pages"]
        browser.look()
        browser.open(page["url"])
        assert browser.run("location.search") == ""
        assert browser.run("document.cookie") == ""
        browser.until(lambda: browser.text("#live") == "Live.")
        before = browser.text("#summary")
        browser.until(lambda: browser.text("#summary") != before)
        assert SCRIPT in browser.text("#variables")
        assert browser.run("document.title") == "paramserver /job:chief/task:0"
        for place in ("servers", "tasks", "time-line", "rounds", "transports", "variables"):
            tables = f"document.querySelectorAll('#{place} table')"
            assert browser.run(f"{tables}.length") > 0, place
            unlabelled = f"[...{tables}].filter(t => !t.caption || !t.querySelector('th[scope=row]')).length"
            assert browser.run(unlabelled) == 0, place
        job.cluster.kill(W1)
        job.cluster.start_task(W1)
        browser.until(lambda: "failed" in browser.text("#time-line") or "lost" in browser.text("#time-line"))
        browser.until(lambda: "left: worker-1" in browser.text("#time-line"))
        assert browser.run("document.querySelectorAll('#time-line rect.ended').length") == 1
        browser.look(width=390, dark=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390
        assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        browser.look(script=False)
        browser.open(page["url"])
        assert "job is running" in browser.text("#summary")
        assert "loaded again every 5 seconds" in browser.text("#live")
        shown = browser.text("#summary")
        browser.until(lambda: browser.text("#summary") != shown)
        assert browser.said == [], "the policy was broken, or a script failed"
