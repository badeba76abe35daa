"""Exact attention in linear memory: the public names, and what they check."""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.attention.flash_backward import backward_heads
from mpiscale.kernels.attention.flash_forward import forward_heads
from mpiscale.kernels.attention.reference import (
    flash_attention_backward_reference,
    flash_attention_reference,
)
from mpiscale.kernels.choose import choose, expect_shape


def flash_attention_numba(
    q: Array, k: Array, v: Array, scale: float, causal: bool
) -> tuple[Array, Array]:
    """As flash_attention_reference, in memory linear in tq and tk.

    The inputs may be strided views, for instance into packed q, k and v.
    """
    _check(q, k, v)
    q, k, v = map(_with_unit_stride, (q, k, v))
    batch, tq, heads, _ = q.shape
    out = np.empty((batch, tq, heads, v.shape[3]), q.dtype)
    lse = np.empty((batch * heads, tq), q.dtype)
    scale = q.dtype.type(scale)
    forward_heads(batch * heads, q, k, v, scale, bool(causal), out, lse)
    return out, lse.reshape(batch, heads, tq)


def flash_attention_backward_numba(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """As flash_attention_backward_reference, in memory linear in tq and tk."""
    _check(q, k, v)
    batch, tq, heads, _ = q.shape
    expect_shape("out", out, (batch, tq, heads, v.shape[3]))
    expect_shape("dout", dout, out.shape)
    expect_shape("lse", lse, (batch, heads, tq))
    q, k, v = map(_with_unit_stride, (q, k, v))
    dq, dk, dv = _empty_side_by_side(q, k, v)
    backward_heads(
        batch * k.shape[2],
        q,
        k,
        v,
        np.ascontiguousarray(out),
        np.ascontiguousarray(lse),
        np.ascontiguousarray(dout),
        q.dtype.type(scale),
        bool(causal),
        dq,
        dk,
        dv,
    )
    return dq, dk, dv


def _check(q: Array, k: Array, v: Array) -> None:
    batch, _, heads, width = q.shape
    _, tk, kv_heads, _ = k.shape
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"got {heads} query heads and {kv_heads} key-value heads, expected the "
            "latter to divide the former: change one of the two"
        )
    expect_shape("k", k, (batch, tk, kv_heads, width))
    expect_shape("v", v, (batch, tk, kv_heads, v.shape[-1]))


def _empty_side_by_side(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Three arrays [b, t, heads, d], if possible as views into one array.

    Query, key and value mostly come out of one product; then their gradients are its
    output's gradient as they are, without a copy to bring them together.
    """
    if not q.shape[1] == k.shape[1] == v.shape[1] or k.shape[3] != v.shape[3]:
        return tuple(np.empty(x.shape, x.dtype) for x in (q, k, v))
    ends = np.cumsum([x.shape[2] for x in (q, k, v)])
    packed = np.empty((*q.shape[:2], ends[-1], q.shape[3]), q.dtype)
    return tuple(np.split(packed, ends[:-1], axis=2))


def _with_unit_stride(x: Array) -> Array:
    """x, copied only if the elements of a position do not lie side by side."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


flash_attention = choose(
    flash_attention_reference, flash_attention_numba, like=("q", None)
)
flash_attention_backward = choose(
    flash_attention_backward_reference,
    flash_attention_backward_numba,
    like=("q", "k", "v"),
)

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def forward(x: Array) -> tuple[Array, Array, Array, float, bool]:
        """One sequence of `rows` positions, heads of size 64, causal."""
        heads = x.reshape(1, x.shape[0], -1, 64)
        return heads, heads, heads, 0.125, True

    def backward(x: Array) -> tuple[Array | float, ...]:
        """Arguments of the backward pass for `forward`'s."""
        q, k, v, scale, causal = forward(x)
        out, lse = flash_attention_numba(q, k, v, scale, causal)
        return q, k, v, out, lse, q, scale, causal

    main(
        Case(flash_attention_reference, flash_attention_numba, forward),
        Case(
            flash_attention_backward_reference, flash_attention_backward_numba, backward
        ),
    )
