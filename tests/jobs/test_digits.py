"""The main job, as its first user runs it: real scans, a whole cluster, a checkpoint, and on from there."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest

from pstesting import forks
from tests.kit.internals import start_server
from tests.kit.shell import PROGRAMS, SECONDS, Done, shell

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
STEPS = 23
"""Steps of one epoch: 1437 scans in batches of 64."""


def standalone(cwd: Path, *args: str, ps: int = 2, workers: int = 2) -> Done:
    done = shell(["psworker", "--standalone", "--ps", str(ps), "--workers", str(workers), *args], cwd)
    assert done.code == 0, done.err
    assert not done.left
    return done


def epochs(done: Done) -> dict[int, float]:
    """The loss that was shown for each epoch, by its number."""
    return {int(number): float(loss) for number, loss in re.findall(r"epoch +(\d+)/\d+ +loss (\S+)", done.out)}


def result(done: Done) -> tuple[float, int]:
    """Test accuracy, and after how many steps; it is said by exactly one process."""
    (found,) = re.findall(r"test accuracy (\S+) after (\d+) steps", done.out)
    return float(found[0]), int(found[1])


def test_a_cluster_learns_digits_and_resumes(examples, tmp_path):
    """Two servers, two workers and a chief reach 0.93, and one process goes on from their checkpoint."""
    digits = str(examples / "digits.py")
    done = standalone(tmp_path, digits, "--epochs", "4", "--save-every", "3")
    assert list(epochs(done)) == [1, 2, 3, 4]
    assert re.search(r"loss \S+ +\d+ steps/s +\S+ [kM]?B/s", done.out)
    assert re.findall(r"saved checkpoint (\S+)", done.out) == ["digits/ckpt-1", "digits/ckpt-2"]
    accuracy, steps = result(done)
    assert (accuracy >= 0.93, steps) == (True, 4 * STEPS)

    on = shell(["python", digits, "--epochs", "5", "--resume", "--devices", "cpu:0,cpu:1"], tmp_path)
    assert (on.code, list(epochs(on)), result(on)[1]) == (0, [5], 5 * STEPS)
    assert "saved checkpoint digits/ckpt-3" in on.out
    assert result(on)[0] >= 0.93
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "a clone ignores nothing else"


@pytest.mark.soak  # that others go on, the test above says; that nothing is left to do takes two more processes
def test_a_smaller_fleet_finds_all_steps_done(tmp_path):
    """It restores what a larger one has saved in the end, trains nothing, and tests the same weights."""
    done = standalone(tmp_path, DIGITS, "--epochs", "2")
    again = standalone(tmp_path, "--no-chief", DIGITS, "--epochs", "2", "--resume", ps=1, workers=1)
    assert (epochs(again), result(again)) == ({}, result(done))


@pytest.mark.ci  # to import grain takes longer than to train
def test_a_grain_pipeline_gives_what_one_process_sees(examples, tmp_path):
    """The other example: a fleet's losses are those of one process, random shifts included."""
    pytest.importorskip("grain", reason="grain is not installed; it comes with paramserver[examples]")
    script = str(examples / "grain_pipeline.py")
    fleet = standalone(tmp_path, "--no-chief", script, "--epochs", "2", ps=1)
    alone = shell(["python", script, "--epochs", "2"], tmp_path)
    losses = [[float(x) for x in re.findall(r"epoch \d  loss (\S+)", done.out)] for done in (fleet, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # four digits are shown
    assert len(losses[0]) == 2
    assert losses[0][1] < 0.8 * losses[0][0]


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_fleet_does_what_one_process_does(tmp_path, optimizer):
    """The losses of a chief that runs the script and two workers are those of one process."""
    args = [DIGITS, "--epochs", "2", "--batch", "128", "--optimizer", optimizer]
    alone = shell(["python", *args], tmp_path)
    assert len(epochs(alone)) == 2
    fleet = standalone(tmp_path, "--chief-runs-script", *args)
    assert epochs(fleet) == pytest.approx(epochs(alone), abs=2e-4)  # four digits are shown


@pytest.mark.soak
def test_servers_that_stay_serve_one_job_after_another(tmp_path):
    """A second job on the same servers is not taken for one that comes late to the first: it resumes."""
    process, address = start_server(flags=("--checkpoint-root", str(tmp_path / "there")), until_done=False)
    with process:
        cluster = {"ps": [address], "worker": ["127.0.0.1:1"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        words = ["psworker", DIGITS, "--resume", "--epochs"]
        jobs = [shell([*words, count], tmp_path, TF_CONFIG=config) for count in ("1", "2")]
        assert process.poll() is None
        assert process.stdin
        process.stdin.close()
    assert [(done.code, list(epochs(done)), result(done)[1]) for done in jobs] == [(0, [1], STEPS), (0, [2], 2 * STEPS)]
    assert "no checkpoint in 'digits' yet: starts anew" in jobs[0].out
    assert "starts anew" not in jobs[1].out


def on_terminal(words: list[str], cwd: Path, columns: int) -> str:
    """What a command shows on a terminal of that width, up to its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "TF_CONFIG": ""}
    command = [*PROGRAMS[words[0]], *words[1:]]
    with forks.Forked[bytes](command, cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # EIO: nobody has the terminal open any more
                break
            if not data:
                break
            shown += data
        assert process.wait(SECONDS) == 0, shown.decode()
    os.close(ours)
    return shown.decode()


@pytest.mark.soak
@pytest.mark.parametrize(
    "words", [["python"], ["psworker", "--standalone", "--workers", "2"]], ids=["alone", "cluster"]
)
def test_a_terminal_is_shown_one_bar(tmp_path, words):
    """On a terminal there is one progress bar, of the leading process, that fits; under a launcher, too."""
    shown = on_terminal([*words, DIGITS, "--epochs", "3"], tmp_path, 90)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    frames = [part for part in re.split(r"[\r\n]+", plain) if "━" in part]
    states = {
        int(n) for frame in frames for n in re.findall(r"epoch +(\d)/3 +loss \S+ +\d+ steps/s +\S+ [kM]?B/s ", frame)
    }
    assert states == {1, 2, 3}
    assert max(map(len, frames)) < 90
    assert {frame.startswith("[worker 0] ") for frame in frames} == {"--standalone" in words}
    assert "[worker 1]" not in plain
    assert not re.search(r"\[worker 0\] *[\r\n]", plain)
    assert plain.count("test accuracy") == 1
