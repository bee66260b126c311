"""The table of values and messages, the classes of the values, and the .proto agree."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from pswire.api import Contribution, CreateBatchReply, PullReply, RoundReply
from pswire.encoding import messages
from pswire.encoding.mapper import Codec, Mapper
from pswire.encoding.verbs import refusal_from_pb, refusal_to_pb
from pswire.errors import InvalidRequest, PSError
from pswire.model.log import LogEntry
from pswire.model.plan import Operand
from pswire.model.status import Saving, WorkerProgress
from pswire.model.tensor import TensorSpec
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers import votes as said_by_servers
from pswire.servers.votes import Vote
from pswire.transport.payload import EMPTY
from tests.kit.samples import (
    ALONE,
    ENTRIES,
    HAPPENED,
    PEER_INCARNATION,
    PROCESS,
    QUESTIONS,
    ROUND,
    SAMPLES,
    TABLES,
    VOTES,
    plain,
)

BY_HAND: dict[type, Codec[Any, Any]] = {
    Contribution: Codec(pb.PushHeader, lambda c: messages.contribution_to_pb(c, 8), messages.contribution_from_pb),
    RoundReply: ROUND,
    PullReply: Codec(pb.PullHeader, messages.pull_to_pb, lambda m: messages.pull_from_pb(m, EMPTY)),
    CreateBatchReply: Codec(pb.CreateBatchReply, messages.batch_to_pb, messages.batch_from_pb),
    PSError: Codec(pb.Refusal, refusal_to_pb, refusal_from_pb),
    Vote: Codec(pb.ServerVote, lambda v: messages.said_to_pb(v, PEER_INCARNATION), messages.said_from_pb),
    said_by_servers.Testimony: Codec(pb.Testimony, messages.testimony_to_pb, messages.testimony_from_pb),
}
PAIRS = messages.MAPPER.pairs | BY_HAND

REQUESTS: list[type[Message]] = [
    *(
        pb.OpenRequest,
        pb.BeatRequest,
        pb.BeatReply,
        pb.LeaveRequest,
        pb.CreateHeader,
        pb.ProposeRequest,
        pb.WatchRequest,
    ),
    *(pb.ApproveRequest, pb.ApproveReply, pb.PullRequest, pb.SnapshotRequest, pb.RestoreRequest, pb.RecentReply),
    *(pb.Part, pb.CreateFrame, pb.PushFrame, pb.RoundFrame, pb.PullFrame, pb.LaneHello, pb.LaneAlive),
    *(pb.IntroduceRequest, pb.IntroduceReply, pb.ExchangeHeader, pb.AskFrame, pb.AnswerFrame, pb.BeatReply),
    *(pb.CreateBatchRequest, pb.ScheduleRequest, pb.TakeRequest, pb.FetchRequest, pb.HandOutRequest),
    pb.EnlistRequest,
    *(pb.OfferRequest, pb.MoveRequest, pb.MoveReply),
]
"""What the rims write themselves: the arguments of a verb, and the envelopes of payloads."""

OF_THE_RIMS = {
    f"paramserver.v1.OpenReply.{name}"
    for name in ("data_port", "data_path", "lane_token", "in_flight", "buffer_bytes", "protocol")
} | {"paramserver.v1.EnlistReply.protocol", "paramserver.v1.OfferReply.protocol"}
"""What the rims add to a message of the table: no core knows of it."""

OF_SENDERS = {"paramserver.v1.ServerVote.session"}
"""What says who has sent it, and is read by the rim."""

OF_PAYLOADS = {f"paramserver.v1.{name}.size" for name in ("PushHeader", "RoundHeader", "PullHeader")}
"""What is read for the payload, and not for the value."""


def values() -> Iterator[tuple[Codec[Any, Any], Any]]:
    """The values of the samples that are messages of their own, each with its pair."""
    for value in (value for sample in SAMPLES for value in (*sample.args, sample.answer)):
        if type(value) in PAIRS:
            yield PAIRS[type(value)], value
    for entry in ENTRIES:
        yield PAIRS[LogEntry], entry
    for variable in (*TABLES, ALONE):
        yield messages.VARIABLE, variable
    for question in QUESTIONS:
        yield messages.TABLE_READ, question
    yield messages.HAPPENED, HAPPENED
    for said in VOTES:
        yield PAIRS[Vote], said
    yield PAIRS[said_by_servers.Testimony], VOTES[-1]


def fields() -> set[str]:
    """The fields of all messages that the table is for."""
    kinds = [kind for name, kind in pb.DESCRIPTOR.message_types_by_name.items() if getattr(pb, name) not in REQUESTS]
    return {field.full_name for kind in kinds for field in kind.fields} - OF_THE_RIMS


def walk(message: Message) -> Iterator[Message]:
    """A message and all within it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for below in value if field.is_repeated else (value,):
                yield from walk(below)


def without_each(message: Message, known: set[str]) -> Iterator[tuple[str, Message]]:
    """For each field that is set in a message, or below it, and is not known: its name, and the message without it."""
    for index, below in enumerate(walk(message)):
        for field, _ in below.ListFields():
            if field.full_name in known:
                continue
            less = deepcopy(message)
            next(found for n, found in enumerate(walk(less)) if n == index).ClearField(field.name)
            yield field.full_name, less


def is_other(pair: Codec[Any, Any], message: Message, value: Any) -> bool:
    """Whether a message is another value than one that is known, or is refused."""
    try:
        return bool(plain(pair.from_pb(message)) != plain(value))
    except InvalidRequest:
        return True


def test_each_field_of_each_message_is_mapped_once() -> None:
    """All fields of the .proto are written; without any of them the value is another, and with all the same."""
    written, read = set(), set()
    for pair, value in values():
        message = pair.to_pb(value)
        assert type(message) is pair.message
        came = pair.from_pb(message)
        assert plain(came) == plain(value if type(value) not in (RoundReply, PullReply) else came)
        for name, less in without_each(message, read):
            written.add(name)
            read |= {name} if is_other(pair, less, came) else set()
    assert written == fields()
    assert read == fields() - OF_PAYLOADS - OF_SENDERS


def test_each_message_has_one_value() -> None:
    """No two rows are for the same message, and none is without: it is in the table, or the rims write it."""
    kinds = [pair.message for pair in PAIRS.values()]
    assert len(kinds) == len({*kinds})
    within = {pb.Numbers, pb.Assign, pb.NamedTensor, pb.Sessions}  # parts of others: their values are tuples
    assert {*kinds, *REQUESTS, *within} == {getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name}


def test_each_number_of_an_enumeration_has_a_word() -> None:
    """All but an unspecified 0, which is never sent; the words are those of the .proto."""
    enums: list[EnumDescriptor] = list(pb.DESCRIPTOR.enum_types_by_name.values())
    enums += [enum for kind in pb.DESCRIPTOR.message_types_by_name.values() for enum in kind.enum_types]
    words = [
        {v.number: v.name.rpartition("_")[2].lower() for v in enum.values if not v.name.endswith("UNSPECIFIED")}
        for enum in enums
    ]
    assert sorted(map(str, words)) == sorted(str(dict(found)) for found in messages.MAPPER.enums.values())


def test_a_class_that_its_message_does_not_fit_is_no_row() -> None:
    """A field that the message has not is found when the table is made, not when somebody sends it."""
    with pytest.raises(KeyError, match="task"):
        Mapper().pair(WorkerProgress, pb.Saving)


def test_what_is_within_needs_no_row() -> None:
    """A class whose fields are those of its message comes into the table with the first one that has it."""
    assert messages.MAPPER.pairs[Saving].message is pb.Saving
    assert messages.MAPPER.pairs[type(PROCESS)].message is pb.ProcessStatus


def test_a_row_comes_before_those_that_it_is_in() -> None:
    """A class that came into the table by its fields alone gets no checks later: they would not be made."""
    mapper = Mapper()
    mapper.pair(Operand, pb.Operand)
    with pytest.raises(ValueError, match="TensorSpec'> is in the table"):
        mapper.pair(TensorSpec, pb.TensorSpec, check=TensorSpec.check)
