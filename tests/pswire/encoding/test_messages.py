"""Our values as protobuf: the table of values and messages, the classes of the values and the .proto agree; and the
table that both gRPC rims share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from pswire.api import ApproveRequest, Contribution, PullReply, RoundReply, RowRead
from pswire.encoding import calls, messages, plain_votes, verbs
from pswire.encoding.calls import CALLS
from pswire.encoding.mapper import Mapper, MessageCodec
from pswire.errors import BY_NAME, InvalidRequest, PSError, ServerLost
from pswire.limits import MAX_PLAN_BYTES, Timeouts
from pswire.model.closures import ClosureName
from pswire.model.log import Generation, LogEntry, Lost
from pswire.model.plan import Operand
from pswire.model.status import Saving, WorkerProgress
from pswire.model.tensor import TensorSpec
from pswire.network.payload import EMPTY
from pswire.pb import parameter_server_pb2 as pb
from pswire.servers.requests import REQUESTS
from pswire.servers.votes import Vote
from tests.kit import samples
from tests.kit.attacks import spoil
from tests.kit.cases import search
from tests.kit.samples import ROUND

MAPPED = messages.MAPPER.pairs
PUSH = MessageCodec(pb.PushHeader, lambda c: messages.contribution_to_pb(c, 8), messages.contribution_from_pb)
PULL = MessageCodec(pb.PullHeader, messages.pull_to_pb, lambda m: messages.pull_from_pb(m, EMPTY))
VOTE = MessageCodec(pb.ServerVote, lambda v: messages.said_to_pb(v, samples.PEER_INCARNATION), messages.said_from_pb)
BY_HAND: dict[Any, MessageCodec[Any, Any]] = {Contribution: PUSH, RoundReply: ROUND, PullReply: PULL, Vote: VOTE}
PAIRS = MAPPED | BY_HAND

# ---- What a message says ----

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def sampled() -> Iterator[tuple[MessageCodec[Any, Any], Any]]:
    """The values of the samples that are messages of their own, each with its pair."""
    for sample in samples.SAMPLES:
        yield from ((PAIRS[type(value)], value) for value in (*sample.args, sample.answer) if type(value) in PAIRS)
        if sample.verb in REQUESTS:
            yield PAIRS[REQUESTS[sample.verb]], REQUESTS[sample.verb](*sample.args)
    yield from ((PAIRS[LogEntry], entry) for entry in samples.ENTRIES)
    yield from ((PAIRS[Vote], said) for said in samples.VOTES)


SAMPLED = list(sampled())


@search(6)
@given(st.sampled_from(SAMPLED), st.integers(0, 3), st.data())
def test_values_arrive_as_they_were(sampled: tuple[MessageCodec[Any, Any], Any], spoilt: int, data: Any) -> None:
    """Whatever numbers, texts and choices a message has, it is refused, or written again as it was read. NaN differs
    from itself, and equal sets may print their members in another order: equality or the repr has to hold."""
    pair, value = sampled
    message = pair.message.FromString(pair.to_pb(value).SerializeToString())
    for _ in range(spoilt):
        spoil(data.draw, message)
    try:
        read = pair.from_pb(message)
    except InvalidRequest:
        assert spoilt
        return
    again = pair.from_pb(pair.message.FromString(pair.to_pb(read).SerializeToString()))
    assert again == read or repr(again) == repr(read)


OTHER_PUSH: dict[str, Any] = {
    "session": 5, "generation": 7, "round": 0, "plan_id": bytes(32), "weights": (2.0,), "more": False, "positions": (),
    "want": (150,), "observes": False, "start": 3, "nonfinite": (), "first_values": (), "previous": -1, "rows": (),
    "lookups": (), "seconds": 8, "closure": ClosureName(1, 2, 3, (4,)), "chunks": (4,), "alone": True,
    "trace": f"00-{7:032x}-{7:016x}-01", "host": 1 << 60, "parts": (samples.contribution(round=7),),
    "hints": (samples.contribution().lookups), "batch": "words",
}  # fmt: skip
"""For each field of a push another value than that of the sample."""


def pushed(names: set[str], round: int, previous: int) -> Contribution:
    """A push to a round with other values for some fields."""
    return replace(samples.contribution(), **{n: OTHER_PUSH[n] for n in names} | {"round": round, "previous": previous})


PUSHES = st.lists(st.tuples(st.sets(st.sampled_from([*OTHER_PUSH])), st.integers(0, 1 << 40), st.integers(-1, 99)))


@search(4)
@given(PUSHES)
def test_pushes_are_the_same_where_some_of_them_is_kept(said: list[tuple[set[str], int, int]]) -> None:
    """What is kept of a push is used for one that says the same, and for no other, whichever fields differ. Before what
    varies it has the same bytes as another one that says the same beside that."""
    assert [*OTHER_PUSH] == [*Contribution.__dataclass_fields__]
    encoder, decoder, before = messages.PushEncoder(), messages.PushDecoder(), dict[Any, bytes]()
    each = [({name} if differs else set[str](), 3, 2) for name in OTHER_PUSH for differs in (False, True)]
    for names, round, previous in [*said, *said, *said, *each]:
        push = pushed(names, round, previous)
        header = encoder.encode(push, 8)
        assert decoder.decode(header) == (push, 8)
        assert pb.PushHeader.FromString(header) == messages.contribution_to_pb(push, 8)
        steady = header.removesuffix(messages._varying(push))
        assert steady == before.setdefault(push.at(0, 0, ()), steady)
    assert decoder.decode(encoder.encode(push, 9)) == (push, 9)


@search(8)
@given(st.sets(st.sampled_from([*OTHER_PUSH])), st.data())
def test_behind_known_bytes_a_push_is_read_as_the_message_that_it_is(names: set[str], data: st.DataObject) -> None:
    """Other fields may come there, or the same ones again, or nothing that is a message."""
    decoder, steady = messages.PushDecoder(), messages.PushEncoder().encode(pushed(names, 0, -1).at(0, -1, ()), 8)
    for round in range(3):
        decoder.decode(steady + pb.PushHeader(round=round, follows=round).SerializeToString())
    assert len(decoder._known) == 1
    behind = messages.contribution_to_pb(pushed(data.draw(st.sets(st.sampled_from([*OTHER_PUSH]))), 5, 4), 8)
    header = steady + data.draw(st.just(behind.SerializeToString()) | st.binary(max_size=9))
    try:
        message = verbs.parse(pb.PushHeader, header)
        expected = messages.contribution_from_pb(message), message.size
    except InvalidRequest:
        with pytest.raises(InvalidRequest):
            decoder.decode(header)
    else:
        assert decoder.decode(header) == expected


def test_few_pushes_are_kept() -> None:
    """Of many plans some, and none whose header is large."""
    encoder, plain = messages.PushEncoder(), samples.contribution()
    large = replace(plain, hints=(RowRead(1, bytes(messages.MAX_STEADY_BYTES)),))
    for push in (plain, large, *(replace(plain, plan_id=bytes([n])) for n in range(200)), plain):
        header = encoder.encode(push, 8)
        assert messages.contribution_from_pb(pb.PushHeader.FromString(header)) == push
        assert len(encoder._known) <= messages.MAX_STEADY
        assert all(len(kept) <= messages.MAX_STEADY_BYTES for _, kept in encoder._known.values())


OTHER_ANSWER: dict[str, Any] = {
    "round": 42, "generation": Generation(7, ()), "more": False, "excluded": (), "payload": samples.small(),
    "warnings": (), "observers": (), "rows": (), "over": 46,
}  # fmt: skip
"""For each field of an answer another value than that of the sample."""


def test_answers_are_the_same_where_some_of_them_is_kept() -> None:
    """What is kept of an answer is used for one that says the same, and for no other, whichever field differs. A
    generation is read once, as long as the answers have the same."""
    first = samples.reply()
    assert [*OTHER_ANSWER] == [*RoundReply.__dataclass_fields__]
    encoder, decoder = messages.RoundEncoder(), messages.RoundDecoder()
    for name, value in OTHER_ANSWER.items():
        other = replace(first, **{name: value})
        for reply in (first, first, other, first):
            message = pb.RoundHeader.FromString(encoder.encode(reply))
            assert message == ROUND.to_pb(reply)
            assert repr(decoder.decode(message, reply.payload)) == repr(reply)
    headers = [ROUND.to_pb(replace(first, round=n, generation=Generation(n // 2, ()))) for n in range(4)]
    one, two, three, four = (decoder.decode(header, EMPTY).generation for header in headers)
    assert one is two
    assert three is four
    assert [one.number, three.number] == [0, 1]


# ---- The table of values and messages; that it has every field, `test_golden` shows ----


def test_a_class_that_its_message_does_not_fit_is_no_row() -> None:
    """A field that the message has not is found when the table is made, not when somebody sends it. A class whose
    fields are those of its message comes into the table with the first one that has it. It gets no checks later: they
    would not be made."""
    with pytest.raises(KeyError, match="task"):
        Mapper().pair(WorkerProgress, pb.Saving)
    assert messages.MAPPER.pairs[Saving].message is pb.Saving
    mapper = Mapper()
    mapper.pair(Operand, pb.Operand)
    with pytest.raises(ValueError, match="TensorSpec'> is in the table"):
        mapper.pair(TensorSpec, pb.TensorSpec, check=TensorSpec.check)


# ---- What is no value ----

SPEC = pb.TensorSpec(dtype="float32")
REFUSED: dict[str, Message] = {
    "a restore has no stage 0": pb.RestoreOrder(),
    "unknown mode 0": pb.Member(task=pb.Task(job="worker")),
    "unknown reduction 0": pb.Plan(reductions=[pb.Reduction(tensor=SPEC)]),
    "unknown reduction 99": pb.Plan(reductions=[pb.Reduction(op=99, tensor=SPEC)]),  # type: ignore[arg-type]
    "unknown kind of input 0": pb.Program(inputs=[pb.Input(spec=SPEC)]),
    "unknown kind of input 99": pb.Program(
        inputs=[pb.Input(kind=99, spec=SPEC)]  # type: ignore[arg-type]
    ),
    "unknown kind of value 0": pb.Plan(returned=[pb.Ref(index=1)]),
    "unknown kind of value 99": pb.Plan(returned=[pb.Ref(kind=99)]),  # type: ignore[arg-type]
    "an entry of the log is empty": pb.Entry(),
    "unknown dtype ''": pb.TensorSpec(),
    "unknown dtype 'object'": pb.TensorSpec(dtype="object"),
    f"invalid shape ({1 << 45},)": pb.TensorSpec(dtype="int8", shape=[1 << 45]),
    "a variable's name must have 1 to 512 printable characters": pb.VariableSpec(tensor=SPEC),
    "a variable's name must have 1 to 512 printable": pb.VariableSpec(name="a\nb", tensor=SPEC),
    "is not a shard ShardOf": pb.VariableSpec(name="a", tensor=SPEC, shard=pb.ShardOf(whole="w", rows=4)),
    "a variable's name must have 1 to 512": pb.VariableSpec(name="a", tensor=SPEC, saved_as="a\nb"),
    "unknown job ''; known are chief, worker, ps, evaluator": pb.Task(index=1),
    "unknown job 'boss'": pb.Task(job="boss"),
    f"bytes; at most {MAX_PLAN_BYTES} are allowed": pb.Plan(snapshot=pb.SnapshotOrder(path="x" * MAX_PLAN_BYTES)),
}
EMPTY_CHOICES: dict[str, Message] = {
    "a table has no initializer": pb.Initializer(),
    "a table's filter has no kind": pb.Admission(),
    "a table's eviction policy has no kind": pb.Eviction(),
}
_KEYS = pb.TableSpec.INT64
REFUSED |= EMPTY_CHOICES | {
    "unknown form 7 of gradients": pb.Plan(reductions=[pb.Reduction(op=1, tensor=SPEC, form=7)]),  # type: ignore[arg-type]
    "unknown dtype 0 of keys": pb.TableSpec(dtype="float32"),
    "unknown dtype 3 of keys": pb.TableSpec(key_dtype=3),  # type: ignore[arg-type]
    "table has no initializer": pb.VariableSpec(tensor=SPEC, part=pb.TablePart(spec=pb.TableSpec(key_dtype=_KEYS))),
    "unknown value 0 of keys without": pb.TableSpec(key_dtype=_KEYS, initializer=pb.Initializer(zeros=pb.Zeros())),
    "unknown question 0 to a table": pb.TableRead(),
    "unknown question 4 to a table": pb.TableRead(what=4),  # type: ignore[arg-type]
}
READERS: dict[Any, Callable[[Any], Any]] = {p.message: p.from_pb for p in MAPPED.values()}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(words: str) -> None:
    """Unknown numbers, missing choices and impossible sizes are refused where they come in, in these words."""
    message = REFUSED[words]
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        READERS[type(message)](message)


@pytest.mark.parametrize("words", EMPTY_CHOICES)
def test_an_unknown_choice_is_refused(words: str) -> None:
    """A choice of a oneof that is not known here is none: its bytes are passed over, and not taken for another."""
    kind = type(EMPTY_CHOICES[words])
    with pytest.raises(InvalidRequest, match=words):
        READERS[kind](kind.FromString(b"\xfa\x01\x02\x08\x01"))  # field 31, which has a field 1


@given(st.sampled_from([pb.Plan, pb.Entry, pb.WatchReply, pb.StatusReply, pb.VariableSpec]), st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(kind: type[Message], data: bytes) -> None:
    """No bytes do anything but be read, or raise InvalidRequest; what is no message is named with its size."""
    with pytest.raises(InvalidRequest, match="2 bytes are not a valid OpenRequest"):
        verbs.parse(pb.OpenRequest, b"\xff\xff")
    try:
        READERS[kind](verbs.parse(kind, data))
    except InvalidRequest:
        pass


# ---- The table of the rims ----


def test_the_table_of_verbs_is_the_protocol() -> None:
    """Table and .proto have the same verbs, in the same order, with the same streams, requests and deadlines."""
    service = pb.DESCRIPTOR.services_by_name["ParameterServer"]
    assert [(v.path, v.streams) for v in verbs.VERBS.values()] == [
        (f"/{service.full_name}/{m.name}", (m.client_streaming, m.server_streaming)) for m in service.methods
    ]
    assert [v.request.DESCRIPTOR for v in verbs.VERBS.values() if not v.streams[0]] == [
        m.input_type for m in service.methods if not m.client_streaming
    ]
    assert {v.deadline for v in verbs.VERBS.values()} <= {"", *Timeouts.__dataclass_fields__}
    assert {v.late for v in verbs.VERBS.values()} <= set(BY_NAME)
    assert list(verbs.STATUS) == list(BY_NAME)  # every error has a status


@given(st.sampled_from(sorted(BY_NAME)), TEXT, st.sampled_from(["", "/job:worker/task:1"]))
def test_errors_cross(name: str, text: str, task: str) -> None:
    """An error arrives with its class, its message and its task."""
    _, details, metadata = verbs.refusal(BY_NAME[name](text, task))
    came = verbs.refused(details, metadata)
    assert type(came) is BY_NAME[name]
    assert (came.message, came.task) == (text, task)


@example("\u00e4" * 5000, "")
@given(st.text(max_size=5000), st.text(max_size=20))
def test_no_text_of_an_error_breaks_the_answer(text: str, task: str) -> None:
    """Metadata are plain ASCII, and details short enough for a header, whatever the error says."""
    error = PSError(text, task)
    _, details, metadata = verbs.refusal(error)
    assert len(details.encode()) <= verbs.MAX_DETAILS_BYTES
    assert len(verbs.refusal_to_pb(error).message.encode()) <= verbs.MAX_DETAILS_BYTES
    assert all(value.isascii() and value.isprintable() for _, value in metadata)


def test_errors_of_other_versions() -> None:
    """A class made from a known one crosses as that; an unknown name arrives as PSError; none as none."""

    class Burnt(ServerLost):
        pass

    assert verbs.refusal(Burnt("x"))[2] == ((verbs.ERROR_KEY, "ServerLost"),)
    assert type(verbs.refused("x", [(verbs.ERROR_KEY, "Newer"), (verbs.TASK_KEY, "t")])) is PSError
    assert verbs.refused("Socket closed", []) is None


@pytest.mark.parametrize("most", [3, 100])
@given(st.lists(st.integers(0, 30), max_size=12))
def test_long_requests_are_cut(most: int, sizes: list[int]) -> None:
    """The pieces have all items, in order; each fits one message, unless it has a single one, and is given encoded."""
    entries = [Lost(0, "x" * size) for size in sizes]
    cut = list(calls.cut(ApproveRequest(1, 0, entries), "entries", most, 99))
    assert [entry for piece, _ in cut for entry in piece.entries] == entries
    for piece, data in cut:
        assert len(piece.entries) <= 1 or (len(piece.entries) <= most and len(data) <= 99)
        assert CALLS["Approve"].request_from(pb.ApproveRequest.FromString(data), "") == replace(
            piece, entries=tuple(piece.entries)
        )


@given(st.lists(st.integers(0, 30), max_size=20))
def test_what_fits_is_the_first_batch(sizes: list[int]) -> None:
    """And no more of the rest is made than the one that does not fit."""
    messages = [pb.PushFrame(header=bytes(size)) for size in sizes]
    made: list[pb.PushFrame] = []
    found = verbs.fitting((made.append(message) or message for message in messages), 40)  # type: ignore[func-returns-value]
    sums = [sum(m.ByteSize() for m in messages[:n]) for n in range(len(messages) + 1)]
    assert found == messages[: max(n for n, size in enumerate(sums) if n <= 1 or size <= 40)]
    assert len(made) <= len(found) + 1


# ---- Plain votes as packed numbers ----

NUMBERS = st.integers(0, (1 << 64) - 1)

PLAIN = st.builds(
    Vote, job=NUMBERS, round=NUMBERS, plan_id=st.binary(max_size=40), generation=NUMBERS,
    attempt=st.integers(0, (1 << 32) - 1), whole=st.frozensets(NUMBERS, max_size=9),
    closed=st.integers(-1, (1 << 63) - 1),
)  # fmt: skip


@search()
@given(PLAIN)
def test_plain_votes_arrive_as_they_were(vote: Vote) -> None:
    """With any members and numbers."""
    packed = plain_votes.pack(vote)
    assert packed is not None
    assert plain_votes.unpack(packed) == vote


@search()
@given(PLAIN.filter(lambda vote: not vote.plan_id), st.data())
def test_a_vote_that_is_cut_off_is_refused(vote: Vote, data: st.DataObject) -> None:
    """Its members would be others."""
    packed = plain_votes.pack(vote)
    assert packed is not None
    with pytest.raises(InvalidRequest, match="is not whole"):
        plain_votes.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


def test_nothing_is_lost_of_votes_that_say_more() -> None:
    """A vote with an error, a digest, sums or late contributions is not packed, and neither is a testimony."""
    plain, *others = samples.VOTES
    assert plain_votes.pack(plain) is not None
    assert [plain_votes.pack(each) for each in others] == [None] * 5
