"""The compiled kernels give what PyTorch gives, forward and backward."""

import numpy as np
import pytest

from mpiscale.kernels import adamw, cross_entropy, gelu, norm, softmax, swiglu
from mpiscale.kernels.attention import flash_attention as attention
from tests.kernels.cases import drawing

torch = pytest.importorskip("torch")
F = torch.nn.functional
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float32, 2e-5), (np.float64, 1e-11)]
)


def close(got, expected, tolerance):
    np.testing.assert_allclose(got, expected.detach().numpy(), tolerance, tolerance)


def leaves(*arrays):
    return [torch.tensor(a, requires_grad=True) for a in arrays]


ELEMENTWISE = {
    "softmax": (
        lambda x: F.softmax(x, -1),
        softmax.softmax,
        lambda x, y, dy: softmax.softmax_backward(y, dy),
    ),
    "log_softmax": (
        lambda x: F.log_softmax(x, -1),
        softmax.log_softmax,
        lambda x, y, dy: softmax.log_softmax_backward(y, dy),
    ),
    "gelu": (F.gelu, gelu.gelu, lambda x, y, dy: gelu.gelu_backward(x, dy)),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        gelu.gelu_tanh,
        lambda x, y, dy: gelu.gelu_tanh_backward(x, dy),
    ),
    "swiglu": (
        lambda x: F.silu(x[..., :8]) * x[..., 8:],
        swiglu.swiglu,
        lambda x, y, dy: swiglu.swiglu_backward(x, dy),
    ),
}


@DTYPES
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_and_row_kernels_equal_pytorch(name, dtype, tolerance):
    theirs, forward, backward = ELEMENTWISE[name]
    x = 3 * drawing(dtype)(4, 5, 16)
    (tx,) = leaves(x)
    expected = theirs(tx)
    y = forward(x)
    dy = drawing(dtype, seed=1)(*y.shape)
    expected.backward(torch.tensor(dy))
    close(y, expected, tolerance)
    close(backward(x, y, dy), tx.grad, tolerance)


@DTYPES
def test_norms_equal_pytorch(dtype, tolerance):
    draw = drawing(dtype)
    x, gain, bias, dy = draw(70, 33), draw(33), draw(33), draw(70, 33)
    tx, tgain, tbias = leaves(x, gain, bias)
    expected = F.layer_norm(tx, (33,), tgain, tbias, 1e-5)
    expected.backward(torch.tensor(dy))
    y, mean, rstd = norm.layer_norm(x, gain, bias, 1e-5)
    close(y, expected, tolerance)
    ours = norm.layer_norm_backward(dy, x, gain, mean, rstd)
    for got, leaf in zip(ours, (tx, tgain, tbias), strict=True):
        close(got, leaf.grad, tolerance)

    tx, tgain = leaves(x, gain)
    expected = F.rms_norm(tx, (33,), tgain, 1e-5)
    expected.backward(torch.tensor(dy))
    y, rstd = norm.rms_norm(x, gain, 1e-5)
    close(y, expected, tolerance)
    dx, dgain = norm.rms_norm_backward(dy, x, gain, rstd)
    close(dx, tx.grad, tolerance)
    close(dgain, tgain.grad, tolerance)


@DTYPES
def test_cross_entropy_equals_pytorch(dtype, tolerance):
    logits, labels = drawing(dtype)(6, 11), np.array([0, 3, -100, 10, 5, -100])
    (tlogits,) = leaves(logits)
    options = {"ignore_index": -100, "label_smoothing": 0.1, "reduction": "none"}
    expected = F.cross_entropy(tlogits, torch.tensor(labels), **options)
    expected.sum().backward()
    maximum, sum_exp, target, logit_sum = cross_entropy.logits_statistics(
        logits, labels, 0, 11
    )
    log_normalizer = maximum + np.log(sum_exp)
    used = (labels != -100).astype(dtype)
    loss = log_normalizer - dtype(0.9) * target - dtype(0.1 / 11) * logit_sum
    close(used * loss, expected, tolerance)
    dlogits = cross_entropy.cross_entropy_backward(
        logits, labels, log_normalizer, used, 0.1, 11, 0
    )
    close(dlogits, tlogits.grad, tolerance)


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_pytorch(causal, dtype, tolerance):
    draw = drawing(dtype)
    q, k, v = draw(2, 70, 4, 16), draw(2, 70, 2, 16), draw(2, 70, 2, 16)
    tensors = leaves(q, k, v)
    heads_first = [t.transpose(1, 2) for t in tensors]
    expected = F.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    dout = drawing(dtype, seed=1)(*q.shape)
    expected.backward(torch.tensor(dout))
    out, lse = attention.flash_attention(q, k, v, 0.3, causal)
    close(out, expected, tolerance)
    gradients = attention.flash_attention_backward(q, k, v, out, lse, dout, 0.3, causal)
    for got, leaf in zip(gradients, tensors, strict=True):
        close(got, leaf.grad, tolerance)


@DTYPES
def test_three_steps_of_adamw_equal_pytorch(dtype, tolerance):
    draw = drawing(dtype)
    param, grads = draw(50), draw(3, 50)
    (theirs,) = leaves(param)
    optimizer = torch.optim.AdamW(
        [theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )
    m, v = np.zeros_like(param), np.zeros_like(param)
    for step, grad in enumerate(grads, start=1):
        theirs.grad = torch.tensor(grad)
        optimizer.step()
        adamw.adamw(param, grad, m, v, 0.1, 0.9, 0.99, 1e-8, 0.1, step)
    close(param, theirs, tolerance)
