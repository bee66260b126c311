"""What LLVM has, and Numba has no word for: intrinsics for kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

Combined = Literal["sum", "max", "min"]

TRANSPORTS = 8
"""Elements that a reduction takes side by side: NumPy's number, for sums."""


def prefetch(to_write: int, near: int) -> Any:
    """Returns an intrinsic for kernels that prefetches an element of an array.

    Args:
        to_write: 1 if it will be written.
        near: 2 for the second-level cache, 3 for the first.
    """
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    types: Any = import_module("numba.core.types")

    def prefetch(typing: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(array)(context, builder, args[0]).data
            byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            address = builder.bitcast(builder.gep(data, [args[1]]), byte)
            builder.call(function, [address, i32(to_write), i32(near), i32(1)])  # the last: it is data
            return context.get_dummy_value()

        return types.void(array, types.intp), generate

    return extending.intrinsic(prefetch)


def bits() -> Any:
    """Returns an intrinsic for kernels: the bits of a float64 or a float32 as an int64."""
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    types: Any = import_module("numba.core.types")

    def bits(typing: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.bitcast(args[0], ir.IntType(number.bitwidth))
            return builder.zext(found, ir.IntType(64)) if number.bitwidth < 64 else found

        return types.int64(number), generate

    return extending.intrinsic(bits)


def real() -> Any:
    """Returns an intrinsic for kernels: the float32 with the lowest bits of an int64."""
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    types: Any = import_module("numba.core.types")

    def real(typing: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

        return types.float32(types.int64), generate

    return extending.intrinsic(real)


def from_half() -> Any:
    """Returns an intrinsic for kernels: the float32 of the bits of a float16."""
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    types: Any = import_module("numba.core.types")
    word, real = ir.IntType(32), ir.FloatType()

    def from_half(typing: Any, half: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            whole = builder.zext(args[0], word)
            size = builder.shl(builder.and_(whole, word(0x7FFF)), word(13))
            sign = builder.shl(builder.and_(whole, word(0x8000)), word(16))
            # Read as a float32 the exponent is 112 too small; that of infinity and NaN becomes the greatest.
            finite = builder.bitcast(builder.fmul(builder.bitcast(size, real), real(2.0**112)), word)
            is_finite = builder.icmp_unsigned("<", size, word(0x0F800000))
            found = builder.select(is_finite, finite, builder.or_(size, word(0x7F800000)))
            return builder.bitcast(builder.or_(found, sign), real)

        return types.float32(types.uint16), generate

    return extending.intrinsic(from_half)


def to_half() -> Any:
    """Returns an intrinsic for kernels: the bits of the float16 nearest to a float32, the even one of two."""
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    types: Any = import_module("numba.core.types")
    word, real = ir.IntType(32), ir.FloatType()

    def to_half(typing: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            whole = builder.bitcast(args[0], word)
            size = builder.and_(whole, word(0x7FFFFFFF))
            sign = builder.and_(builder.lshr(whole, word(16)), word(0x8000))
            last = builder.and_(builder.lshr(size, word(13)), word(1))
            found = builder.lshr(builder.add(builder.sub(size, word(0x38000000 - 0xFFF)), last), word(13))
            # The last bit of a sum with 0.5 is the least float16.
            tiny = builder.bitcast(builder.fadd(builder.bitcast(size, real), real(0.5)), word)
            tiny = builder.sub(tiny, word(0x3F000000))
            found = builder.select(builder.icmp_unsigned("<", size, word(0x38800000)), tiny, found)
            found = builder.select(builder.icmp_unsigned(">=", size, word(0x477FF000)), word(0x7C00), found)
            found = builder.select(builder.icmp_unsigned(">", size, word(0x7F800000)), word(0x7E00), found)
            return builder.trunc(builder.or_(found, sign), ir.IntType(16))

        return types.uint16(types.float32), generate

    return extending.intrinsic(to_half)


def watching() -> Any:
    """Returns an intrinsic for kernels: `total + 0 * value`, which stays zero while all values are finite.

    The compiler may reorder these additions, so that it can do several elements at once; it must not reorder others.
    """
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")

    def watch(typing: Any, total: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            product = builder.fmul(args[1], ir.Constant(args[1].type, 0.0), flags=("contract",))
            return builder.fadd(args[0], product, flags=("reassoc", "contract"))

        return total(total, value), generate

    return extending.intrinsic(watch)


def eights(op: Combined) -> Any:
    """Returns an intrinsic for kernels that reduces the first elements of an array.

    `eights(x, n)` takes `n - n % 8` elements, eight at least: element i goes with i + 8 and so on, then the eight that
    are left with their neighbours, in pairs.
    """
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    cgutils: Any = import_module("numba.core.cgutils")

    def reduced(typing: Any, array: Any, n: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def combined(one: Any, other: Any) -> Any:
                return _COMBINED[op](builder, array.dtype, one, other)

            data = context.make_array(array)(context, builder, args[0]).data
            vector = ir.VectorType(data.type.pointee, TRANSPORTS)

            def load(index: Any) -> Any:
                address = builder.bitcast(builder.gep(data, [index]), vector.as_pointer())
                return builder.load(address, align=array.dtype.bitwidth // 8)

            word = args[1].type
            found = cgutils.alloca_once_value(builder, load(word(0)))
            count = builder.sdiv(args[1], word(TRANSPORTS))
            with cgutils.for_range(builder, count, start=word(1)) as loop:
                more = load(builder.mul(loop.index, word(TRANSPORTS)))
                builder.store(combined(builder.load(found), more), found)
            transports = [builder.extract_element(builder.load(found), ir.IntType(32)(n)) for n in range(TRANSPORTS)]
            while len(transports) > 1:
                transports = [combined(*pair) for pair in zip(transports[::2], transports[1::2], strict=True)]
            return transports[0]

        return array.dtype(array, n), generate

    return extending.intrinsic(reduced)


def _chosen(builder: Any, dtype: Any, one: Any, other: Any, sign: str) -> Any:
    """Returns the greater or the smaller of two numbers, or of vectors of them; NaN if either is."""
    if not hasattr(dtype, "signed"):
        better = builder.or_(builder.fcmp_ordered(sign, one, other), builder.fcmp_unordered("uno", one, one))
    else:
        better = (builder.icmp_signed if dtype.signed else builder.icmp_unsigned)(sign, one, other)
    return builder.select(better, one, other)


_COMBINED: dict[Combined, Callable[[Any, Any, Any, Any], Any]] = {
    "sum": lambda builder, dtype, one, other: builder.fadd(one, other),
    "max": lambda builder, dtype, one, other: _chosen(builder, dtype, one, other, ">"),
    "min": lambda builder, dtype, one, other: _chosen(builder, dtype, one, other, "<"),
}
