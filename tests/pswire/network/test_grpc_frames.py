"""The frames of the grpc transport: valid protobuf, aligned, and refused where they are malformed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.model.tensor import DTYPES, Array, TensorSpec, portable, spec_of
from pswire.network.grpc_frames import MAX_OVERHEAD, Frame, frames
from pswire.network.parts import Assembly, parts_of
from pswire.network.payload import Payload
from pswire.pb import parameter_server_pb2 as pb
from tests.kit.cases import search


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Arrays of any dtype and shape, in C or Fortran order, strided, of either byte order; any bits."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
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


def travel(payload: Payload) -> Payload:
    """The payload as the other end has it."""
    assembly = Assembly(payload.size)
    for sent in frames(b"header", parts_of(payload)):
        frame = Frame.decode(sent.encode())
        assembly.add(frame.offset, frame.data or ())
    return assembly.check_whole()


def ramp(nbytes: int) -> Array:
    return np.arange(nbytes, dtype=np.uint64).astype(np.uint8)


@given(st.lists(arrays(), max_size=6))
def test_tensors_arrive_bit_for_bit(sent: list[Array]) -> None:
    """Every dtype, shape, order and byte order arrives with the same shape, dtype and bits."""
    specs = [spec_of(array) for array in sent]
    came = travel(Payload.pack([portable(array) for array in sent])).tensors(specs)
    assert [(a.shape, a.dtype, a.tobytes()) for a in came] == [
        (a.shape, DTYPES[s.dtype], bits(a)) for a, s in zip(sent, specs, strict=True)
    ]


def test_a_tensor_within_one_part_is_not_copied() -> None:
    """What one part holds is a read-only view of the received bytes."""
    message = next(frames(b"", parts_of(Payload.pack([np.arange(4.0)])))).encode()
    assembly = Assembly(32)
    frame = Frame.decode(message)
    assembly.add(frame.offset, frame.data or ())
    (came,) = assembly.payload.tensors([TensorSpec("float64", (4,))])
    assert np.shares_memory(came, np.frombuffer(message, np.uint8))
    assert not came.flags.writeable


@given(st.binary(max_size=300), st.integers(0, 1 << 40), st.integers(0, 300))
def test_frames_are_protobuf(header: bytes, offset: int, size: int) -> None:
    """The generated class writes the bytes that we write, and each reads the other's; a header may be alone."""
    assert Frame(header).encode() == pb.PushFrame(header=header).SerializeToString()
    assert Frame.decode(Frame(header).encode()) == Frame(header)
    data = ramp(size).tobytes()
    ours = Frame(header, offset, (memoryview(data),)).encode()
    theirs = pb.PushFrame.FromString(ours)
    assert (theirs.header, theirs.part.offset, theirs.part.data) == (header, offset, data)
    assert theirs.SerializeToString() == ours
    bare = pb.PushFrame(header=header, part=pb.Part(offset=offset, data=data)).SerializeToString()
    frame = Frame.decode(bare)
    assert frame.data is not None
    assert (frame.header, frame.offset, b"".join(frame.data)) == (header, offset, data)


EDGES = [range(1, 40), range(80, 140), range(16_330, 16_400), range((1 << 21) - 60, (1 << 21) + 8)]


@pytest.mark.parametrize("size", [size for edge in EDGES for size in edge])
def test_data_are_aligned_in_their_frame(size: int) -> None:
    """Data start at a multiple of ALIGN, also where a length takes one byte more to write."""
    data = bytes(size)
    for header in (b"", b"x" * (size % 23)):
        message = Frame(header, 0, (memoryview(data),)).encode()
        assert (len(message) - size) % ALIGN == 0
        assert pb.PushFrame.FromString(message).part.data == data


VALID = Frame(b"header", 0, (ramp(40).data,)).encode()
DAMAGED = st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=1), st.integers(0, len(VALID))).map(
    lambda cut: (VALID[: cut[0]] + cut[1] + VALID[cut[0] + 1 :])[: cut[2]]
)


@given(st.binary(max_size=200) | DAMAGED)
@search(2)
def test_malformed_frames_are_refused(message: bytes) -> None:
    """Whatever comes, with one byte changed, or cut off, it is a frame or an InvalidRequest; so is what follows."""
    try:
        frame = Frame.decode(message)
        Assembly(64).add(frame.offset, frame.data or ())
    except InvalidRequest:
        pass


def test_a_frame_of_padding_is_refused() -> None:
    """A part keeps its frame in memory, so a frame that is mostly padding is an attack."""
    message = pb.PushFrame(part=pb.Part(offset=0, pad=bytes(MAX_OVERHEAD), data=b"x")).SerializeToString()
    with pytest.raises(InvalidRequest, match="padding"):
        Frame.decode(message)
