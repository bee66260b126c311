"""Pins what images and releases are made of: `make lock` writes locks/NAME.lock, with uv, for all Pythons at once.

Each file is complete for itself, and they agree with one another: all are cut out of one resolution. With --upgrade
the newest releases are taken, else what is pinned stays where pyproject.toml lets it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
PYTHON = "3.11"
"""The oldest Python that is supported: what is pinned suits it and all later ones."""

OF_PROGRAMS = ("s3", "gpu", "gpu-cuda13", "jax", "examples", "summary", "otel", "ray", "simulation")
"""Extras with which the programs are installed: a lock of each has what the programs need, and the extra.

Not torch: which of its builds is wanted, for CPUs or for which CUDA, says the index that it is taken from.
"""

OF_TOOLS = ("dist",)
"""Extras of tools, which are installed without the programs."""

BESIDE = {"gpu": ["nvidia-cuda-runtime-cu12==12.6.*"]}
"""What an image needs beside an extra: CuPy compiles while it runs, and NVIDIA's runtime image has no headers."""


def requirements() -> dict[str, list[str]]:
    """The requirements of each lock, by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    own, extras = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    programs = {name: [*own, *extras[name], *BESIDE.get(name, [])] for name in OF_PROGRAMS}
    tools = {name: list(extras[name]) for name in OF_TOOLS}
    return {"runtime": list(own), **programs, **tools, "build": list(project["build-system"]["requires"])}


def compile_into(path: Path, wanted: list[str], *flags: str) -> None:
    """Writes the pins of some requirements, with the digests of all their files; what the file pins is preferred.

    Raises:
        SystemExit: uv finds no versions; it has said why.
    """
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--universal", "--python-version", PYTHON]
    told = [*command, "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", *flags]
    lines = "\n".join(wanted)
    done = subprocess.run(
        [*told, "--output-file", str(path)], input=lines, stdout=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Writes all locks anew."""
    kept = [] if "--upgrade" in sys.argv[1:] else [path.read_text(encoding="utf-8") for path in LOCKS.glob("*.lock")]
    pins = sorted({line.removesuffix(" \\") for text in kept for line in text.splitlines() if line[:1].isalnum()})
    wanted = requirements()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole.txt")
        whole.write_text("\n".join(pins), encoding="utf-8")
        compile_into(whole, sorted({line for lines in wanted.values() for line in lines}))
        LOCKS.mkdir(exist_ok=True)
        for name, lines in wanted.items():
            made = Path(scratch, f"{name}.txt")
            compile_into(made, lines, "--constraints", str(whole))
            head = f"# Pinned by `make lock`, from pyproject.toml: {name}.\n"
            (LOCKS / f"{name}.lock").write_text(head + made.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
