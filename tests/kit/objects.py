"""An object store that speaks S3, on loopback, for as long as a test needs it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """Runs one with an empty bucket; gives what the environment of its clients has to say."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    said = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in said.items():
                patch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            urllib.request.urlopen(f"{said['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"").close()
            s3fs.S3FileSystem().mkdir(BUCKET)
            yield said
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
