"""The README and the pages for a start, typed into shells from the top: each command does what the text around it says.

They run in namespaces of their own, where port 2222 is free.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
NAMESPACES = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
ELSEWHERE = {
    "make demo": "the same command as in the third step of the quickstart, after an installation",
    "make test": "what runs this",
}
"""Commands that are not run here, and why."""

OTHER_HOSTS = (
    "psctl certs ",
    "export PS_TLS_CERT=",
    "psworker --hosts ",
    "psworker --ray ",
    "ray job ",
    "psworker --join 10.",
)
"""What commands begin with that need hosts which are not here; `tools/check_docs.py` looks at their flags."""

SECONDS = 180
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str) -> list[list[str]]:
    """The commands of each console block, less their comments."""
    found = _BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    lines = [[re.sub(r"\s+#.*", "", line[2:]) for line in block.splitlines() if line[:2] == "$ "] for block in found]
    return [[line for line in block if line not in ELSEWHERE and not line.startswith(OTHER_HOSTS)] for block in lines]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A clone as `make demo` leaves it."""
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let a user have namespaces of its own")
    for name in ("examples", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    return tmp_path


def git(clone: Path, *words: str) -> str:
    """What git says of a clone."""
    return subprocess.run(["git", "-C", clone, *words], capture_output=True, text=True, check=True).stdout


def new_files(clone: Path) -> str:
    """Files of a clone that git neither knows nor ignores."""
    return git(clone, "ls-files", "--others", "--exclude-standard")


def typed(lines: list[str]) -> str:
    """A script that ends with the first command that fails."""
    return "\n".join(["set -e", "ip link set lo up", "source .venv/bin/activate", *lines])


def run(script: str, cwd: Path) -> str:
    """What a script prints in namespaces of its own."""
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        [*NAMESPACES, "bash", "-c", script], cwd=cwd, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def by_hand(shells: list[list[str]]) -> list[str]:
    """A script that types into several shells at once, and ends the server, the first, when the others are done."""
    others = [f"({'; '.join(lines)}) & clients+=($!)" for lines in shells[1:]]
    *before, server = shells[0]
    wait = 'for client in "${clients[@]}"; do wait $client; done'
    # A shell starts what it runs in the background with SIGINT ignored, so the other signal that the text names.
    return [*before, f"{server} & server=$!", *others, wait, "kill -TERM $(pgrep -f 'bin/psserver')", "wait $server"]


def shells_and_the_rest(document: str) -> Iterator[tuple[list[list[str]], list[list[str]]]]:
    found = blocks(document)
    starts = [index for index, block in enumerate(found) if block and block[-1].endswith("psserver")]
    assert len(starts) == 1, "the document has one cluster that is started by hand"
    (first,) = starts
    yield found[first : first + 3], found[:first] + found[first + 3 :]


def test_three_shells(home):
    """What is started by hand in three shells trains, and the server ends at SIGTERM."""
    ((shells, _),) = shells_and_the_rest("docs/quickstart.md")
    out = run(typed(by_hand(shells)), home)
    assert "test accuracy" in out
    assert new_files(home) == ""
    assert "ended; it held 20 variables" in out


def test_a_fourth_shell_drives(home):
    """With a chief in the cluster the fourth shell drives, and ends with the job."""
    ((shells, rest),) = shells_and_the_rest("docs/quickstart.md")
    (chief,) = [block for block in rest if block and block[-1].endswith("psworker")]
    with_chief = [[chief[0], *block[1:]] for block in shells]
    assert "test accuracy" in run(typed(by_hand([*with_chief, chief])), home)


def test_the_readme_from_the_top(home):
    """Each command of it and of the next page ends well, in order; resuming goes on, the clone stays clean."""
    found = [*blocks("README.md"), *blocks("docs/running.md")]
    said = [run(typed(block), home) for block in found if block]
    assert "epoch 25/25" in said[-1]
    assert new_files(home) == ""
    assert {path.name for path in (home / "runs").iterdir()} == {"digits", "digits-sgd", "digits.npz"}


def test_a_job_that_grows(home):
    """The drill for it: two workers join, and each leaves again with code 0."""
    (drill,) = [block for block in blocks("docs/operations.md") if any("psworker --join" in line for line in block)]
    out = run(typed(drill), home)
    shown = [line.split(", ")[2] for line in out.splitlines() if line.startswith("job is running")]
    assert shown == ["4 replicas", "3 replicas", "2 replicas"]


def test_the_quickstart_from_the_top(home):
    """Each command of the quickstart ends well; the last job ends although a worker is killed."""
    ((_, rest),) = shells_and_the_rest("docs/quickstart.md")
    commands = [block for block in rest if block and not block[-1].endswith("psworker")]
    assert "kill -9" in " ".join(commands[-1])
    for block in commands:
        run(typed(block), home)
    log = (home / "elastic.log").read_text()
    assert "epoch 40/40" in log
    assert "replaced" in log
