"""How a process ends that runs a command of ours."""

import os
import subprocess
import sys

import pytest

TEXT = """
import atexit, gc, sys, threading, time, types
from pswire import process
process.begin_command()
resting = not gc.isenabled()
process.take_interrupts()
print(resting, gc.isenabled(), gc.get_freeze_count() > 0)

class Torn:
    def __del__(self): print("taken apart")

sys.modules["theirs"] = types.ModuleType("theirs")
sys.modules["theirs"].torn = Torn()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.01), print("thread"))).start()
print("unfinished", end="")
sys.exit(process.ends_with(7))
"""


@pytest.mark.parametrize("name", ["psctl", "own.py"])
def test_a_command_ends_without_taking_its_modules_apart(tmp_path, name):
    """After its threads and what runs at exit, with all that was printed; anybody's own script ends as ever."""
    path = tmp_path / name
    path.write_text(TEXT)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    ours = name == "psctl"
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"{ours} True {ours}\nunfinishedthread\nat exit\n" + "taken apart\n" * (not ours)


def test_a_command_whose_reader_is_gone_says_what_python_says(tmp_path):
    """Nothing is lost without a word: where it cannot print, it ends with Python's own exit code for that."""
    path = tmp_path / "psctl"
    path.write_text(TEXT)
    with open("/dev/full", "w") as full:
        environ = os.environ | {"PYTHONUNBUFFERED": ""}
        done = subprocess.run([sys.executable, path], env=environ, stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 120
    assert "No space left on device" in done.stderr
