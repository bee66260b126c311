"""What a process shows comes from flags, a file or the environment; each fault names its file, and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage

from psclient.psctl.cli import command
from pswire.security.given import printable, read_small
from tests.kit import internals as inside
from tests.kit.certificates import NAMES, Certificates, options
from tests.kit.storage import write_checkpoint

Break = Callable[[Certificates, Path], object]
MINE = ["worker-0.paramserver"]


def put(name: str, data: bytes | Callable[[Certificates], bytes]) -> Break:
    return lambda certificates, folder: (folder / name).write_bytes(data(certificates) if callable(data) else data)


def gone(name: str) -> Break:
    return lambda certificates, folder: (folder / name).unlink()


def write(made: inside.Security, folder: Path) -> inside.SecurityOptions:
    for name, data in (("tls.crt", made.certificate), ("tls.key", made.key)):
        (folder / name).write_bytes(data)
    return inside.SecurityOptions(tls_cert=str(folder / "tls.crt"), tls_key=str(folder / "tls.key"))


def signed(names: list[str], first_day: int, last_day: int) -> Break:
    return lambda certificates, folder: write(certificates.signed(names, first_day, last_day), folder)


def a_directory(certificates: Certificates, folder: Path) -> None:
    (folder / "ca.crt").unlink()
    (folder / "ca.crt").mkdir()


NO_CERTIFICATE = r"tls.crt does not contain a PEM certificate"
NO_KEY = r"tls.key does not contain a PEM private key"
WRONG: dict[str, tuple[Break, str]] = {
    "no certificate": (gone("tls.crt"), r"--tls-cert .*tls.crt cannot be read: No such"),
    "no key": (gone("tls.key"), r"--tls-key .*tls.key cannot be read.*psctl certs"),
    "a directory": (a_directory, r"--tls-ca .*ca.crt cannot be read: Is a directory"),
    "no PEM": (put("tls.crt", b"\x30\x82\x01"), NO_CERTIFICATE),
    "half of it": (put("tls.crt", b"-----BEGIN CERTIFICATE-----\nMIIB\n"), NO_CERTIFICATE),
    "the key as certificate": (put("tls.crt", lambda c: c.of("worker-0").key), NO_CERTIFICATE),
    "the certificate as key": (put("tls.key", lambda c: c.of("worker-0").certificate), NO_KEY),
    "no key in PEM": (put("tls.key", b"secret"), r"tls.key does not contain a PEM private key without a password"),
    "an empty CA": (put("ca.crt", b""), r"ca.crt does not contain a PEM certificate"),
    "another's key": (put("tls.key", lambda c: c.of("worker-1").key), r"tls.key is not the key of .*tls.crt"),
    "another CA": (put("ca.crt", lambda c: c.of_other("worker-0").ca), r"tls.crt is not signed by .*ca.crt.*one CA"),
    "expired": (signed(MINE, -2, -1), r"tls.crt expired at 20\d\d-.*--renew"),
    "not yet valid": (signed(MINE, 1, 2), r"tls.crt is valid only from 20.*clock"),
    "no name": (signed([], -1, 2), r"tls.crt names no task.*certificate with the name worker-0.paramserver"),
    "an empty token": (put("token", b"\n"), r"token is not a token; it needs at least 16.*openssl rand -hex 32"),
    "a short token": (put("token", b"secret"), r"token is not a token"),
    "two lines": (put("token", b"0123456789abcdef\n0123456789abcdef\n"), r"token is not a token"),
    "no ASCII": (put("token", "héllohéllohéllohéllo".encode()), r"token is not a token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file(certificates: Certificates, tmp_path: Path, case: str) -> None:
    broken, text = WRONG[case]
    shutil.copytree(certificates.out / "worker-0", tmp_path / "worker-0")
    broken(certificates, tmp_path / "worker-0")
    with pytest.raises(inside.ConfigError, match=text):
        options(tmp_path).read("worker-0")


NEAR = r"tls.crt expires at 20\d\d-.*; .*--renew"
ALONE = r"tls.crt has no extended key usage clientAuth, .*other servers reject .*serverAuth and clientAuth.*psctl certs"

WARNED: dict[str, tuple[str, int, list[Any], str]] = {
    "days": ("worker-0", 15, [], ""),
    "an end that is near": ("worker-0", 13, [], NEAR),
    "a server for servers alone": ("ps-0", 100, [Usage.SERVER_AUTH], ALONE),
    "both": ("ps-0", 100, [Usage.SERVER_AUTH, Usage.CLIENT_AUTH], ""),
    "any": ("ps-0", 100, [Usage.SERVER_AUTH, Usage.ANY_EXTENDED_KEY_USAGE], ""),
    "none": ("ps-0", 100, [], ""),
    "a worker": ("worker-0", 100, [Usage.SERVER_AUTH], ""),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_is_good_for_a_while_is_warned_of(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """With the file, and what to do: a job may run longer than its certificates, and servers are clients of others."""
    name, days, usages, warned = WARNED[case]
    own = write(certificates.signed([f"{name}.paramserver"], -1, days, usages=usages), tmp_path)
    mine = replace(options(certificates.out), tls_cert=own.tls_cert, tls_key=own.tls_key).read(name)
    assert mine.expiry == pytest.approx(time.time() + days * 86400, abs=100)
    for said in (NEAR, ALONE):
        assert bool(re.search(rf"{tmp_path}/{said}", caplog.text)) == (said == warned)


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_one_of_three(certificates: Certificates, missing: str) -> None:
    """All three are needed, and the flag that lacks is named; another's certificate says whose it is."""
    flag, all_of = "--" + missing.replace("_", "-"), options(certificates.out)
    with pytest.raises(inside.ConfigError, match=f"belong together; missing: {flag};"):
        replace(all_of, **{missing: ""}).read("worker-0")
    others = inside.SecurityOptions(*(part.replace("{task}", "worker-1") for part in vars(all_of).values()))
    with pytest.raises(inside.ConfigError, match=r"worker-1's, not for this process, worker-0.*worker-0.paramserver"):
        others.read("worker-0")


def test_the_environment_and_flags(certificates: Certificates) -> None:
    """What the environment says is read back, and flags win. Neither key nor token is in what is printed of them."""
    token = "0123456789abcdef"
    given = replace(options(certificates.out), token=token)
    for text in (repr(given), repr(replace(certificates.of("worker-0"), token=token))):
        assert token not in text
        assert "PRIVATE KEY" not in text
    assert inside.SecurityOptions.from_environ(given.variables()) == given
    assert inside.SecurityOptions.from_environ({}).read("worker-0") == inside.Security()
    flagged = given.under({"tls_cert": "mine.crt", "tls_key": None, "other": "x"})
    assert flagged == replace(given, tls_cert="mine.crt")
    alone = inside.SecurityOptions(token=token).read("worker-0")
    assert (alone.token, alone.tls) == (token, False)


def certs(*args: object, code: int = 0, **environ: str) -> str:
    result = CliRunner(env=environ).invoke(command, ["certs", *map(str, args)], standalone_mode=False)
    if code:
        assert isinstance(result.exception, inside.ConfigError), result.output
        return str(result.exception)
    assert result.exception is None, result.output
    return result.output


def names_in(folder: Path) -> frozenset[str]:
    return inside.SecurityOptions(tls_cert=str(folder / "tls.crt")).names()


def test_certificates_of_a_cluster(tmp_path: Path) -> None:
    """Each task gets what it needs, for its owner alone, with its one name; the key of the CA is with none of them."""
    assert inside.certificate_name(inside.task_name(inside.Task("ps", 3))) == "ps-3.paramserver"
    assert inside.named(["ps-3.paramserver", "example.org", "worker-1.paramserver"]) == {"ps-3", "worker-1"}
    out = tmp_path / "certs"
    certs(out, "--ps", 2, "--workers", 2)
    assert {path.name for path in out.iterdir()} == {*NAMES, "ca"}
    for path in [out, *out.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for name in NAMES:
        assert {path.name for path in (out / name).iterdir()} == {"tls.crt", "tls.key", "ca.crt", "token"}
        assert options(out).read(name).tls
    assert len({options(out).read(name).token for name in NAMES}) == 1
    assert len({options(out).read(name).key for name in NAMES}) == len(NAMES)


def test_what_is_there_stays(certificates: Certificates, tmp_path: Path) -> None:
    """A second call adds what is new, of the same CA, and overwrites nothing; half of a pair is refused. What is
    renewed has new keys and certificates; CA and token stay, so that one process after the other may take them.
    Certificates of two CAs never get mixed in one directory."""
    certs(tmp_path, "--ps", 1, "--workers", 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    printed = certs(tmp_path, "--ps", 2, "--workers", 1)
    assert f"kept {tmp_path}/ps-0" in printed
    assert f"made {tmp_path}/ps-1" in printed
    assert {path: path.read_bytes() for path in before} == before
    old = options(tmp_path).read("ps-0")
    assert options(tmp_path).read("ps-1").ca == old.ca
    certs(tmp_path, "--ps", 2, "--workers", 1, "--renew", "--days", 700)
    new = options(tmp_path).read("ps-0")
    assert (new.ca, new.token) == (old.ca, old.token)
    assert new.key != old.key
    assert new.certificate != old.certificate
    (tmp_path / "ps-1" / "tls.key").unlink()
    said = certs(tmp_path, "--ps", 2, "--workers", 1, code=2)
    assert "has tls.crt but not tls.key; make both again with --renew" in said
    shutil.copytree(certificates.other / "ps-0", tmp_path / "ps-0", dirs_exist_ok=True)
    assert "was signed by another CA" in certs(tmp_path, "--ps", 1, "--workers", 1, code=2)


TF_CONFIG = json.dumps({"cluster": {"ps": ["a:1", "b:1"], "worker": ["c:1"], "chief": ["d:1"]}})


@pytest.mark.parametrize(
    ("args", "config", "more"),
    [
        (["--ps", 2, "--workers", 2], "", ["ps-1", "worker-1", "chief-0"]),
        (["--ps", 1, "--workers", 2, "--no-chief"], "", ["worker-1"]),
        ([], TF_CONFIG, ["ps-1", "chief-0"]),
        (["--cluster", "cluster.json", "--evaluator"], "", ["ps-1", "chief-0", "evaluator-0"]),
        (
            ["--extra-workers", 1, "--extra-ps", 2],
            TF_CONFIG,
            ["ps-1", "chief-0", "worker-1", "ps-standby-0", "ps-standby-1"],
        ),
        (["--ps", 1, "--workers", 0, "--extra-workers", 1], "", ["chief-0"]),
    ],
    ids=["numbers", "worker 0 is chief", "the environment", "a file", "more that join", "all that join"],
)
def test_each_task_has_a_directory(in_tmp_path: Path, args: list[object], config: str, more: list[str]) -> None:
    """By numbers, TF_CONFIG or a file; who join have the next indices; JSON says so; else what to write."""
    (in_tmp_path / "cluster.json").write_text(TF_CONFIG)
    rows = json.loads(certs("certs", *args, "--json", TF_CONFIG=config))["certificates"]
    expected = {"ps-0", "worker-0", "admin", *more}
    assert {path.name for path in Path("certs").iterdir()} == expected | {"ca"}
    assert {Path(row["path"]).name for row in rows} == expected
    assert all(row["made"] for row in rows)
    assert names_in(Path("certs/worker-0")) == {"worker-0"}
    assert "--ps 2 --workers 2" in certs("none", code=2, TF_CONFIG="")


def test_certificates_of_workers_that_join_and_of_standby_servers(tmp_path: Path) -> None:
    """Workers have the next indices, and each names itself alone; a standby server names all servers, and nobody
    else."""
    certs(tmp_path, "--ps", 2, "--workers", 2, "--extra-workers", 2, "--extra-ps", 1)
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "ca", "worker-2", "worker-3", "ps-standby-0"}
    for name in ("worker-2", "worker-3", "ps-0", "ps-1"):
        assert names_in(tmp_path / name) == {name}
    assert names_in(tmp_path / "ps-standby-0") == {"ps-standby-0", "ps-0", "ps-1"}
    for name in ("ps-0", "ps-1", "ps-standby-0"):
        files = (str(tmp_path / "ps-standby-0" / file) for file in ("tls.crt", "tls.key", "ca.crt", "token"))
        assert inside.SecurityOptions(*files).read(name).tls
    # That of a smaller cluster could take the place of some servers alone: it is said, and not replaced unasked.
    said = certs(tmp_path, "--ps", 3, "--workers", 1, "--extra-ps", 1, code=2)
    owned = "ps-0, ps-1, ps-standby-0, but the cluster now has ps-0, ps-1, ps-2; remove"
    assert f"{tmp_path}/ps-standby-0 belongs to {owned}" in said
    shutil.rmtree(tmp_path / "ps-standby-0")
    for _ in range(2):
        certs(tmp_path, "--ps", 3, "--workers", 1, "--extra-ps", 1)
    assert names_in(tmp_path / "ps-standby-0") == {"ps-standby-0", "ps-0", "ps-1", "ps-2"}


FILE = """
workers: 2
server:
  max_sessions: 7
security:
  tls_cert: file/{task}/tls.crt
  tls_key: file/{task}/tls.key
"""


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag wins over the file, the file over the environment."""
    (tmp_path / "x.yaml").write_text(FILE)
    (tmp_path / "x.py").touch()
    files = str(tmp_path / "x.yaml"), str(tmp_path / "x.py")
    monkeypatch.setattr(os, "environ", {})
    words = ["--config", files[0], "--tls-cert", "flag.crt", files[1]]
    cluster = inside.Cluster(inside.psworker_command.main(words, standalone_mode=False).launch)
    assert cluster.config.security == inside.SecurityOptions("flag.crt", "file/{task}/tls.key")
    assert cluster.config.server.max_sessions == 7


def test_a_task_reads_its_own(certificates: Certificates) -> None:
    """In a path {task} is the task's own; flags win over the environment."""
    environ = options(certificates.out).variables()
    config = inside.server_config(environ, task=1)
    assert config.security == certificates.of("ps-1")
    assert not config.insecure
    other = str(certificates.out / "ps-0" / "tls.crt")
    with pytest.raises(inside.ConfigError, match="ps-0's, not for this process, ps-1"):
        inside.server_config(environ, task=1, tls_cert=other)
    assert inside.server_config({}).security == inside.Security()
    assert inside.server_config({"PS_INSECURE": "1"}).insecure
    assert not inside.server_config({"PS_INSECURE": "0"}).insecure
    with pytest.raises(inside.ConfigError, match="PS_INSECURE must be 1 or 0, not 'false'"):
        inside.server_config({"PS_INSECURE": "false"})
    # So does a task that connects. The file comes before the token of the environment, which a launcher may draw.
    for name in ("worker-1", "chief-0", "admin"):
        for more in ({}, {"PS_TOKEN": "0123456789abcdef"}):
            assert inside.security_from(name, environ | more) == certificates.of(name)


def test_a_cluster_keeps_its_token() -> None:
    """One that is given, or one that is drawn for each cluster; it is no flag, as other users see command lines."""
    given = inside.Cluster(security=inside.SecurityOptions(token="0123456789abcdef"), timeouts=inside.Timeouts())
    assert given.security(inside.Task("worker", 0)).token == "0123456789abcdef"
    clusters = [inside.Cluster(security=inside.SecurityOptions()) for _ in range(3)]
    drawn = {cluster.security(inside.Task("worker", 0)).token for cluster in clusters}
    assert [len(token) for token in drawn] == [64] * 3
    for taken in (inside.psworker_command, inside.psserver_command):
        assert "--token" not in {name for parameter in taken.params for name in parameter.opts}


# ---- Files that are given by name, and names from elsewhere ----


def test_a_file_without_an_end_is_refused(tmp_path: Path) -> None:
    """A device, or a file that is too large for what it should be; a pipe is read as a shell gives it."""
    endless = inside.SecurityOptions(token_file="/dev/zero")
    for read in (lambda: read_small("/dev/zero"), lambda: endless.read("worker-0")):
        with pytest.raises(inside.ConfigError, match="/dev/zero has more than 4 MiB"):
            read()
    (tmp_path / "small").write_bytes(b"12345")
    assert read_small(tmp_path / "small", 5) == b"12345"
    with pytest.raises(inside.ConfigError, match="small has more than"):
        read_small(tmp_path / "small", 4)
    reads, writes = os.pipe()
    os.write(writes, b"token")
    os.close(writes)
    assert read_small(f"/dev/fd/{reads}") == b"token"
    os.close(reads)


def test_a_fifo_is_no_checkpoint(tmp_path: Path) -> None:
    """Nobody waits for a writer: the error names it, since what is newest is not known."""
    write_checkpoint(tmp_path / "run" / "ckpt-1", {"v": np.zeros(3)})
    (tmp_path / "run" / "ckpt-9").mkdir()
    os.mkfifo(tmp_path / "run" / "ckpt-9" / "manifest.json")
    with pytest.raises(
        inside.CheckpointError, match=r"ckpt-9/manifest\.json cannot be read: .*it is not a regular file"
    ):
        inside.open_saved(str(tmp_path / "run"))


def test_what_steers_a_terminal_is_written_out() -> None:
    """Lines and tabs stay."""
    assert printable("\x1b[31m\ta\nb\x07\x9b2J\r") == "\\x1b[31m\ta\nb\\x07\\x9b2J\\x0d"
    assert printable("Größe 数 🙂") == "Größe 数 🙂"
