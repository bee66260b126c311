"""The number of the protocol: the meaning and the bytes of the verbs, of gRPC's frames, and of the transports.

Both ends say theirs when a session opens, a client again on each transport. Each end serves its own number and that of
the version before, so that servers and workers may be replaced one after the other. A change of the bytes that the
other end has to know, or of what they mean, is a new number.
"""

from __future__ import annotations

from pswire.errors import ConfigError
from pswire.model.log import Mode

PROTOCOL = 4
"""The number of this version.

0 is spoken by versions that say none; 1 by those whose servers know nothing of one another, so that each decides alone
whose contributions a round has; 2 by those that know no dynamic tables, and take a part of one for an array of as many
rows as a contribution may have, and no bounded staleness; 3 by those that take what is compressed for what is not,
whose server 0 hands out no batches, and which keep the consistency with which a job began.
"""

TABLES = 3
"""The first number whose servers know dynamic tables."""

CLOSURES = 3
"""The first number whose servers know closures."""

BACKUP_WORKERS = 3
"""The first number whose servers make rounds without the last of their members."""

STALENESS = 3
"""The first number whose servers bound the staleness of workers."""

COMPRESSION = 4
"""The first number whose servers know compressed contributions."""

CHUNKS = 4
"""The first number whose server 0 hands out batches."""

CHANGES = 4
"""The first number whose servers change the consistency of a job that runs."""

HEARTBEATS = 4
"""The first number whose servers take heartbeats on transports."""

ALONE = 4
"""The first number whose servers know rounds of one worker in a job whose workers make rounds together."""

OLDEST = 2
"""That of the version before this one; the numbers after it are of this one's making, and of no other version."""

SERVED = tuple(range(OLDEST, PROTOCOL + 1))


def spoken_with(number: int) -> int:
    """Returns the number that this end answers a peer with: the lower one of both, since older peers know no higher."""
    return min(number, PROTOCOL)


def check_protocol(number: int, theirs: str, ours: str) -> None:
    """Refuses a peer whose protocol this end does not serve.

    Args:
        number: the peer's protocol number.
        theirs: words for the peer, for the message.
        ours: words for this end, for the message.

    Raises:
        ConfigError: this end does not serve the number.
    """
    if number not in SERVED:
        raise ConfigError(
            f"{theirs} speaks protocol {number}, and {ours} {OLDEST} to {PROTOCOL}; install the same version of "
            "paramserver for both"
        )


def check_tables(number: int, table: str, theirs: str, ours: str) -> None:
    """Refuses to create a dynamic table on a server that would take a part of it for an array.

    Args:
        number: the server's protocol number.
        table: the table's name.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server knows no tables.
    """
    if number < TABLES:
        raise _lacks(number, "dynamic tables", theirs, ours, f"creates the table {table!r}", "start the job anew")


def check_closures(number: int, theirs: str, ours: str) -> None:
    """Refuses to run closures with a server that would take their pushes for those of a worker.

    Args:
        number: the server's protocol number.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server knows no closures.
    """
    if number < CLOSURES:
        raise _lacks(number, "closures", theirs, ours, "is of a job with a coordinator", "start the job anew")


def check_chunks(number: int, theirs: str, ours: str) -> None:
    """Refuses to ask a server for batches that hands out none.

    Args:
        number: the server's protocol number.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server hands out no batches.
    """
    if number < CHUNKS:
        what = "batches that are handed out"
        raise _lacks(number, what, theirs, ours, "has a dataset with AutoShardPolicy.DYNAMIC", "take AUTO", "or")


def check_changes(number: int, theirs: str, ours: str) -> None:
    """Refuses to change the consistency of a job on a server that would make rounds as before.

    Args:
        number: the server's protocol number.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server knows no changes.
    """
    if number < CHANGES:
        raise _lacks(number, "changes of consistency", theirs, ours, "calls set_consistency", "leave it out", "or")


def check_compression(number: int, variable: str, theirs: str, ours: str) -> None:
    """Refuses to compress contributions to a server that would take them for what they are not.

    Args:
        number: the server's protocol number.
        variable: name of the variable whose contributions are to be compressed.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server knows no compression.
    """
    if number < COMPRESSION:
        does = f"compresses contributions to variable {variable!r}"
        raise _lacks(number, "compression", theirs, ours, does, "leave it out", "or")


def check_alone(number: int, variable: str, theirs: str, ours: str) -> None:
    """Refuses a variable with a consistency of its own on a server that would take its rounds for those of all.

    Args:
        number: the server's protocol number.
        variable: name of the variable.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server knows one consistency for all variables.
    """
    if number < ALONE:
        does = f"creates variable {variable!r} with ps.Async()"
        raise _lacks(number, "consistency for each variable", theirs, ours, does, "leave it out", "or")


def check_consistency(number: int, mode: Mode, backup_workers: int, staleness: int, theirs: str, ours: str) -> None:
    """Refuses a consistency that a server does not know, and would take for another one.

    Args:
        number: the server's protocol number.
        mode: the way in which a process makes its rounds.
        backup_workers: members without whose contributions a round may be made.
        staleness: in the mode "bounded" the most rounds that a worker may be ahead.
        theirs, ours: as `check_protocol` has them.

    Raises:
        ConfigError: the server knows no backup workers, or bounds nothing.
    """
    if backup_workers and number < BACKUP_WORKERS:
        what, said = "backup workers", f"ps.Sync(backup_workers={backup_workers})"
    elif mode == "bounded" and number < STALENESS:
        what, said = "bounded staleness", f"ps.BoundedStaleness({staleness})"
    else:
        return
    raise _lacks(number, what, theirs, ours, f"runs with {said}", "take another consistency", "or")


def _lacks(number: int, what: str, theirs: str, ours: str, does: str, remedy: str, joined: str = "and") -> ConfigError:
    """Returns the error of a server whose protocol does not have what this end needs."""
    return ConfigError(
        f"{theirs} speaks protocol {number}, which has no {what}, and {ours}, which speaks {PROTOCOL}, {does}; install "
        f"the same version of paramserver for both, {joined} {remedy}"
    )
