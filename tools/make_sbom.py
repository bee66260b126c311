"""Writes bills of materials: `make_sbom.py FOLDER` makes NAME.cdx.json of each set of pins that programs run with.

CycloneDX, with the digests of all files of each package. They are made of the locks, so that they are the same
wherever they are made, and need no network. The programs themselves are the component that a bill is about.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from make_locks import LOCKS, OF_PROGRAMS, ROOT

SPEC_VERSION = "1.6"


def write(lock: str, folder: Path) -> Path:
    """Writes the bill of one lock; returns its path. `make dist-check` holds it against CycloneDX's schema.

    Raises:
        subprocess.CalledProcessError: the lock cannot be read; stderr says why.
    """
    path = folder / f"paramserver-{lock}.cdx.json"
    command = [
        sys.executable,
        "-W",
        "ignore::UserWarning",
        "-m",
        "cyclonedx_py",
        "requirements",
        str(LOCKS / f"{lock}.lock"),
    ]
    about = ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"]
    how = ["--output-reproducible", "--spec-version", SPEC_VERSION, "--of", "JSON", "--no-validate"]
    subprocess.run([*command, *about, *how, "--output-file", str(path)], check=True)
    return path


def main() -> None:
    """Writes the bills into the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for lock in ("runtime", *OF_PROGRAMS):
        write(lock, folder)


if __name__ == "__main__":
    main()
