"""Prints what this project and some of its extras depend on: `requirements.py [EXTRA ...]`, beside pyproject.toml."""

from __future__ import annotations

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
unknown = [name for name in sys.argv[1:] if name not in extras]
if unknown:
    sys.exit(f"pyproject.toml has no extra {unknown[0]!r}; it has {', '.join(sorted(extras))}")
wanted = [*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name])]
sys.stdout.writelines(f"{line}\n" for line in wanted)
