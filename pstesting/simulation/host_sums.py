"""Workers of one simulated host, which sum what they contribute: they stand for those of `HostGroup`.

What is summed is what the real code sums. What it takes is a price for each contribution that is handed over, in place
of memory that workers share, sockets, and the thread that gathers. None of these workers may end before its rounds do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from psclient._src.processes.aggregation.host_group import parts_of
from psclient._src.processes.aggregation.sums import OwnPush, sum_of
from psclient._src.rounds.rounds import Exchange
from pstesting.simulation.clusters import Cluster
from pstesting.simulation.machines import Strand
from pstesting.simulation.scheduler import Scheduler
from pswire.api import RoundReply


class HostSums:
    """The workers of one host. Each sends for all to its share of the servers.

    Args:
        scheduler: the simulation's.
        cluster: the cluster.
        number: of the host; not 0.

    Attributes:
        number: as above.
    """

    def __init__(self, scheduler: Scheduler, cluster: Cluster, number: int) -> None:
        self.number = number
        self._scheduler = scheduler
        self._costs, self._workload = cluster.costs, cluster.workload
        self._latency = cluster.transport_costs.latency
        self._members: list[HostMember] = []
        self._gathered: dict[tuple[int, int], dict[HostMember, OwnPush]] = {}

    def join(self, strand: Strand, exchange: Exchange) -> HostMember:
        """Takes a worker in, whose thread and whose rounds are given; all come before the first round."""
        member = HostMember(self, strand, exchange)
        self._members.append(member)
        return member

    def _seconds(self, server: int) -> float:
        """What a contribution takes that is handed over, or an answer, on either side."""
        return self._costs.hand + self._workload.on(server).pushed * self._costs.hand_byte

    def hand_over(self, member: HostMember, own: OwnPush) -> None:
        """A worker has something to contribute: it goes to the one that sends."""
        seconds, sender = self._seconds(own.server), self._sender(own.server)
        if member is sender:
            self._gather(member, own)
        else:
            member.strand.do(seconds, self._later, sender.strand, seconds, self._gather, member, own)

    def _sender(self, server: int) -> HostMember:
        """Returns who sends to a server, as the real ones share them out once all are there."""
        return self._members[server % parts_of(self._workload.servers) % len(self._members)]

    def _later(self, strand: Strand, seconds: float, call: Callable[..., object], *args: object) -> None:
        self._scheduler.after(self._latency, strand.do, seconds, call, *args)

    def _gather(self, member: HostMember, own: OwnPush) -> None:
        name = own.server, own.said.round
        gathered = self._gathered.setdefault(name, {})
        gathered[member] = own
        if len(gathered) < len(self._members):
            return
        del self._gathered[name]
        sender = self._sender(own.server)
        found = sum_of(gathered[sender], [gathered[each] for each in self._members])
        if found is None:
            raise RuntimeError("gradients of simulated workers cannot be summed")
        pushed = sender.exchange.pushes.once(own.server, *found)
        pushed.add_done_callback(partial(self._hand_back, sender, gathered))

    def _hand_back(self, sender: HostMember, gathered: dict[HostMember, OwnPush], pushed: Future[RoundReply]) -> None:
        reply, mine = pushed.result(), gathered.pop(sender)
        for member, own in gathered.items():
            seconds = self._seconds(own.server)
            sender.strand.do(seconds, self._later, member.strand, seconds, own.answer, reply)
        mine.answer(reply)  # it has much to do after it, as the real one


class HostMember:
    """One of them.

    Args:
        host: all.
        strand: its thread.
        exchange: its rounds.

    Attributes:
        number: of the host.
        strand, exchange: as above.
    """

    def __init__(self, host: HostSums, strand: Strand, exchange: Exchange) -> None:
        self.number = host.number
        self.strand = strand
        self.exchange = exchange
        self._host = host

    def push(self, own: OwnPush) -> Future[RoundReply]:
        """As `HostGroup.push`."""
        self._host.hand_over(self, own)
        return own.future

    def by_itself(self, push: Callable[[], Future[RoundReply]]) -> Future[RoundReply]:
        """As `HostGroup.by_itself`."""
        return push()
