"""Safetensors files, against the library of the format."""

import io
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pswire.checkpoint import safetensors_stream
from pswire.checkpoint.strict_json import Malformed
from pswire.errors import CheckpointError
from pswire.model.tensor import DTYPES, TensorSpec, portable, spec_of

ALL = {
    **{name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()},
    "a scalar": np.array(-1.5, "float32"),
    "empty": np.zeros((0, 4), "int16"),
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "a view": np.arange(10, dtype="int8")[::-3],
    "big-endian": np.arange(3, dtype=">f8"),
    "odd numbers": np.array([np.nan, np.inf, -0.0], "float16"),
    "name / of ümläut\n": np.array([True, False, True]),
}


def written(path, values):
    """Writes arrays; returns their checksums."""
    specs = {name: spec_of(portable(value)) for name, value in values.items()}
    with open(path, "wb") as file:
        file.write(safetensors_stream.header(specs))
        return {
            name: safetensors_stream.append(file, [portable(values[name])])
            for name in safetensors_stream.ordered(specs)
        }


def read(file, entry):
    """A tensor of a file, which has to have the checksum that the entry says."""
    tensor, found = safetensors_stream.TensorReader(file, entry), np.empty(entry.spec.shape, DTYPES[entry.spec.dtype])
    tensor.read(found)
    tensor.end()
    return found


def test_the_library_reads_it(tmp_path):
    """`safetensors.numpy.load_file` gives every dtype and layout as it was, complex128 as its parts, as documented."""
    written(tmp_path / "x", ALL)
    found = load_file(tmp_path / "x")
    assert set(found) == set(ALL)
    parts = found.pop("complex128")
    np.testing.assert_array_equal(parts[..., 0] + 1j * parts[..., 1], ALL["complex128"])
    for name, value in found.items():
        expected = portable(ALL[name])
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), name
        assert value.tobytes() == expected.tobytes(), name
    with safe_open(tmp_path / "x", "np") as file:
        assert file.metadata() == {"complex128": "complex128"}


def test_it_reads_what_the_library_writes(tmp_path):
    """Files of other programs are read, whatever the order in which they have their tensors."""
    values = {name: value for name, value in ALL.items() if value.dtype != np.complex128 and name in DTYPES}
    save_file(values, tmp_path / "x", {"made": "elsewhere"})
    with open(tmp_path / "x", "rb") as file:
        entries = safetensors_stream.read_header(file, (tmp_path / "x").stat().st_size)
        for name, value in values.items():
            np.testing.assert_array_equal(read(file, entries[name]), value)


def test_what_is_written_is_read_with_its_checksum(tmp_path):
    """The checksum is XXH3 of the bytes in the file, and another one is refused. Each begins at a multiple of its
    item's size, so that a reader may use the file's memory as it is."""
    sums = written(tmp_path / "x", ALL)
    raw = (tmp_path / "x").read_bytes()
    with open(tmp_path / "x", "rb", buffering=0) as file:
        entries = safetensors_stream.read_header(file, len(raw))
        for name, entry in entries.items():
            array = read(file, replace(entry, checksum=sums[name]))
            data = raw[entry.offset : entry.offset + entry.spec.nbytes]
            assert sums[name] == f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"
            assert (array.dtype, array.tobytes()) == (portable(ALL[name]).dtype, portable(ALL[name]).tobytes())
            with pytest.raises(Malformed, match="has another checksum"):
                read(file, replace(entry, checksum="xxh3:0"))
            assert entry.offset % array.itemsize == 0


def test_a_large_tensor_is_written_piece_by_piece(tmp_path):
    """Nothing as large as a tensor is held a second time."""
    value = np.arange(safetensors_stream.PIECE, dtype="int64")
    pieces = []

    class Sink(io.BytesIO):
        def write(self, data):
            pieces.append(len(data))
            return super().write(data)

    sink = Sink()
    safetensors_stream.append(sink, [value])
    assert max(pieces) == safetensors_stream.PIECE
    assert sink.getvalue() == value.tobytes()


@given(
    arrays.arrays(
        st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "bfloat16"]),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
)
def test_any_array_comes_back(value):
    """Bit for bit, whatever its shape and dtype."""
    file = io.BytesIO(safetensors_stream.header({"x": spec_of(value)}))
    file.seek(0, io.SEEK_END)
    safetensors_stream.append(file, [value])
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    entry = safetensors_stream.read_header(file, size)["x"]
    assert entry.spec == spec_of(value)
    assert read(file, entry).tobytes() == value.tobytes()


def test_the_name_of_the_metadata_is_no_variable():
    """The format keeps it for itself: the error says what to do."""
    with pytest.raises(CheckpointError, match=r"'__metadata__'.*rename the variable"):
        safetensors_stream.header({"__metadata__": TensorSpec("int8", ())})


@given(st.binary(max_size=200))
def test_noise_is_no_file(data):
    """Any bytes give a header or a `ValueError`."""
    try:
        safetensors_stream.read_header(io.BytesIO(data), len(data))
    except ValueError:
        pass


def test_every_cut_is_noticed():
    """A file that ends early, wherever, is told as one that is cut short or broken."""
    specs = {"x": TensorSpec("int64", (4,))}
    whole = safetensors_stream.header(specs) + bytes(32)
    for size in range(len(whole)):
        with pytest.raises(ValueError, match=r"truncated|damaged"):
            safetensors_stream.read_header(io.BytesIO(whole[:size]), size)
