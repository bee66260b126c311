"""Compiled kernels are kept for the next process: by all that they depend on, and for this user alone."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from psserver.config import server_config
from psserver.devices import ServerDevice
from psserver.programs.kernels import compiler as compiled
from psserver.programs.kernels import kept, machine_code, row_groups
from psserver.programs.kernels.codegen import Form, parameters
from psserver.programs.kernels.compiler import Compiler, compile_numba
from psserver.programs.kernels.fusion import split
from psserver.programs.kernels.kept import KeptCode
from psserver.programs.kernels.kernels import row_form
from psserver.programs.kernels.row_steps import split_rows
from pstesting import forks
from pswire.model.tensor import TensorSpec
from tests.kit.programs import traced
from tests.psserver.programs.test_kernels import VECTOR

ROOT = Path(__file__).resolve().parents[3]
FORM = Form(split(traced(lambda w, g: w.assign_sub(g), [VECTOR], [VECTOR])[0])[-1].program)
NAME = "5e" * 32


def compiler(folder: Path | str, **more: object) -> Compiler:
    """A compiler that has made one kernel, or has loaded it."""
    made = Compiler(ServerDevice(), patience=1, folder=str(folder), **more)
    made.elementwise(FORM)
    made.wait()
    made.close()
    return made


def counts(made: Compiler) -> tuple[int, int, int]:
    return made.compiled, made.loaded, made.failed


def names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with the kernel of `FORM`. No test changes it."""
    folder = tmp_path_factory.mktemp("kernels") / "new" / "below"
    assert counts(compiler(folder)) == (1, 0, 0)
    return folder


@pytest.fixture
def folder(filled, tmp_path):
    copy = tmp_path / "kernels"
    copy.mkdir(mode=0o700)
    for path in filled.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_a_kernel_is_compiled_once(filled):
    """Whoever comes next loads it. The folder is made for this user alone, and holds that file, no lock and no rest."""
    assert counts(compiler(filled)) == (0, 1, 0)
    assert names(filled) == [".kernel"]
    assert [path.stat().st_mode & 0o777 for path in (filled, *filled.iterdir())] == [0o700, 0o600]


def in_a_ball(w, g):
    w.assign_sub(0.1 * g)
    w.assign(w / np.maximum(np.sqrt(np.sum(w * w, axis=1, keepdims=True)), 1.0))


def test_kernels_of_rows_are_kept_too():
    """What sorts received rows, and what computes on rows of tables: all that servers compile for the CPU."""
    half = TensorSpec("float16", (5, 300))
    form = row_form(split_rows(traced(in_a_ball, [half], [half])[0])[-1])
    taken = ["int64"] * 3 + [p.dtype for p in (*parameters(form), *form.rooms)]
    of_rows, code = (
        machine_code.object_code(compile_numba(kernel, sizes, dtypes).compiled.inspect_llvm(), sizes, len(dtypes))
        for kernel, sizes, dtypes in (
            (form.rows, 4, taken),
            (row_groups.grouping, row_groups.NUMBERS, ["int64"] * row_groups.ARRAYS),
        )
    )
    assert of_rows is not None
    ids = np.random.default_rng(0).integers(0, 50, 200)
    loaded = row_groups.RowGroups.of(ids, 50, machine_code.loaded(code, row_groups.NUMBERS, row_groups.ARRAYS))
    plain = row_groups.RowGroups.of(ids, 50)
    assert all(np.array_equal(getattr(loaded, n), getattr(plain, n)) for n in ("ids", "order", "starts"))


def raising(carray):
    def kernel(n, p):
        if n < 0:
            raise ValueError("negative")

    return kernel


def error_function(carray):
    def kernel(n, p):
        carray(p, 1)[0] = math.erf(n)

    return kernel


@pytest.mark.parametrize("definition", [raising, error_function])
def test_what_needs_numba_or_other_functions_is_not_kept(definition):
    """What can raise: its error is Python's. And what calls more than a few functions of C: a process that has not
    imported Numba may have no such function, and LLVM would end it. Each process compiles it."""
    made = compile_numba(definition, 1, ["int64"])
    assert machine_code.object_code(made.compiled.inspect_llvm(), 1, 1) is None


def test_a_warm_process_imports_no_numba(filled):
    """It loads machine code by llvmlite alone: half a second and 90 MB less in each server."""
    script = (
        "import sys; from tests.psserver.programs.test_kept_kernels import *; "
        "assert 'numba' not in sys.modules; found = compiler(sys.argv[1]); "
        "print(counts(found), 'numba' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script, str(filled)], capture_output=True, text=True, check=True)
    assert run.stdout == "(0, 1, 0) False\n"


FILES = ["empty", "short", "half", "flipped", "writable", "a link", "another user's"]


@pytest.mark.parametrize("wrong", FILES if os.geteuid() == 0 else FILES[:-1])  # only root can give a file away
def test_a_damaged_file_is_made_anew(folder, tmp_path, wrong):
    """Its hash tells; and one that others could write is not run, nor one that is a link: each is checked like the
    folder. The new one is used from then on."""
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    match wrong:
        case "writable":
            path.chmod(0o622)
        case "another user's":
            os.chown(path, 12345, -1)
        case "a link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case _:
            flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
            damaged = {"empty": b"", "short": b"x" * 10, "half": whole[: len(whole) // 2], "flipped": flipped}
            path.write_bytes(damaged[wrong])
    assert counts(compiler(folder)) == (1, 0, 0)
    assert counts(compiler(folder)) == (0, 1, 0)  # a sound file stands in its place
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("what", ["numba", "llvmlite", "python", "processor", "source"])
def test_other_versions_miss_it(folder, monkeypatch, what):
    """Of Numba, LLVM or Python; another processor; another text of our generator."""
    version, host, source = machine_code.version, machine_code._host(), machine_code.inspect.getsource
    match what:
        case "python":
            monkeypatch.setattr(machine_code.platform, "python_version", lambda: "3.99.0")
        case "processor":  # with a feature less: the code for it would run here as well
            fewer = host[2].replace("+popcnt", "-popcnt") if "+popcnt" in host[2] else host[2] + ","
            monkeypatch.setattr(machine_code, "_host", lambda: (*host[:2], fewer))
        case "source":
            monkeypatch.setattr(machine_code.inspect, "getsource", lambda m: source(m) + "#" * (m is compiled))
        case name:
            monkeypatch.setattr(machine_code, "version", lambda n: "0.0" if n == name else version(n))
    assert counts(compiler(folder)) == (1, 0, 0)
    assert len(list(folder.iterdir())) == 2
    monkeypatch.undo()
    assert counts(compiler(folder)) == (0, 1, 0)


def test_the_folder_stays_small(tmp_path, monkeypatch):
    """Beyond its size those go that nobody has used for longest; files of others stay, and are not counted."""
    monkeypatch.setattr(kept, "MAX_BYTES", 3 * 1032)
    store = KeptCode(str(tmp_path / "k"))
    stranger = tmp_path / "k" / "mine.kernel"
    stranger.write_bytes(b"x" * 100_000)
    for number in range(3):
        store.write(str(number) * 64, b"c" * 1000)
        os.utime(tmp_path / "k" / f"{str(number) * 64}.kernel", (number, number))
    assert store.read("0" * 64)  # used: now 1 is the oldest
    store.write("3" * 64, b"c" * 1000)
    assert [n for n in range(4) if store.read(str(n) * 64)] == [0, 2, 3]
    assert stranger.exists()


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    """Unfinished files and locks, once they are old; those of a process at work stay. A full disk keeps nothing, and no
    unfinished file stays; the kernel works all the same."""
    store = KeptCode(str(tmp_path))
    old, fresh = [tmp_path / f"{NAME}.{end}" for end in ("123", "lock")], tmp_path / f"{'ab' * 32}.lock"
    for path in (*old, fresh):
        path.write_bytes(b"")
    for path in old:
        os.utime(path, (1, 1))
    store.write("77" * 32, b"code")
    assert [path.exists() for path in (*old, fresh)] == [False, False, True]

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = {*tmp_path.iterdir()}
    monkeypatch.setattr(kept.os, "rename", full)
    store.write(NAME, b"code")
    assert {*tmp_path.iterdir()} == before


TOGETHER = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.psserver.programs.test_kept_kernels import compiler, counts
here = Path(sys.argv[1])
(here / sys.argv[2]).touch()
while len(list(here.iterdir())) < 2:
    time.sleep(0.001)
print(*counts(compiler(here.parent / "k")))
"""


def test_two_processes_share_the_work(tmp_path):
    """Two that want the same kernel at the same moment: one compiles, the other waits for it and loads."""
    here = tmp_path / "begun"
    here.mkdir()
    command = [sys.executable, "-c", TOGETHER, str(here)]  # no forks of this process, whose threads they would lack
    both = [forks.Forked([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in both)
    assert said == ["0 1 0", "1 0 0"]
    assert names(tmp_path / "k") == [".kernel"]


def test_nobody_waits_long_for_another_process(tmp_path, monkeypatch):
    """One that stands still with the lock holds nobody up; nor does one that ends wait for it."""
    one, other = KeptCode(str(tmp_path)), KeptCode(str(tmp_path))
    monkeypatch.setattr(kept, "LOCK_SECONDS", 0.1)
    with one.locked(NAME, lambda: False), other.locked(NAME, lambda: False):
        pass
    monkeypatch.setattr(kept, "LOCK_SECONDS", 1000)
    began = time.monotonic()
    with one.locked(NAME, lambda: False), other.locked(NAME, lambda: True):
        assert time.monotonic() - began < 100


def unusable(caplog, folder, level=logging.INFO):
    """The line that a compiler logs, once, on a folder that it does not use."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "psserver"):
        made = compiler(folder)
    assert counts(made) == (1, 0, 0)
    (record,) = [each for each in caplog.records if str(folder) in each.getMessage()]  # others may log meanwhile
    assert record.levelno == level
    return record.getMessage()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_where_others_may_write_is_not_used(folder, caplog, mode):
    """What is in it would be run by this server; the log says so, and what to do."""
    folder.chmod(mode)
    said = unusable(caplog, folder, logging.WARNING)
    assert f"other users can write to {folder}" in said
    assert f"chmod go-w {folder}" in said
    assert "PS_KERNEL_CACHE=0" in said


def test_a_folder_that_is_none_is_not_used(folder, caplog, tmp_path):
    """A link may lead elsewhere the next moment; a container's home may be read-only, and that is nothing to worry
    about; and whatever its mode, a folder of another user is not used."""
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(folder)
    file.write_text("")
    for each in (link, file):
        assert "is not a directory; name a directory" in unusable(caplog, each, logging.WARNING)
    assert "/proc/nobody/kernels cannot be used" in unusable(caplog, "/proc/nobody/kernels")
    if os.geteuid() == 0:  # only root can give a folder away
        os.chown(folder, 12345, -1)
        assert "belongs to user 12345" in unusable(caplog, folder, logging.WARNING)


def test_the_folder_is_below_the_users_caches(tmp_path, monkeypatch):
    """`PS_KERNEL_CACHE` names another, or none; settings that change Numba's code switch it off."""
    monkeypatch.chdir(tmp_path)

    def folder(**environ: str) -> str:
        return server_config({"HOME": "/tmp/me", **environ}).kernel_cache

    assert folder() == "/tmp/me/.cache/paramserver/kernels"
    assert folder(XDG_CACHE_HOME="/fast") == "/fast/paramserver/kernels"
    assert folder(XDG_CACHE_HOME="relative") == "/tmp/me/.cache/paramserver/kernels"
    assert folder(PS_KERNEL_CACHE="here") == str(tmp_path / "here")
    assert folder(PS_KERNEL_CACHE="0", XDG_CACHE_HOME="/fast") == ""
    assert folder(NUMBA_CPU_NAME="generic") == ""
    assert folder(NUMBA_NUM_THREADS="2") != ""
    assert folder(HOME="nowhere") == ""
    Path(".numba_config.yaml").write_text("opt: 0")
    assert folder() == ""
