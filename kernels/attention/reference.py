"""Attention in one block: the specification of the flash kernels.

Shapes: b sequences, tq queries, tk keys, h heads of size d, hk key-value heads (grouped
heads: hk divides h, and head i reads key-value head i // (h // hk)).
"""

from __future__ import annotations

import numpy as np

from mpiscale.backend import Array


def flash_attention_reference(
    q: Array, k: Array, v: Array, scale: float, causal: bool
) -> tuple[Array, Array]:
    """out = softmax(scale q k^T) v, lse = log of the softmax's denominator.

    q [b, tq, h, d], k [b, tk, hk, d], v [b, tk, hk, e] -> out [b, tq, h, e],
    lse [b, h, tq]. With `causal`, aligned to the end, query i sees key j if
    j - (tk - tq) <= i. A query that sees no key gives out 0 and lse -inf.
    """
    group = q.shape[2] // k.shape[2]
    scores = _scores(q, np.repeat(k, group, axis=2), scale, causal)
    maximum = scores.max(axis=-1, initial=-np.inf)
    shift = np.where(maximum == -np.inf, 0, maximum)  # -inf - (-inf) is NaN
    with np.errstate(divide="ignore"):  # log 0 is meant: -inf
        lse = shift + np.log(np.exp(scores - shift[..., None]).sum(axis=-1))
    p = _probabilities(scores, lse)
    return np.einsum("bhqk,bkhe->bqhe", p, np.repeat(v, group, axis=2)), lse


def flash_attention_backward_reference(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    scale: float,
    causal: bool,
) -> tuple[Array, Array, Array]:
    """dv = p^T dout, ds = p (dout v^T - sum_e dout out), dq = scale ds k, dk likewise.

    Shapes as in flash_attention_reference; -> dq, dk, dv, of the shapes of q, k, v. The
    probabilities p are recomputed from lse.
    """
    hk = k.shape[2]
    group = q.shape[2] // hk
    k_repeated, v_repeated = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    p = _probabilities(_scores(q, k_repeated, scale, causal), lse)
    delta = np.einsum("bqhe,bqhe->bhq", dout, out)[..., None]
    dp = np.einsum("bqhe,bkhe->bhqk", dout, v_repeated)
    ds = p * (dp - delta) * q.dtype.type(scale)
    dq = np.einsum("bhqk,bkhd->bqhd", ds, k_repeated)
    dk = np.einsum("bhqk,bqhd->bkhd", ds, q)
    dv = np.einsum("bhqk,bqhe->bkhe", p, dout)
    return dq, _sum_groups(dk, hk), _sum_groups(dv, hk)


def _scores(q: Array, k: Array, scale: float, causal: bool) -> Array:
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * q.dtype.type(scale)
    if causal:
        tq, tk = scores.shape[-2:]
        query, key = np.arange(tq)[:, None], np.arange(tk)
        scores[..., key - (tk - tq) > query] = -np.inf
    return scores


def _probabilities(scores: Array, lse: Array) -> Array:
    """e^(score - lse), and 0 where lse is -inf: that query saw no key."""
    seen = np.where(lse == -np.inf, np.inf, lse)[..., None]
    return np.exp(scores - seen)


def _sum_groups(x: Array, hk: int) -> Array:
    """x [b, t, h, d] -> [b, t, hk, d]: sum over the heads that share one."""
    b, t, h, d = x.shape
    return x.reshape(b, t, hk, h // hk, d).sum(axis=3)
