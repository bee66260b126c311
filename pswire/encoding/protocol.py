"""The number of the protocol: the meaning and the bytes of the verbs, of gRPC's frames, and of the transports.

A process says its number, and the version of its package, when it opens a session or joins a job, servers say theirs to
each other and to whoever looks at them. Processes with different numbers do not work together. A change of the bytes,
or of their meaning, is a new number.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from pswire.errors import ConfigError
from pswire.pb import parameter_server_pb2 as pb

PROTOCOL = 1
"""The number of this version."""


@cache
def spoken() -> pb.Spoken:
    """Returns what this process speaks."""
    try:
        return pb.Spoken(protocol=PROTOCOL, version=version("paramserver"))
    except PackageNotFoundError:  # it runs from its sources, and is not installed
        return pb.Spoken(protocol=PROTOCOL)


def check_protocol(said: pb.Spoken, theirs: str, ours: str) -> None:
    """Refuses a process that speaks another protocol.

    Args:
        said: what it speaks; nothing, where it does not say it.
        theirs: words for it, for the message.
        ours: words for this process, for the message.

    Raises:
        ConfigError: it speaks another protocol.
    """
    if said.protocol != PROTOCOL:
        raise ConfigError(
            f"{theirs} has {_words(said)}, but {ours} has {_words(spoken())}. Install the same version of "
            "paramserver everywhere, and restart the job"
        )


def _words(said: pb.Spoken) -> str:
    known = said.version[:20] if said.version.isprintable() else ""
    return f"paramserver {known or '?'} (protocol {said.protocol})"
