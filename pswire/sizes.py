"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

from pswire.errors import ConfigError

_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, where: str, least: int = 0) -> int:
    """Reads a size such as `4GiB`, `500MB` or plain bytes; returns bytes.

    Args:
        text: the size.
        where: the option it is given for, such as `--memory-limit`; for messages.
        least: the smallest size allowed, in bytes.

    Raises:
        ConfigError: the text is no size, or the size is too small.
    """
    match = _SIZE.fullmatch(text)
    if not match or match[2].upper() not in _BYTES:
        ends = f"and at least {human(least)}" if least else "or 0 for none"
        raise ConfigError(f"{where} {text!r} is not a size; write bytes with a unit, such as 4GiB, {ends}")
    size = int(float(match[1]) * _BYTES[match[2].upper()])
    if size < least:
        raise ConfigError(f"{where} {text} is too small; give at least {human(least)}")
    return size


def human(nbytes: int) -> str:
    """Formats a number of bytes for people: `1.5 GiB`."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def counted(count: int, what: str) -> str:
    """Formats how many there are of something: `1 variable`, `2 variables`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
