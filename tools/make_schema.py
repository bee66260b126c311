"""Writes configs/schema.json, by which editors check the files that `psworker --config` reads."""

from __future__ import annotations

import json
from pathlib import Path

from psclient._src.launch.config_file import schema

TARGET = Path(__file__).resolve().parent.parent / "configs" / "schema.json"

if __name__ == "__main__":
    TARGET.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
