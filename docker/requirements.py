"""Prints which of the locks an image installs: `requirements.py [EXTRA ...]`, beside pyproject.toml and locks/."""

from __future__ import annotations

import sys
from pathlib import Path

here = sorted(path.stem for path in Path("locks").glob("*.lock"))
extras = [name for name in here if name not in ("build", "dist", "runtime")]
unknown = [name for name in sys.argv[1:] if name not in extras]
if unknown:
    sys.exit(f"there is no lock of an extra {unknown[0]!r}; there are {', '.join(extras)}")
sys.stdout.writelines(f"-r locks/{name}.lock\n" for name in sys.argv[1:] or ["runtime"])
