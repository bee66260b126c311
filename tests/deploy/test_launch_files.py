"""Files that describe a local cluster: what they may say, and that those in configs/ run."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from psclient._src.launch.config_file import SECTIONS, load_launch_config, refuse, schema
from pswire.options import Option, options_of
from tests.kit.internals import (
    FLAGS,
    ConfigError,
    LaunchConfig,
    SecurityOptions,
    ServerOptions,
    Timeouts,
    local_devices,
)
from tests.kit.shell import shell

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
SECONDS = 240


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_keys_are_the_attributes() -> None:
    """What a cluster can be told, a file can tell; `tools/make_schema.py` has been run since keys changed."""
    properties = schema()["properties"]
    assert {*properties} == {field.name for field in dataclasses.fields(LaunchConfig)}
    for name, owner in (("server", ServerOptions), ("timeouts", Timeouts)):
        assert {*properties[name]["properties"]} == {field.name for field in dataclasses.fields(owner)}
    assert {*properties["security"]["properties"]} == set(FLAGS) == {*vars(SecurityOptions())} - {"token"}
    assert json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8")) == schema()
    jsonschema.Draft202012Validator.check_schema(schema())


OWNERS = {None: LaunchConfig, **SECTIONS}
KEYS = [(section, name, key) for section, owner in OWNERS.items() for name, key in options_of(owner).items()]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([-0.5, 0.5]),
    st.sampled_from(
        ["driver", "none", "shm", "grpc", "debug", "json", "cpu", "gpu:1", "gpu:x", "4GiB", "4 Gib", "4 G", ""]
    ),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none()), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
)


@given(st.sampled_from(KEYS), VALUES)
def test_the_schema_and_the_loader_refuse_the_same(place: tuple[str | None, str, Option], value: Any) -> None:
    """What an editor underlines is what psworker refuses, and nothing else."""
    section, name, key = place
    data = {section: {name: value}} if section else {name: value}
    valid = jsonschema.Draft202012Validator(schema()).is_valid(data)
    with nullcontext() if valid else pytest.raises(ConfigError, match=f"^{name} must be "):
        refuse(key, value, name)


def test_a_file_says_everything(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "ps: 3\nworkers: 4\nchief: none\nrestarts: 2\nscript: a.py\nargs: [--epochs, 3]\ntransport: tcp\n"
        "server: {device: 'gpu:1', memory_limit: 4GiB, checkpoint_root: /tmp/x, threads: 2, shared_memory: 0}\n"
        "timeouts: {session_timeout: 5}\nsecurity: {token_file: 'certs/{task}/token'}\n",
    )
    assert load_launch_config(path) == LaunchConfig(
        ps=3,
        workers=4,
        chief="none",
        restarts=2,
        script="a.py",
        args=("--epochs", "3"),
        transport="tcp",
        server=ServerOptions("gpu:1", "4GiB", "/tmp/x", 2, "0"),
        timeouts=Timeouts(session_timeout=5.0),
        security=SecurityOptions(token_file="certs/{task}/token"),
    )


BAD = {
    "wokers: 2": "key wokers is unknown; did you mean workers?",
    "zebra: 2": "key zebra is unknown; known are args, chief",
    "server: {memory: 1}": "key of server memory is unknown; did you mean memory_limit?",
    "timeouts: {sesion_timeout: 1}": "key of timeouts sesion_timeout is unknown; did you mean session_timeout?",
    "timeouts: {lease: 1}": "key of timeouts lease is called session_timeout now",
    "security: {tls_crt: a}": "key of security tls_crt is unknown; did you mean tls_cert?",
    "security: {token: abc}": "key of security token is unknown; did you mean token_file?",
    "timeouts: {session_timeout: soon}": "timeouts.session_timeout must be a positive number of seconds, not 'soon'",
    "timeouts: {session_timeout: 0}": "timeouts.session_timeout must be a positive number of seconds, not 0",
    "timeouts: {session_timeout: .inf}": "timeouts.session_timeout must be a positive number of seconds, not inf",
    "timeouts: {session_timeout: .nan}": "timeouts.session_timeout must be a positive number of seconds, not nan",
    "ps: two": "ps must be a whole number from 1, not 'two'",
    "ps: true": "ps must be a whole number from 1, not True",
    "ps: 0": "ps must be a whole number from 1, not 0",
    "workers: -1": "workers must be a whole number from 0, not -1",
    "restarts: 1.5": "restarts must be a whole number from 0, not 1.5",
    "chief: maybe": "chief must be one of driver, script, none, not 'maybe'",
    "transport: 3": "transport must be one of shm, tcp, grpc, not 3",
    "evaluator: perhaps": "evaluator must be true or false, not 'perhaps'",
    "log_level: loud": "log_level must be one of debug, info, warning, error, not 'loud'",
    "script: 3": "script must be text, not 3",
    "args: --resume": "args must be a list, one item for each argument, not '--resume'",
    "args: [{a: 1}]": "args must be a list, one item for each argument, not [{'a': 1}]",
    "server: 3": "server must be a mapping of keys to values, not 3",
    "server: {device: tpu}": "server.device must be cpu or gpu:N, not 'tpu'",
    "server: {memory_limit: much}": "server.memory_limit must be a number of bytes with a unit, such as 4GiB",
    "server: {memory_limit: -1}": "server.memory_limit must be a number of bytes with a unit, such as 4GiB, not -1",
    "server: {threads: 0}": "server.threads must be a whole number from 1, not 0",
    "- 3": "must be a mapping of keys to values, not [3]",
    "a: [": "is not valid YAML",
    "ps: 1\nworkers: 2\nps: 2": "line 3: key ps appears twice; remove one",
    "server: {device: cpu, device: gpu:0}": "line 1: key device appears twice; remove one",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    """One line names the file and the key, and says what to write."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_launch_config(path)
    assert BAD[text] in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load_launch_config(tmp_path / "none.yaml")


def test_values_are_checked_once_all_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable, a file and flags may each say a part of what goes together."""
    monkeypatch.setenv("PS_REPLICATION_FACTOR", "2")
    config = load_launch_config(written(tmp_path, "{workers: 0, script: a.py}"))
    with pytest.raises(ConfigError, match="replication_factor=2 needs two servers"):
        config.check()
    with pytest.raises(ConfigError, match="because the cluster has no worker"):
        replace(config, ps=2).check()
    replace(config, ps=2, workers=1).check()


def test_committed_files_are_clusters() -> None:
    """Each way to run a local cluster has one, which fits the schema that it names, and names a script that exists."""
    names = {"local", "two-by-two", "gpu", "async", "tls", "standalone", "elastic"}
    assert {path.stem for path in FILES} == names
    for path in FILES:
        jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema())
        assert "# yaml-language-server: $schema=schema.json" in path.read_text(encoding="utf-8")
        assert (ROOT / load_launch_config(path).script).exists()


OTHER_MODES = {"async.yaml", "elastic.yaml", "standalone.yaml", "tls.yaml", "two-by-two.yaml"}
"""They start what other files start, in modes that tests of jobs train in."""

OFTEN = [pytest.param(path, marks=pytest.mark.soak if path.name in OTHER_MODES else ()) for path in FILES]


@pytest.mark.parametrize("path", OFTEN, ids=lambda path: path.name)
def test_committed_files_train(path: Path, tmp_path: Path) -> None:
    """psworker runs what the file says to its end, and nothing is left."""
    config = load_launch_config(path)
    if config.server.device != "cpu" and not any(str(device).startswith("gpu") for device in local_devices(None)):
        pytest.skip("no CUDA device: the file is only read")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if config.security.tls_cert:
        made = shell(["psctl", "certs", "certs", "--ps", "2", "--workers", "2"], tmp_path)
        assert made.code == 0, made.err
    words = ["psworker", "--config", str(path), config.script, *config.args, "--epochs", "1"]
    done = shell(words, tmp_path, SECONDS)
    assert done.code == 0, done.err
    assert "test accuracy" in done.out
    assert (tmp_path / config.server.checkpoint_root / "digits" / "ckpt-1" / "manifest.json").exists()
    assert done.left == ()
