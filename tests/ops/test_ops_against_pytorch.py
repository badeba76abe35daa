"""Every op in float32, forward and backward, against PyTorch's op of the same name."""

import numpy as np
import pytest

from mpiscale.ops import activations, arithmetic, indexing, matmul, reductions, shapes
from mpiscale.ops.attention import attention
from mpiscale.ops.cross_entropy import IGNORE, cross_entropy
from mpiscale.ops.norm import layer_norm, rms_norm
from mpiscale.ops.softmax import log_softmax, softmax
from mpiscale.tensor import Tensor

torch = pytest.importorskip("torch")
F = torch.nn.functional
IDS = np.array([[3, 0, 3], [1, 3, 0]])
LABELS = np.array([1, IGNORE, 4])


def torch_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def torch_cross_entropy(x):
    return F.cross_entropy(x, torch.tensor(LABELS), label_smoothing=0.1)


def torch_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


OPS = {
    "add": (arithmetic.add, torch.add, [(2, 3), (3,)]),
    "subtract": (arithmetic.subtract, torch.sub, [(2, 1), (2, 3)]),
    "multiply": (arithmetic.multiply, torch.mul, [(2, 3), (2, 1)]),
    "divide": (arithmetic.divide, torch.div, [(2, 3), (3,)]),
    "exp": (arithmetic.exp, torch.exp, [(2, 3)]),
    "relu": (activations.relu, torch.relu, [(2, 3)]),
    "tanh": (activations.tanh, torch.tanh, [(2, 3)]),
    "sigmoid": (activations.sigmoid, torch.sigmoid, [(2, 3)]),
    "silu": (activations.silu, F.silu, [(2, 3)]),
    "gelu": (activations.gelu, F.gelu, [(5, 33)]),
    "gelu tanh": (
        activations.gelu_tanh,
        lambda x: F.gelu(x, approximate="tanh"),
        [(5, 33)],
    ),
    "swiglu": (activations.swiglu, torch_swiglu, [(5, 34)]),
    "softmax": (softmax, lambda x: x.softmax(-1), [(5, 33)]),
    "log_softmax": (log_softmax, lambda x: x.log_softmax(-1), [(5, 33)]),
    "layer_norm": (
        layer_norm,
        lambda x, g, b: F.layer_norm(x, x.shape[-1:], g, b),
        [(5, 33), (33,), (33,)],
    ),
    "rms_norm": (
        rms_norm,
        lambda x, g: F.rms_norm(x, x.shape[-1:], g, eps=1e-5),
        [(5, 33), (33,)],
    ),
    "sum": (lambda x: reductions.sum(x, 1), lambda x: x.sum(1), [(2, 3, 4)]),
    "mean": (
        lambda x: reductions.mean(x, (0, 2)),
        lambda x: x.mean((0, 2)),
        [(2, 3, 4)],
    ),
    "max": (lambda x: reductions.max(x, -1), lambda x: x.amax(-1), [(2, 3, 4)]),
    "matmul": (matmul.matmul, torch.matmul, [(2, 3, 4), (4, 5)]),
    "linear": (
        matmul.linear,
        lambda x, w, b: x @ w + b,
        [(2, 3, 4), (4, 5), (5,)],
    ),
    "transpose": (
        lambda x: shapes.transpose(x, (2, 0, 1)),
        lambda x: x.permute(2, 0, 1),
        [(2, 3, 4)],
    ),
    "concatenate": (
        lambda x, y: shapes.concatenate([x, y], 0),
        lambda x, y: torch.cat([x, y], 0),
        [(2, 3), (1, 3)],
    ),
    "embedding": (
        lambda t: indexing.embedding(t, IDS),
        lambda t: F.embedding(torch.tensor(IDS), t),
        [(5, 4)],
    ),
    "gather": (
        lambda x: indexing.gather(x, IDS, 1),
        lambda x: x.gather(1, torch.tensor(IDS)),
        [(2, 4)],
    ),
    "cross_entropy": (
        lambda x: cross_entropy(x, LABELS, label_smoothing=0.1),
        torch_cross_entropy,
        [(3, 5)],
    ),
    "attention": (
        attention,
        torch_attention,
        [(2, 70, 4, 8), (2, 70, 2, 8), (2, 70, 2, 8)],
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_op_equals_pytorch_in_float32(name):
    ours, theirs, op_shapes = OPS[name]
    rng = np.random.default_rng(0)
    data = [rng.normal(size=shape).astype(np.float32) for shape in op_shapes]
    x = [Tensor(d, requires_grad=True) for d in data]
    t = [torch.tensor(d, requires_grad=True) for d in data]
    y, expected = ours(*x), theirs(*t)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.data, expected.detach().numpy(), rtol=2e-5, atol=2e-6)
    grad = rng.normal(size=y.shape).astype(np.float32)
    y.backward(grad)
    expected.backward(torch.tensor(grad))
    for a, b in zip(x, t, strict=True):
        assert a.grad.dtype == np.float32
        np.testing.assert_allclose(a.grad, b.grad.numpy(), rtol=1e-4, atol=1e-5)
