"""Images and the compose file, as far as they can be read without a daemon, and the locks that pin what is in them."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from psclient.psctl.cli import command as psctl
from tests.kit.internals import (
    GLIBC_TUNABLES,
    LAST_SECONDS,
    Timeouts,
    check_addresses,
    parse_tf_config,
    standby_name,
    task_name,
)
from tests.kit.internals import psserver_command as psserver
from tests.kit.internals import psworker_command as psworker
from tests.kit.shell import printed

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RUNS = {name: service for name, service in SERVICES.items() if name not in ("certs", "prometheus")}
"""Containers that run a program of ours, after the certificates are made."""
TASKS = {name: service for name, service in RUNS.items() if "TF_CONFIG" in service["environment"]}
"""Those that are tasks from the start: all but standby servers and workers that join."""
JOINING = {name: service for name, service in RUNS.items() if "--join" in " ".join(service["command"])}
"""The others, by the names that their certificates have with it."""
OWNERS = {"ps-standby": standby_name(0), "worker-2": "worker-2", "worker-3": "worker-3"}
PROGRAMS: dict[str, click.Command] = {"psserver": psserver, "psworker": psworker, "psctl": psctl}


def parse(words: list[str]) -> click.Context:
    """What one of our programs makes of a command line; raises `click.ClickException` where it would refuse it."""
    command, args = PROGRAMS[words[0]], words[1:]
    while isinstance(command, click.Group):
        _, found, args = command.resolve_command(click.Context(command), args)
        assert found is not None
        command = found
    return command.make_context(words[0], args)


def stages() -> dict[str, str]:
    found = {}
    for text in DOCKERFILE.split("\nFROM ")[1:]:
        first, _, rest = text.partition("\n")
        if " AS " in first:
            found[first.split()[-1]] = rest
    return found


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_images_are_for_nobody_in_particular(kind: str) -> None:
    """They run without root, their program gets the signals, and their probe and their command are commands of ours.

    Packages come from the locks, each by its digest, what builds the wheel as well, and nothing is looked for. Compiled
    files have no dates in them, all files that of the commit, and so has the user's entry.
    """
    build, final = stages()[f"{kind}-build"], stages()[kind]
    lines = final.splitlines()
    assert "USER 10001:10001" in lines
    assert not any(line.startswith("ENTRYPOINT") for line in lines)
    (command,) = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD")]
    (probe,) = [json.loads(line.partition(" CMD ")[2]) for line in lines if line.startswith("HEALTHCHECK")]
    assert (parse(command).params["host"], probe[:2]) == ("0.0.0.0", ["psctl", "health"])
    parse(probe)
    assert f"GLIBC_TUNABLES={GLIBC_TUNABLES}" in final.split()
    for line in build.split("&&"):
        words = line.split()
        if words[:1] and words[0].endswith("/pip") and words[1] in ("install", "wheel"):
            assert "--no-deps" in words
            assert ("--require-hashes" in words) != ("--no-index" in words)
    assert "-r locks/build.lock" in build
    assert re.search(r"requirements\.py (gpu )?simulation \${EXTRAS}", build)  # what psctl plan and calibrate need
    assert build.count("--no-compile") == 2
    assert "compileall -q -f --invalidation-mode unchecked-hash" in build
    assert build.index("compileall") < build.index('touch --no-dereference --date="@${SOURCE_DATE_EPOCH}"')
    assert final.index("ARG SOURCE_DATE_EPOCH") < final.index("useradd")
    # Compose builds from another base where the environment names one, and else from the Dockerfile's.
    given = SERVICES["certs"]["build"]["args"]
    (base,) = re.findall(r"^ARG CPU_BASE=(.*)$", DOCKERFILE, re.MULTILINE)
    assert given["CPU_BASE"] == f"${{CPU_BASE:-{base}}}"
    assert given["PIP_INDEX_URL"] == "${PIP_INDEX_URL:-}"


def test_what_is_copied_is_let_through() -> None:
    """Each file that the Dockerfile copies from the repository is there, and .dockerignore does not hide it."""
    let = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    copied = [line for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line]
    names = {name for line in copied for name in line.split()[1:-1] if name != "."}
    assert names == {"docker/requirements.py", "locks"}
    packages = {"psclient", "psserver", "pstesting", "pswire", "LICENSE", "README.md", "pyproject.toml", "examples"}
    assert let == names | packages
    assert all((ROOT / name).exists() for name in let)


def test_each_container_is_a_task_of_one_cluster() -> None:
    """All agree on the cluster and where servers are; each sees its own key, to read, and the CA's key is elsewhere."""
    configs = {name: parse_tf_config(service["environment"].get("TF_CONFIG", "")) for name, service in RUNS.items()}
    tasks = {name: config.task for name, config in configs.items() if config}
    clusters = [config.cluster for config in configs.values() if config]
    assert clusters == [clusters[0]] * 5
    assert {*tasks} == {*TASKS}
    assert sorted(map(task_name, tasks.values())) == ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    for name, task in tasks.items():
        if task.job == "ps":
            assert clusters[0].task_address("ps", task.index) == f"{name}:2222"
    (words,) = [shlex.split(part) for part in SERVICES["certs"]["command"][2].split("&&") if "psctl" in part]
    made = parse(words).params
    assert (made["ps"], made["workers"], made["extra_ps"], made["extra_workers"]) == (2, 2, 1, 2)
    assert {*JOINING} == {*OWNERS} == {*RUNS} - {*TASKS}
    volumes = dict(volume.split(":", 1) for volume in SERVICES["certs"]["volumes"])
    for name, service in RUNS.items():
        owner = task_name(tasks[name]) if name in tasks else OWNERS[name]
        mine = [volume for volume in service["volumes"] if volume.startswith("certs")]
        assert mine == [f"certs-{owner}:/certs:ro"]
        assert volumes[f"certs-{owner}"] == f"/out/{owner}"
    assert set(COMPOSE["volumes"]) == {*volumes, "checkpoints"}


def test_containers_may_do_little() -> None:
    """A root that nobody writes on, no new privileges, no capabilities but what changes owners, no network outside.

    The chief's page and Prometheus alone are reached from the host, and from there alone. Memory, processors, processes
    and log are limited; libraries compute in as many threads as there are processors. Docker's own 10 s are less than a
    task may take that is told to end; a limit in seconds fits it.
    """
    for name, service in SERVICES.items():
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"]
        assert ("cap_add" in service) == (name == "certs")
        root = str(service.get("user", "10001")).startswith("0")
        assert root == (name == "certs")
        reached = name in ("chief", "prometheus")
        assert ("networks" in service, "ports" in service) == (reached, reached)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}
        assert name == "certs" or {"cpus", "mem_limit", "pids_limit"} <= set(service)
    assert SERVICES["certs"]["network_mode"] == "none"
    alone = {"com.docker.network.bridge.enable_ip_masquerade": "false"}  # replies from outside do not come back
    assert COMPOSE["networks"] == {"default": {"internal": True}, "outside": {"driver_opts": alone}}
    for service in RUNS.values():
        assert service["environment"]["OMP_NUM_THREADS"] == service["cpus"]
        assert int(service["stop_grace_period"].removesuffix("s")) >= Timeouts().termination_grace + LAST_SECONDS


def test_prometheus_scrapes_all_that_runs() -> None:
    """Each container that runs a program of ours is a target at the port that it is told, under the job's name."""
    config = yaml.safe_load((ROOT / "configs" / "prometheus" / "prometheus.yaml").read_text(encoding="utf-8"))
    (scraped,) = config["scrape_configs"]
    (targets,) = scraped["static_configs"]
    ports = {service["environment"]["PS_METRICS_PORT"] for service in RUNS.values()}
    assert ports == {"9090"}
    assert set(targets["targets"]) == {f"{name}:9090" for name in RUNS}
    assert {service["environment"]["PS_METRICS_HOST"] for service in RUNS.values()} == {"0.0.0.0"}
    assert {service["environment"]["PS_JOB"] for service in RUNS.values()} == {scraped["job_name"]}
    assert all((ROOT / "configs" / "prometheus" / name).exists() for name in config["rule_files"])
    (mounted, where, _) = SERVICES["prometheus"]["volumes"][0].split(":")
    assert (ROOT / "docker" / mounted).resolve() == ROOT / "configs" / "prometheus"
    assert f"--config.file={where}/prometheus.yaml" in SERVICES["prometheus"]["command"]
    assert SERVICES["prometheus"]["profiles"] == ["metrics"]


def test_a_standby_server_waits_for_a_place_and_more_workers_join() -> None:
    """They know all servers, and are started with their profiles alone. The server says where it is, and nothing probes
    it; workers run the workers' script with its arguments."""
    standby = "ps-standby"
    flags = parse(SERVICES[standby]["command"]).params
    config = parse_tf_config(SERVICES["chief"]["environment"]["TF_CONFIG"])
    assert config is not None
    servers = tuple(config.cluster.task_address("ps", index) for index in range(config.cluster.num_tasks("ps")))
    assert check_addresses(flags["join"], "--join") == servers
    assert (flags["advertise"], flags["port"], flags["until_done"]) == (f"{standby}:2222", 2222, True)
    assert SERVICES[standby]["profiles"] == ["standby"]
    assert SERVICES[standby]["healthcheck"] == {"disable": True}
    script = parse(SERVICES["worker-0"]["command"]).params
    for name in {*JOINING} - {standby}:
        flags = parse(SERVICES[name]["command"]).params
        assert check_addresses(flags["join"], "--join") == servers
        assert (flags["script"], flags["args"]) == (script["script"], script["args"])
        assert SERVICES[name]["profiles"] == ["more"]


@pytest.mark.parametrize("profiles", [(), ("metrics",), ("standby",), ("more",), ("metrics", "standby")])
def test_compose_reads_the_file(profiles: tuple[str, ...]) -> None:
    """docker-compose, where it is at hand, finds no fault, and the services of the profiles."""
    words = [word for profile in profiles for word in ("--profile", profile)]
    read = printed("docker-compose", "-f", ROOT / "docker" / "compose.yaml", *words, "config", "--services")
    expected = {name for name, service in SERVICES.items() if set(service.get("profiles", ())) <= set(profiles)}
    assert expected <= set(read.split()) <= set(SERVICES)  # Compose 1 lists those of all profiles


def test_commands_are_ours() -> None:
    """Every container runs a program that takes these flags; servers end with the job, and have a probe."""
    for service in TASKS.values():
        context = parse(service["command"])
        if context.info_name == "psserver":
            assert context.params["until_done"]
            parse(service["healthcheck"]["test"][1:])
            assert set(service["depends_on"]) == {"certs"}
        else:
            assert {name: one["condition"] for name, one in service["depends_on"].items()} == {
                "certs": "service_completed_successfully",
                "ps-0": "service_healthy",
                "ps-1": "service_healthy",
            }
            assert not context.params["script"] or (ROOT / context.params["script"]).exists()


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


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_a_lock_has_what_is_asked_for(lock: str, python: str) -> None:
    """Each requirement of pyproject.toml is pinned, to a version that it allows: else `make lock` has to be run."""
    assert set(LOCKS) == set(WANTED)
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
    [
        ([], ["runtime"]),
        (["examples"], ["examples"]),
        (["gpu", "s3"], ["gpu", "s3"]),
        *((["examples", extra], []) for extra in ("gpus", "torch", "dist")),
    ],
)
def test_an_image_installs_locks(extras: list[str], expected: list[str]) -> None:
    """The runtime's, or those of its extras, each of which has the runtime's packages; or it says which there are."""
    script = [sys.executable, str(ROOT / "docker" / "requirements.py"), *extras]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"-r locks/{name}.lock" for name in expected]
    assert done.returncode == int(not expected)
    assert expected or f"no lock of an extra '{extras[1]}'; there are examples, gpu, " in done.stderr
    for name in expected:
        assert set(versions("runtime", "3.12").items()) <= set(versions(name, "3.12").items())


def test_the_site_needs_no_test_tools(tmp_path: Path) -> None:
    """`make docs`, where nothing is installed yet, installs the extra `docs` and no other."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    assert re.findall(r"install -e '(.*?)'", printed("make", "-n", "docs", cwd=tmp_path)) == [".[docs]"]
