"""Files that are given by name, and names from elsewhere."""

from __future__ import annotations

import os

import pytest

from pswire.checkpoint.reader import open_saved
from pswire.errors import CheckpointError, ConfigError
from pswire.security.given import printable, read_small
from pswire.security.identity import SecurityOptions
from tests.kit.storage import write_checkpoint
from tests.psclient.psctl.test_checkpoint import VALUES


def test_a_file_without_an_end_is_refused(tmp_path):
    """A device, or a file that is too large for what it should be; a pipe is read as a shell gives it."""
    for text in (lambda: read_small("/dev/zero"), lambda: SecurityOptions(token_file="/dev/zero").read("worker-0")):
        with pytest.raises(ConfigError, match="/dev/zero has more than 4 MiB"):
            text()
    (tmp_path / "small").write_bytes(b"12345")
    assert read_small(tmp_path / "small", 5) == b"12345"
    with pytest.raises(ConfigError, match="small has more than"):
        read_small(tmp_path / "small", 4)
    reads, writes = os.pipe()
    os.write(writes, b"token")
    os.close(writes)
    assert read_small(f"/dev/fd/{reads}") == b"token"
    os.close(reads)


def test_a_fifo_is_no_checkpoint(tmp_path):
    """Nobody waits for a writer: the error names it, since what is newest is not known."""
    write_checkpoint(tmp_path / "run" / "ckpt-1", VALUES)
    (tmp_path / "run" / "ckpt-9").mkdir()
    os.mkfifo(tmp_path / "run" / "ckpt-9" / "manifest.json")
    with pytest.raises(CheckpointError, match=r"ckpt-9/manifest\.json cannot be read: .*it is not a regular file"):
        open_saved(str(tmp_path / "run"))


def test_what_steers_a_terminal_is_written_out():
    """Lines and tabs stay."""
    assert printable("\x1b[31m\ta\nb\x07\x9b2J\r") == "\\x1b[31m\ta\nb\\x07\\x9b2J\\x0d"
    assert printable("Größe 数 🙂") == "Größe 数 🙂"
