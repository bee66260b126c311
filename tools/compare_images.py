"""Compares two images, or containers' file systems: `compare_images.py FIRST SECOND`, with docker.

Each file of one has to be in the other, with the same bytes, owner and mode. Times are passed over: those of the files
that a release installs are fixed by the Dockerfile, and those of directories that a layer touches by the builder alone
(BuildKit's `rewrite-timestamp`). It prints what differs, and exits with 1 where something does.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile

Entry = tuple[bytes, int, int, int, str, str]

OF_THE_BUILDER = {".dockerenv", "etc/hostname", "etc/hosts", "etc/resolv.conf", "dev/console"}
"""Files that docker makes for each container."""


def contents(image: str) -> dict[str, Entry]:
    """All files of an image: kind, mode, owner and group, where a link leads, and a digest of the bytes."""
    made = subprocess.run(["docker", "create", image, "true"], check=True, stdout=subprocess.PIPE, text=True)
    container = made.stdout.strip()
    found: dict[str, Entry] = {}
    try:
        with (
            subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export,
            tarfile.open(fileobj=export.stdout, mode="r|") as archive,
        ):
            for one in archive:
                file = archive.extractfile(one) if one.isreg() else None
                digest = hashlib.file_digest(file, "sha256").hexdigest() if file else ""
                found[one.name] = (one.type, one.mode, one.uid, one.gid, one.linkname, digest)
    finally:
        subprocess.run(["docker", "rm", container], check=True, stdout=subprocess.DEVNULL)
    return {name: entry for name, entry in found.items() if name not in OF_THE_BUILDER}


def main() -> None:
    """Exits with 0 where both have the same files, with 1 and their names where not."""
    first, second = (contents(image) for image in sys.argv[1:3])
    differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    sys.stdout.writelines(f"{name}: {first.get(name)} and {second.get(name)}\n" for name in differ)
    sys.stdout.write(f"{len(first)} and {len(second)} files, {len(differ)} differ\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
