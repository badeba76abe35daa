"""Every kernel at the size that it has in a training step of a given shape.

A GPT's step runs layer norm, GELU's tanh form, attention, cross entropy and AdamW. The
others are given the arrays that they would get in the same place: RMS norm, RoPE and
SwiGLU those of a Llama, softmax the scores of plain attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiscale.backend import FLOAT32, Array
from mpiscale.bench.shapes import Shape
from mpiscale.kernels import (
    adamw,
    cross_entropy,
    dropout,
    gelu,
    norm,
    rope,
    softmax,
    swiglu,
)
from mpiscale.kernels.attention import flash_attention
from mpiscale.kernels.gemm import product as gemm_product

Draw = Callable[..., Array]  # draw(*shape) -> normal numbers
Arguments = tuple[Any, ...]
EPS = 1e-5


class KernelCase(NamedTuple):
    """A kernel's two versions, its arguments, and which of these it updates."""

    reference: Callable[..., Any]
    compiled: Callable[..., Any]
    arguments: Callable[[Draw, Shape], Arguments]
    updated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As the public kernel is called."""
        return self.reference.__name__.removesuffix("_reference")


def bytes_moved(case: KernelCase, arguments: Arguments, result: Any) -> int:
    """Bytes that any version has to move, if nothing is in a cache before.

    Each array argument is read once, each result is written once, and what is updated
    in place is written too.
    """
    updated = [arguments[i] for i in case.updated]
    return _nbytes(arguments) + _nbytes(_as_sequence(result)) + _nbytes(updated)


def _nbytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _as_sequence(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple) else (result,)


def drawing(seed: int = 0) -> Draw:
    """draw(*shape): normal numbers in float32."""
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.standard_normal(shape, FLOAT32)


def stream(draw: Draw, s: Shape) -> Array:
    """The residual stream.  [batch, length, width]"""
    return draw(s.batch, s.length, s.width)


def hidden(draw: Draw, s: Shape) -> Array:
    """Between the two products of the MLP.  [batch, length, 4 width]"""
    return draw(s.batch, s.length, 4 * s.width)


def logits(draw: Draw, s: Shape) -> Array:
    """[tokens, vocabulary]"""
    return draw(s.tokens, s.vocabulary)


def scores(draw: Draw, s: Shape) -> Array:
    """Of plain attention.  [batch, heads, length, length]"""
    return draw(s.batch, s.heads, s.length, s.length)


def twice(make: Callable[[Draw, Shape], Array]) -> Callable[[Draw, Shape], Arguments]:
    """Two arrays of the same shape: an activation and a gradient."""
    return lambda draw, s: (make(draw, s), make(draw, s))


def once(make: Callable[[Draw, Shape], Array]) -> Callable[[Draw, Shape], Arguments]:
    """One array."""
    return lambda draw, s: (make(draw, s),)


def layer_norm_arguments(draw: Draw, s: Shape) -> Arguments:
    """x, gain, bias, eps"""
    return stream(draw, s), draw(s.width), draw(s.width), EPS


def layer_norm_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """dy, x, gain, mean, rstd"""
    x, gain, bias, eps = layer_norm_arguments(draw, s)
    _, mean, rstd = norm.layer_norm_numba(x, gain, bias, eps)
    return stream(draw, s), x, gain, mean, rstd


def rms_norm_arguments(draw: Draw, s: Shape) -> Arguments:
    """x, gain, eps"""
    return stream(draw, s), draw(s.width), EPS


def rms_norm_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """dy, x, gain, rstd"""
    x, gain, eps = rms_norm_arguments(draw, s)
    return stream(draw, s), x, gain, norm.rms_norm_numba(x, gain, eps)[1]


def swiglu_arguments(draw: Draw, s: Shape) -> Arguments:
    """gate and up side by side"""
    return (draw(s.batch, s.length, 8 * s.width),)


def swiglu_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """gate and up side by side, dy"""
    return *swiglu_arguments(draw, s), hidden(draw, s)


def softmax_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """softmax(x), ds"""
    return softmax.softmax_numba(scores(draw, s)), scores(draw, s)


def log_softmax_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """log_softmax(x), dy"""
    return softmax.log_softmax_numba(scores(draw, s)), scores(draw, s)


def labels(s: Shape) -> Array:
    """[tokens] ids that differ from row to row."""
    return np.arange(s.tokens) * 7 % s.vocabulary


def statistics_arguments(draw: Draw, s: Shape) -> Arguments:
    """logits, labels, first, vocabulary"""
    return logits(draw, s), labels(s), 0, s.vocabulary


def cross_entropy_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """logits, labels, log_normalizer, dloss, label_smoothing, vocabulary, first"""
    x, ids, first, v = statistics_arguments(draw, s)
    maximum, sum_exp, _, _ = cross_entropy.logits_statistics_numba(x, ids, first, v)
    dloss = np.full(s.tokens, 1 / s.tokens, FLOAT32)
    return x, ids, maximum + np.log(sum_exp), dloss, 0.0, v, first


def dropout_arguments(draw: Draw, s: Shape) -> Arguments:
    """x, p, key, row_offset, column_offset"""
    x = draw(s.tokens, s.width)
    return x, 0.1, 1, np.arange(s.tokens) * s.width, np.arange(s.width)


def rope_arguments(draw: Draw, s: Shape) -> Arguments:
    """x in heads, cos, sin"""
    head_size = s.width // s.heads
    angle = draw(s.length, head_size // 2)
    x = draw(s.batch, s.length, s.heads, head_size)
    return x, np.cos(angle), np.sin(angle)


def attention_arguments(draw: Draw, s: Shape) -> Arguments:
    """q, k and v as views of one array, as a model has them; scale, causal"""
    head_size = s.width // s.heads
    packed = draw(s.batch, s.length, 3, s.heads, head_size)
    q, k, v = (packed[:, :, i] for i in range(3))
    return q, k, v, 1 / math.sqrt(head_size), True


def attention_backward_arguments(draw: Draw, s: Shape) -> Arguments:
    """q, k, v, out, lse, dout, scale, causal"""
    q, k, v, scale, causal = attention_arguments(draw, s)
    out, lse = flash_attention.flash_attention_numba(q, k, v, scale, causal)
    return q, k, v, out, lse, draw(*out.shape), scale, causal


def product_arguments(draw: Draw, s: Shape) -> Arguments:
    """The MLP's first product, added: x, weight, out, accumulate"""
    x, weight = draw(s.tokens, s.width), draw(s.width, 4 * s.width)
    return x, weight, draw(s.tokens, 4 * s.width), True


def adamw_arguments(draw: Draw, s: Shape) -> Arguments:
    """All matrices of the blocks and the embedding, flat: param, grad, m, v, ..."""
    n = 12 * s.layers * s.width**2 + s.vocabulary * s.width
    param, grad, m = draw(n), draw(n), draw(n)
    return param, grad, m, np.square(draw(n)), 3e-4, 0.9, 0.95, 1e-8, 0.1, 3


def _case(
    module: Any,
    name: str,
    arguments: Callable[[Draw, Shape], Arguments],
    updated: tuple[int, ...] = (),
) -> KernelCase:
    reference, compiled = (
        getattr(module, name + version) for version in ("_reference", "_numba")
    )
    return KernelCase(reference, compiled, arguments, updated)


CASES = (
    _case(gemm_product, "product_into", product_arguments, updated=(2,)),
    _case(norm, "layer_norm", layer_norm_arguments),
    _case(norm, "layer_norm_backward", layer_norm_backward_arguments),
    _case(gelu, "gelu_tanh", once(hidden)),
    _case(gelu, "gelu_tanh_backward", twice(hidden)),
    _case(flash_attention, "flash_attention", attention_arguments),
    _case(flash_attention, "flash_attention_backward", attention_backward_arguments),
    _case(cross_entropy, "logits_statistics", statistics_arguments),
    _case(cross_entropy, "cross_entropy_backward", cross_entropy_backward_arguments),
    _case(adamw, "adamw", adamw_arguments, updated=(0, 2, 3)),
    _case(dropout, "dropout", dropout_arguments),
    _case(gelu, "gelu", once(hidden)),
    _case(gelu, "gelu_backward", twice(hidden)),
    _case(norm, "rms_norm", rms_norm_arguments),
    _case(norm, "rms_norm_backward", rms_norm_backward_arguments),
    _case(swiglu, "swiglu", swiglu_arguments),
    _case(swiglu, "swiglu_backward", swiglu_backward_arguments),
    _case(rope, "rope", rope_arguments),
    _case(softmax, "softmax", once(scores)),
    _case(softmax, "softmax_backward", softmax_backward_arguments),
    _case(softmax, "log_softmax", once(scores)),
    _case(softmax, "log_softmax_backward", log_softmax_backward_arguments),
)
