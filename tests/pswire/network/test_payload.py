"""Payloads: whole or on their way, cut into parts and collected from them; and the frames of gRPC that carry them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pswire.errors import InvalidRequest
from pswire.limits import ALIGN
from pswire.model.tensor import DTYPES, Array, TensorSpec, layout, portable, spec_of
from pswire.network.grpc_frames import MAX_OVERHEAD, Frame, frames
from pswire.network.parts import MIN_PART_BYTES, SPARE_PARTS, STEPS, Assembly, Cutter, Part, parts_of
from pswire.network.payload import Chunk, Payload
from pswire.pb import parameter_server_pb2 as pb
from tests.kit.cases import search

STEP = 2 * ALIGN
SIZES = st.lists(st.integers(0, 100), max_size=6)
PART_SIZES = st.sampled_from([STEP, 2 * STEP, 3 * STEP, 1024])


def ramp(nbytes: int, first: int = 0) -> Array:
    return np.arange(first, first + nbytes, dtype=np.uint64).astype(np.uint8)


def content(sizes: Sequence[int]) -> tuple[list[Chunk], int, bytes]:
    """Tensors of these sizes as they are packed: the chunks, the payload's size, and its bytes with the padding."""
    packed = Payload.pack([ramp(size, 17 * place + 1) for place, size in enumerate(sizes)])
    whole = bytearray(packed.size)
    for offset, buffer in packed.chunks:
        whole[offset : offset + len(buffer)] = buffer
    return packed.chunks, packed.size, bytes(whole)


def joined(payload: Payload) -> bytes:
    """What is there of a payload, with zeros where it has padding; each byte once."""
    out = bytearray(payload.end)
    reached = 0
    for offset, buffer in payload.chunks:
        assert offset >= reached, "bytes are there twice"
        reached = offset + len(buffer)
        out[offset:reached] = buffer
    return bytes(out)


def cut_at(whole: bytes, cuts: Iterable[int]) -> list[Chunk]:
    """Bytes cut at some multiples of ALIGN."""
    at = sorted({0, len(whole), *(cut * ALIGN for cut in cuts if cut * ALIGN < len(whole))})
    return [(start, memoryview(whole[start:end])) for start, end in itertools.pairwise(at)]


# ---- Parts ----


@example([30, 60], 96, 1, [])  # which fits one part
@given(SIZES, PART_SIZES, st.integers(1, STEPS), st.lists(st.integers(0, 2), max_size=12))
def test_a_payload_is_cut_as_it_grows(sizes: list[int], part_bytes: int, steps: int, turns: list[int]) -> None:
    """However adding and cutting take turns it is cut alike: others may have been told of the same parts. Parts have no
    gap or overlap, and lie at aligned places; none is too large, and no tensor that fits one is cut. One who looks only
    when told leaves nothing behind, and is told of nothing in vain."""
    chunks, size, whole = content(sizes)
    payload, rest = Payload((), size), list(chunks)
    cutter, parts = Cutter(payload, part_bytes, steps), list[Part]()
    other, told, ends = Cutter(payload, part_bytes, steps), list[Part](), [0]

    def look() -> None:
        assert payload.end > ends[-1]
        ends.append(payload.end)
        while (part := other.next()) is not None:
            told.append(part)
        if not other.done:
            other.when(0, look)

    def cut() -> None:
        while (part := cutter.next()) is not None:
            parts.append(part)
        uncut = payload.end - sum(len(b) for _, bs in parts for b in bs)
        assert uncut < part_bytes // 2 or payload.size - payload.end + uncut <= part_bytes

    if not other.done:
        other.when(0, look)
    for turn in turns:
        for _ in range(turn):
            if rest:
                payload.add(*rest.pop(0))
        cut()
    for chunk in rest:
        payload.add(*chunk)
    cut()
    assert cutter.done
    assert other.done
    data = [b"".join(buffers) for _, buffers in parts]
    starts = [offset for offset, _ in parts]
    assert b"".join(data) == whole
    assert starts == [0, *np.cumsum(list(map(len, data)))][: len(parts)]
    assert all(offset % ALIGN == 0 for offset in starts)
    assert all(0 < len(each) <= part_bytes for each in data)
    assert size > part_bytes or len(parts) <= 1
    for offset, nbytes in zip(layout(TensorSpec("uint8", (n,)) for n in sizes)[0], sizes, strict=True):
        assert nbytes > part_bytes or not any(offset < at < offset + nbytes for at in starts)
    assert parts == told == list(parts_of(Payload(chunks, size), part_bytes, steps))


# ---- Growing ----


@given(SIZES, st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_a_payload_grows(sizes: list[int], spans: list[tuple[int, int]]) -> None:
    """Its end moves on; it is whole with the last byte, and then reads as one that was whole from the first. Bytes that
    come again change nothing, in whole or in part: what was there first stays, and each byte is there once."""
    chunks, size, whole = content(sizes)
    specs = [TensorSpec("uint8", (n,)) for n in sizes]
    payload = Payload((), size)
    for first, count in [*spans, (0, size)]:
        start = min(first * ALIGN, payload.end)
        end = min(start + count * ALIGN, size)
        # Who sends something else the second time changes nothing by it.
        again = bytes(255 if at < payload.end else whole[at] for at in range(start, end))
        before = payload.end
        payload.add(start, memoryview(again))
        assert payload.end == max(before, end)
        assert payload.whole == (payload.end == size)
        assert joined(payload) == whole[: payload.end]
    assert payload.whole
    assert [t.tobytes() for t in payload.tensors(specs)] == [t.tobytes() for t in Payload(chunks, size).tensors(specs)]


def test_a_tensor_is_read_before_the_rest_is_there() -> None:
    """And one that is there in part is refused."""
    spec = TensorSpec("float64", (4,))
    whole = Payload.pack([np.arange(4.0), np.arange(4.0, 8.0)])
    payload = Payload((), whole.size)
    payload.add(*whole.chunks[0])
    payload.add(32, whole.chunks[1][1][:16])
    assert np.concatenate(payload.pieces(0, spec)).tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest, match=r"at byte 32 has 32 bytes, .* has only 16 of them"):
        payload.pieces(32, spec)
    payload.add(48, whole.chunks[1][1][16:])
    assert np.concatenate(payload.pieces(32, spec)).tolist() == [4, 5, 6, 7]


@given(st.lists(st.integers(0, 9 * ALIGN), max_size=12), st.integers(0, 8))
def test_who_waits_is_told_once(offsets: list[int], late: int) -> None:
    """As soon as all bytes before its place are there, whatever the order in which they began to wait; not before."""
    payload, told = Payload((), 8 * ALIGN), list[int]()
    for place, offset in enumerate(offsets[late:]):
        payload.reach(offset, partial(told.append, place + late))
    for step in range(8):
        payload.add(step * ALIGN, memoryview(bytes(ALIGN)))
        ready = [p for p, offset in enumerate(offsets) if p >= late and offset <= payload.end]
        assert sorted(told) == ready
    for place, offset in enumerate(offsets[:late]):
        payload.reach(offset, partial(told.append, place))
    payload.add(0, memoryview(bytes(8 * ALIGN)))
    assert sorted(told) == [place for place, offset in enumerate(offsets) if offset <= 8 * ALIGN]


def test_who_is_told_may_wait_again_and_add() -> None:
    """It is called without a lock."""
    payload, seen = Payload((), 4 * ALIGN), list[int]()

    def look() -> None:
        seen.append(payload.end)
        if not payload.whole:
            payload.reach(payload.end + 1, look)
            payload.add(payload.end, memoryview(bytes(ALIGN)))

    payload.reach(1, look)
    payload.add(0, memoryview(bytes(ALIGN)))
    assert seen == [ALIGN, 2 * ALIGN, 3 * ALIGN, 4 * ALIGN]


# ---- What is sent again ----

CUTS = st.lists(st.integers(0, 20), max_size=6)


@given(SIZES, st.data())
def test_attempts_complete_each_other(sizes: list[int], data: st.DataObject) -> None:
    """Cut as they like, begun and broken off at any time: the first has all bytes once the last one is whole."""
    _, size, whole = content(sizes)
    kept = Payload((), size)
    attempts = [(kept, cut_at(whole, data.draw(CUTS)))]
    for _ in range(data.draw(st.integers(0, 3))):
        attempts.append((Payload((), size), cut_at(whole, data.draw(CUTS))))
    followed = {0}
    while attempts[-1][1]:
        which = data.draw(st.integers(0, len(attempts) - 1))
        payload, rest = attempts[which]
        if data.draw(st.booleans()) and which not in followed:
            followed.add(which)
            kept.follow(payload)
        elif rest:
            payload.add(*rest.pop(0))
        assert joined(kept) == whole[: kept.end]
    if len(attempts) - 1 not in followed:
        kept.follow(attempts[-1][0])
    assert kept.whole
    assert joined(kept) == whole


def test_attempts_come_at_once() -> None:
    """Each in a thread of its own, while the first goes on, too, and one that waits for each byte: exact bytes, and
    nothing twice."""
    whole, ready = bytes(ramp(400 * ALIGN, 3)), threading.Barrier(5)

    def send(kept: Payload, payload: Payload, step: int) -> None:
        ready.wait()
        if payload is not kept:
            kept.follow(payload)
        for chunk in cut_at(whole, range(0, 400, step)):
            payload.add(*chunk)

    def wait(kept: Payload, told: list[int]) -> None:
        ready.wait()
        for end in range(len(whole) + 1):
            kept.reach(end, partial(told.append, end))

    for _ in range(5):
        kept, told = Payload((), len(whole)), list[int]()
        others = [Payload((), len(whole)) for _ in range(3)]
        sending = (partial(send, kept, *each) for each in zip((kept, *others), (7, 1, 3, 11), strict=True))
        with ThreadPoolExecutor(5) as pool:
            for each in [pool.submit(work) for work in (*sending, partial(wait, kept, told))]:
                each.result()
        assert kept.whole
        assert sorted(told) == [*range(len(whole) + 1)]
        assert joined(kept) == whole


def test_what_follows_costs_what_it_has() -> None:
    """A push of many small parts that is sent again is not gone through anew at each of them."""
    count = 20_000
    kept, other = Payload((), count * ALIGN), Payload((), count * ALIGN)
    kept.follow(other)
    added, add = [0], kept.add

    def counting(offset: int, buffer: memoryview) -> None:
        added[0] += 1
        add(offset, buffer)

    kept.add = counting  # type: ignore[method-assign]
    buffer = memoryview(bytes(ALIGN))
    for step in range(200):
        other.add(step * ALIGN, buffer)
    assert added[0] <= 3 * 200


# ---- Assembly ----

WRONG: dict[str, tuple[int, Sequence[tuple[int, int]]]] = {
    "a part that is not the next": (64, [(32, 32)]),
    "a part twice": (64, [(0, 32), (0, 32)]),
    "a part that overlaps": (64, [(0, 32), (16, 32)]),
    "a part of more bytes than announced": (64, [(0, 65)]),
    "a part after the last": (64, [(0, 64), (64, 1)]),
    "a part where nothing was announced": (0, [(0, 1)]),
    "a part that begins within an element": (64, [(0, 3), (3, 61)]),
    "more tiny parts than may be": (MIN_PART_BYTES, [(at * ALIGN, ALIGN) for at in range(SPARE_PARTS + 2)]),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_out_of_place_are_refused(case: str) -> None:
    """Parts come in order, without gap, and never exceed what was announced, which bounds how many they may be."""
    size, (*good, (last, nbytes)) = WRONG[case]
    assembly = Assembly(size)
    for offset, count in good:
        assembly.add(offset, (memoryview(bytes(count)),))
    with pytest.raises(InvalidRequest, match=r"a part of|are too small"):
        assembly.add(last, (memoryview(bytes(nbytes)),))


def test_a_stream_that_ends_early_is_refused() -> None:
    """What is missing is said. Empty parts are not kept, however many come."""
    assembly = Assembly(64)
    for _ in range(1000):
        assembly.add(0, (memoryview(b""),))
    assembly.add(0, (memoryview(bytes(48)),))
    assert [(at, bytes(data)) for at, data in assembly.payload.chunks] == [(0, bytes(48))]
    assert not assembly.payload.whole
    with pytest.raises(InvalidRequest, match="byte 48 of 64"):
        assembly.check_whole()


def test_parts_grow_what_an_earlier_attempt_began() -> None:
    """An attempt that goes on while another one completes its payload is still held to its own order."""
    whole = bytes(ramp(8 * ALIGN))
    assembly, again = Assembly(len(whole)), Payload((), len(whole))
    assembly.add(0, (memoryview(whole[:STEP]),))
    assembly.payload.follow(again)
    again.add(0, memoryview(whole[: 3 * STEP]))
    assembly.add(STEP, (memoryview(whole[STEP : STEP + ALIGN]),))
    with pytest.raises(InvalidRequest, match=f"expected {STEP + ALIGN}"):
        assembly.add(3 * STEP, (memoryview(whole[3 * STEP :]),))
    again.add(3 * STEP, memoryview(whole[3 * STEP :]))
    assert joined(assembly.check_whole()) == whole


def test_a_payload_of_another_size_is_refused() -> None:
    """Tensors are read only from a payload that has exactly their bytes."""
    with pytest.raises(InvalidRequest, match="cannot hold"):
        Payload.pack([np.zeros(3)]).tensors([TensorSpec("float64", (4,))])
    with pytest.raises(InvalidRequest, match=r"float64.* at byte 0 has 8 bytes, .* has only 0 of them"):
        Payload((), 8).tensors([TensorSpec("float64", ())])
    assert Payload.pack([]).tensors([]) == []


@pytest.mark.parametrize("size", [3, 5000], ids=["small", "large"])
def test_a_copy_has_its_own_memory(size: int) -> None:
    """The arrays may change; what lies between tensors is zeros, so that servers compare all bytes at once. Arrays of
    which the system knows no bytes travel as all others. Small ones are gathered so, and large ones are not."""
    dtypes = ("float32", "int8", "bool", "float16", "bfloat16", "complex64", "int64")
    arrays = [np.ones(size + n, DTYPES[dtype]) for n, dtype in enumerate(dtypes)] + [np.array(2.0), np.empty((0, 3))]
    specs, before = list(map(spec_of, arrays)), [array.copy() for array in arrays]
    packed, copied, gathered = Payload.pack(arrays), Payload.copied(arrays), Payload.gathered(arrays)
    assert packed.size == copied.size == gathered.size
    assert sum(copied.chunks[0][1]) == sum(sum(array.tobytes()) for array in arrays)
    for array in arrays:
        array.fill(0)
    for payload, own in ((packed, False), (copied, True), (gathered, size == 3)):
        found = payload.tensors(specs)
        assert all(one.tobytes() == two.tobytes() for one, two in zip(found, before if own else arrays, strict=True))


@pytest.mark.parametrize("pieces", [1, 2], ids=["in one piece", "in two"])
def test_shared_tensors_are_read_only(pieces: int) -> None:
    """All readers of a value have the same array; others may write into theirs, and arrays that are filled stay so."""
    arrays = [np.arange(16, dtype="float32"), np.arange(2.0)]
    specs = list(map(spec_of, arrays))
    data = memoryview(bytearray(Payload.copied(arrays).chunks[0][1]))
    payload = Payload([(0, data)] if pieces == 1 else [(0, data[:32]), (32, data[32:])], len(data))
    for shared in (False, True):
        found = payload.tensors(specs, shared=shared)
        assert [array.tolist() for array in found] == [array.tolist() for array in arrays]
        assert [array.flags.writeable for array in found] == [not shared] * 2
    own = np.zeros(2)
    assert payload.tensors(specs, {1: own}, shared=True)[1] is own
    assert own.flags.writeable
    assert own.tolist() == [0.0, 1.0]


# ---- Frames of gRPC: valid protobuf, aligned, and refused where they are malformed ----


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
