"""Payloads, parts and frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN, MAX_NDIM, PART_BYTES
from pswire.pb import parameter_server_pb2 as pb
from pswire.tensor import (
    DTYPES,
    MAX_OVERHEAD,
    MIN_PART_BYTES,
    SPARE_PARTS,
    Array,
    Assembly,
    Frame,
    Payload,
    TensorSpec,
    frames,
    layout,
    portable,
    spec_of,
)

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Arrays of any dtype and shape, in C or Fortran order, strided, of either byte order; any bits."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(SHAPES)
    count = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    form = draw(st.sampled_from(["plain", "fortran", "strided", "big-endian"]))
    if form == "fortran":
        return np.asfortranarray(array)
    if form == "strided" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    if form == "big-endian" and dtype.byteorder != "|" and dtype.kind != "V":
        return array.astype(dtype.newbyteorder(">"))
    return array


def bits(array: Array) -> bytes:
    """An array's bytes as they travel: C order, little-endian."""
    return np.asarray(array).astype(DTYPES[array.dtype.name], copy=False).tobytes()


def assemble(size: int, sent: Iterable[Frame]) -> Payload:
    assembly = Assembly(size)
    for frame in sent:
        assembly.add(frame)
    return assembly.payload()


def travel(payload: Payload, header: bytes = b"h") -> Payload:
    """The payload as the other end has it."""
    return assemble(payload.size, [Frame.decode(frame.encode()) for frame in frames(header, payload)])


def ramp(nbytes: int) -> Array:
    return np.arange(nbytes, dtype=np.uint64).astype(np.uint8)


def part(offset: int, data: bytes) -> Frame:
    return Frame(b"", offset, (memoryview(data),))


@given(st.lists(arrays(), max_size=6))
def test_tensors_arrive_bit_for_bit(sent: list[Array]) -> None:
    """Every dtype, shape, order and byte order arrives with the same shape, dtype and bits."""
    specs = [spec_of(array) for array in sent]
    came = travel(Payload.pack([portable(array) for array in sent])).tensors(specs)
    assert [(a.shape, a.dtype, a.tobytes()) for a in came] == [
        (a.shape, DTYPES[s.dtype], bits(a)) for a, s in zip(sent, specs, strict=True)
    ]


@given(st.lists(st.integers(0, 100), max_size=6), st.sampled_from([16, 32, 48, 1024]))
def test_parts_cover_the_payload_in_order(sizes: list[int], part_bytes: int) -> None:
    """Parts follow one another without gap or overlap, and none but the last is short."""
    payload = Payload.pack([ramp(size) for size in sizes])
    parts = [(offset, b"".join(buffers)) for offset, buffers in payload.parts(part_bytes)]
    assert [offset for offset, _ in parts] == list(range(0, payload.size, part_bytes))
    assert all(len(data) == part_bytes for _, data in parts[:-1])
    whole = b"".join(data for _, data in parts)
    offsets, end = layout(TensorSpec("uint8", (size,)) for size in sizes)
    assert len(whole) == end == payload.size
    assert [whole[o : o + n] for o, n in zip(offsets, sizes, strict=True)] == [ramp(n).tobytes() for n in sizes]


def test_a_tensor_of_several_parts_is_whole_again() -> None:
    """A tensor larger than a part arrives whole, and so does the small one behind it."""
    large, small = np.arange(PART_BYTES // 2 + 5, dtype=np.float32), np.array(7.0)
    payload = Payload.pack([large, small])
    assert len(list(payload.parts())) == 3
    came = travel(payload).tensors([spec_of(large), spec_of(small)])
    np.testing.assert_array_equal(came[0], large)
    assert came[1] == small


def test_a_tensor_within_one_part_is_not_copied() -> None:
    """What one part holds is a read-only view of the received bytes."""
    message = next(frames(b"", Payload.pack([np.arange(4.0)]))).encode()
    assembly = Assembly(32)
    assembly.add(Frame.decode(message))
    (came,) = assembly.payload().tensors([TensorSpec("float64", (4,))])
    assert np.shares_memory(came, np.frombuffer(message, np.uint8))
    assert not came.flags.writeable


@given(st.binary(max_size=300), st.integers(0, 1 << 40), st.integers(0, 300))
def test_frames_are_protobuf(header: bytes, offset: int, size: int) -> None:
    """The generated class writes the bytes that we write, and each reads the other's."""
    data = ramp(size).tobytes()
    ours = Frame(header, offset, (memoryview(data),)).encode()
    theirs = pb.PushFrame.FromString(ours)
    assert (theirs.header, theirs.part.offset, theirs.part.data) == (header, offset, data)
    assert theirs.SerializeToString() == ours
    bare = pb.PushFrame(header=header, part=pb.Part(offset=offset, data=data)).SerializeToString()
    frame = Frame.decode(bare)
    assert frame.data is not None
    assert (frame.header, frame.offset, b"".join(frame.data)) == (header, offset, data)


@given(st.binary(max_size=300))
def test_a_frame_may_be_a_header_alone(header: bytes) -> None:
    """Without a part, the frame is the protobuf message without one."""
    assert Frame(header).encode() == pb.PushFrame(header=header).SerializeToString()
    assert Frame.decode(Frame(header).encode()) == Frame(header)


EDGES = [range(1, 40), range(80, 140), range(16_330, 16_400), range((1 << 21) - 60, (1 << 21) + 8)]


@pytest.mark.parametrize("size", [size for edge in EDGES for size in edge])
def test_data_are_aligned_in_their_frame(size: int) -> None:
    """Data start at a multiple of ALIGN, also where a length takes one byte more to write."""
    data = bytes(size)
    for header in (b"", b"x" * (size % 23)):
        message = Frame(header, 0, (memoryview(data),)).encode()
        assert (len(message) - size) % ALIGN == 0
        assert pb.PushFrame.FromString(message).part.data == data


@given(st.binary(max_size=200))
def test_malformed_frames_are_refused(message: bytes) -> None:
    """Whatever comes, it is a frame or an InvalidRequest; and so is what follows from it."""
    try:
        Assembly(64).add(Frame.decode(message))
    except InvalidRequest:
        pass


@given(st.data())
def test_damaged_frames_are_refused(data: st.DataObject) -> None:
    """A valid frame with one byte changed, or cut off, is a frame or an InvalidRequest."""
    message = bytearray(Frame(b"header", 0, (ramp(40).data,)).encode())
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] = data.draw(st.integers(0, 255))
    try:
        Frame.decode(bytes(message[: data.draw(st.integers(0, len(message)))]))
    except InvalidRequest:
        pass


def test_a_frame_of_padding_is_refused() -> None:
    """A part keeps its frame in memory, so a frame that is mostly padding is an attack."""
    message = pb.PushFrame(part=pb.Part(offset=0, pad=bytes(MAX_OVERHEAD), data=b"x")).SerializeToString()
    with pytest.raises(InvalidRequest, match="padding"):
        Frame.decode(message)


WRONG: dict[str, tuple[int, Sequence[Frame]]] = {
    "a part that is not the next": (64, [part(32, bytes(32))]),
    "a part twice": (64, [part(0, bytes(32)), part(0, bytes(32))]),
    "a part that overlaps": (64, [part(0, bytes(32)), part(16, bytes(32))]),
    "a part of more bytes than announced": (64, [part(0, bytes(65))]),
    "a part after the last": (64, [part(0, bytes(64)), part(64, bytes(1))]),
    "a part where nothing was announced": (0, [part(0, bytes(1))]),
    "a part that begins within an element": (64, [part(0, bytes(3)), part(3, bytes(61))]),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_out_of_place_are_refused(case: str) -> None:
    """Parts come in order, without gap, and never exceed what was announced."""
    size, sent = WRONG[case]
    with pytest.raises(InvalidRequest, match=r"a part of|cut too small"):
        assemble(size, sent)


def test_tiny_parts_are_refused() -> None:
    """What a peer announced bounds how many parts it may cut it into."""
    assert MIN_PART_BYTES > ALIGN * (SPARE_PARTS + 2)
    with pytest.raises(InvalidRequest, match="too small"):
        assemble(MIN_PART_BYTES, (part(at, bytes(ALIGN)) for at in range(0, MIN_PART_BYTES, ALIGN)))


def test_parts_without_bytes_cost_nothing() -> None:
    """Empty parts are not kept, however many come."""
    assembly = Assembly(16)
    for _ in range(1000):
        assembly.add(part(0, b""))
    assembly.add(part(0, bytes(16)))
    assert [(at, bytes(data)) for at, data in assembly.payload().chunks] == [(0, bytes(16))]


def test_a_stream_that_ends_early_is_refused() -> None:
    """A contribution is whole or absent."""
    assembly = Assembly(64)
    assembly.add(part(0, bytes(48)))
    assert not assembly.whole
    with pytest.raises(InvalidRequest, match="byte 48 of 64"):
        assembly.payload()


def test_a_payload_of_another_size_is_refused() -> None:
    """Tensors are read only from a payload that has exactly their bytes."""
    with pytest.raises(InvalidRequest, match="cannot hold"):
        Payload.pack([np.zeros(3)]).tensors([TensorSpec("float64", (4,))])
    with pytest.raises(InvalidRequest, match="not whole"):
        Payload((), 8).tensors([TensorSpec("float64", ())])
    assert Payload.pack([]).tensors([]) == []


IMPOSSIBLE: list[tuple[str, tuple[int, ...]]] = [
    ("object", (1,)),
    ("float128", (1,)),
    ("", ()),
    ("float32", (-1,)),
    ("float32", (1 << 60,)),
    ("float32", (0, 1 << 60)),
    ("float32", (1 << 30, 0, 1 << 30)),
    ("int8", (1,) * (MAX_NDIM + 1)),
]


@pytest.mark.parametrize(("dtype", "shape"), IMPOSSIBLE)
def test_impossible_specs_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """A spec that passes is one that NumPy can make; no other does."""
    with pytest.raises(InvalidRequest):
        TensorSpec(dtype, shape).check()


@given(SHAPES, st.sampled_from(sorted(DTYPES)))
def test_possible_specs_pass(shape: tuple[int, ...], dtype: str) -> None:
    """Specs of real arrays pass, and say their size."""
    array = np.zeros(shape, DTYPES[dtype])
    spec = spec_of(array).check()
    assert (spec.size, spec.nbytes) == (array.size, array.nbytes)


@pytest.mark.parametrize("array", [np.array([None]), np.array(["x"]), np.zeros(1, "f4,i4"), np.zeros(1, "M8[s]")])
def test_arrays_that_do_not_travel_are_refused(array: Any) -> None:
    """Objects, strings, records and dates have no place on the wire."""
    with pytest.raises(InvalidRequest, match="cannot travel"):
        spec_of(array)
