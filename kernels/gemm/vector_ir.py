"""Words for writing vector code in LLVM's IR: what the intrinsics here are made of."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

FLOAT, BYTE = ir.FloatType(), ir.IntType(8)
INT32, INT64 = ir.IntType(32), ir.IntType(64)
FLOAT_BYTES = 4


def vector_type(lanes: int) -> Any:
    """`lanes` floats; LLVM cuts or widens it to the registers that there are."""
    return ir.VectorType(FLOAT, lanes)


class Matrix:
    """A float32 [rows, columns] argument of an intrinsic, taken apart."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.builder = builder
        self.data = builder.bitcast(array.data, BYTE.as_pointer())
        self.rows, self.columns = cgutils.unpack_tuple(builder, array.shape, 2)
        strides = cgutils.unpack_tuple(builder, array.strides, 2)
        self.row_stride, self.column_stride = strides  # in bytes

    def row(self, index: Any) -> Any:
        """Pointer to a row's first element."""
        return self.builder.gep(
            self.data, [self.builder.mul(index, self.row_stride)], inbounds=True
        )

    def at(self, row: Any, column: Any) -> Any:
        """Pointer to an element of a matrix whose rows have unit stride."""
        offset = self.builder.mul(column, INT64(FLOAT_BYTES))
        return self.builder.gep(self.row(row), [offset], inbounds=True)


def load_vector(builder: Any, pointer: Any, lanes: int, index: int = 0) -> Any:
    """The index-th vector of `lanes` floats from `pointer` on; any alignment."""
    return builder.load(_vector_at(builder, pointer, lanes, index), align=FLOAT_BYTES)


def store_vector(builder: Any, vector: Any, pointer: Any, index: int = 0) -> None:
    """Write the index-th vector from `pointer` on."""
    place = _vector_at(builder, pointer, vector.type.count, index)
    builder.store(vector, place, align=FLOAT_BYTES)


def broadcast_load(builder: Any, pointer: Any, lanes: int) -> Any:
    """A vector whose lanes all hold the float at `pointer`."""
    element = builder.load(builder.bitcast(pointer, FLOAT.as_pointer()), align=4)
    undefined = ir.Constant(vector_type(lanes), ir.Undefined)
    first = builder.insert_element(undefined, element, INT32(0))
    return shuffle(builder, first, undefined, [0] * lanes)


def shuffle(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    """A vector of chosen lanes of x (counted from 0) and of y (counted on)."""
    mask = ir.Constant(ir.VectorType(INT32, len(lanes)), lanes)
    return builder.shuffle_vector(x, y, mask)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, in one instruction where the CPU has one."""
    kind = ir.FunctionType(x.type, [x.type] * 3)
    name = f"llvm.fmuladd.v{x.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [x, y, z])


def prefetch_for_write(builder: Any, pointer: Any) -> None:
    """Fetch the cache line at `pointer` to L1 in the background; never faults."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), *[INT32] * 3])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    write, nearest, data = INT32(1), INT32(3), INT32(1)
    builder.call(function, [pointer, write, nearest, data])


def minimum(builder: Any, x: Any, y: Any) -> Any:
    """The smaller of two integers."""
    return builder.select(builder.icmp_signed("<", x, y), x, y)


def _vector_at(builder: Any, pointer: Any, lanes: int, index: int) -> Any:
    offset = INT64(FLOAT_BYTES * lanes * index)
    place = builder.gep(pointer, [offset], inbounds=True)
    return builder.bitcast(place, vector_type(lanes).as_pointer())
