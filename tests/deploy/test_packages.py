"""What `make dist` has made, as it is installed: `make dist-check` runs it, for it takes a minute and a registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv" / "tools" / "bin" / "python"
DIST = ROOT / "dist"
PACKAGES = ("psclient", "psserver", "pstesting", "pswire")

SCRIPT = """
import numpy as np
import psclient as ps

x = np.random.default_rng(0).normal(size=(1000, 4)).astype("float32")
y = x @ np.float32([1, -2, 3, 4])
strategy = ps.ParameterServerStrategy()
batches = strategy.experimental_distribute_dataset(ps.ArrayDataset((x, y)).batch(50))
with strategy.scope():
    w = ps.Variable(np.zeros(4, "float32"))
    optimizer = ps.optimizers.SGD(0.1)


def step(x, y):
    optimizer.apply_gradients([(x.T @ (x @ w - y) / 50, w)])


for _ in batches.epochs(5):
    for batch in batches:
        strategy.run(step, args=batch)
print("learned", np.round(w.numpy(), 1).tolist())
"""

VALIDATION = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

validator = JsonStrictValidator(SchemaVersion.V1_6)
wrong = [name for name in sys.argv[1:] if validator.validate_str(open(name).read())]
print("\\n".join(wrong))
"""


def run(*words: str | Path, cwd: Path, seconds: float = 300, **environ: str) -> str:
    """Runs a command that has to succeed; returns what it printed."""
    told = {name: value for name, value in os.environ.items() if not name.startswith(("PS_", "PYTHON", "TF_CONFIG"))}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=told | environ, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> set[str]:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    return {name for name in listed if (ROOT / name).exists()}


def wheel() -> Path:
    (path,) = DIST.glob("*.whl")
    return path


def interpreter(version: str) -> str:
    """A Python of this version, on the path or of pyenv, or a test that is skipped for want of it."""
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [shutil.which(f"python{version}"), *sorted(map(str, kept.glob(f"{version}.*/bin/python")))]
    for candidate in filter(None, found):
        try:
            run(candidate, "-c", f"import sys, venv; assert '{version}' == '%d.%d' % sys.version_info[:2]", cwd=ROOT)
        except AssertionError:
            continue
        return candidate
    pytest.skip(f"there is no Python {version} here")


def test_a_wheel_has_the_packages_and_nothing_else() -> None:
    """Each file of the four packages that git knows, their generated code among it, and what describes the wheel.

    An sdist has all that git knows but how CI starts. The tools are in an environment of their own, with none of ours.
    """
    with zipfile.ZipFile(wheel()) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in tracked() if name.split("/")[0] in PACKAGES}
    assert {f"{name}/py.typed" for name in PACKAGES} | {"pswire/pb/parameter_server_pb2.py"} <= names
    assert wheel().name.endswith("-py3-none-any.whl")  # no native code: kernels are compiled where they run
    (path,) = DIST.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        assert {each.mtime for each in sdist} == {int(os.environ["SOURCE_DATE_EPOCH"])}  # the commit's, and not of now
    assert names == {name for name in tracked() if not name.startswith(".ci/")} | {"PKG-INFO"}
    assert TOOLS.is_file(), "run it by make dist-check"
    found = run(TOOLS, "-c", "import importlib.util as u; print(u.find_spec('psclient'))", cwd=Path(sys.prefix))
    assert found == "None\n"


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    """Built again from files of another place, another time and other modes, sdist and wheel are what they were."""
    copy = tmp_path / "elsewhere"
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)  # with the time of now
        target.chmod(target.stat().st_mode & 0o700)
    moment = os.environ.get("SOURCE_DATE_EPOCH") or pytest.fail("run it by make dist-check")
    run(TOOLS, "-m", "build", "--no-isolation", "--outdir", tmp_path, copy, cwd=copy, SOURCE_DATE_EPOCH=moment)
    for first in (wheel(), *DIST.glob("*.tar.gz")):
        assert (tmp_path / first.name).read_bytes() == first.read_bytes(), first.name


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_wheel_installs_in_an_empty_environment(version: str, tmp_path: Path) -> None:
    """What is installed fits together, commands answer, and a local cluster trains, far from the repository."""
    work = tmp_path / "work"
    work.mkdir()
    python, bin = interpreter(version), tmp_path / "env" / "bin"
    run(TOOLS, "-m", "uv", "--quiet", "venv", "--python", python, tmp_path / "env", cwd=work)
    run(TOOLS, "-m", "uv", "--quiet", "pip", "install", "--python", bin / "python", wheel(), cwd=work)
    run(TOOLS, "-m", "uv", "--quiet", "pip", "check", "--python", bin / "python", cwd=work)
    assert "Inspect running jobs" in run(bin / "psctl", "--help", cwd=work)
    assert run(bin / "psserver", "--version", cwd=work) == f"psserver {wheel().name.split('-')[1]}\n"
    (work / "script.py").write_text(SCRIPT, encoding="utf-8")
    said = run(bin / "psworker", "--standalone", "--ps", "2", "--workers", "2", "script.py", cwd=work)
    assert said.count("learned [1.0, -2.0, 3.0, 4.0]") == 2, said
    alone = run(bin / "python", "script.py", cwd=work)
    assert "learned [1.0, -2.0, 3.0, 4.0]" in alone


def test_bills_of_materials_are_valid(tmp_path: Path) -> None:
    """By CycloneDX's schema, which refuses others; with versions and digests, and the same bytes again."""
    run(TOOLS, ROOT / "tools" / "make_sbom.py", tmp_path, cwd=ROOT, SOURCE_DATE_EPOCH=os.environ["SOURCE_DATE_EPOCH"])
    bills = sorted(DIST.glob("*.cdx.json"))
    assert {path.name for path in bills} >= {"paramserver-runtime.cdx.json", "paramserver-gpu.cdx.json"}
    broken = tmp_path / "broken.cdx.json"
    broken.write_text(bills[0].read_text(encoding="utf-8").replace('"version"', '"versions"'), encoding="utf-8")
    assert run(TOOLS, "-c", VALIDATION, *bills, broken, cwd=ROOT).split() == [str(broken)]
    for path in bills:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        bill = json.loads(path.read_text(encoding="utf-8"))
        lock = (ROOT / "locks" / path.name.replace("paramserver-", "").replace(".cdx.json", ".lock")).read_text("utf-8")
        pinned = {line.split()[0] for line in lock.splitlines() if "==" in line}
        assert {f"{one['name']}=={one['version']}" for one in bill["components"]} == pinned
        assert bill["metadata"]["component"]["name"] == "paramserver"
        for one in bill["components"]:
            assert all(place["hashes"] for place in one["externalReferences"]), one["name"]
