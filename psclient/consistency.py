"""How updates of different workers relate to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sync:
    """Synchronous rounds: every update includes each member's contribution once and whole."""
