"""Installed versions of this package, of Python, and of what matters between processes."""

from __future__ import annotations

import platform
from functools import cache
from types import MappingProxyType

PACKAGES = ("paramserver", "grpcio", "numba", "numpy", "protobuf", "cupy", "cupy-cuda12x", "cupy-cuda13x")
"""Names of packages, as package indexes write them."""


def version(name: str = PACKAGES[0]) -> str:
    """Returns the version of an installed package; raises `ModuleNotFoundError` if it is not installed."""
    from importlib import metadata  # it parses mail headers: no process waits for it at its start

    return metadata.version(name)


@cache
def versions() -> MappingProxyType[str, str]:
    """Versions by name, without those that are not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return MappingProxyType(found)
