"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import pytest

from pswire.errors import ConfigError
from pswire.sizes import human, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), ("3mib", 3 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    """Binary and decimal units mean what they say."""
    assert parse_bytes(text, "--memory-limit") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 Gi", "1,5GiB"])
def test_what_is_no_size(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ConfigError, match="--memory-limit"):
        parse_bytes(text, "--memory-limit")


@pytest.mark.parametrize(("text", "wrong"), [("abc", "no size"), ("0", "too little"), ("1023KiB", "too little")])
def test_a_size_may_have_a_least(text: str, wrong: str) -> None:
    """What is no size, and what is less, is told the least; nobody is sent to 0, which is less too."""
    with pytest.raises(ConfigError, match=f"--in-flight .*{wrong}.*at least 1 MiB$"):
        parse_bytes(text, "--in-flight", 1 << 20)
    assert parse_bytes("1MiB", "--in-flight", 1 << 20) == 1 << 20


@pytest.mark.parametrize("text", ["0 bytes", "1023 bytes", "1 KiB", "1.5 MiB", "7 GiB", "2048 TiB"])
def test_sizes_are_read_as_they_are_written(text: str) -> None:
    """What people are shown means the same on a command line."""
    size = parse_bytes(text.removesuffix("bytes"), "here")
    assert human(size) == text
