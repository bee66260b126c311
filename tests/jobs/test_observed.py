"""Jobs of real processes tell what they do: metrics of every task, and a log that programs can read."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import CHIEF, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import add, gate, say
from pswire.telemetry import logging_setup
from tests.kit.shell import shell
from tests.kit.telemetry import Page, documented, metrics_url, mistakes

ROUNDS = 5
TASKS = (PS0, PS1, CHIEF, W0, W1)


def observed(rounds: int) -> None:
    """Makes some rounds, and stands still so that somebody may look."""
    import logging

    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
    for _ in range(rounds):
        strategy.run(add, args=(v, np.ones(1 << 12, "float32")))
        v.numpy()
    logging.getLogger("mine").warning("half way")
    say("rounds", strategy.round)
    gate("on")
    strategy.close()


def test_every_task_tells_what_it_does(tmp_path):
    """Servers, workers and the chief agree on the rounds; each line of a log says whose it is."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "metrics_port": 0, "log_format": "json"}
    with ProcessCluster(observed, tmp_path, (ROUNDS,), gates=["on"], **keys) as job:
        assert {job.hear(task, "rounds") for task in (W0, W1)} == {ROUNDS}
        pages = {task: Page.at(metrics_url(job, task)) for task in TASKS}
        job.open("on")
        job.finish()
        said = {task: _own(job.errors(task)) for task in TASKS}
    lines = {task: [logging_setup.read(line) for line in said[task]] for task in TASKS}
    for task in (W0, W1):
        _check_worker(pages[task])
    _check_servers([pages[PS0], pages[PS1]])
    chief = pages[CHIEF]
    assert (chief("chief_epochs_total"), chief("chief_members"), chief("chief_plans_approved_total")) == (1, 2, 1)
    assert not chief.families["paramserver_chief_missing"].samples
    _check_names(pages.values())
    for task, found in lines.items():
        assert all(line and line["task"] == str(task) for line in found), said[task]
    (mine,) = [line for line in lines[W1] if line["logger"] == "mine"]
    assert (mine["message"], mine["round"]) == ("half way", ROUNDS)
    assert int(mine["session"]) > 0


def _own(errors: str) -> list[str]:
    """What a task itself has said; the launcher, which is the test's process, tells of who is slow to end."""
    return [line for line in errors.splitlines() if not line.startswith("psworker: waits for ")]


def _check_worker(page: Page) -> None:
    assert page("worker_rounds_total", outcome="completed") == page("worker_round") == ROUNDS
    assert page("worker_phase_seconds_count", phase="waiting") == ROUNDS
    assert page("worker_phase_seconds_count", phase="computing") == ROUNDS - 1
    assert _moved(page, "worker", "sent") >= ROUNDS << 14


def _check_servers(pages: list[Page]) -> None:
    holder, other = sorted(pages, key=lambda page: -page("server_variable_bytes"))
    assert (holder("server_variable_bytes"), other("server_variable_bytes")) == (1 << 14, 0)
    assert holder("server_rounds_total", outcome="completed") == ROUNDS
    assert holder("server_round_phase_seconds_count", phase="applying") == ROUNDS
    assert _moved(holder, "server", "received") >= 2 * ROUNDS << 14
    assert _moved(other, "server", "received") == 0
    assert [page("server_sessions", state="open") for page in pages if page.has("server_sessions", state="open")] == [2]


def _moved(page: Page, side: str, direction: str) -> float:
    return sum(page(f"{side}_payload_bytes_total", lane=lane, direction=direction) for lane in ("shm", "tcp", "grpc"))


def _check_names(pages) -> None:
    """All metrics keep the conventions, and the document has exactly these."""
    families = {family.name: family for page in pages for family in page.ours}
    assert not mistakes(families.values())
    counters = {name + "_total" * (family.type == "counter") for name, family in families.items()}
    assert counters == documented().keys()


@pytest.mark.parametrize(
    ("body", "code"), [("1 / 0", 1), ("import psclient as ps; ps.ParameterServerStrategy(devices=['tpu:7'])", 2)]
)
def test_all_of_stderr_is_json(body, code, tmp_path):
    """What the launcher relays, tracebacks of scripts, and its own report: nothing else is there."""
    script = tmp_path / "script.py"
    script.write_text(f"print('begins')\n{body}\n", encoding="utf-8")
    done = shell(["psworker", "--standalone", "--log-format", "json", "script.py"], tmp_path)
    assert done.code == code, done.err
    assert "[worker 0] begins" in done.out
    lines = [logging_setup.read(line) for line in done.err.splitlines()]
    assert all(lines), done.err
    failed = next(line for line in lines if line["task"] == "/job:worker/task:0" and line["level"] == "error")
    assert ("exception" in failed) == ("1 / 0" in body)
    assert lines[-1]["task"] is None
    assert f"/job:worker/task:0 failed (exit code {code})" in lines[-1]["message"]
    assert ("ZeroDivisionError" if "1 / 0" in body else "tpu:7") in lines[-1]["message"]
