"""What the loss counts, and what it refuses."""

import math

import numpy as np
import pytest

from mpiscale.ops.cross_entropy import IGNORE, cross_entropy
from mpiscale.tensor import Tensor


def test_all_labels_ignored_gives_zero_loss_and_zero_gradient():
    logits = Tensor(np.ones((4, 3)), requires_grad=True)
    loss = cross_entropy(logits, np.full(4, IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


def test_parts_of_a_batch_divide_by_the_labels_of_the_whole():
    rng = np.random.default_rng(0)
    data, labels = rng.normal(size=(6, 5)), np.array([1, IGNORE, 2, 3, IGNORE, IGNORE])
    whole = Tensor(data, requires_grad=True)
    cross_entropy(whole, labels).backward()
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    total, grads = 0.0, []
    for part in parts:
        x = Tensor(data[part], requires_grad=True)
        loss = cross_entropy(x, labels[part], valid=3)
        loss.backward()
        total += loss.item()
        grads.append(x.grad)
    assert total == pytest.approx(cross_entropy(Tensor(data), labels).item(), rel=1e-14)
    np.testing.assert_allclose(np.concatenate(grads), whole.grad, rtol=1e-14)


def test_ignored_rows_do_not_count_even_if_they_are_not_finite():
    data = np.array([[0.0, 0.0], [math.nan, math.inf]])
    logits = Tensor(data, requires_grad=True)
    loss = cross_entropy(logits, np.array([0, IGNORE]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    np.testing.assert_allclose(logits.grad, [[-0.5, 0.5], [0, 0]])


def test_smoothing_uses_the_whole_vocabulary():
    logits = Tensor(np.array([[2.0, 1.0, 0.0, -1.0]]))
    loss = cross_entropy(logits, np.array([0]), label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.590190, abs=5e-7)


def test_overwriting_gives_the_same_gradient_in_the_place_of_the_logits():
    rng = np.random.default_rng(0)
    for dtype in (np.float64, np.float32):
        data, labels = rng.normal(size=(6, 50)).astype(dtype), rng.integers(50, size=6)
        labels[2] = IGNORE
        grads = []
        for overwrite in (False, True):
            x = Tensor(data.copy(), requires_grad=True)
            logits = x * 1.0
            before = logits.data.copy()
            cross_entropy(logits, labels, None, 0.1, overwrite).backward()
            grads.append(x.grad)
            assert (logits.data == before).all() != overwrite
        np.testing.assert_array_equal(*grads)


def test_large_logits_stay_finite():
    logits = Tensor(np.array([[2e3, 1e3, 0.0, -1e3]]), requires_grad=True)
    loss = cross_entropy(logits, np.array([1]), label_smoothing=0.1)
    loss.backward()
    assert math.isfinite(loss.item()) and np.isfinite(logits.grad).all()


@pytest.mark.parametrize("label", [4, 9, -1, -3])
def test_a_label_outside_the_vocabulary_is_named_with_its_place(label):
    labels = np.array([[0, 1], [label, IGNORE]])
    with pytest.raises(ValueError, match=rf"label {label} at index \(1, 0\)"):
        cross_entropy(Tensor(np.zeros((2, 2, 4))), labels)


def test_labels_of_another_shape_or_type_are_refused():
    with pytest.raises(ValueError, match=r"labels of shape \(3,\)"):
        cross_entropy(Tensor(np.zeros((2, 4))), np.zeros(3, int))
    with pytest.raises(TypeError, match="integers"):
        cross_entropy(Tensor(np.zeros((2, 4))), np.zeros(2))
