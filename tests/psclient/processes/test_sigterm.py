"""What SIGTERM tells a process, in processes of their own: they say what they come to, and end with a code."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pstesting import forks
from pstesting.processes import SECONDS

HEAD = """
import os, signal, sys, threading, time
from psclient._src.processes.sigterm import NOTICE
def say(text): print(text, flush=True)
def sleep():
    while True: time.sleep(0.01)
"""
# Python runs no handler of a signal that comes just before the thread falls asleep: so it sleeps again and again.


def ends(tmp_path, text, *numbers):
    """Runs a program, sends it a signal whenever it says `ready`; returns its code, and what else it said."""
    command = [sys.executable, "-c", HEAD + text]
    with forks.Forked[str](command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number in numbers:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
        said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said.split()


STEPS = "say('ready')\nwhile not NOTICE.leaving: time.sleep(0.01)\nwhile not {until}: time.sleep(0.01)\n"
LEAVE = "try:\n    NOTICE.leave()\nfinally:\n    say('finally')\n"


@pytest.mark.parametrize("installed", ["", "NOTICE.install()\n"])
def test_who_has_a_part_goes_on_and_leaves_where_it_may(tmp_path, installed):
    """With code 0, after `finally`; the job's servers are told meanwhile."""
    told = "told = []\nNOTICE.take_part(lambda: told.append(1), 600.0, False)\n"
    code, said = ends(tmp_path, installed + told + STEPS.format(until="told") + LEAVE, signal.SIGTERM)
    assert (code, said) == (0, ["finally"])


def test_who_has_no_part_ends_at_once(tmp_path):
    """Under psworker by an ordinary exit, else as Python does; so does one that has left its job."""
    text = "try:\n    say('ready')\n    sleep()\nfinally:\n    say('finally')"
    assert ends(tmp_path, "NOTICE.install()\n" + text, signal.SIGTERM) == (143, ["finally"])
    assert ends(tmp_path, text, signal.SIGTERM) == (-signal.SIGTERM, [])
    left = "told = lambda: None\nNOTICE.take_part(told, 600.0, False)\nNOTICE.has_left(told)\n"
    assert ends(tmp_path, left + text, signal.SIGTERM) == (-signal.SIGTERM, [])


def test_a_second_signal_and_the_end_of_the_grace_period_end_at_once(tmp_path):
    """By an ordinary exit with code 143."""
    text = "try:\n    say('ready')\n    while not NOTICE.leaving: time.sleep(0.01)\n    {}sleep()\n"
    text += "finally:\n    say('finally')"
    part = "NOTICE.take_part(lambda: None, {}, False)\n"
    twice = part.format(600.0) + text.format("say('ready'); ")
    assert ends(tmp_path, twice, signal.SIGTERM, signal.SIGTERM) == (143, ["finally"])
    assert ends(tmp_path, part.format(0.2) + text.format(""), signal.SIGTERM) == (143, ["finally"])


@pytest.mark.parametrize("installed", ["", "NOTICE.install()\n"])
def test_who_closes_for_long_after_the_grace_period_is_ended(tmp_path, installed):
    """As one that waits for servers that are gone as well: with the same code, before a scheduler kills it."""
    part = "NOTICE.take_part(lambda: None, 0.2, False)\n"
    text = "try:\n    say('ready')\n    sleep()\nfinally:\n    say('finally')\n    time.sleep(20)\n    say('late')\n"
    assert ends(tmp_path, installed + part + text, signal.SIGTERM) == (143, ["finally"])


def test_the_launcher_ends_a_process_at_once(tmp_path):
    """Its SIGHUP is a SIGTERM before which nothing is finished; a handler of the script's own is called."""
    text = "NOTICE.install(True)\nNOTICE.take_part(lambda: None, 600.0, False)\n{}say('ready')\nsleep()"
    assert ends(tmp_path, text.format(""), signal.SIGHUP) == (143, [])
    own = "signal.signal(signal.SIGTERM, lambda *_: (say('mine'), sys.exit(3)))\n"
    assert ends(tmp_path, text.format(own), signal.SIGHUP) == (3, ["mine"])


def test_another_thread_ends_the_process(tmp_path):
    """Where that comes to a step; and a fork of the process has no part in the job."""
    text = "NOTICE.take_part(lambda: None, 600.0, False)\n"
    steps = "def train():\n    while not NOTICE.leaving: time.sleep(0.01)\n    NOTICE.leave()\n"
    begin = "threading.Thread(target=train).start()\nsay('ready')\nsleep()"
    assert ends(tmp_path, text + steps + begin, signal.SIGTERM) == (0, [])
    fork = "child = os.fork()\nif not child: sleep()\ntime.sleep(0.2)\nos.kill(child, signal.SIGTERM)\n"
    assert ends(tmp_path, text + fork + "say(os.waitpid(child, 0)[1])") == (0, [str(int(signal.SIGTERM))])


def test_who_only_waits_leaves_at_once(tmp_path):
    """Nothing is to be finished there: as soon as it is told, or if it was told before."""
    text = "NOTICE.take_part(lambda: None, 600.0, False)\n"
    waits = "with NOTICE.anywhere():\n    say('ready')\n    sleep()"
    assert ends(tmp_path, text + waits, signal.SIGTERM) == (0, [])
    late = "say('ready')\nwhile not NOTICE.leaving: time.sleep(0.01)\nwith NOTICE.anywhere():\n    say('in')"
    assert ends(tmp_path, text + late, signal.SIGTERM) == (0, [])
