"""PyTorch's op for each kernel: (arguments of ours) -> a call that does the same.

A backward pass is timed as `torch.autograd.grad` on a graph that is kept; its call
through the autograd engine takes some microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from mpiscale.backend import Array

Call = Callable[[], Any]


def tensors(*arrays: Array) -> list[torch.Tensor]:
    """Tensors on the same memory."""
    return [torch.from_numpy(array) for array in arrays]


def backward(
    forward: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dy: torch.Tensor
) -> Call:
    """A call that gives the gradients of `inputs`; forward is done here, once."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = forward(*leaves)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def elementwise(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Call]:
    """The op on its only array."""

    def prepare(array: Array) -> Call:
        x = torch.from_numpy(array)
        return lambda: forward(x)

    return prepare


def elementwise_backward(
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Call]:
    """The op's backward, for kernels with arguments (x, dy)."""

    def prepare(array: Array, dy: Array) -> Call:
        return backward(forward, tensors(array), torch.from_numpy(dy))

    return prepare


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis."""
    return torch.softmax(x, -1)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis."""
    return torch.log_softmax(x, -1)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh form."""
    return F.gelu(x, approximate="tanh")


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) up: PyTorch has no op of its own for it."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def softmax_backward_from_output(s: Array, ds: Array) -> Call:
    """Our kernel is given s = softmax(x): log s is an x that has it."""
    return backward(softmax, [torch.from_numpy(s).log()], torch.from_numpy(ds))


def log_softmax_backward_from_output(y: Array, dy: Array) -> Call:
    """Our kernel is given y = log_softmax(x): y itself is an x that has it."""
    return backward(log_softmax, tensors(y), torch.from_numpy(dy))


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Call:
    """F.layer_norm"""
    data, g, b = tensors(x, gain, bias)
    return lambda: F.layer_norm(data, g.shape, g, b, eps)


def layer_norm_backward(
    dy: Array, x: Array, gain: Array, mean: Array, rstd: Array
) -> Call:
    """Of F.layer_norm with a bias."""

    def forward(data: torch.Tensor, g: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(data, g.shape, g, b)

    data, g = tensors(x, gain)
    return backward(forward, [data, g, torch.zeros_like(g)], torch.from_numpy(dy))


def rms_norm(x: Array, gain: Array, eps: float) -> Call:
    """F.rms_norm"""
    data, g = tensors(x, gain)
    return lambda: F.rms_norm(data, g.shape, g, eps)


def rms_norm_backward(dy: Array, x: Array, gain: Array, rstd: Array) -> Call:
    """Of F.rms_norm."""

    def forward(data: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(data, g.shape, g, 1e-5)

    return backward(forward, tensors(x, gain), torch.from_numpy(dy))


def cross_entropy(logits: Array, labels: Array, first: int, vocabulary: int) -> Call:
    """F.cross_entropy, a loss for each row."""
    x, ids = tensors(logits, labels)
    return lambda: F.cross_entropy(x, ids, reduction="none")


def cross_entropy_backward(
    logits: Array,
    labels: Array,
    log_normalizer: Array,
    dloss: Array,
    label_smoothing: float,
    vocabulary: int,
    first: int,
) -> Call:
    """Of F.cross_entropy."""
    ids = torch.from_numpy(labels)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, ids, reduction="none")

    return backward(forward, tensors(logits), torch.from_numpy(dloss))


def dropout(
    x: Array, p: float, key: int, row_offset: Array, column_offset: Array
) -> Call:
    """F.dropout: its masks are others, and it stores them."""
    data = torch.from_numpy(x)
    return lambda: F.dropout(data, p)


def rope(x: Array, cos: Array, sin: Array) -> Call:
    """In four products, as models in PyTorch write it: there is no op for it."""
    data, c, s = tensors(x, cos, sin)
    c, s = c[:, None], s[:, None]

    def rotated() -> torch.Tensor:
        x1, x2 = data.chunk(2, -1)
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)

    return rotated


def attention(q: Array, k: Array, v: Array, scale: float, causal: bool) -> Call:
    """F.scaled_dot_product_attention"""
    heads = tensors(q, k, v)
    return lambda: _attend(scale, causal, *heads)


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    scale: float,
    causal: bool,
) -> Call:
    """Of F.scaled_dot_product_attention."""
    forward = functools.partial(_attend, scale, causal)
    return backward(forward, tensors(q, k, v), torch.from_numpy(dout))


def _attend(
    scale: float, causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """[b, t, h, d] -> [b, t, h, d]; PyTorch wants the heads before the positions."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return y.transpose(1, 2)


def adamw(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Call:
    """torch.optim.AdamW(fused=True) on one parameter that has made step - 1 steps."""
    p, g, exp_avg, exp_avg_sq = (x.clone() for x in tensors(param, grad, m, v))
    p.grad = g
    optimizer = torch.optim.AdamW(
        [p], lr, (beta1, beta2), eps, weight_decay, fused=True
    )
    optimizer.state[p] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }

    def update() -> torch.Tensor:
        optimizer.step()
        return p

    return update


def product_into(a: Array, b: Array, out: Array, accumulate: bool) -> Call:
    """torch.addmm: out + a b"""
    assert accumulate
    matrix_a, matrix_b, start = tensors(a, b, out)
    return lambda: torch.addmm(start, matrix_a, matrix_b)


TORCH_CALLS: dict[str, Callable[..., Call]] = {
    "softmax": elementwise(softmax),
    "softmax_backward": softmax_backward_from_output,
    "log_softmax": elementwise(log_softmax),
    "log_softmax_backward": log_softmax_backward_from_output,
    "gelu": elementwise(F.gelu),
    "gelu_backward": elementwise_backward(F.gelu),
    "gelu_tanh": elementwise(gelu_tanh),
    "gelu_tanh_backward": elementwise_backward(gelu_tanh),
    "swiglu": elementwise(swiglu),
    "swiglu_backward": elementwise_backward(swiglu),
    "layer_norm": layer_norm,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm": rms_norm,
    "rms_norm_backward": rms_norm_backward,
    "logits_statistics": cross_entropy,
    "cross_entropy_backward": cross_entropy_backward,
    "dropout": dropout,
    "rope": rope,
    "flash_attention": attention,
    "flash_attention_backward": attention_backward,
    "adamw": adamw,
    "product_into": product_into,
}
