"""The public surface of `psclient`, by module: `python tools/surface.py [--write]`.

`tests/psclient/surface.txt` has it. A name that is added or goes shows there, in the review of the change.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent

LISTED = ROOT / "tests" / "psclient" / "surface.txt"

MODULES = (
    *("psclient", "psclient.cluster_resolver", "psclient.compression", "psclient.coordinator"),
    *("psclient.dynamic_embedding", "psclient.experimental", "psclient.experimental.partitioners"),
    *("psclient.initializers", "psclient.losses", "psclient.metrics", "psclient.nn", "psclient.ops"),
    *("psclient.optimizers", "psclient.optimizers.schedules", "psclient.summary", "psclient.train"),
    *("psclient.jax", "psclient.jax.optimizers", "psclient.torch"),
)

OURS = ("psclient", "pswire")


def lines(module: ModuleType) -> Iterator[str]:
    """Yields a line for each public name of a module; of a class of ours with its public attributes."""
    names = getattr(module, "__all__", None)
    for name, value in sorted(
        vars(module).items() if names is None else ((name, getattr(module, name)) for name in names)
    ):
        if names is None and (name.startswith("_") or getattr(value, "__module__", "") != module.__name__):
            continue  # a module that has no list has all that it defines
        if inspect.isclass(value) and value.__module__.startswith(OURS):
            yield f"{module.__name__}.{name}: {' '.join(attributes(value))}".rstrip()
        else:
            yield f"{module.__name__}.{name}"


def attributes(kind: type) -> list[str]:
    """Returns the public attributes of a class, also of its bases, as far as these are ours."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith(OURS)]
    return sorted({name for base in bases for name in vars(base) if not name.startswith("_")})


def surface(known: str) -> str:
    """Returns the surface; of modules whose framework is not installed what is known of them.

    Args:
        known: the text that is listed.
    """
    found: list[str] = []
    for name in MODULES:
        try:
            found += lines(importlib.import_module(name))
        except ImportError:
            found += [line for line in known.splitlines() if line.partition(":")[0].rpartition(".")[0] == name]
    return "\n".join(found) + "\n"


def main() -> int:
    known = LISTED.read_text() if LISTED.exists() else ""
    now = surface(known)
    if "--write" in sys.argv:
        LISTED.write_text(now)
    elif now != known:
        print(f"the public surface has changed: python {Path(__file__).name} --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
