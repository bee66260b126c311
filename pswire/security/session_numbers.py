"""Numbers of sessions, each of which says for which task it was made.

The server that keeps the sessions gives a number to a task, which opens its session by it on all other servers. They
see in the number itself whose it is. So nobody else can take it there, however early it comes.
"""

from __future__ import annotations

from hashlib import sha256

from pswire.cluster import Task

TAG_BITS = 22
"""The lowest bits of a number: a hash of the other ones and of the task. Nobody can choose the number that another task
is given, so nobody has to be kept from computing one for itself.
"""

COUNT_BITS = 20
"""The bits above, which count within one incarnation of the server that gives it; `psctl` shows these."""

DRAWN_BITS = 64 - TAG_BITS - COUNT_BITS
"""The highest bits, of the incarnation: servers may remember the numbers of an earlier one."""


def number_for(task: Task, incarnation: int, count: int) -> int:
    """Returns a number for a session of a task; those of later sessions are greater, while the count has no more bits.

    Args:
        task: the task.
        incarnation: of the server that gives the number, 64 random bits.
        count: how many numbers it has given, this one included.
    """
    drawn = ((incarnation >> TAG_BITS + COUNT_BITS) + (count >> COUNT_BITS)) % (1 << DRAWN_BITS)
    count %= 1 << COUNT_BITS
    return (drawn << COUNT_BITS | count) << TAG_BITS | _tag(task, drawn, count)


def is_made_for(task: Task, number: int) -> bool:
    """Returns True if a number was made for a task."""
    return number % (1 << TAG_BITS) == _tag(task, number >> TAG_BITS + COUNT_BITS, count_of(number))


def count_of(number: int) -> int:
    """Returns the number as people are shown it."""
    return (number >> TAG_BITS) % (1 << COUNT_BITS)


def _tag(task: Task, drawn: int, count: int) -> int:
    said = sha256(f"paramserver: session {drawn} {count} of {task}".encode()).digest()
    return int.from_bytes(said[:4], "big") >> 32 - TAG_BITS
