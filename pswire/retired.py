"""Names that options, environment variables and commands had before the first release.

A name that is given and no longer known would be an ordinary typing error; these say what to write now. There are no
aliases.
"""

VARIABLES = {
    "PS_AGGREGATION": "PS_LOCAL_REDUCTION",
    "PS_LANE": "PS_TRANSPORT",
    "PS_REFUSED": "PS_CONNECTION_REFUSED",
    "PS_REPLICATION": "PS_REPLICATION_FACTOR",
    "PS_TIMEOUT_ALONE": "PS_NO_WORKERS_TIMEOUT",
    "PS_TIMEOUT_BEAT": "PS_HEARTBEAT_INTERVAL",
    "PS_TIMEOUT_CALL": "PS_CALL_TIMEOUT",
    "PS_TIMEOUT_CHIEF": "PS_CHIEF_TIMEOUT",
    "PS_TIMEOUT_FIRST": "PS_FIRST_WORKER_TIMEOUT",
    "PS_TIMEOUT_GRACE": "PS_TERMINATION_GRACE",
    "PS_TIMEOUT_LEASE": "PS_SESSION_TIMEOUT",
    "PS_TIMEOUT_ROUND": "PS_ROUND_TIMEOUT",
    "PS_TIMEOUT_SERVER": "PS_SERVER_TIMEOUT",
    "PS_TIMEOUT_START": "PS_START_TIMEOUT",
    "PS_TIMEOUT_WORD": "PS_REPORT_INTERVAL",
}
"""Environment variables."""

OPTIONS = {
    "aggregation": "local_reduction",
    "lane": "transport",
    "refused": "connection_refused",
    "replication": "replication_factor",
} | {
    old.removeprefix("PS_TIMEOUT_").lower(): new.removeprefix("PS_").lower()
    for old, new in VARIABLES.items()
    if old.startswith("PS_TIMEOUT_")
}
"""Options, as keys of a configuration file have them; a flag has dashes."""

COMMANDS = {"page": "dashboard", "recent": "events", "end": "delete"}
"""Commands of `psctl` and of its groups."""

NOTES = {"PS_REPLICATION": "it counts the original too: 2 in place of 1", "replication": "2 in place of 1"}
"""What else differs."""


def renamed(name: str, known: dict[str, str]) -> str:
    """Returns what to say of a retired name; "" for any other one.

    Args:
        name: the name that was given.
        known: one of the tables above.
    """
    if name not in known:
        return ""
    note = f" ({NOTES[name]})" if name in NOTES else ""
    return f"is called {known[name]} now{note}"
