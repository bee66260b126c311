"""What a process shows is read and checked when it starts: each fault names its file, and what to do."""

from __future__ import annotations

import json
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.x509.oid import ExtendedKeyUsageOID

from psclient.psctl.cli import command
from tests.kit.certificates import NAMES, Certificates, options
from tests.kit.internals import ConfigError, Security, SecurityOptions, Task, certificate_name, named, task_name

Break = Callable[[Certificates, Path], object]


def put(name: str, data: bytes) -> Break:
    return lambda certificates, folder: (folder / name).write_bytes(data)


def shown(name: str, part: str, given: Callable[[Certificates], Security]) -> Break:
    return lambda certificates, folder: (folder / name).write_bytes(getattr(given(certificates), part))


def write(made: Security, folder: Path) -> SecurityOptions:
    for name, data in (("tls.crt", made.certificate), ("tls.key", made.key)):
        (folder / name).write_bytes(data)
    return SecurityOptions(tls_cert=str(folder / "tls.crt"), tls_key=str(folder / "tls.key"))


def signed(names: list[str], first_day: int, last_day: int) -> Break:
    return lambda certificates, folder: write(certificates.signed(names, first_day, last_day), folder)


MINE = ["worker-0.paramserver"]


WRONG: dict[str, tuple[Break, str]] = {
    "no certificate": (
        lambda c, folder: (folder / "tls.crt").unlink(),
        r"--tls-cert .*tls.crt cannot be read: No such",
    ),
    "no key": (lambda c, folder: (folder / "tls.key").unlink(), r"--tls-key .*tls.key cannot be read.*psctl certs"),
    "a directory": (
        lambda c, folder: ((folder / "ca.crt").unlink(), (folder / "ca.crt").mkdir()),
        r"--tls-ca .*ca.crt cannot be read: Is a directory",
    ),
    "no PEM": (put("tls.crt", b"\x30\x82\x01"), r"tls.crt has no certificate in PEM"),
    "half of it": (put("tls.crt", b"-----BEGIN CERTIFICATE-----\nMIIB\n"), r"tls.crt has no certificate in PEM"),
    "the key as certificate": (shown("tls.crt", "key", lambda c: c.of("worker-0")), r"tls.crt has no certificate"),
    "the certificate as key": (
        shown("tls.key", "certificate", lambda c: c.of("worker-0")),
        r"tls.key has no private key",
    ),
    "no key in PEM": (put("tls.key", b"secret"), r"tls.key has no private key in PEM without a password"),
    "an empty CA": (put("ca.crt", b""), r"ca.crt has no certificate in PEM"),
    "another's key": (shown("tls.key", "key", lambda c: c.of("worker-1")), r"tls.key is not the key of .*tls.crt"),
    "another CA": (
        shown("ca.crt", "ca", lambda c: c.of_other("worker-0")),
        r"tls.crt is not signed by .*ca.crt.*one CA",
    ),
    "expired": (signed(MINE, -2, -1), r"tls.crt has expired: it was good until 20\d\d-.*--renew"),
    "not yet valid": (signed(MINE, 1, 2), r"tls.crt is not yet valid: it is good from 20.*clock"),
    "no name": (signed([], -1, 2), r"tls.crt names no task.*certificate with the name worker-0.paramserver"),
    "an empty token": (put("token", b"\n"), r"token is no token: write at least 16.*openssl rand -hex 32"),
    "a short token": (put("token", b"secret"), r"token is no token"),
    "two lines": (put("token", b"0123456789abcdef\n0123456789abcdef\n"), r"token is no token"),
    "no ASCII": (put("token", "héllohéllohéllohéllo".encode()), r"token is no token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file(certificates: Certificates, tmp_path: Path, case: str) -> None:
    """Is found when it is read, and named."""
    broken, text = WRONG[case]
    shutil.copytree(certificates.out / "worker-0", tmp_path / "worker-0")
    broken(certificates, tmp_path / "worker-0")
    with pytest.raises(ConfigError, match=text):
        options(tmp_path).read("worker-0")


def test_anothers_certificate(certificates: Certificates) -> None:
    """Names whose it is, and the name that it has to have."""
    with pytest.raises(ConfigError, match=r"worker-1's, and not of this process, worker-0.*worker-0.paramserver"):
        SecurityOptions(
            *(part.replace("{task}", "worker-1") for part in vars(options(certificates.out)).values())
        ).read("worker-0")


@pytest.mark.parametrize(("days", "warned"), [(15, False), (13, True)])
def test_an_end_that_is_near_is_warned_of(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, warned: bool
) -> None:
    """With the file, the day, and what to do: a job may run longer than its certificates."""
    own = write(certificates.signed(MINE, -1, days), tmp_path)
    mine = replace(options(certificates.out), tls_cert=own.tls_cert, tls_key=own.tls_key).read("worker-0")
    assert mine.expiry == pytest.approx(time.time() + days * 86400, abs=100)
    assert bool(re.search(r"tls.crt is good until 20\d\d-.*, and no longer; .*--renew", caplog.text)) == warned


SERVER, CLIENT, ANY = (
    ExtendedKeyUsageOID.SERVER_AUTH,
    ExtendedKeyUsageOID.CLIENT_AUTH,
    ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE,
)


@pytest.mark.parametrize(
    ("name", "usages", "warned"),
    [
        ("ps-0", [SERVER], True),
        ("ps-0", [SERVER, CLIENT], False),
        ("ps-0", [SERVER, ANY], False),
        ("ps-0", [], False),
        ("worker-0", [SERVER], False),
    ],
    ids=["a server", "both", "any", "none", "a worker"],
)
def test_a_server_that_cannot_vote_is_warned(
    certificates: Certificates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    usages: list[Any],
    warned: bool,
) -> None:
    """Its certificate is for servers alone, and to the others it is a client. The file is named, and what to do."""
    made = certificates.signed([f"{name}.paramserver"], -1, 100, usages=usages)
    own = write(made, tmp_path)
    replace(options(certificates.out), tls_cert=own.tls_cert, tls_key=own.tls_key).read(name)
    said = f"{tmp_path}/tls.crt has no extended key usage clientAuth: .*several servers; .*both usages.*psctl certs"
    assert bool(re.search(said, caplog.text)) == warned


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_one_of_three(certificates: Certificates, missing: str) -> None:
    """All three are needed, and the flag that lacks is named."""
    flag = "--" + missing.replace("_", "-")
    with pytest.raises(ConfigError, match=f"belong together; missing: {flag};"):
        replace(options(certificates.out), **{missing: ""}).read("worker-0")


def test_secrets_are_not_shown(certificates: Certificates) -> None:
    """Neither key nor token is in what is printed of them."""
    mine = replace(certificates.of("worker-0"), token="0123456789abcdef")
    for text in (repr(mine), repr(replace(options(certificates.out), token="0123456789abcdef"))):
        assert "0123456789abcdef" not in text
        assert "PRIVATE KEY" not in text


def test_the_environment_and_flags(certificates: Certificates) -> None:
    """What the environment says is read back, and flags win."""
    given = replace(options(certificates.out), token="0123456789abcdef")
    assert SecurityOptions.from_environ(given.variables()) == given
    assert SecurityOptions.from_environ({}).read("worker-0") == Security()
    flagged = given.under({"tls_cert": "mine.crt", "tls_key": None, "other": "x"})
    assert flagged == replace(given, tls_cert="mine.crt")
    alone = SecurityOptions(token="0123456789abcdef").read("worker-0")
    assert alone.token == "0123456789abcdef"
    assert not alone.tls


def test_names() -> None:
    """A task, its name and its certificate's are one to one; other names on a certificate stand for nobody."""
    assert certificate_name(task_name(Task("ps", 3))) == "ps-3.paramserver"
    assert named(["ps-3.paramserver", "example.org", "worker-1.paramserver"]) == {"ps-3", "worker-1"}


# ---- psctl certs ----


def certs(*args: object, code: int = 0, **environ: str) -> str:
    """What psctl prints."""
    result = CliRunner(env=environ).invoke(command, ["certs", *map(str, args)], standalone_mode=False)
    if code:
        assert isinstance(result.exception, ConfigError), result.output
        return str(result.exception)
    assert result.exception is None, result.output
    return result.output


def test_certificates_of_a_cluster(tmp_path: Path) -> None:
    """Each task gets what it needs, for its owner alone; the key of the CA is with none of them."""
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


def test_what_is_there_stays(tmp_path: Path) -> None:
    """A second call adds what is new, of the same CA, and overwrites nothing; half of a pair is refused."""
    certs(tmp_path, "--ps", 1, "--workers", 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    printed = certs(tmp_path, "--ps", 2, "--workers", 1)
    assert f"kept {tmp_path}/ps-0" in printed
    assert f"made {tmp_path}/ps-1" in printed
    assert {path: path.read_bytes() for path in before} == before
    assert options(tmp_path).read("ps-1").ca == options(tmp_path).read("ps-0").ca
    (tmp_path / "ps-1" / "tls.key").unlink()
    assert "has tls.crt and not tls.key; --renew" in certs(tmp_path, "--ps", 2, "--workers", 1, code=2)


def test_renewed(tmp_path: Path) -> None:
    """Keys and certificates are new; CA and token stay, so that one process after the other may take them."""
    certs(tmp_path, "--ps", 1, "--workers", 1)
    before = options(tmp_path).read("ps-0")
    certs(tmp_path, "--ps", 1, "--workers", 1, "--renew", "--days", 700)
    after = options(tmp_path).read("ps-0")
    assert (after.ca, after.token) == (before.ca, before.token)
    assert after.key != before.key
    assert after.certificate != before.certificate


TF_CONFIG = json.dumps({"cluster": {"ps": ["a:1", "b:1"], "worker": ["c:1"], "chief": ["d:1"]}})


def test_the_tasks_of_a_cluster_file(tmp_path: Path) -> None:
    """TF_CONFIG says who there is, from the environment or a file; without any of them it says what to write."""
    file = tmp_path / "cluster.json"
    file.write_text(TF_CONFIG)
    certs(tmp_path / "one", TF_CONFIG=TF_CONFIG)
    certs(tmp_path / "two", "--cluster", file, "--evaluator", TF_CONFIG="")
    expected = {"ps-0", "ps-1", "worker-0", "chief-0", "admin", "ca"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == expected
    assert {path.name for path in (tmp_path / "two").iterdir()} == expected | {"evaluator-0"}
    assert "--ps 2 --workers 2" in certs(tmp_path / "three", code=2, TF_CONFIG="")


def test_without_a_chief(tmp_path: Path) -> None:
    """Worker 0 is; there is no certificate that nobody needs."""
    certs(tmp_path, "--ps", 1, "--workers", 2, "--no-chief")
    assert not (tmp_path / "chief-0").exists()


def names_in(folder: Path) -> frozenset[str]:
    """The tasks that the certificate in a directory names."""
    return SecurityOptions(tls_cert=str(folder / "tls.crt")).names()


def test_certificates_of_workers_that_join_and_of_spare_servers(tmp_path: Path) -> None:
    """Workers have the next indices, and each names itself alone; a spare server names all servers, and nobody else."""
    certs(tmp_path, "--ps", 2, "--workers", 2, "--extra-workers", 2, "--extra-ps", 1)
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "ca", "worker-2", "worker-3", "ps-spare-0"}
    for name in ("worker-2", "worker-3", "ps-0", "ps-1"):
        assert names_in(tmp_path / name) == {name}
    assert names_in(tmp_path / "ps-spare-0") == {"ps-spare-0", "ps-0", "ps-1"}
    for name in ("ps-0", "ps-1", "ps-spare-0"):
        files = (str(tmp_path / "ps-spare-0" / file) for file in ("tls.crt", "tls.key", "ca.crt", "token"))
        assert SecurityOptions(*files).read(name).tls


def test_more_that_join_than_a_file_has(tmp_path: Path) -> None:
    """The cluster of a file says which indices are the next, also where there are no workers yet."""
    certs(tmp_path / "one", "--extra-workers", 1, "--extra-ps", 2, TF_CONFIG=TF_CONFIG)
    expected = {"ps-0", "ps-1", "worker-0", "chief-0", "admin", "ca", "worker-1", "ps-spare-0", "ps-spare-1"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == expected
    certs(tmp_path / "two", "--ps", 1, "--workers", 0, "--extra-workers", 1)
    assert names_in(tmp_path / "two" / "worker-0") == {"worker-0"}


def test_a_spare_server_of_a_smaller_cluster(tmp_path: Path) -> None:
    """It could take the place of some servers alone: it is said, and not replaced unasked."""
    certs(tmp_path, "--ps", 1, "--workers", 1, "--extra-ps", 1)
    said = certs(tmp_path, "--ps", 2, "--workers", 1, "--extra-ps", 1, code=2)
    assert f"{tmp_path}/ps-spare-0 is of ps-0, ps-spare-0, and the cluster has ps-0, ps-1 now; remove" in said
    shutil.rmtree(tmp_path / "ps-spare-0")
    certs(tmp_path, "--ps", 2, "--workers", 1, "--extra-ps", 1)
    certs(tmp_path, "--ps", 2, "--workers", 1, "--extra-ps", 1)
    assert names_in(tmp_path / "ps-spare-0") == {"ps-spare-0", "ps-0", "ps-1"}


def test_in_json(tmp_path: Path) -> None:
    """Machines read which directories there are."""
    rows = json.loads(certs(tmp_path, "--ps", 1, "--workers", 0, "--json"))["certificates"]
    assert [Path(row["path"]).name for row in rows] == ["chief-0", "ps-0", "admin"]
    assert all(row["made"] for row in rows)


def test_another_authority(certificates: Certificates, tmp_path: Path) -> None:
    """Certificates of two CAs never get mixed in one directory."""
    certs(tmp_path, "--ps", 1, "--workers", 1)
    shutil.rmtree(tmp_path / "ps-0")
    shutil.copytree(certificates.other / "ps-0", tmp_path / "ps-0")
    assert "is of another CA" in certs(tmp_path, "--ps", 1, "--workers", 1, code=2)
