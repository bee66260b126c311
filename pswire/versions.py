"""Which versions of this package, of Python, and of what matters between processes are installed."""

from __future__ import annotations

import platform
from functools import cache
from types import MappingProxyType

PACKAGES = ("paramserver", "grpcio", "numba", "numpy", "protobuf", "cupy", "cupy-cuda12x", "cupy-cuda13x")
"""As package indexes name them."""


@cache
def versions() -> MappingProxyType[str, str]:
    """Versions by name, without those that are not installed."""
    from importlib import metadata  # which parses mail headers: no process waits for it at its start

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return MappingProxyType(found)
