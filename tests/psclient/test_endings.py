"""What is done before a process ends, while threads can still be started."""

from __future__ import annotations

from pathlib import Path

import pytest
from shell import shell

from psclient import endings

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from psclient import endings

pool = ThreadPoolExecutor()
for name in ("first", "second"):
    endings.register(lambda name=name: print(name, pool.submit(int, "7").result(), flush=True))
print("the script ends", flush=True)
"""


@pytest.mark.parametrize("program", ["python", "psworker"])
def test_what_ends_with_the_process_may_use_threads(tmp_path: Path, program: str) -> None:
    """The last registered comes first, after the script, and an executor still takes work: under `atexit` none does."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = shell([program, "script.py"], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == ["the script ends", "second 7", "first 7"]


def test_an_error_keeps_nothing_else_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Each is called once; what one raises is logged, and what was unregistered is not called."""
    called: list[str] = []

    def left_out() -> None:
        called.append("left out")

    endings.register(lambda: called.append("first"))
    endings.register(lambda: [][1])
    endings.register(left_out)
    endings.unregister(left_out)
    endings.unregister(left_out)
    endings.run()
    endings.run()
    assert called == ["first"]
    assert "IndexError" in caplog.text
