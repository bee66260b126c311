"""The image and the compose file, as far as they can be read without a daemon: what runs in them is ours and fits."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from psclient.psctl.cli import command as psctl
from tests.kit.internals import GLIBC_TUNABLES, Task, check_addresses, parse_tf_config, spare_name, task_name
from tests.kit.internals import psserver_command as psserver
from tests.kit.internals import psworker_command as psworker

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RUNS = {name: service for name, service in SERVICES.items() if name not in ("certs", "prometheus")}
"""Containers that run a program of ours, after the certificates are made."""
TASKS = {name: service for name, service in RUNS.items() if "TF_CONFIG" in service["environment"]}
"""Those that are tasks from the start: all but spare servers."""
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
    """The instructions of each stage of the Dockerfile, by its name."""
    found = {}
    for text in DOCKERFILE.split("\nFROM ")[1:]:
        first, _, rest = text.partition("\n")
        if " AS " in first:
            found[first.split()[-1]] = rest
    return found


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_images_are_for_nobody_in_particular(target: str) -> None:
    """They run without root, their program gets the signals, and their probe and their command are commands of ours."""
    lines = stages()[target].splitlines()
    assert "USER 10001:10001" in lines
    assert not any(line.startswith("ENTRYPOINT") for line in lines)
    (command,) = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD")]
    (probe,) = [json.loads(line.partition(" CMD ")[2]) for line in lines if line.startswith("HEALTHCHECK")]
    assert (parse(command).params["host"], probe[:2]) == ("0.0.0.0", ["psctl", "health"])
    parse(probe)
    assert f"GLIBC_TUNABLES={GLIBC_TUNABLES}" in stages()[target].split()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_image_has_what_is_pinned(kind: str) -> None:
    """Packages come from the locks, each by its digest, what builds the wheel as well, and nothing is looked for."""
    for line in stages()[f"{kind}-build"].split("&&"):
        words = line.split()
        if words[:1] and words[0].endswith("/pip") and words[1] in ("install", "wheel"):
            assert "--no-deps" in words
            assert ("--require-hashes" in words) != ("--no-index" in words)
    assert "-r locks/build.lock" in stages()[f"{kind}-build"]


def test_an_image_names_no_time() -> None:
    """Compiled files have no dates in them, all files that of the commit, and so has the user's entry."""
    for kind in ("cpu", "gpu"):
        build, final = stages()[f"{kind}-build"], stages()[kind]
        assert build.count("--no-compile") == 2
        assert "compileall -q -f --invalidation-mode unchecked-hash" in build
        assert build.index("compileall") < build.index('touch --no-dereference --date="@${SOURCE_DATE_EPOCH}"')
        assert final.index("ARG SOURCE_DATE_EPOCH") < final.index("useradd")


def test_what_is_copied_is_let_through() -> None:
    """Each file that the Dockerfile copies from the repository is there, and .dockerignore does not hide it."""
    let = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY") and "--from" not in line
    ]
    names = {name for words in copied for name in words if name != "."}
    assert names == {"docker/requirements.py", "locks"}
    packages = {"psclient", "psserver", "pswire", "LICENSE", "README.md", "pyproject.toml", "examples"}
    assert let == names | packages
    assert all((ROOT / name).exists() for name in let)


def test_each_container_is_a_task_of_one_cluster() -> None:
    """Two servers, two workers and a chief, which agree on the cluster; servers are where it says they are."""
    configs = {name: parse_tf_config(service["environment"]["TF_CONFIG"]) for name, service in TASKS.items()}
    clusters = [config.cluster for config in configs.values() if config]
    assert clusters == [clusters[0]] * 5
    tasks = {name: config.task for name, config in configs.items() if config}
    assert set(tasks.values()) == {Task("ps", 0), Task("ps", 1), Task("worker", 0), Task("worker", 1), Task("chief", 0)}
    for name, task in tasks.items():
        if task.job == "ps":
            assert clusters[0].task_address("ps", task.index) == f"{name}:2222"


def test_each_container_sees_its_own_key() -> None:
    """The CA's key and each task's are on volumes of their own, and a task has the one of its own, to read."""
    (words,) = [shlex.split(part) for part in SERVICES["certs"]["command"][2].split("&&") if "psctl" in part]
    made = parse(words).params
    assert (made["ps"], made["workers"], made["extra_ps"]) == (2, 2, len(RUNS) - len(TASKS))
    volumes = dict(volume.split(":", 1) for volume in SERVICES["certs"]["volumes"])
    for service in RUNS.values():
        config = parse_tf_config(service["environment"].get("TF_CONFIG", ""))
        name = task_name(config.task) if config else spare_name(0)
        mine = [volume for volume in service["volumes"] if volume.startswith("certs")]
        assert mine == [f"certs-{name}:/certs:ro"]
        assert volumes[f"certs-{name}"] == f"/out/{name}"
    assert set(COMPOSE["volumes"]) == {*volumes, "checkpoints"}


def test_containers_may_do_little() -> None:
    """A root that nobody writes on, no new privileges, no capabilities but what changes owners, no network outside.

    Prometheus alone is reached from the host, and from there alone.
    """
    for name, service in SERVICES.items():
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"]
        assert ("cap_add" in service) == (name == "certs")
        root = str(service.get("user", "10001")).startswith("0")
        assert root == (name == "certs")
        assert ("networks" in service, "ports" in service) == (name == "prometheus", name == "prometheus")
    assert SERVICES["certs"]["network_mode"] == "none"
    assert COMPOSE["networks"] == {"default": {"internal": True}, "outside": None}
    assert all(port.startswith("127.0.0.1:") for port in SERVICES["prometheus"]["ports"])


def test_containers_may_use_so_much() -> None:
    """Of memory, processors, processes and log; libraries compute in as many threads as there are processors."""
    for name, service in SERVICES.items():
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}
        if name != "certs":
            assert {"cpus", "mem_limit", "pids_limit"} <= set(service)
    for service in RUNS.values():
        assert service["environment"]["OMP_NUM_THREADS"] == service["cpus"]


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


def test_a_spare_server_waits_for_a_place() -> None:
    """It knows all servers, says where it is, and is started with its profile alone; nothing probes it."""
    (spare,) = [name for name in RUNS if name not in TASKS]
    flags = parse(SERVICES[spare]["command"]).params
    config = parse_tf_config(SERVICES["chief"]["environment"]["TF_CONFIG"])
    assert config is not None
    servers = tuple(config.cluster.task_address("ps", index) for index in range(config.cluster.num_tasks("ps")))
    assert check_addresses(flags["join"], "--join") == servers
    assert (flags["advertise"], flags["port"], flags["until_done"]) == (f"{spare}:2222", 2222, True)
    assert SERVICES[spare]["profiles"] == ["spare"]
    assert SERVICES[spare]["healthcheck"] == {"disable": True}


@pytest.mark.parametrize("profiles", [(), ("metrics",), ("spare",), ("metrics", "spare")])
def test_compose_reads_the_file(profiles: tuple[str, ...]) -> None:
    """docker-compose, where it is at hand, finds no fault, and the services of the profiles."""
    compose = shutil.which("docker-compose")
    if compose is None:
        pytest.skip("no docker-compose: the file is read by the tests alone")
    words = [word for profile in profiles for word in ("--profile", profile)]
    command = [compose, "-f", str(ROOT / "docker" / "compose.yaml"), *words, "config", "--services"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = {name for name, service in SERVICES.items() if set(service.get("profiles", ())) <= set(profiles)}
    assert expected <= set(done.stdout.split()) <= set(SERVICES)  # Compose 1 lists those of all profiles


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
