"""What images and releases are made of is pinned, and the pins are those of what pyproject.toml asks for."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MADE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "make_locks.py"))
WANTED: dict[str, list[str]] = MADE["requirements"]()
LOCKS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "locks").glob("*.lock"))}
PYTHONS = ("3.11", "3.12", "3.13")
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def pins(lock: str) -> list[Requirement]:
    """The lines of a lock; a line without a digest, or with anything but one version, is a failure."""
    found = []
    for line in LOCKS[lock].replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            continue
        text, *digests = line.split("--hash=")
        assert len(DIGEST.findall(line)) == len(digests) > 0, line
        requirement = Requirement(text.strip())
        (specifier,) = requirement.specifier
        assert (specifier.operator, specifier.version[-2:] != ".*") == ("==", True), line
        found.append(requirement)
    return found


def environment(python: str) -> Environment:
    """What markers see on Linux with a Python."""
    about = default_environment()
    about.update(python_version=python, python_full_version=f"{python}.0", implementation_version=f"{python}.0")
    return about


def versions(lock: str, python: str) -> dict[str, str]:
    """The version of each package that a Python gets; two of one package are a failure."""
    found: dict[str, str] = {}
    for pin in pins(lock):
        if pin.marker is None or pin.marker.evaluate(dict(environment(python))):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{lock} has two versions of {name} for Python {python}"
            (specifier,) = pin.specifier
            found[name] = specifier.version
    return found


def test_every_lock_has_its_requirements() -> None:
    """`make lock` makes these files, and no other."""
    assert set(LOCKS) == set(WANTED)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_a_lock_has_what_is_asked_for(lock: str, python: str) -> None:
    """Each requirement of pyproject.toml is pinned, to a version that it allows: else `make lock` has to be run."""
    pinned = versions(lock, python)
    for line in WANTED[lock]:
        asked = Requirement(line)
        version = pinned.get(canonicalize_name(asked.name))
        assert version is not None, f"locks/{lock}.lock lacks {asked}: run make lock"
        assert asked.specifier.contains(version, prereleases=True), f"{asked.name} {version} is not {asked}: make lock"


@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_a_lock_is_complete(lock: str) -> None:
    """What pinned packages require, as far as these releases are installed here, is pinned beside them, and fits."""
    python = "{}.{}".format(*sys.version_info)
    pinned, looked = versions(lock, python), 0
    for name, version in pinned.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version != version:
            continue
        looked += 1
        for requirement in map(Requirement, installed.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({**environment(python), "extra": ""}):
                found = pinned.get(canonicalize_name(requirement.name), "")
                assert found, f"{name} needs {requirement}, which is not pinned"
                assert requirement.specifier.contains(found, prereleases=True), f"{name}: {requirement}, not {found}"
    if not looked:
        pytest.skip(f"none of the releases of locks/{lock}.lock is installed here")


@pytest.mark.parametrize("python", PYTHONS)
def test_locks_agree(python: str) -> None:
    """A package has one version in all of them, so that extras can be installed together."""
    found: dict[str, tuple[str, str]] = {}
    for lock in LOCKS:
        for name, version in versions(lock, python).items():
            first = found.setdefault(name, (version, lock))
            assert first[0] == version, f"{name} is {first[0]} in {first[1]} and {version} in {lock}"


@pytest.mark.parametrize(
    ("extras", "expected"),
    [((), ["runtime"]), (("examples",), ["examples"]), (("gpu", "s3"), ["gpu", "s3"])],
)
def test_an_image_installs_locks(extras: tuple[str, ...], expected: list[str]) -> None:
    """The runtime's, or those of its extras, each of which has the runtime's packages."""
    script = [sys.executable, str(ROOT / "docker" / "requirements.py"), *extras]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"-r locks/{name}.lock" for name in expected]
    for name in expected:
        assert set(versions("runtime", "3.12").items()) <= set(versions(name, "3.12").items())


@pytest.mark.parametrize("extra", ["gpus", "torch", "dist"])
def test_an_image_is_refused_what_is_not_locked(extra: str) -> None:
    """It says which extras there are."""
    script = [sys.executable, str(ROOT / "docker" / "requirements.py"), extra]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no lock of an extra '{extra}'; there are examples, gpu, " in done.stderr


def test_the_site_needs_no_test_tools(tmp_path: Path) -> None:
    """`make docs`, where nothing is installed yet, installs the extra `docs` and no other."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(["make", "-n", "docs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"install -e '(.*)'", done.stdout) == [".[docs]"]
