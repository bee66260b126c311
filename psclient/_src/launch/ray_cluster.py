"""A cluster whose tasks are actors of Ray, in a placement group of their own: a bundle for each task."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from psclient._src.config import LaunchConfig, launcher_variable
from psclient._src.launch.agent import Order
from psclient._src.launch.cluster import TERM_SECONDS
from psclient._src.launch.ray_actor import AgentActor, NodeReport, Prepared, RayTask, last_line, ray_package
from psclient._src.launch.remote_cluster import RemoteCluster, RemoteProcess, TaskLocation
from psclient._src.processes.output import Line
from psclient._src.processes.process import address_in, server_arguments, waiting_server_arguments
from pswire.cluster import Task, join_address
from pswire.errors import ConfigError, Unreachable
from pswire.limits import refuse_unknown
from pswire.telemetry.reminder import Reminder
from pswire.variables import RAY_ADDRESS, THREADS

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's strategies of placement groups."""

DRIVES = {"CPU": 0.1}
"""What a chief that only drives takes."""

AUTO = "auto"
"""The address of the Ray cluster that `RAY_ADDRESS` names, or that runs on this host."""

REACH_SECONDS = 10.0
"""Seconds that the head of a Ray cluster may take to take a connection."""

SLICE_SECONDS = 0.5
"""Seconds for which Ray is asked at a time: an interruption is seen between two."""


@dataclass(frozen=True)
class Resources:
    """What tasks take of a Ray cluster.

    Attributes:
        ps: of a server, as Ray names it: `{"CPU": 1, "GPU": 0.5, "memory": 8e9}`, memory in bytes.
        worker: of a worker, of an evaluator, and of a chief that runs the script.
        placement: how the tasks lie on nodes, one of `PLACEMENTS`.
    """

    ps: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement: str = PLACEMENTS[0]

    def __post_init__(self) -> None:
        refuse_unknown([self.placement], PLACEMENTS, "placement")
        for name, bundle in (("ps_resources", self.ps), ("worker_resources", self.worker)):
            if not any(bundle.values()) or min(bundle.values()) < 0:
                raise ConfigError(f"{name} {dict(bundle)} must have amounts above 0, such as CPU=1")


def parse_resources(text: str, name: str) -> dict[str, float]:
    """Returns the resources that `CPU=4,GPU=1` says; raises `ConfigError` naming what says them."""
    found: dict[str, float] = {}
    for word in text.split(","):
        key, _, value = word.strip().partition("=")
        if not key or not re.fullmatch(r"[0-9]+(\.[0-9]+)?([eE][0-9]+)?", value) or key in found:
            raise ConfigError(f"{name} {text!r} must be resources with amounts, such as CPU=4,GPU=1")
        found[key] = float(value)
    return found


class _NotThere(ConfigError):
    """Ray could not run an actor: its node is gone, or lacks what it needs."""


def connect(address: str) -> None:
    """Connects this process with a Ray cluster, as its driver.

    Args:
        address: `host:port` of its head, or "auto" for the one of this host, or of `RAY_ADDRESS`.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    ray = ray_package()
    address = launcher_variable(RAY_ADDRESS) or address if address == AUTO else address
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()  # Ray tries for minutes
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except (OSError, ValueError, RuntimeError) as error:
        refused = isinstance(error, ConnectionRefusedError)
        why = "nothing listens there" if refused else last_line(error).rstrip(".")
        raise ConfigError(
            f"found no Ray cluster at {address} ({why}); start one with ray start --head, or give the address of its "
            "head"
        ) from error


class RayCluster(RemoteCluster):
    """A cluster of actors of Ray; a context manager that leaves no task, actor or placement group behind.

    This process is a driver of Ray, that has called `ray.init`. It has to reach the servers.

    Args:
        resources: what tasks take.
        config, sink, keys: as of `Cluster`.
    """

    lost = "the Ray actor on {} was lost"

    def __init__(
        self,
        resources: Resources | None = None,
        config: LaunchConfig | None = None,
        sink: Callable[[Line], None] | None = None,
        **keys: Any,
    ) -> None:
        super().__init__(config or LaunchConfig(), sink, **keys)
        self.resources = resources or Resources()
        self._order = [*self.servers(), *self.clients()]
        self._group: Any = None
        self._places: dict[Task, TaskLocation] = {}
        self._ports: dict[Task, int] = {}  # that were free there
        self._waiting: dict[Task, Any] = {}  # actors that have no agent yet
        self._made = 0

    def start(self) -> None:
        """Reserves what the tasks take, looks at the nodes, and starts the tasks; returns when the servers listen.

        Raises:
            ConfigError: there is no room, a node cannot run tasks, or a server refused its flags.
            Unreachable: a node, or a server, did not answer in time.
        """
        ray = ray_package()
        if not ray.is_initialized():
            raise ConfigError("this process is not connected to a Ray cluster; call ray.init() first")
        bundles = [dict(self._bundle(task)) for task in self._order]
        name = f"paramserver {self.job}"
        self._group = ray.util.placement_group(bundles, self.resources.placement, name=name)
        try:
            self._await_room(bundles)
            for task in self._order:
                self._make_actor(task)
            for task in self._order:
                self._look(task)
        except BaseException:
            self._free()
            raise
        super().start()

    def stop(self, grace: float = TERM_SECONDS, number: int = signal.SIGTERM) -> None:
        """As of `Cluster`."""
        super().stop(grace, number)
        self._free()

    def place(self, task: Task) -> TaskLocation:
        """Where a task runs, or ran last."""
        return self._places[task]

    # ---- Room ----

    def _bundle(self, task: Task) -> Mapping[str, float]:
        """What a task takes."""
        if task.job == "ps":
            return self.resources.ps
        return DRIVES if task.job == "chief" and self.config.chief == "driver" else self.resources.worker

    def _await_room(self, bundles: list[dict[str, float]]) -> None:
        limit = self.config.timeouts.start_timeout
        until = time.monotonic() + limit

        asked = _summed(bundles)
        wanted = f"room for {len(bundles)} tasks of {_said(asked)} ({self.resources.placement})"

        def there() -> str:
            has, free = ({name: found.get(name, 0) for name in asked} for found in _resources())
            return f"it has {_said(has)}, of which {_said(free)} are free"

        word = Reminder(
            self.config.timeouts.report_interval,
            lambda: self._tell(self._order[0], f"psworker: waiting for Ray to have {wanted}: {there()}"),
        )
        while not self._group.wait(SLICE_SECONDS):
            word.look()
            if time.monotonic() > until:
                raise ConfigError(
                    f"Ray had no {wanted} within {limit:g} s (PS_START_TIMEOUT): {there()}; request less with "
                    "--ps-resources and --worker-resources, or add nodes"
                )

    def _free(self) -> None:
        if self._group is not None:
            ray_package().util.remove_placement_group(self._group)
            self._group = None

    # ---- Actors ----

    def _make_actor(self, task: Task) -> None:
        ray, bundle = ray_package(), dict(self._bundle(task))
        index = self._order.index(task)
        placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, index)
        self._made += 1
        options = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0)}
        options |= {"memory": bundle.pop("memory")} if "memory" in bundle else {}
        made = ray.remote(AgentActor).options(
            **options,
            resources=bundle,
            scheduling_strategy=placed,
            max_concurrency=8,  # one waits for output, and signals shall not
            name=f"paramserver {self.job} {task} {self._made}",
        )
        self._waiting[task] = made.remote()

    def _settle(self, task: Task, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Makes the actor of a task that is started again; where its node is gone, Ray moves its bundle first."""
        until = time.monotonic() + self.config.timeouts.start_timeout
        while True:
            try:
                self._make_actor(task)
                return self._look(task, unwanted)
            except _NotThere:
                if time.monotonic() > until or unwanted():
                    raise
                time.sleep(SLICE_SECONDS)

    def _look(self, task: Task, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Finds out where the actor of a task is.

        Raises:
            _NotThere: Ray could not run it.
            ConfigError: no task can be run there.
            Unreachable: it did not answer in time, or nobody wants it any more.
        """
        ray = ray_package()
        asked = self._waiting[task].look.remote(os.getcwd(), self.config.script)
        until = time.monotonic() + self.config.timeouts.start_timeout
        while not ray.wait([asked], timeout=SLICE_SECONDS)[0]:
            if time.monotonic() > until or self._signals or unwanted():
                ray.kill(self._waiting.pop(task))
                raise Unreachable("Ray did not start its actor in time; see `ray status`", str(task))
        try:
            found: NodeReport = ray.get(asked)
        except ray.exceptions.RayError as error:
            del self._waiting[task]
            raise _NotThere(f"Ray cannot run its actor: {last_line(error)}", str(task)) from error
        name = f"{found.host} ({found.address})"
        found.check_version(name, "the driver")
        if not found.script:
            raise ConfigError(
                f"{name} has {self.config.script} neither in Ray's working_dir nor in {os.getcwd()}; start the driver "
                "with a working_dir: ray job submit --working-dir . -- psworker --ray auto ..., or "
                'ray.init(runtime_env={"working_dir": "."})'
            )
        self._ports[task] = found.port
        self._places[task] = TaskLocation(name, found.address, found.address, found.where, 1)

    # ---- Tasks ----

    def _server(self, task: Task, port: int) -> RemoteProcess:
        if task in self._waiting:
            return super()._server(task, port)
        if self.config.replication_factor > 1:
            # The job goes on meanwhile, and is watched.
            return self._again(task, lambda: self._order_of_server(task, port))
        before = self.place(task).address
        self._settle(task)
        if self.place(task).address == before:
            return super()._server(task, port)
        # Nothing goes on before it is there: the others get its address.
        self.processes[task] = process = super()._server(task, 0)
        line = self._await_server(task)
        self.addresses[task] = self._address(task, address_in(line))
        self._tell(task, line, error=False)
        return process

    def _order_of_server(self, task: Task, port: int) -> Order:
        """The order for a server that is started again: at its address, or on another node, where it waits."""
        place, options = self.place(task), self.config.server
        if join_address(place.address, port) == self.addresses[task]:
            arguments = server_arguments(task, place.listen, port, options)
        else:
            servers = [address for _, address in sorted(self.addresses.items())]
            arguments = waiting_server_arguments(servers, place.listen, self._ports[task], options)
        return self._order_of(task, "psserver", arguments + self._server_flags(task), self.server_environ)

    def _client(self, task: Task) -> RemoteProcess:
        if task in self._waiting:
            return super()._client(task)
        more = {**self._told(task), **self.client_environ}
        return self._again(task, lambda: self._order_of(task, "psclient", self._arguments(task), more))

    def _again(self, task: Task, order: Callable[[], Order]) -> RayTask:
        """Starts a task again, once there is room for its actor."""

        def prepare(unwanted: Callable[[], bool]) -> Prepared:
            self._settle(task, unwanted)
            return self._waiting.pop(task), order()

        self._agents[task] = again = self._task(task, prepare)
        return again

    def _begin(self, task: Task, order: Order) -> RayTask:
        actor = self._waiting.pop(task)
        return self._task(task, lambda unwanted: (actor, order))

    def _task(self, task: Task, prepare: Callable[[Callable[[], bool]], Prepared]) -> RayTask:
        return RayTask(prepare, lambda: self.lost.format(self.place(task).name))

    def _order_of(self, task: Task, program: str, arguments: list[str], more: Mapping[str, str]) -> Order:
        order = super()._order_of(task, program, arguments, more)
        threads = str(max(1, int(self._bundle(task).get("CPU", 1))))
        return replace(order, variables={**dict.fromkeys(THREADS, threads), **order.variables})


def _resources() -> list[dict[str, float]]:
    """What the Ray cluster has, and what is free of that."""
    ray = ray_package()
    return [ray.cluster_resources(), ray.available_resources()]


def _summed(bundles: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}


def _said(resources: Mapping[str, float]) -> str:
    """Resources in words, such as `CPU 4, GPU 2`."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
