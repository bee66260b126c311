"""Checks that the committed pswire/pb is what protoc makes of protos/; with --write, makes it so."""

from __future__ import annotations

import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = ROOT / "pswire" / "pb"


def generate(into: Path) -> list[Path]:
    """Runs protoc; returns the generated files."""
    sources = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.glob("*.proto"))]
    flags = [f"-Ipswire/pb={PROTOS}", f"--python_out={into}", f"--pyi_out={into}"]
    if protoc.main(["protoc", *flags, *[f"pswire/pb/{source}" for source in sources]]):
        sys.exit("check_proto: protoc refused protos/")
    return sorted((into / "pswire" / "pb").iterdir())


def main() -> None:
    """Exits with 1 where the committed code differs."""
    with tempfile.TemporaryDirectory() as scratch:
        files = generate(Path(scratch))
        if "--write" in sys.argv:
            for file in files:
                shutil.copyfile(file, GENERATED / file.name)
            return
        stale = [file.name for file in files if not _same(file, GENERATED / file.name)]
    if stale:
        sys.exit(f"check_proto: {', '.join(stale)} in pswire/pb is not what protos/ says; run `make proto`")


def _same(new: Path, committed: Path) -> bool:
    return committed.exists() and filecmp.cmp(new, committed, shallow=False)


if __name__ == "__main__":
    main()
