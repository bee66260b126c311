"""Detection of a broken lane that nobody has closed: its packets vanish, while the server answers elsewhere.

A plain state machine, without a clock. Beats travel on another connection: only the time between beats that were
answered counts. So a server that stands still is waited for, and a network that is cut as a whole breaks no lane.
"""

from __future__ import annotations


class Silence:
    """For how long a server has been silent on one lane. Of no thread: a word and a beat may come at once.

    Args:
        lease: seconds of silence after which the lane is broken.

    Attributes:
        heard: set when anything has come on the lane.
    """

    def __init__(self, lease: float) -> None:
        self.heard = False
        self._lease = lease
        self._most = lease / 2
        self._silent = 0.0
        self._beat: float | None = None
        # The other way: what the server has received, what was sent when it first said so, and for how long it does.
        self._received = self._sent = 0
        self._stuck = 0.0
        self._word: float = 0.0

    def word(self, received: int, paused: bool, sent: int, now: float) -> None:
        """Takes the server's word on the bytes it has received on the lane.

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

    def beat(self, waiting: bool, now: float) -> str:
        """Takes a beat's answer from the server.

        Args:
            waiting: True if the server owes an answer, or a word, on the lane.
            now: monotonic seconds.

        Returns:
            The reason why the lane is broken; "" if it is not.
        """
        if not waiting:
            self._stuck = 0.0
        if self.heard or not waiting:
            self._silent, self._beat = 0.0, None
        else:
            # What lies between two beats counts for little: the server, or this process, may have stood still.
            self._silent += min(now - self._beat, self._most) if self._beat is not None else 0.0
            self._beat = now
        self.heard = False
        if self._silent >= self._lease:
            return f"nothing has come on it for {self._silent:.3g} s"
        if self._stuck >= self._lease:
            return f"the server receives nothing more on it for {self._stuck:.3g} s"
        return ""
