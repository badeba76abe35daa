"""The NumPy references, which specify the kernels, against differences and PyTorch."""

from typing import Any

import numpy as np
import pytest

from mpiscale.backend import Array
from mpiscale.kernels import cross_entropy, gelu, norm, rope, softmax, swiglu
from mpiscale.kernels.attention import reference
from tests.kernels.cases import drawing

draw = drawing(np.float64)
X, GAIN, BIAS = draw(3, 6), draw(6), draw(6)
COS, SIN = np.cos(draw(3, 2)), np.sin(draw(3, 2))
Q, K, V = draw(1, 4, 4, 3), draw(1, 5, 2, 3), draw(1, 5, 2, 2)


def layer_norm_gradients(x, gain, bias, dy):
    _, mean, rstd = norm.layer_norm_reference(x, gain, bias, 1e-3)
    return norm.layer_norm_backward_reference(dy, x, gain, mean, rstd)


def rms_norm_gradients(x, gain, dy):
    rstd = norm.rms_norm_reference(x, gain, 1e-3)[1]
    return norm.rms_norm_backward_reference(dy, x, gain, rstd)


def loss_of(logits):
    """The loss that the statistics stand for: smoothed, with a padding column."""
    labels = np.array([0, 4, -100])
    parts = cross_entropy.logits_statistics_reference(logits, labels, 0, 5)
    maximum, sum_exp, target, logit_sum = parts
    loss = maximum + np.log(sum_exp) - 0.9 * target - 0.1 / 5 * logit_sum
    return loss * (labels != -100)


def loss_gradient(logits, dy):
    labels = np.array([0, 4, -100])
    lse = np.log(np.exp(logits[:, :5]).sum(axis=1))
    dloss = dy * (labels != -100)
    return (
        cross_entropy.cross_entropy_backward_reference(
            logits, labels, lse, dloss, 0.1, 5, 0
        ),
    )


def attention_gradients(q, k, v, dy):
    out, lse = reference.flash_attention_reference(q, k, v, 0.6, True)
    return reference.flash_attention_backward_reference(
        q, k, v, out, lse, dy, 0.6, True
    )


# name: forward(*inputs), gradients(*inputs, dy), inputs
PAIRS: dict[str, tuple[Any, Any, tuple[Array, ...]]] = {
    "softmax": (
        softmax.softmax_reference,
        lambda x, dy: (
            softmax.softmax_backward_reference(softmax.softmax_reference(x), dy),
        ),
        (X,),
    ),
    "log_softmax": (
        softmax.log_softmax_reference,
        lambda x, dy: (
            softmax.log_softmax_backward_reference(
                softmax.log_softmax_reference(x), dy
            ),
        ),
        (X,),
    ),
    "layer_norm": (
        lambda x, gain, bias: norm.layer_norm_reference(x, gain, bias, 1e-3)[0],
        layer_norm_gradients,
        (X, GAIN, BIAS),
    ),
    "rms_norm": (
        lambda x, gain: norm.rms_norm_reference(x, gain, 1e-3)[0],
        rms_norm_gradients,
        (X, GAIN),
    ),
    "gelu": (
        gelu.gelu_reference,
        lambda x, dy: (gelu.gelu_backward_reference(x, dy),),
        (X,),
    ),
    "gelu_tanh": (
        gelu.gelu_tanh_reference,
        lambda x, dy: (gelu.gelu_tanh_backward_reference(x, dy),),
        (X,),
    ),
    "swiglu": (
        swiglu.swiglu_reference,
        lambda x, dy: (swiglu.swiglu_backward_reference(x, dy),),
        (X,),
    ),
    "cross_entropy": (loss_of, loss_gradient, (X,)),
    "rope": (
        lambda x: rope.rope_reference(x, COS, SIN),
        lambda x, dy: (rope.rope_reference(dy, COS, -SIN),),
        (draw(1, 3, 2, 4),),
    ),
    "flash_attention": (
        lambda q, k, v: reference.flash_attention_reference(q, k, v, 0.6, True)[0],
        attention_gradients,
        (Q, K, V),
    ),
}


def central_differences(forward, inputs, which, dy, h=1e-5):
    """d sum(dy * forward) / d inputs[which], one element at a time."""
    gradient = np.empty_like(inputs[which])
    for index in np.ndindex(gradient.shape):
        ends = []
        for step in (h, -h):
            moved = [a.copy() for a in inputs]
            moved[which][index] += step
            ends.append((dy * forward(*moved)).sum())
        gradient[index] = (ends[0] - ends[1]) / (2 * h)
    return gradient


@pytest.mark.parametrize("name", PAIRS)
def test_backward_reference_equals_central_differences(name):
    forward, gradients, inputs = PAIRS[name]
    dy = drawing(np.float64, seed=1)(*forward(*inputs).shape)
    for which, gradient in enumerate(gradients(*inputs, dy)):
        expected = central_differences(forward, inputs, which, dy)
        np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-9)
