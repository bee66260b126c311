"""Processes that kill themselves at a point of a save or a restore.

Run as a program: `dying.py POINT server|chief ...`. Nothing but the point differs from
`psserver`, or from a chief without a script.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def die(*_: object) -> None:
    """Ends as a machine does that loses its power."""
    os.kill(os.getpid(), signal.SIGKILL)


def _half(file: Any, data: Any) -> None:
    file.write(data[: len(data) // 2])
    file.flush()
    die()


def _server(point: str) -> None:
    from pswire.checkpoint import safetensors_stream, storage
    from pswire.checkpoint.manifest import MANIFEST
    from pswire.model.tensor import as_bytes

    directory, replace, put = storage.Directory, os.replace, storage.Directory.put

    def at_name(source: Any, target: Any) -> None:
        if (os.path.basename(target) == MANIFEST) == (point == "naming the manifest"):
            die()
        replace(source, target)

    def after(self: Any, path: str, data: bytes) -> None:
        put(self, path, data)
        die()

    match point:
        case "before a shard":
            directory.write = die  # type: ignore[method-assign, assignment]
        case "in a shard":
            safetensors_stream.append = lambda file, arrays: _half(file, as_bytes(next(iter(arrays))))  # type: ignore[assignment, return-value]
        case "naming a shard" | "naming the manifest":
            storage.os.replace = at_name  # type: ignore[assignment]
        case "before the manifest":
            directory.put = die  # type: ignore[method-assign, assignment]
        case "in the manifest":
            directory.put = lambda self, path, data: self.write(path, lambda file: _half(file, data))  # type: ignore[method-assign]
        case "after the manifest":
            directory.put = after  # type: ignore[method-assign]
        case "in a restore":
            safetensors_stream.read = die  # type: ignore[assignment]
        case _:
            raise ValueError(point)


def _chief(point: str) -> None:
    from psclient._src.transport.remote_server import RemoteServer

    ask = RemoteServer.snapshot

    def asking(self: RemoteServer, token: int, plan_id: bytes, manifest: str) -> Any:
        if point == ("before the manifest" if manifest else "before the shards"):
            die()
        answer = ask(self, token, plan_id, manifest)
        if point == ("after the manifest" if manifest else "after a shard"):
            answer.result()
            die()
        return answer

    if point not in ("before the shards", "after a shard", "before the manifest", "after the manifest", "never"):
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
        drive(config, Timeouts(lease=60.0), security_from("chief-0"), "", "lost")


if __name__ == "__main__":
    main(*sys.argv[1:])
