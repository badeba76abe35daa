"""Rotary position embedding, in the convention that rotates halves (Llama).

Source: J. Su et al., "RoFormer", 2021; pairs (i, i + d/2) as in Hugging Face's Llama.
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.choose import choose, expect_shape
from mpiscale.kernels.threads import row_kernel


def rope_reference(x: Array, cos: Array, sin: Array) -> Array:
    """y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin; x1, x2: halves of the last axis.

    x [b, t, h, d], cos, sin [t, d/2] or [b, t, d/2] -> y [b, t, h, d], contiguous. The
    rotation's transpose turns back, so the backward pass is the same with -sin.
    """
    x1, x2 = np.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for all heads
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def rope_numba(x: Array, cos: Array, sin: Array) -> Array:
    """As rope_reference, without temporaries; x may be a view into packed q, k, v."""
    batch, length, _, width = x.shape
    if width % 2:
        raise ValueError(f"heads have size {width}, expected an even one: pad them")
    tables = (batch if cos.ndim == 3 else 1, length, width // 2)
    expect_shape("cos", cos, tables if cos.ndim == 3 else tables[1:])
    expect_shape("sin", sin, cos.shape)
    cos, sin = (np.ascontiguousarray(a).reshape(tables) for a in (cos, sin))
    y = np.empty(x.shape, x.dtype)
    _rotate_positions(batch * length, x, cos, sin, y)
    return y


@row_kernel
def _rotate_positions(
    lo: int, hi: int, x: Array, cos: Array, sin: Array, y: Array
) -> None:
    length, heads, half = x.shape[1], x.shape[2], cos.shape[2]
    for row in range(lo, hi):
        batch, position = row // length, row % length
        table = batch if cos.shape[0] > 1 else 0
        c, s = cos[table, position], sin[table, position]
        for head in range(heads):
            x1, x2 = x[batch, position, head, :half], x[batch, position, head, half:]
            y1, y2 = y[batch, position, head, :half], y[batch, position, head, half:]
            for j in range(half):
                y1[j] = x1[j] * c[j] - x2[j] * s[j]
                y2[j] = x2[j] * c[j] + x1[j] * s[j]


rope = choose(rope_reference, rope_numba, like=("x",))

if __name__ == "__main__":
    from mpiscale.kernels.bench import Case, main

    def arguments(x: Array) -> tuple[Array, Array, Array]:
        """One sequence, heads of size 64."""
        heads = x.reshape(1, x.shape[0], -1, 64)
        angle = x[:, :32]
        return heads, np.cos(angle), np.sin(angle)

    main(Case(rope_reference, rope_numba, arguments))
