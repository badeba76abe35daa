"""Every kernel with its reference, its compiled version, and arguments to try it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiscale.backend import Array
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


class Case(NamedTuple):
    """One kernel; its arguments are made with draw(*shape) -> normal numbers."""

    public: Callable[..., Any]
    reference: Callable[..., Any]
    compiled: Callable[..., Any]
    arguments: Callable[[Callable[..., Array], int, int], tuple[Any, ...]]

    @property
    def name(self) -> str:
        return self.reference.__name__.removesuffix("_reference")


def case(module: Any, name: str, arguments: Callable[..., Any]) -> Case:
    public, reference, compiled = (
        getattr(module, name + version) for version in ("", "_reference", "_numba")
    )
    return Case(public, reference, compiled, arguments)


def one_array(draw, rows, width):
    return (draw(rows, width),)


def two_arrays(draw, rows, width):
    return draw(rows, width), draw(rows, width)


def layer_norm_backward(draw, rows, width):
    dy, x, gain = draw(rows, width), draw(rows, width), draw(width)
    return dy, x, gain, *norm.layer_norm_reference(x, gain, gain, 1e-5)[1:]


def rms_norm_backward(draw, rows, width):
    dy, x, gain = draw(rows, width), draw(rows, width), draw(width)
    return dy, x, gain, norm.rms_norm_reference(x, gain, 1e-5)[1]


def labels(rows, width):
    """Local labels, foreign ones and the ignore index -100, for a shard that starts
    at 3."""
    return np.resize(np.array([3, -100, 2 + width, 0, 3 + width]), rows)


def dropout_arguments(draw, rows, width):
    # A part of a larger array: each row starts at another place within a block of 4.
    row_offset = np.arange(rows) * (2 * width + 1) + 2**33
    return draw(rows, width), 0.3, 2**63 + 5, row_offset, np.arange(width)


def adamw_arguments(draw, rows, width):
    param, grad, m, v = draw(4, rows * width)
    return param, grad, m, np.abs(v), 0.1, 0.9, 0.99, 1e-8, 0.1, 3


def rope_arguments(draw, rows, width):
    angle = draw(2, rows, width)
    return draw(2, rows, 3, 2 * width), np.cos(angle), np.sin(angle)


def attention(draw, rows, width):
    """Grouped heads, packed: four of q and two each of k and v."""
    packed = draw(2, rows, 8, width)
    return packed[:, :, :4], packed[:, :, 4:6], packed[:, :, 6:], 0.3, True


def attention_backward(draw, rows, width):
    arguments = attention(draw, rows, width)
    out, lse = flash_attention.flash_attention(*arguments)
    return *arguments[:3], out, lse, draw(*out.shape), *arguments[3:]


CASES = [
    case(softmax, "softmax", one_array),
    case(softmax, "softmax_backward", two_arrays),
    case(softmax, "log_softmax", one_array),
    case(softmax, "log_softmax_backward", two_arrays),
    case(norm, "layer_norm", lambda d, r, w: (d(r, w), d(w), d(w), 1e-5)),
    case(norm, "layer_norm_backward", layer_norm_backward),
    case(norm, "rms_norm", lambda d, r, w: (d(r, w), d(w), 1e-5)),
    case(norm, "rms_norm_backward", rms_norm_backward),
    case(gelu, "gelu", one_array),
    case(gelu, "gelu_backward", two_arrays),
    case(gelu, "gelu_tanh", one_array),
    case(gelu, "gelu_tanh_backward", two_arrays),
    case(swiglu, "swiglu", lambda d, r, w: (d(r, 2 * w),)),
    case(swiglu, "swiglu_backward", lambda d, r, w: (d(r, 2 * w), d(r, w))),
    case(
        cross_entropy,
        "logits_statistics",
        lambda d, r, w: (d(r, w), labels(r, w), 3, 2 + w),
    ),
    case(
        cross_entropy,
        "cross_entropy_backward",
        lambda d, r, w: (d(r, w), labels(r, w), d(r) + 4, d(r), 0.1, 2 + w, 3),
    ),
    case(rope, "rope", rope_arguments),
    case(dropout, "dropout", dropout_arguments),
    case(adamw, "adamw", adamw_arguments),
    case(flash_attention, "flash_attention", attention),
    case(flash_attention, "flash_attention_backward", attention_backward),
]


def drawing(dtype, seed: int = 0) -> Callable[..., Array]:
    """draw(*shape): normal numbers of this type."""
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.standard_normal(shape).astype(dtype)


def results(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Array]:
    """Outputs and, since a kernel may write them, array arguments after the call."""
    args = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in args)
    out = function(*args)
    outputs = [] if out is None else [*out] if isinstance(out, tuple) else [out]
    return outputs + [a for a in args if isinstance(a, np.ndarray)]
