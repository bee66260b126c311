"""Calls of gRPC that are sent again until they are answered, and what is told where they are not."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from psclient._src.interpreter.interrupts import waits
from psclient._src.network.grpc_calls import GrpcCalls
from pswire.encoding.verbs import UNANSWERED, Verb, refused
from pswire.errors import BY_NAME, ConfigError, InvalidRequest, PSError, ServerGone, ServerLost, Unreachable
from pswire.limits import Timeouts
from pswire.network.grpc_channel import NOBODY, SILENT, reason

log = logging.getLogger("psclient.calls")

FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""Seconds between two attempts: the first pause, and what it doubles up to."""

NOT_YET = "it has not answered yet"
"""What is known of a call that a server may answer late on purpose."""

WAIT_SECONDS = 600.0
"""Seconds that a call waits at the server before it is sent again."""

T = TypeVar("T")


@dataclass(eq=False)
class Attempts:
    """The calls of one connection. May be used by any thread.

    Args:
        address: the server's address, `host:port`.
        task: the server's, for messages.
        timeouts: time limits of the cluster.
        calls: the connection.
        missing: returns the processes that the server waits for, in words.
        decides: True if the server is lost once nothing listens at its address any more; else that is silence, which is
            waited for, and somebody else decides.
        told: True if this process is told by the chief which server is lost, since variables have copies: then whatever
            says that the server is lost is silence as well.

    Attributes:
        opened: True if there is a session to lose.
    """

    address: str
    task: str
    timeouts: Timeouts
    calls: GrpcCalls
    missing: Callable[[], str]
    decides: bool = True
    told: bool = False

    opened = False
    _life = 0
    _silent_since: float | None = field(default=None, init=False)  # when the answers stopped; the next one resets it
    _lost_since: float | None = field(default=None, init=False)  # since when others say that the server is lost

    def begin_anew(self) -> None:
        """Another life of the server is to be found: calls to the one before end, and there is no session to lose."""
        self._life += 1
        self.opened, self._silent_since, self._lost_since = False, None, None

    @waits
    def until_answered(self, verb: Verb, once: Callable[[float], T], extra: float = 0.0, ends: bool = False) -> T:
        """Repeats an attempt until it is answered, its deadline has passed, or the server is lost.

        Args:
            verb: the verb to call.
            once: makes one attempt that may take so many seconds.
            extra: seconds beside the verb's own deadline.
            ends: True if the server ends by it: where nothing listens any more, there will be no answer.

        Raises:
            PSError: the server's answer, or the reason why there is none.
        """
        limit = getattr(self.timeouts, verb.deadline) + extra if verb.deadline else float("inf")
        started = time.monotonic()
        spoke, pause, life, before = started, FIRST_PAUSE, self._life, ""
        while True:
            self.calls.check()
            if life != self._life:
                raise ServerGone("was replaced by another process", self.task)
            now = time.monotonic()
            seconds = self._attempt_seconds(verb, self._left(limit - (now - started)), extra)
            try:
                result = once(seconds)
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                # An attempt that took longer than it may was stopped with this process, and heard nothing meanwhile.
                why = self._unanswered(verb, error, max(now, time.monotonic() - seconds))
            except ServerLost as error:  # the answer to a call on a stream
                why = error
            else:
                self._silent_since = None
                return result
            # Out here, since what is raised there would keep gRPC's error, which is its call: see `GrpcCalls.close`.
            self.calls.check()
            if self.awaits_verdict(why):
                why = str(why)
                self._lost_since = self._lost_since or time.monotonic()
            if isinstance(why, PSError):
                raise why
            if why == SILENT and seconds < self._attempt_seconds(verb, float("inf"), extra):
                why = before or why  # what is left of the deadline may be too short to hear anything
            before = why
            gone = ends and why == NOBODY
            self._give_up(verb, limit, time.monotonic() - started, why, gone)
            # A server that answers late on purpose is not named here: who waits says for whom.
            if why != NOT_YET and time.monotonic() - spoke > self.timeouts.report_interval:
                spoke = time.monotonic()
                log.warning("no answer from %s at %s (%s); retrying", self.task, self.address, why)
            self.calls.failed.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LAST_PAUSE)

    def awaits_verdict(self, error: object) -> bool:
        """Returns whether an answer says that the server is lost, of which this process waits to be told."""
        return self.told and isinstance(error, ServerLost) and error.task in ("", self.task)

    def _silence(self) -> float:
        """Returns for how many seconds the server has not answered, or has been called lost; 0 if it answers."""
        since = [each for each in (self._silent_since, self._lost_since) if each is not None]
        return time.monotonic() - min(since) if since else 0.0

    def _left(self, of_deadline: float) -> float:
        """Returns the seconds until a call is given up; for a silent server not before it counts as lost."""
        silence = self._silence() if self.opened else 0.0
        return max(of_deadline, self.timeouts.server_timeout - silence) if silence else of_deadline

    def _attempt_seconds(self, verb: Verb, left: float, extra: float) -> float:
        """Returns an attempt's time limit. A prompt verb's is half a lease: the network may have lost the answer."""
        longest = WAIT_SECONDS if verb.waits else self.timeouts.session_timeout / 2 + extra
        return max(min(left, longest), 0.001)

    def _unanswered(self, verb: Verb, error: Exception, began: float) -> str | PSError:
        """Returns why an attempt has no answer, or the error that the server answered with, if it did."""
        if not isinstance(error, grpc.Call):
            return "cancelled"
        code, details = error.code().name, error.details() or ""
        answer = refused(details, error.trailing_metadata() or ())
        if answer is not None or code not in UNANSWERED:
            self._silent_since = None
            return answer or self._foreign(verb, code, details)
        if code == "DEADLINE_EXCEEDED" and verb.waits:
            return NOT_YET
        if self._silent_since is None:
            self._silent_since = began if code == "DEADLINE_EXCEEDED" else time.monotonic()
        if code == "UNAVAILABLE":
            self._check_security()
        return reason(details, code.lower().replace("_", " "))

    def _check_security(self) -> None:
        """Raises `ConfigError` if it is known that no attempt can succeed, and there is no session yet."""
        if self.opened:
            self.calls.renew()
        elif why := self.calls.mismatch():
            raise ConfigError(f"{self.address}: {why}", self.task)

    def _foreign(self, verb: Verb, code: str, details: str) -> PSError:
        """Returns the error for an answer of no server of ours, or for a message too large for one."""
        if code == "UNIMPLEMENTED":
            return Unreachable(
                f"the process at {self.address} is not a parameter server of this version; correct the "
                "address, or install the same version of paramserver everywhere",
                self.task,
            )
        return InvalidRequest(f"the call was rejected: {details} ({code})", self.task)

    def _give_up(self, verb: Verb, limit: float, elapsed: float, why: str, gone: bool) -> None:
        """Raises what is to be told to the caller, if there is no use in trying again."""
        silence = self._silence()
        if self.opened:
            if gone or (why == NOBODY and self.decides):
                raise ServerLost(
                    f"was lost ({NOBODY}, at {self.address}); its variables are lost; restart from a checkpoint",
                    self.task,
                )
            if silence >= self.timeouts.server_timeout:
                raise ServerLost(
                    f"was lost: no answer at {self.address} for {silence:.3g} s (PS_SERVER_TIMEOUT; "
                    f"{why}); restart from a checkpoint",
                    self.task,
                )
            if silence:
                return  # it may be back where it was: nothing is late that it holds up
        if elapsed >= limit:
            raise self._late(verb, elapsed, why)

    def _late(self, verb: Verb, elapsed: float, why: str) -> PSError:
        if verb.waits:
            text = f"{verb.name} did not complete within {elapsed:.3g} s{self.missing()}"
            return BY_NAME[verb.late](text, self.task)
        return Unreachable(
            f"no answer at {self.address} for {elapsed:.3g} s ({why}); start this task, or correct its "
            "address in TF_CONFIG",
            self.task,
        )
