"""Code of processes that tests start: children of workers; servers that die at a point of a save, or hold a read back.

It imports nothing of ours before that is needed, so that a child starts soon, however it is started. Run as a program:
`children.py POINT server|chief ...`; nothing but the point differs from `psserver`, or from a chief without a script.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

METHODS = ("fork", "spawn", "forkserver")
"""Ways of `multiprocessing` to start a process."""


def doubled(value: Any) -> tuple[int, Any]:
    """The process that computes it, and the double."""
    return os.getpid(), 2 * np.asarray(value)


def put_doubled(queue: Any, value: Any) -> None:
    """Puts what `doubled` returns into a queue."""
    queue.put(doubled(value))


# ---- Processes that fail ----


def die(*_: object) -> None:
    """Ends as a machine does that loses its power."""
    os.kill(os.getpid(), signal.SIGKILL)


def _half(file: Any, data: Any) -> None:
    file.write(data[: len(data) // 2])
    file.flush()
    die()


def _server(point: str) -> None:
    from pswire.checkpoint import safetensors_stream, storage
    from pswire.model.tensor import as_bytes

    directory, put = storage.Directory, storage.Directory.put

    def after(self: Any, path: str, data: bytes) -> None:
        put(self, path, data)
        die()

    match point:
        case "in a shard":
            safetensors_stream.append = lambda file, arrays: _half(file, as_bytes(next(iter(arrays))))  # type: ignore[assignment, return-value]
        case "in the manifest":
            directory.put = lambda self, path, data: self.write(path, lambda file: _half(file, data))  # type: ignore[method-assign]
        case "after the manifest":
            directory.put = after  # type: ignore[method-assign]
        case _:
            raise ValueError(point)


def _chief(point: str) -> None:
    from psclient._src.network.remote_server import RemoteServer

    ask = RemoteServer.snapshot

    def asking(self: RemoteServer, token: int, plan_id: bytes, manifest: str) -> Any:
        if point == "before the shards":
            die()
        answer = ask(self, token, plan_id, manifest)
        if manifest and point == "after the manifest":
            answer.result()
            die()
        return answer

    if point not in ("before the shards", "after the manifest", "never"):
        raise ValueError(point)
    RemoteServer.snapshot = asking  # type: ignore[method-assign]


def main(point: str, kind: str, *args: str) -> None:
    """Runs a server with these flags, or a chief of the cluster in TF_CONFIG, until it dies."""
    if kind == "server":
        _server(point)
        from psserver.cli import main as serve

        serve(args)
    else:
        _chief(point)
        from psclient._src.config import security_from
        from psclient._src.launch.chief import drive
        from pswire.cluster import parse_tf_config
        from pswire.limits import Timeouts

        config = parse_tf_config(args[0])
        assert config is not None
        drive(config, Timeouts(session_timeout=60.0), security_from("chief-0"), "", "lost")


def _beginning_with(place: Path, code: str) -> dict[str, str]:
    """Returns what the environment of processes has to have so that each of them runs some code first."""
    place.mkdir(parents=True)
    (place / "sitecustomize.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}


DYING = """
import sys

args = sys.orig_argv
if "psserver" in args and args[args.index("--task") + 1] == "{server}":
    sys.path.append("{root}")
    from tests.kit.children import _server

    _server("{point}")
"""


def dies(directory: Path, server: int, point: str) -> dict[str, str]:
    """Returns what the environment of servers has to have so that one of them dies at a point of its first save."""
    code = DYING.format(server=server, point=point, root=Path(__file__).parents[2])
    return _beginning_with(directory / "dying", code)


HOLDING = """
import os
import sys
import time

if "psserver" in sys.orig_argv:
    from psserver.checkpoints.handover import Handover

    read = Handover._read

    def held(self, order, *rest):
        parent = os.getppid()  # a test that was killed lets nobody read any more
        while os.getppid() == parent and not os.path.exists(os.path.join("{directory}", "read")):
            time.sleep(0.01)
        return read(self, order, *rest)

    Handover._read = held
"""


def holds_reading(directory: Path) -> dict[str, str]:
    """Returns what the environment of servers has to have so that they wait for `let_read` of that directory."""
    place = directory / "reading"
    return _beginning_with(place, HOLDING.format(directory=place))


def let_read(directory: Path) -> None:
    """Lets servers read, now and from now on."""
    (directory / "reading" / "read").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
