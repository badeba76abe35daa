"""What ops refuse, before a wrong number or a late error comes of it."""

import math

import numpy as np
import pytest

from mpiscale.ops.activations import relu
from mpiscale.ops.indexing import embedding, gather, index
from mpiscale.ops.matmul import linear, matmul, vocabulary_logits
from mpiscale.ops.norm import layer_norm
from mpiscale.ops.shapes import cast, concatenate, reshape, stack, transpose
from mpiscale.tensor import Tensor


def ones(*shape, dtype=np.float64):
    return Tensor(np.ones(shape, dtype))


REFUSED = {
    "mixed types in linear": (
        lambda: linear(ones(2, 3, dtype=np.float32), ones(3, 2)),
        "x is of float32 and weight of float64",
    ),
    "a bias of another shape": (
        lambda: linear(ones(2, 3), ones(3, 2), ones(1)),
        r"bias of shape \(1,\) .* expected \(2,\)",
    ),
    "a weight that is no matrix": (
        lambda: linear(ones(2, 3), ones(3, 2, 1)),
        r"must be a matrix, got shape \(3, 2, 1\)",
    ),
    "a width that does not fit": (
        lambda: linear(ones(2, 4), ones(3, 2)),
        "last axis must have length 3",
    ),
    "logits of another width": (
        lambda: vocabulary_logits(ones(2, 4), ones(7, 3)),
        "last axis must have length 3",
    ),
    "matmul of unequal inner axes": (
        lambda: matmul(ones(2, 3), ones(2, 3)),
        "cannot multiply",
    ),
    "mixed types in concatenate": (
        lambda: concatenate([ones(1), ones(1, dtype=np.float32)]),
        "float32 and float64",
    ),
    "mixed types in stack": (
        lambda: stack([ones(1), ones(1, dtype=np.float32)]),
        "float32 and float64",
    ),
    "a cast to integers": (
        lambda: cast(ones(1), np.dtype(np.int64)),
        "floating-point type, got int64",
    ),
    "indices that would broadcast": (
        lambda: gather(ones(3, 4), np.zeros((1, 2), int)),
        "alike but for axis -1",
    ),
    "axes that are no permutation": (
        lambda: transpose(ones(2, 3), (0, 0)),
        "no permutation",
    ),
    "a token id out of range": (
        lambda: embedding(ones(3, 2), np.array([0, 3])),
        r"token id 3 at index \(1,\)",
    ),
    "token ids that are floats": (
        lambda: embedding(ones(3, 2), np.array([0.0])),
        "must be integers",
    ),
    "mixed types in layer norm": (
        lambda: layer_norm(ones(2, 3), ones(3, dtype=np.float32)),
        "float32 and float64",
    ),
    "elements that do not fill a shape": (
        lambda: reshape(ones(3), (2, 2)),
        "cannot reshape",
    ),
    "an index out of range": (lambda: index(ones(3), 3), "out of bounds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        call()


def test_relu_of_infinities_is_no_nan():
    x = Tensor(np.array([-math.inf, 1.0, math.inf]), requires_grad=True)
    y = relu(x)
    y.backward(np.array([math.inf, 1.0, 1.0]))
    assert y.data.tolist() == [0, 1, math.inf]
    assert x.grad.tolist() == [0, 1, 1]
