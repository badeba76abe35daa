"""Views that stand for copies: only where the memory really is one piece."""

import numpy as np

from mpiscale.ops.shapes import joined_view, split
from mpiscale.tensor import Tensor


def test_pieces_side_by_side_are_joined_without_a_copy():
    whole = np.arange(24.0).reshape(2, 2, 6)
    pieces = np.split(whole, [1, 3], axis=-1)
    joined = joined_view(pieces)
    assert np.shares_memory(joined, whole)
    np.testing.assert_array_equal(joined, whole)
    heads = whole.reshape(2, 2, 3, 2)  # as attention's gradients come back
    pieces = [part.reshape(2, 2, -1) for part in np.split(heads, [2], axis=2)]
    np.testing.assert_array_equal(joined_view(pieces), whole)


def test_pieces_that_are_not_side_by_side_are_not_joined():
    whole = np.arange(24.0).reshape(2, 2, 6)
    a, b, c = np.split(whole, [1, 3], axis=-1)
    assert joined_view([b, a, c]) is None  # another order
    assert joined_view([a, c]) is None  # a gap
    assert joined_view([a, b.copy(), c]) is None  # other memory
    assert joined_view([a.copy(), b.copy(), c.copy()]) is None
    assert joined_view([whole[..., 0:2:2], whole[..., 2:6:2]]) is None  # strided
    other = np.arange(24.0).reshape(2, 2, 6)
    assert joined_view([a, np.split(other, [1, 3], axis=-1)[1]]) is None
    rows = np.split(np.arange(8.0).reshape(4, 2), 2, axis=0)
    assert joined_view(rows) is None  # neighbours in memory, but along another axis


def test_split_gives_the_same_gradient_whether_or_not_a_copy_is_needed():
    for axis in (-1, 0):
        grads = []
        for copy in (False, True):
            x = Tensor(np.zeros((4, 6)), requires_grad=True)
            a, b = split(x, (x.shape[axis] - 2, 2), axis)
            grad = np.arange(24.0).reshape(4, 6)
            parts = np.split(grad, [x.shape[axis] - 2], axis=axis)
            pair = [p.copy() if copy else p for p in parts]
            both = Tensor.from_op(np.zeros(1), (a, b), lambda _, g=pair: tuple(g))
            both.backward()
            grads.append(x.grad)
            np.testing.assert_array_equal(x.grad, grad)
