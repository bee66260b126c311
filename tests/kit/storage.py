"""Where checkpoints and tables lie: disks, an object store that speaks S3, checkpoints written by other means."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
import xxhash
from moto.server import ThreadedMotoServer
from safetensors.numpy import save_file

from psserver.tiers.tier import Tier
from tests.kit.internals import MANIFEST, Array, ConfigError, Manifest, Position, Saved, as_bytes, spec_of


def write_checkpoint(
    path: Path, values: Mapping[str, Array], shards: int = 2, checksums: bool = True, **more: Any
) -> Path:
    """Writes a checkpoint of some variables, dealt out over files.

    Args:
        path: its directory.
        values: by name.
        shards: how many files.
        checksums: whether the manifest has any.
        more: fields of the manifest; the round is 7 where it is not given.
    """
    path.mkdir(parents=True)
    files, tensors = {}, {}
    for place in range(shards):
        file = f"shard-{place:05d}-of-{shards:05d}.safetensors"
        mine = dict(sorted(values.items())[place::shards])
        parted = {name: "complex128" for name, value in mine.items() if value.dtype == np.complex128}
        save_file({name: _laid_out(value) for name, value in mine.items()}, path / file, parted or None)
        files[file] = (path / file).stat().st_size
        for name, value in mine.items():
            digest = xxhash.xxh3_128_hexdigest(as_bytes(np.ascontiguousarray(value)))
            tensors[name] = Saved(file, spec_of(value), f"xxh3:{digest}" if checksums else "")
    said = {"round": 7, "positions": (Position(0, 1, 5),), "saved_at": 1e9, "library": "a test"} | more
    (path / MANIFEST).write_text(Manifest(tensors=tensors, files=files, **said).text(), encoding="utf-8")
    return path


def _laid_out(value: Array) -> Array:
    if value.dtype != np.complex128:
        return np.ascontiguousarray(value).reshape(value.shape)
    return np.stack([value.real, value.imag], axis=-1)


ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def disk() -> Iterator[Path]:
    """Gives an empty directory that a tier takes; skips the test where this machine has none."""
    for where in (Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT):
        directory = Path(tempfile.mkdtemp(prefix="tier-", dir=where))
        try:
            Tier(str(directory), 1 << 20).close()
        except ConfigError:
            shutil.rmtree(directory)
            continue
        try:
            yield directory
        finally:
            shutil.rmtree(directory)
        return
    pytest.skip("this machine has no disk for the files of tables")


def on_small_disk(script: str, directory: Path, size: str) -> list[str]:
    """Runs a script, whose argument is a directory on a disk of a size, such as 8m; returns the lines that it prints.

    A file system of memory stands for the disk: the script has a tier take it.
    Skips the test where none can be mounted.
    """
    enter = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    shell = 'mount -t tmpfs -o size="$1" none "$2" && exec "$3" -c "$4" "$2"'
    command = [*enter, "sh", "-c", shell, "sh", size, str(directory), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


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
