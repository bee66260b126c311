"""The mapper: turns frozen values into protobuf messages and back, by the names and types of their fields.

A `Mapper` reads the type hints of a class and the descriptor of its message once, and makes two functions of them. What
travels in every round is written by hand, beside the table, which costs it less. These types are known:

| field of the value | field of the message |
|---|---|
| `bool`, `int`, `float`, `str`, `bytes` | the same |
| a `Literal` that was given to `words` | an enumeration |
| another class | its message |
| `tuple[X, ...]`, `Sequence[X]` | repeated |
| `tuple[X, Y]` | a message with as many fields, in that order |
| `Mapping` | a map |
| `X | None` | absent for None |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pswire.errors import InvalidRequest

V = TypeVar("V")
M = TypeVar("M", bound=Message)
W = TypeVar("W")

Way = Callable[[Any], Any]

SCALARS = (bool, int, float, str, bytes)


class Words(dict[Any, W]):
    """The words of a `Literal`, by the numbers of an enumeration; another number raises `InvalidRequest`.

    Attributes:
        numbers: the numbers by the words.
    """

    def __init__(self, words: object, enum: Any, unknown: str) -> None:
        by_suffix = {name.rpartition("_")[2].lower(): number for name, number in enum.items()}
        super().__init__({by_suffix[word]: word for word in get_args(words)})
        self.numbers: dict[W, Any] = {word: number for number, word in self.items()}
        self._unknown = unknown

    def __missing__(self, number: int) -> W:
        raise InvalidRequest(self._unknown.format(number))


@dataclass(frozen=True)
class MessageCodec(Generic[V, M]):
    """A kind of value, and the message that it travels as.

    Attributes:
        message: the message's class.
        to_pb: makes the message of a value.
        from_pb: makes the value of a message; raises `InvalidRequest` for one that cannot be.
    """

    message: type[M]
    to_pb: Callable[[V], M]
    from_pb: Callable[[M], V]


class Mapper:
    """The table of all pairs of a class and its message.

    Attributes:
        pairs: codecs by type: those that were added, and those of the values within.
        enums: words by their `Literal`.
    """

    def __init__(self) -> None:
        self.pairs: dict[Any, MessageCodec[Any, Any]] = {}
        self.enums: dict[Any, Words[Any]] = {}

    def words(self, words: Any, enum: Any, unknown: str) -> Words[Any]:
        """Adds a `Literal`.

        Args:
            words: the `Literal` with the words.
            enum: the enumeration; the last part of each name is a word, and 0 is none.
            unknown: the message for another number, which stands there as `{}`.
        """
        return self.enums.setdefault(words, Words(words, enum, unknown))

    def pair(
        self,
        value: type[V],
        message: type[M],
        *,
        flags: Mapping[str, str] | None = None,
        admit: Callable[[M], object] | None = None,
        check: Callable[[V], V] | None = None,
    ) -> MessageCodec[V, M]:
        """Adds a class whose fields are those of its message.

        Args:
            value: the class of the values.
            message: class of its message.
            flags: for a `Mapping` that may be None the message's field that tells whether it is there.
            admit: called with a message before it is read.
            check: called with a value that was read.
        """
        flags, fields = flags or {}, []
        for name, kind in get_type_hints(value).items():
            if get_origin(kind) is ClassVar:
                continue
            optional = NoneType in get_args(kind)
            there = reduce(or_, (one for one in get_args(kind) if one is not NoneType)) if optional else kind
            way = self._way(there, message.DESCRIPTOR.fields_by_name[name])
            fields.append((name, flags.get(name), optional, *way))

        def to_pb(v: V) -> M:
            made: dict[str, Any] = {}
            for name, flag, _, write, _ in fields:
                given = getattr(v, name)
                if flag is not None:
                    made[flag] = given is not None
                if given is not None:
                    made[name] = write(given)
            return message(**made)

        def from_pb(m: M) -> V:
            if admit is not None:
                admit(m)
            found = []
            for name, flag, optional, _, read in fields:
                there = not optional or (getattr(m, flag) if flag is not None else m.HasField(name))
                found.append(read(getattr(m, name)) if there else None)
            return value(*found) if check is None else check(value(*found))

        return self.add(value, MessageCodec(message, to_pb, from_pb))

    def answer(self, kind: Any, message: type[M]) -> MessageCodec[Any, M]:
        """Returns the pair of a class, of the type of a message's only field, or of None for a message without fields.

        Args:
            kind: the type of the value.
            message: the message's class.
        """
        if kind is NoneType:
            return MessageCodec(message, lambda _: message(), lambda _: None)
        if is_dataclass(kind):
            return self.known(kind, message)
        (field,) = message.DESCRIPTOR.fields
        name, (write, read) = field.name, self._way(kind, field)
        return MessageCodec(message, lambda v: message(**{name: write(v)}), lambda m: read(getattr(m, name)))

    def choice(self, values: Any, message: type[M], missing: str) -> MessageCodec[Any, M]:
        """Adds a union of classes, each of which is a choice of the message's oneof by its name.

        Args:
            values: the union; a class with one field may be that field's message.
            message: the message's class.
            missing: the message for none of them.
        """
        (oneof,) = message.DESCRIPTOR.oneofs
        name, writers, readers = oneof.name, {}, {}
        for value in get_args(values):
            chosen = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", value.__name__).lower()
            inner = self._inner(value, message.DESCRIPTOR.fields_by_name[chosen].message_type)
            writers[value], readers[chosen] = (chosen, inner.to_pb), inner.from_pb

        def to_pb(value: Any) -> M:
            chosen, write = writers[type(value)]
            return message(**{chosen: write(value)})

        def from_pb(received: M) -> Any:
            chosen = received.WhichOneof(name)
            if chosen is None:
                raise InvalidRequest(missing)
            return readers[chosen](getattr(received, chosen))

        return self.add(values, MessageCodec(message, to_pb, from_pb))

    def add(self, value: Any, pair: MessageCodec[V, M]) -> MessageCodec[V, M]:
        """Adds a pair, for values of a type.

        Raises:
            ValueError: the type is in the table already. A row that came after those it is in would not check there.
        """
        if value in self.pairs:
            raise ValueError(f"{value} is in the table; its row must come before the rows that contain it")
        self.pairs[value] = pair
        return pair

    def _inner(self, value: Any, message: Any) -> MessageCodec[Any, Any]:
        """The pair of a choice; if its message is that of its only field, the class is put around that."""
        hints = get_type_hints(value)
        if len(hints) == 1 and not hints.keys() & message.fields_by_name.keys():
            ((name, kind),) = hints.items()
            within = self.known(kind, GetMessageClass(message))
            return MessageCodec(
                within.message, lambda v: within.to_pb(getattr(v, name)), lambda m: value(within.from_pb(m))
            )
        return self.known(value, GetMessageClass(message))

    def known(self, value: Any, message: type[Message]) -> MessageCodec[Any, Any]:
        """Returns the pair of a class; added where it is not there yet, by its fields alone."""
        return self.pairs.get(value) or self.pair(value, message)

    def _way(self, kind: Any, field: Any) -> tuple[Way, Way]:
        """Returns what writes a field of a value, and what reads the message's field."""
        inner = get_args(kind)
        if kind in SCALARS:
            return _same, _same
        if kind in self.enums:
            words = self.enums[kind]
            return words.numbers.__getitem__, words.__getitem__
        if get_origin(kind) is Mapping:
            return _same, dict
        if inner and kind not in self.pairs:
            if inner[-1] is Ellipsis or get_origin(kind) is Sequence:
                return _each(*self._way(inner[0], field))
            return self._in_order(inner, field.message_type)
        pair = self.known(kind, GetMessageClass(field.message_type))
        return pair.to_pb, pair.from_pb

    def _in_order(self, kinds: tuple[Any, ...], message: Any) -> tuple[Way, Way]:
        """As `_way`, of a tuple whose items are the fields of a message."""
        made = GetMessageClass(message)
        ways = [(field.name, *self._way(kind, field)) for kind, field in zip(kinds, message.fields, strict=True)]

        def write(items: Any) -> Message:
            return made(**{name: way(item) for (name, way, _), item in zip(ways, items, strict=True)})

        def read(m: Message) -> tuple[Any, ...]:
            return tuple([way(getattr(m, name)) for name, _, way in ways])

        return write, read


def _same(x: Any) -> Any:
    return x


def _each(write: Way, read: Way) -> tuple[Way, Way]:
    """As `Mapper._way`, of a tuple whose items are written and read like this."""
    if write is _same:
        return _same, tuple
    return lambda items: [write(x) for x in items], lambda items: tuple([read(x) for x in items])
