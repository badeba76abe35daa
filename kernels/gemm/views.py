"""Views that cost nothing: parts of arrays for loops that run a thousand times a call.

A slice in compiled code counts references, atomically: twenty cycles for each array,
several times a tile. The views made here count none. They must not outlive the array
that they look into; and nothing checks that they lie in it.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from mpiscale.kernels.gemm.vector_ir import INT64


def _generate_block(
    typing_context: Any, x: Any, i: Any, rows: Any, j: Any, columns: Any
) -> Any:
    """x[i : i + rows, j : j + columns]"""
    view = types.Array(x.dtype, 2, "A")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        strides = cgutils.unpack_tuple(builder, array.strides, 2)
        offsets = [
            builder.mul(n, stride)
            for n, stride in zip((args[1], args[3]), strides, strict=True)
        ]
        return _view(
            context,
            builder,
            view,
            cgutils.pointer_add(
                builder, array.data, builder.add(*offsets), array.data.type
            ),
            (args[2], args[4]),
            strides,
        )

    return view(x, *[types.intp] * 4), generate


def _generate_unit_stride_row(typing_context: Any, x: Any, i: Any) -> Any:
    """x[i], of which the compiler now knows that its elements are neighbours."""
    view = types.Array(x.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        row_stride, _ = cgutils.unpack_tuple(builder, array.strides, 2)
        _, columns = cgutils.unpack_tuple(builder, array.shape, 2)
        itemsize = INT64(context.get_abi_sizeof(context.get_data_type(x.dtype)))
        data = cgutils.pointer_add(
            builder, array.data, builder.mul(args[1], row_stride), array.data.type
        )
        return _view(context, builder, view, data, (columns,), (itemsize,))

    return view(x, types.intp), generate


def _view(
    context: Any, builder: Any, kind: Any, data: Any, shape: Any, strides: Any
) -> Any:
    """An array that owns nothing: meminfo, where references are counted, is null."""
    view = context.make_array(kind)(context, builder)
    populate_array(
        view,
        data=data,
        shape=cgutils.pack_array(builder, shape),
        strides=cgutils.pack_array(builder, strides),
        itemsize=INT64(context.get_abi_sizeof(context.get_data_type(kind.dtype))),
        meminfo=None,
    )
    return view._getvalue()


block: Any = intrinsic(_generate_block)
unit_stride_row: Any = intrinsic(_generate_unit_stride_row)
