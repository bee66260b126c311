"""How long a server has been silent on one transport, while it answers heartbeats on another connection."""

from __future__ import annotations


class Silence:
    """For how long a server has been silent on one transport. Of no thread: a word and a heartbeat may come at once.

    A plain state machine, without a clock. Heartbeats travel on another connection: only the time between heartbeats
    that were answered counts. So a server that stands still is waited for, and a network that is cut as a whole breaks
    no transport.

    Args:
        lease: seconds of silence after which the transport is broken.

    Attributes:
        heard: set when anything has come on the transport.
    """

    def __init__(self, lease: float) -> None:
        self.heard = False
        self._lease = lease
        self._most = lease / 2
        self._silent = 0.0
        self._heartbeat: float | None = None
        # The other way: what the server has received, what was sent when it first said so, and for how long it does.
        self._received = self._sent = 0
        self._stuck = 0.0
        self._word: float = 0.0

    def word(self, received: int, paused: bool, sent: int, now: float) -> None:
        """Takes the server's word on the bytes it has received on the transport.

        Args:
            received: number of bytes.
            paused: True if it receives no more for now, because it has enough.
            sent: bytes that the system has taken from us.
            now: monotonic seconds.
        """
        if paused or received != self._received or received >= self._sent:
            self._received, self._sent, self._stuck = received, sent, 0.0
        else:
            self._stuck += min(now - self._word, self._most)
        self._word = now

    def heartbeat(self, waiting: bool, now: float) -> str:
        """Takes a heartbeat's answer from the server.

        Args:
            waiting: True if the server owes an answer, or a word, on the transport.
            now: monotonic seconds.

        Returns:
            The reason why the transport is broken; "" if it is not.
        """
        if not waiting:
            self._stuck = 0.0
        if self.heard or not waiting:
            self._silent, self._heartbeat = 0.0, None
        else:
            # What lies between two heartbeats counts for little: the server, or this process, may have stood still.
            self._silent += min(now - self._heartbeat, self._most) if self._heartbeat is not None else 0.0
            self._heartbeat = now
        self.heard = False
        if self._silent >= self._lease:
            return f"nothing was received on it for {self._silent:.3g} s"
        if self._stuck >= self._lease:
            return f"the server has not read from it for {self._stuck:.3g} s"
        return ""
