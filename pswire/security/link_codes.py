"""Codes in links to status pages: each is good for an hour, for reading, on all pages of one job.

A code has the time at which it ends, a tag of the job, and an HMAC of both by the job's token. So a server keeps
nothing to check one, and nobody can make one without the token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Literal

GOOD_SECONDS = 3600
"""Seconds for which a code is good."""

TAG_DIGITS = 8
"""Of the tag, by which a code of another job is told from one that was changed."""

_CODE = re.compile(r"([0-9a-f]{1,12})-([0-9a-f]{8})-([0-9a-f]{64})")

Refusal = Literal["missing", "malformed", "other job", "wrong", "over"]
"""Why a code is not taken."""


def make_code(token: str, now: float) -> str:
    """Returns a code that is good for an hour.

    Args:
        token: the job's token.
        now: the time in Unix seconds, by the clock of the server that will check it.
    """
    said = f"{int(now) + GOOD_SECONDS:x}-{tag_of(token)}"
    return f"{said}-{_mac(token, said)}"


def check_code(token: str, code: str, now: float) -> Refusal | None:
    """Returns why a code is not taken; None if it is.

    Args:
        token: the job's token.
        code: the code, as it came from the network.
        now: the time in Unix seconds.
    """
    if not code:
        return "missing"
    found = _CODE.fullmatch(code)
    if found is None:
        return "malformed"
    end, tag, mac = found.groups()
    if not hmac.compare_digest(mac, _mac(token, f"{end}-{tag}")):
        return "wrong" if hmac.compare_digest(tag, tag_of(token)) else "other job"
    return "over" if int(end, 16) <= now else None


def seconds_left(code: str, now: float) -> float:
    """Returns for how long a code that `check_code` has taken is good."""
    return int(code.partition("-")[0], 16) - now


def tag_of(token: str) -> str:
    """Returns the tag of the job with a token. It tells nothing of the token, and is the same in all its processes."""
    return hmac.new(token.encode(), b"paramserver: tag of a job", hashlib.sha256).hexdigest()[:TAG_DIGITS]


def _mac(token: str, said: str) -> str:
    return hmac.new(token.encode(), f"paramserver: status page until {said}".encode(), hashlib.sha256).hexdigest()
