"""Scaled dot-product attention: plain, as in the paper, and flash, by blocks."""

from __future__ import annotations

import math

import numpy as np

from mpiscale.backend import Array
from mpiscale.kernels.attention import flash_attention as flash
from mpiscale.ops.arithmetic import multiply, where
from mpiscale.ops.matmul import matmul
from mpiscale.ops.shapes import reshape, stack, transpose
from mpiscale.ops.softmax import softmax
from mpiscale.tensor import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for every head, by blocks (Dao et al. 2022).

    q [b, tq, h, d], k and v [b, tk, hk, d] -> y [b, tq, h, d]; hk divides h, and query
    head i reads key/value head i // (h / hk). Causal: the last query sees every key,
    the one before it one less, and so on. The [tq, tk] scores never exist as a whole.
    """
    return attention_with_lse(q, k, v, causal)[0]


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True
) -> tuple[Tensor, Array]:
    """As `attention`, and the logarithm of each softmax's denominator [b, h, tq].

    Partial results over disjoint sets of keys are merged by it (ring attention).
    """
    check_heads(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1])
    qd, kd, vd = q.data, k.data, v.data
    out, lse = flash.flash_attention(qd, kd, vd, scale, causal)

    def backward(dout: Array) -> tuple[Array, ...]:
        return tuple(
            flash.flash_attention_backward(qd, kd, vd, out, lse, dout, scale, causal)
        )

    return Tensor.from_op(out, (q, k, v), backward), lse


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """The same from matmul and softmax; holds all [b, h, tq, tk] scores.

    (Vaswani et al. 2017, eq. 1.) What `attention` is tested against.
    """
    check_heads(q, k, v)
    (_, tq, h, d), (_, tk, hk, _) = q.shape, k.shape
    q, k, v = _heads_first(q), _repeat(k, h // hk), _repeat(v, h // hk)
    scores = multiply(matmul(q, transpose(k, (0, 1, 3, 2))), 1 / math.sqrt(d))
    if causal:
        visible = np.tri(tq, tk, tk - tq, dtype=bool)
        scores = where(visible, scores, -math.inf)
    return transpose(matmul(softmax(scores), v), (0, 2, 1, 3))


def _heads_first(x: Tensor) -> Tensor:
    return transpose(x, (0, 2, 1, 3))


def _repeat(x: Tensor, times: int) -> Tensor:
    """x [b, t, hk, d] -> [b, hk * times, t, d], each head `times` times in a row."""
    b, t, hk, d = x.shape
    return _heads_first(reshape(stack([x] * times, axis=3), (b, t, hk * times, d)))


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes that do not belong together."""
    fits = (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and q.shape[2] % k.shape[2] == 0
    )
    if not fits:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} do not fit: expected q "
            "[b, tq, h, d], k and v [b, tk, hk, d] with hk a divisor of h"
        )
